"""A script that knows nothing of profiling computes the same under `bridge-profiling run`, and its window is captured."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bridge_profiling import __file__ as package
from tests.easy.scripts import (
    EVERYTHING,
    IN_A_THREAD,
    INFERS,
    PROFILES_ITSELF,
    RAISES,
    SAVES,
    TOO_SHORT,
    TWO_PHASES,
    bridge_profiling,
    manifest,
    python,
    ranges,
    start,
)
from tests.forked_ranks import run_ranks

PLAIN_LOOP = Path(__file__).parents[2] / "docs" / "examples" / "plain_loop.py"


class TestAScriptWithEverythingInIt:
    """Two optimizers, accumulation, a skipped step, workers, a training child, arguments like ours, an exit code."""

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("everything")
        (folder / "train.py").write_text(EVERYTHING)
        return folder

    @pytest.fixture(scope="class")
    def plain(self, folder: Path) -> subprocess.CompletedProcess[str]:
        return python(folder, "train.py", "--steps", "7")

    @pytest.fixture(scope="class")
    def profiled(self, folder: Path) -> subprocess.CompletedProcess[str]:
        return bridge_profiling(folder, "run", "--steps", "3:6", "train.py", "--steps", "7")

    def test_it_prints_what_it_prints_alone_bit_for_bit(
        self, plain: subprocess.CompletedProcess[str], profiled: subprocess.CompletedProcess[str]
    ) -> None:
        assert plain.stdout.count("0x") == 10
        assert profiled.stdout == plain.stdout, profiled.stderr
        assert profiled.returncode == plain.returncode == 3

    def test_the_trace_holds_exactly_the_window(self, profiled: subprocess.CompletedProcess[str], folder: Path) -> None:
        found = ranges(folder / "profiles")
        steps = [name for name in found if "ProfilerStep" in name]
        assert steps == ["ProfilerStep#3", "ProfilerStep#4", "ProfilerStep#5"]
        # Two batches are one iteration; in iteration 4 GradScaler leaves out the step of the optimizer that counts.
        assert found.count("forward") == found.count("backward") == 6
        assert found.count("Optimizer.step#SGD.step") == 2
        assert found.count("Optimizer.step#AdamW.step") == 3

    def test_one_process_is_captured_once_and_says_so(self, profiled: subprocess.CompletedProcess[str], folder: Path) -> None:
        root = folder / "profiles"
        written = manifest(root)
        assert (written["status"], written["captured"]["iterations"]) == ("complete", [3, 4, 5])
        assert written["durations_ns"]["iteration"] == list(range(10))
        assert written["framework"]["iterations"] == "steps of SGD"
        assert len(list(root.glob("torch/*/*"))) == 1
        assert f"bridge-profiling: type: bridge-profiling report {root}" in profiled.stderr


@pytest.fixture
def single_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class TestTwoRanks:
    """The example, under DDP."""

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("two-ranks")

    @pytest.fixture(scope="class")
    def profiled(self, folder: Path) -> subprocess.CompletedProcess[str]:
        return bridge_profiling(
            folder, "run", "--nproc", "2", "--steps", "3:6", "--output-dir", "out", "--report", str(PLAIN_LOOP)
        )

    def test_losses_are_those_of_the_script_alone(
        self, profiled: subprocess.CompletedProcess[str], capsys: pytest.CaptureFixture[str], single_thread: None
    ) -> None:
        runpy.run_path(str(PLAIN_LOOP), run_name="__main__")
        # Both ranks see the same samples, so that their mean gradient is each one's, and print into one another's lines.
        alone, together = (re.findall(r"step \d+: loss [\d.]+", text) for text in (capsys.readouterr().out, profiled.stdout))
        assert profiled.returncode == 0, profiled.stderr
        assert len(alone) == 16
        assert sorted(together) == sorted(alone * 2)

    def test_both_ranks_share_a_folder(self, folder: Path, profiled: subprocess.CompletedProcess[str]) -> None:
        assert [manifest(folder / "out", rank)["captured"]["iterations"] for rank in (0, 1)] == [[3, 4, 5]] * 2
        assert manifest(folder / "out", 1)["coordinates"]["dp"] == [1, 2]
        assert [path.name for path in (folder / "out" / "torch").iterdir()] == ["iter-3-6"]

    def test_the_report_is_made_and_the_numbers_are_those_of_the_window(
        self, folder: Path, profiled: subprocess.CompletedProcess[str]
    ) -> None:
        assert "no device work" in profiled.stdout.lower()
        assert (folder / "report.html").stat().st_size > 100_000
        analyzed = bridge_profiling(folder, "analyze", "out", "--json")
        found = json.loads(analyzed.stdout)
        assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
        assert [[each["iteration"] for each in rank["iterations"]] for rank in found["ranks"]] == [[3, 4, 5]] * 2


def test_an_exception_inside_the_window_shows_only_the_script_and_leaves_what_was_captured(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RAISES)
    profiled = bridge_profiling(tmp_path, "run", "--steps", "3:6", "train.py")
    assert profiled.returncode == 1
    trace = profiled.stderr[profiled.stderr.index("Traceback") :]
    assert trace.startswith(f'Traceback (most recent call last):\n  File "{tmp_path}/train.py", line 13, in <module>\n')
    assert "\nKeyError: 'no such sample'\n" in trace
    assert str(Path(package).parent) not in trace
    written = manifest(tmp_path / "profiles")
    assert (written["status"], written["captured"]["iterations"], written["interrupted"]) == ("partial", [3], [4])
    assert "KeyError" in written["reason"]
    assert "rank 0, iter-3-6: partial, training raised KeyError" in profiled.stderr
    assert "interrupted ProfilerStep#4" in ranges(tmp_path / "profiles")


@pytest.mark.parametrize(
    ("script", "printed"),
    [
        (
            "raise RuntimeError('bad') from ValueError('never raised')",
            "ValueError: never raised\n\nThe above exception was the direct cause of the following exception:\n\n"
            'Traceback (most recent call last):\n  File "{path}", line 1, in <module>\n'
            "    raise RuntimeError('bad') from ValueError('never raised')\nRuntimeError: bad\n",
        ),
        ("x = = 3", '  File "{path}", line 1\n    x = = 3\n        ^\nSyntaxError: invalid syntax\n'),
    ],
)
def test_an_error_is_shown_as_python_shows_it_and_nothing_else_is_said(tmp_path: Path, script: str, printed: str) -> None:
    (tmp_path / "train.py").write_text(f"{script}\n")
    ended = run_ranks(start, "train.py", folder=tmp_path)
    assert ended.exit_codes == [1]
    assert ended.stderr == printed.format(path=tmp_path / "train.py")


def test_ctrl_c_ends_it_as_it_ends_a_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    ended = run_ranks(start, "train.py", folder=tmp_path)
    assert ended.exit_codes == [130]
    assert ended.stderr.startswith(f'Traceback (most recent call last):\n  File "{tmp_path}/train.py", line 2, in <module>\n')
    assert ended.stderr.endswith("KeyboardInterrupt\n")


def test_a_model_is_saved_copied_and_exported_as_without(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SAVES)
    ended = run_ranks(start, "--steps", "0:4", "train.py", folder=tmp_path)
    assert ended.exit_codes == [0], ended.stderr
    assert ended.stdout == "2 None\n9 None\n9 scripted\n"
    found = ranges(tmp_path / "profiles", folder="iter-0-4")
    assert found.count("forward") == 4
    # The first call of all was found while it ran.
    assert [name for name in found if name in ("forward", "backward")] == ["forward", "backward"] * 4


@pytest.mark.parametrize(("wait", "warmup"), [(0, 1), (1, 1), (3, 1), (0, 4)])
def test_a_profiler_of_the_scripts_own_is_given_way_to(tmp_path: Path, wait: int, warmup: int) -> None:
    """It records before the window opens, starts in the iteration before it, starts within, or has warmed up long before."""
    (tmp_path / "train.py").write_text(PROFILES_ITSELF.format(wait, warmup))
    ended = run_ranks(start, "--steps", "3:6", "train.py", folder=tmp_path)
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
        (INFERS, "no optimizer stepped in this process"),
        (TOO_SHORT, "the script made 2 optimizer steps, iterations 0 to 1, and the window is 3:6. Type --steps 0:2\n"),
        (IN_A_THREAD, "the optimizer steps in a thread that the script has started"),
        (
            f"import logging.config\nlogging.config.dictConfig({{'version': 1}})\n{TWO_PHASES.format(50)}",
            "the script made 2 optimizer steps, iterations 0 to 1, and the window is 3:6. Type --steps 0:2. Another optimizer"
            " has made 50 since, which count from 101 on\n",
        ),
    ],
)
def test_a_script_without_the_window_says_what_to_type(tmp_path: Path, script: str, said: str) -> None:
    (tmp_path / "train.py").write_text(script)
    profiled = run_ranks(start, "--steps", "3:6", "train.py", folder=tmp_path)
    assert profiled.exit_codes == [0], profiled.stderr
    assert f"nothing was captured: {said}" in profiled.stderr
    assert not list(tmp_path.glob("profiles/torch/*/*"))
