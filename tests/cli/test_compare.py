"""`bridge-profiling compare` as it is typed: what it prints, the page, and the exit code a CI job relies on."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.analysis.compared_runs import WrittenRun

Compare = Callable[..., subprocess.CompletedProcess]

_QUIET = [5.0, 5.01, 4.99, 5.02, 5.0]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a base, a run that is 20 % slower, one of two iterations, and no more."""
    root = tmp_path_factory.mktemp("runs")
    WrittenRun(unprofiled_ms=_QUIET, ranks=1).write(root / "base")
    slower = {"gemm": [360.0, 360.0], "softmax": [50.0]}
    WrittenRun(unprofiled_ms=[each * 1.2 for each in _QUIET], ranks=1, kernels=slower, seed=2).write(root / "slower")
    WrittenRun(iterations=2, ranks=1, seed=3).write(root / "short")
    return root


@pytest.fixture
def compare(runs: Path) -> Compare:
    """Runs the command in a fresh process."""

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "bridge_profiling.cli", "compare", *arguments]
        return subprocess.run(command, cwd=runs, capture_output=True, text=True, timeout=300)

    return run


def test_the_answer_is_the_first_sentence_and_the_page_says_the_same(compare: Compare, tmp_path: Path) -> None:
    done = compare("base", "slower", "-o", str(tmp_path / "page.html"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "base → slower"
    assert lines[1].startswith("slower is slower: the median iteration takes 6.0 ms instead of 5.0 ms, +1.0 ms (+20.0%)")
    assert "5 and 5 iterations without profiling" in lines[2]
    (gemm,) = (line for line in lines if line.endswith("  gemm"))
    assert gemm.split()[:3] == ["slower", "2", "2"]
    page = (tmp_path / "page.html").read_text()
    assert "slower is slower: the median iteration takes 6.0 ms" in page
    assert re.search(r"""(?:src|href)=["']?(?:https?:)?//""", page) is None
    assert 'id="packed-plotly"' in page


def test_json_is_all_there_is_on_standard_output(compare: Compare) -> None:
    done = compare("base", "slower", "--json")
    found = json.loads(done.stdout)
    assert found["step"]["verdict"] == "slower"
    assert found["step"]["relative"] == pytest.approx(0.2)
    added_up = sum(part["change_us"] for part in found["by_cause"].values())
    assert added_up == pytest.approx(found["profiled_step"]["change_us"], abs=1e-6)
    assert [(row["name"], row["change"]) for row in found["kernels"]] == [("gemm", "slower")]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["base", "slower", "--fail-over", "5%"], 3, "slower by more than 5%"),
        (["base", "slower", "--fail-over", "25 %"], 0, ""),
        (["slower", "base", "--fail-over", "5"], 0, ""),
        (["base", "base", "--fail-over", "0%"], 0, ""),
        # Iterations enough on one side alone: a gate that was not looked at must say so.
        (["base", "short", "--fail-over", "5%"], 0, "--fail-over 5% cannot be judged"),
        (["base", "slower", "--fail-over", "five"], 2, "Type for example 5%"),
        (["base", "slower", "--fail-over", "-5%"], 2, "Type for example 5%"),
        (["base", "nowhere"], 2, "nowhere does not exist"),
        (["base"], 2, "OTHER"),
        (["base", "slower", "--also-base", "short"], 2, "2 base runs against 1"),
        (["base", "slower", "-o", "nowhere/page.html"], 2, "nowhere/page.html cannot be written"),
    ],
)
def test_the_exit_code_says_what_became_of_the_request(compare: Compare, arguments: list[str], code: int, said: str) -> None:
    done = compare(*arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_with_itself_finds_nothing(compare: Compare) -> None:
    done = compare("base", "base")
    assert done.returncode == 0
    assert done.stdout.splitlines()[1] == "Nothing changed."
    assert "change in parts" not in done.stdout


def test_several_runs_a_side_are_compared_by_their_medians(compare: Compare) -> None:
    done = compare("base", "slower", "--also-base", "base", "--also-other", "slower", "--json")
    found = json.loads(done.stdout)
    assert (found["step"]["method"], found["step"]["samples"]) == ("welch", [2, 2])


def test_a_damaged_capture_is_named_and_ends_with_1(compare: Compare, runs: Path) -> None:
    path = WrittenRun(ranks=2, seed=5).write(runs / "damaged")
    trace = next(path.rglob("rank-1*.json"))
    trace.write_bytes(trace.read_bytes()[:2000])
    done = compare("base", "damaged")
    assert done.returncode == 1
    assert "rank-1.pt.trace.json" in done.stderr
    assert "base → damaged" in done.stdout
