"""What counts as an iteration of a script that says nothing of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.easy.scripts import manifest, ranges, start
from tests.forked_ranks import run_ranks

HEAD = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
"""

#: k-fold: each fold makes an optimizer of its own, and forgets the one before.
FOLDS = f"""{HEAD}
for fold in range(3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
"""

#: An evaluation before the training, with the model that is trained, and losses that are modules.
EVALUATES_FIRST = f"""{HEAD}
with torch.no_grad():
    for i in range(5):
        torch.nn.functional.mse_loss(model(torch.ones(1, 2)), torch.ones(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(8):
    torch.nn.MSELoss()(model(torch.ones(1, 2)), torch.ones(1, 1)).backward()
    optimizer.step()
"""

#: Calls its loss again and again within one step.
LBFGS = f"""{HEAD}
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
def closure():
    optimizer.zero_grad()
    loss = model(torch.ones(1, 2)).square().sum()
    loss.backward()
    return loss
for i in range(8):
    optimizer.step(closure)
"""

#: No module: nothing calls a model.
NO_MODULE = """
import torch
weight = torch.ones(2, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for i in range(8):
    weight.square().sum().backward()
    optimizer.step()
"""

#: The model and its optimizer's step are compiled, also where `make test` switches compiling off.
COMPILED = f"""
import os
os.environ.pop("TORCHDYNAMO_DISABLE", None)
{HEAD}
compiled = torch.compile(model, backend="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = torch.compile(optimizer.step, backend="eager")
for i in range(8):
    compiled(torch.ones(1, 2)).sum().backward()
    step()
"""

#: Compiled into one whole graph, and evaluated before it is trained.
ONE_GRAPH = f"""
import os, warnings
os.environ.pop("TORCHDYNAMO_DISABLE", None)
{HEAD}
compiled = torch.compile(torch.nn.Sequential(model, torch.nn.ReLU()), backend="eager", fullgraph=True)
with torch.no_grad():
    compiled(torch.ones(1, 2))
@torch.compile(backend="eager", fullgraph=True)
def mean(x):
    return model(x).mean()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(8):
    (compiled(torch.ones(1, 2)).sum() + mean(torch.ones(1, 2))).backward()
    optimizer.step()
"""

#: The first optimizer is still there when the second has trained alone for long.
LEFT_BEHIND = f"""{HEAD}
first, second = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.AdamW(model.parameters())
for i in range(110):
    model(torch.ones(1, 2)).sum().backward()
    (first if i < 2 else second).step()
"""


@pytest.mark.parametrize("script", [FOLDS, EVALUATES_FIRST, LBFGS, NO_MODULE, COMPILED, ONE_GRAPH, LEFT_BEHIND])
def test_an_iteration_is_a_step_of_the_optimizer(tmp_path: Path, script: str) -> None:
    (tmp_path / "train.py").write_text(script)
    ended = run_ranks(start, "--steps", "3:6", "train.py", folder=tmp_path)
    assert ended.exit_codes == [0], ended.stderr
    assert "profiling failed" not in ended.stderr
    assert "Warning" not in ended.stderr
    assert manifest(tmp_path / "profiles")["captured"]["iterations"] == [3, 4, 5], ended.stderr
    found = ranges(tmp_path / "profiles")
    assert [name for name in found if "ProfilerStep" in name] == [f"ProfilerStep#{i}" for i in (3, 4, 5)]
    assert found.count("backward") >= 3


def test_the_first_iteration_can_be_captured(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(EVALUATES_FIRST)
    run_ranks(start, "--steps", "0:1", "train.py", folder=tmp_path)
    found = ranges(tmp_path / "profiles", folder="iter-0-1")
    assert [found.count(name) for name in ("ProfilerStep#0", "forward", "backward", "optimizer")] == [1, 1, 1, 1]


def test_what_follows_the_last_step_is_no_iteration(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(EVALUATES_FIRST)
    run_ranks(start, "--steps", "6:10", "train.py", folder=tmp_path)
    written = manifest(tmp_path / "profiles", folder="iter-6-10")
    assert (written["status"], written["captured"]["iterations"]) == ("partial", [6, 7])
    assert "training ended after iteration 7" in written["reason"]
    assert written["durations_ns"]["iteration"] == list(range(8))


def test_a_module_is_run_by_its_name_with_its_own_arguments(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "train.py").write_text(f"import sys\nprint(sys.argv[1:], __package__)\n{EVALUATES_FIRST}")
    ended = run_ranks(_in_this_folder, "--steps=3:6", "-m", "package.train", "--", "-m", "--steps", folder=tmp_path)
    assert ended.stdout.startswith("['--', '-m', '--steps'] package\n"), ended.stderr
    assert manifest(tmp_path / "profiles")["status"] == "complete"


def test_everything_after_the_script_is_the_scripts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint(sys.argv)")
    for ours in ((), ("--steps", "3:6"), ("--",), ("--steps=3:6", "--")):
        ended = run_ranks(start, *ours, "train.py", "a", "--", "--steps", folder=tmp_path)
        assert ended.stdout == "['train.py', 'a', '--', '--steps']\n", ended.stderr


def test_an_unusable_request_is_refused_before_the_script_begins(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('began')")
    for request, said in (
        (("--steps", "3", "train.py"), "--steps 3 is not a window"),
        (("--ranks", "0,4", "train.py"), "names 4, but the job has 1 ranks"),
        (("--ranks", "some", "train.py"), "--ranks some is not a list of ranks"),
        (("--stpes", "3:4", "train.py"), "unrecognized arguments"),
        (("missing.py",), "missing.py does not exist"),
    ):
        ended = run_ranks(start, *request, folder=tmp_path)
        assert ended.exit_codes == [2]
        assert ended.stdout.count("began") == 0
        assert said in ended.stderr


def _in_this_folder(*arguments: str) -> None:
    import sys

    # As `python -m` does.
    sys.path.insert(0, "")
    start(*arguments)
