"""What counts as an iteration of a script that says nothing of them, and what is understood as its command line."""

from pathlib import Path

import pytest

from bridge_profiling.frameworks.run_request import parse
from tests.forked_ranks import run_ranks
from tests.frameworks.scripts import HEAD, manifest, ranges, start

#: An evaluation before the training, with the model that is trained, and losses that are modules.
EVALUATES_FIRST = f"""{HEAD}
with torch.no_grad():
    for i in range(5):
        torch.nn.functional.mse_loss(model(torch.ones(1, 2)), torch.ones(1, 1))
for i in range(8):
    torch.nn.MSELoss()(model(torch.ones(1, 2)), torch.ones(1, 1)).backward()
    sgd.step()
"""

#: Calls its loss again and again within one step.
LBFGS = """
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
def closure():
    optimizer.zero_grad()
    loss = model(torch.ones(1, 2)).square().sum()
    loss.backward()
    return loss
for i in range(8):
    optimizer.step(closure)
"""

#: Compiled into one whole graph, and evaluated before it is trained.
ONE_GRAPH = """
compiled = torch.compile(torch.nn.Sequential(model, torch.nn.ReLU()), backend="eager", fullgraph=True)
with torch.no_grad():
    compiled(torch.ones(1, 2))
@torch.compile(backend="eager", fullgraph=True)
def mean(x):
    return model(x).mean()
train(8, model=lambda x: compiled(x).sum() + mean(x))
"""

CASES = {
    "an optimizer for each fold": "for i in range(3): train(3, torch.optim.SGD(model.parameters(), lr=0.1))",
    "evaluates first": EVALUATES_FIRST.removeprefix(HEAD),
    "LBFGS": LBFGS,
    "one graph": ONE_GRAPH,
    # The first optimizer is still there when the second has trained alone for long.
    "left behind": "train(2)\ntrain(108, torch.optim.AdamW(model.parameters()))",
}


@pytest.mark.integration
@pytest.mark.parametrize("case", CASES)
def test_an_iteration_is_a_step_of_the_optimizer(tmp_path: Path, train, case: str) -> None:
    ended = train(HEAD + CASES[case], "--steps", "3:6")
    assert ended.exit_codes == [0], ended.stderr
    assert "profiling failed" not in ended.stderr
    assert "Warning" not in ended.stderr
    assert manifest(tmp_path / "profiles")["captured"]["iterations"] == [3, 4, 5], ended.stderr
    found = ranges(tmp_path / "profiles")
    assert [name for name in found if "ProfilerStep" in name] == [f"ProfilerStep#{i}" for i in (3, 4, 5)]
    assert found.count("backward") >= 3


@pytest.mark.integration
def test_a_module_is_run_with_its_own_arguments_and_what_follows_its_last_step_is_no_iteration(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text(f"import sys\nprint(sys.argv[1:], __package__)\n{EVALUATES_FIRST}")
    ended = run_ranks(start, "--steps=6:10", "-m", "package.train", "--", "-m", "--steps", folder=tmp_path)
    assert ended.stdout.startswith("['--', '-m', '--steps'] package\n"), ended.stderr
    written = manifest(tmp_path / "profiles", folder="iter-6-10")
    assert (written["status"], written["captured"]["iterations"]) == ("partial", [6, 7])
    assert "training ended after iteration 7" in written["reason"]
    assert written["durations_ns"]["iteration"] == list(range(8))


@pytest.mark.parametrize("ours", [(), ("--steps", "3:6"), ("--",), ("--steps=3:6", "--"), ("-m",)])
def test_everything_after_the_script_is_the_scripts(ours: tuple[str, ...]) -> None:
    request = parse([*ours, "train", "a", "--", "--steps"])
    assert (request.script, request.arguments, request.module) == ("train", ("a", "--", "--steps"), "-m" in ours)
    assert request.steps == ("3:6" if "3:6" in str(ours) else None)
    assert parse(request.to_arguments()) == request
