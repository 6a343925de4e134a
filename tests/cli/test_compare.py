"""`bridge-profiling compare` as it is typed: what it prints, the page, and the exit code a CI job relies on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.analysis.compared_runs import WrittenRun
from tests.cli.conftest import Typed

_QUIET = [5.0, 5.01, 4.99, 5.02, 5.0]


@pytest.fixture(autouse=True)
def runs(folder: Path) -> Path:
    """The working directory has a base, a run that is 20 % slower, and one of two iterations."""
    WrittenRun(unprofiled_ms=_QUIET).write(folder / "base")
    slower = {"gemm": [360.0, 360.0], "softmax": [50.0]}
    WrittenRun(unprofiled_ms=[each * 1.2 for each in _QUIET], kernels=slower, seed=2).write(folder / "slower")
    WrittenRun(iterations=2, seed=3).write(folder / "short")
    return folder


def test_the_answer_is_the_first_sentence_and_the_page_says_the_same(typed: Typed, runs: Path) -> None:
    lines = typed("compare", "base", "slower", "-o", "page.html").stdout.splitlines()
    assert lines[0] == "base → slower"
    assert lines[1].startswith("slower is slower: the median iteration takes 6.0 ms instead of 5.0 ms, +1.0 ms (+20.0%)")
    assert "5 and 5 iterations without profiling" in lines[2]
    (gemm,) = (line for line in lines if line.endswith("  gemm"))
    assert gemm.split()[:3] == ["slower", "2", "2"]
    page = (runs / "page.html").read_text()
    assert "slower is slower: the median iteration takes 6.0 ms" in page
    assert re.search(r"""(?:src|href)=["']?(?:https?:)?//""", page) is None
    assert 'id="packed-plotly"' in page


def test_json_is_all_there_is_on_standard_output(typed: Typed) -> None:
    found = json.loads(typed("compare", "base", "slower", "--json").stdout)
    assert (found["step"]["verdict"], found["step"]["relative"]) == ("slower", pytest.approx(0.2))
    added_up = sum(part["change_us"] for part in found["by_cause"].values())
    assert added_up == pytest.approx(found["profiled_step"]["change_us"], abs=1e-6)
    assert [(row["name"], row["change"]) for row in found["kernels"]] == [("gemm", "slower")]


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("base slower --fail-over 5%", 3, "slower by more than 5%"),
        ("base slower --fail-over 25%", 0, ""),
        ("slower base --fail-over 5", 0, ""),
        ("base base --fail-over 0%", 0, ""),
        # Iterations enough on one side alone: a gate that was not looked at must say so.
        ("base short --fail-over 5%", 0, "--fail-over 5% cannot be judged"),
    ],
)
def test_the_exit_code_says_whether_the_gate_was_passed(typed: Typed, line: str, code: int, said: str) -> None:
    done = typed("compare", *line.split())
    assert done.returncode == code
    assert said in done.stderr


def test_a_run_with_itself_finds_nothing(typed: Typed) -> None:
    done = typed("compare", "base", "base")
    assert (done.returncode, done.stdout.splitlines()[1]) == (0, "Nothing changed.")
    assert "change in parts" not in done.stdout


def test_several_runs_a_side_are_compared_by_their_medians(typed: Typed) -> None:
    found = json.loads(typed("compare", "base", "slower", "--also-base", "base", "--also-other", "slower", "--json").stdout)
    assert (found["step"]["method"], found["step"]["samples"]) == ("welch", [2, 2])


def test_a_damaged_capture_is_named_and_ends_with_1(typed: Typed, runs: Path) -> None:
    trace = next(WrittenRun(ranks=2, seed=5).write(runs / "damaged").rglob("rank-1*.json"))
    trace.write_bytes(trace.read_bytes()[:2000])
    done = typed("compare", "base", "damaged")
    assert done.returncode == 1
    assert "rank-1.pt.trace.json" in done.stderr
    assert "base → damaged" in done.stdout
