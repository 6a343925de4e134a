"""A script that knows nothing of profiling computes the same under `bridge-profiling run`, and its window is captured."""

import json
import re
from pathlib import Path

import pytest

from bridge_profiling import __file__ as package
from tests.forked_ranks import run_ranks
from tests.frameworks.scripts import EVERYTHING, HEAD, bridge_profiling, manifest, python, ranges, start

pytestmark = pytest.mark.integration

PLAIN_LOOP = Path(__file__).parents[2] / "docs" / "examples" / "plain_loop.py"

#: Raises in the middle of iteration 4, out of a data loader.
RAISES = f"""{HEAD}
class Data(torch.utils.data.IterableDataset):
    def __iter__(self):
        for i in range(9):
            if i == 4:
                raise KeyError("no such sample")
            yield torch.full((4, 2), float(i))
for x in torch.utils.data.DataLoader(Data(), batch_size=None):
    train(1, model=lambda _: model(x))
"""

#: Has a profiler of its own, which begins inside the window and ends after it.
PROFILES_ITSELF = """
schedule = torch.profiler.schedule(wait={}, warmup={}, active=3, repeat=1)
with torch.profiler.profile(schedule=schedule, on_trace_ready=lambda it: it.export_chrome_trace("own.json")) as profiler:
    for i in range(12):
        train(1)
        profiler.step()
print(profiler.step_num)
"""


def test_a_script_with_everything_in_it_prints_what_it_prints_alone_and_its_trace_holds_the_window(tmp_path: Path) -> None:
    """Two optimizers, accumulation, a skipped step, workers, a training child, arguments like ours, an exit code."""
    (tmp_path / "train.py").write_text(EVERYTHING)
    arguments = ("train.py", "--steps", "7")
    alone, profiled = python(tmp_path, *arguments), run_ranks(start, "--steps", "3:6", *arguments, folder=tmp_path)
    assert alone.stdout.count("0x") == 10
    assert profiled.stdout == alone.stdout, profiled.stderr
    assert (profiled.exit_codes, alone.returncode) == ([3], 3)
    root = tmp_path / "profiles"
    found = ranges(root)
    assert [name for name in found if "ProfilerStep" in name] == ["ProfilerStep#3", "ProfilerStep#4", "ProfilerStep#5"]
    # Two batches are one iteration; in iteration 4 GradScaler leaves out the step of the optimizer that counts.
    assert found.count("forward") == found.count("backward") == 6
    assert [found.count(f"Optimizer.step#{name}.step") for name in ("SGD", "AdamW")] == [2, 3]
    written = manifest(root)
    assert (written["status"], written["captured"]["iterations"]) == ("complete", [3, 4, 5])
    assert written["durations_ns"]["iteration"] == list(range(10))
    assert written["framework"]["iterations"] == "steps of SGD"
    assert {"parameters", "trainable_parameters", "batch_size", "dataset_size"} <= written["framework"].keys()
    assert len(list(root.glob("torch/*/*"))) == 1


def test_two_ranks_share_a_folder_and_their_losses_are_those_of_the_script_alone(tmp_path: Path) -> None:
    options = ("--nproc", "2", "--steps", "3:6", "--output-dir", "out", "--report")
    profiled = bridge_profiling(tmp_path, "run", *options, str(PLAIN_LOOP))
    assert profiled.returncode == 0, profiled.stderr
    assert (tmp_path / "out" / "report-iter-3-6.html").stat().st_size > 100_000
    # Both ranks see the same samples, so that their mean gradient is each one's, and print into one another's lines.
    texts = (python(tmp_path, str(PLAIN_LOOP)).stdout, profiled.stdout)
    alone, together = (re.findall(r"step \d+: loss [\d.]+", text) for text in texts)
    assert len(alone) == 16
    assert sorted(together) == sorted(alone * 2)
    assert manifest(tmp_path / "out", 1)["coordinates"]["dp"] == [1, 2]
    assert [path.name for path in (tmp_path / "out" / "torch").iterdir()] == ["iter-3-6"]
    assert [manifest(tmp_path / "out", rank)["captured"]["iterations"] for rank in (0, 1)] == [[3, 4, 5]] * 2


def test_an_exception_inside_the_window_shows_only_the_script_and_leaves_what_was_captured(tmp_path: Path, train) -> None:
    profiled = train(RAISES, "--steps", "3:6")
    assert profiled.exit_codes == [1]
    trace = profiled.stderr[profiled.stderr.index("Traceback") :]
    assert trace.startswith(f'Traceback (most recent call last):\n  File "{tmp_path}/train.py", line 19, in <module>\n')
    assert "\nKeyError: 'no such sample'\n" in trace
    assert str(Path(package).parent) not in trace
    written = manifest(tmp_path / "profiles")
    assert (written["status"], written["captured"]["iterations"], written["interrupted"]) == ("partial", [3], [4])
    assert "training raised KeyError" in written["reason"]
    assert "interrupted ProfilerStep#4" in ranges(tmp_path / "profiles")


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("raise RuntimeError('bad') from ValueError('never raised')", 1),
        ("x = = 3", 1),
        # Python's own handler, also where a shell has it ignore SIGINT.
        ("import signal; signal.signal(2, signal.default_int_handler); signal.raise_signal(2)", 130),
    ],
)
def test_an_error_is_shown_as_python_shows_it_and_nothing_else_is_said(tmp_path, train, script, code):
    ended = train(f"{script}\n", "--steps", "3:6")
    assert (ended.exit_codes, ended.stderr) == ([code], python(tmp_path, str(tmp_path / "train.py")).stderr)


@pytest.mark.parametrize(("wait", "warmup"), [(0, 1), (1, 1), (3, 1), (0, 4)])
def test_a_profiler_of_the_scripts_own_is_given_way_to(tmp_path: Path, train, wait: int, warmup: int) -> None:
    """It records before the window opens, starts in the iteration before it, starts within, or has warmed up long before."""
    ended = train(HEAD + PROFILES_ITSELF.format(wait, warmup), "--steps", "3:6")
    assert (ended.exit_codes, ended.stdout) == ([0], "12\n"), ended.stderr
    names = [event["name"] for event in json.loads((tmp_path / "own.json").read_text())["traceEvents"]]
    steps = sorted(name for name in names if name.startswith("ProfilerStep#"))
    assert steps == [f"ProfilerStep#{step}" for step in range(wait + warmup, wait + warmup + 3)]
    written = manifest(tmp_path / "profiles")
    assert (written["status"], written["profilers"][0]["artifacts"]) == ("failed", [])
    assert "another profiler" in written["profilers"][0]["reason"]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("with torch.inference_mode(): model(torch.zeros(1, 2))", "no optimizer stepped in this process"),
        (
            "import threading\nthread = threading.Thread(target=train, args=(8,))\nthread.start()\nthread.join()",
            "the optimizer steps in a thread that the script has started",
        ),
        (
            "import logging.config\nlogging.config.dictConfig({'version': 1})\n"
            "adamw = torch.optim.AdamW(model.parameters())\ntrain(2)\ntrain(50, adamw)",
            "the script made 2 optimizer steps, iterations 0 to 1, and the window is 3:6. Type --steps 0:2.",
        ),
    ],
)
def test_a_script_without_the_window_says_what_to_type(tmp_path: Path, train, script: str, said: str) -> None:
    profiled = train(f"{HEAD}{script}", "--steps", "3:6")
    assert profiled.exit_codes == [0], profiled.stderr
    assert f"nothing was captured: {said}" in profiled.stderr
    assert not list(tmp_path.glob("profiles/torch/*/*"))
