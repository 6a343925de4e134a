"""`bridge-profiling report` as it is typed: the answer, the page, the JSON, and the exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.test_analyze import write

Report = Callable[..., subprocess.CompletedProcess]


@pytest.fixture
def report(tmp_path: Path) -> Report:
    """Runs the command in a fresh process, in a directory with one good rank."""
    write(tmp_path / "run" / "rank-0.json.gz", 0)

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "bridge_profiling.cli", "report", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=120)

    return run


def test_piped_it_prints_the_verdict_and_writes_the_page(report: Report, tmp_path: Path) -> None:
    done = report("run")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert "An iteration takes 0.9 ms" in done.stdout
    assert done.stdout.endswith("\npage: report.html\n")
    assert "my_gemm_kernel" in (tmp_path / "report.html").read_text()


def test_json_alone_writes_no_page_and_holds_the_findings(report: Report, tmp_path: Path) -> None:
    done = report("run", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0
    assert found["ranks"][0]["device"]["compute_us"] == 500
    assert {finding["id"] for finding in found["findings"]} >= {"low_device_busy"}
    assert not (tmp_path / "report.html").exists()
    report("run", "--json", "-o", "both.html")
    assert (tmp_path / "both.html").exists()


def test_thresholds_can_be_set(report: Report) -> None:
    assert "low_device_busy" in report("run").stdout
    assert "low_device_busy" not in report("run", "--threshold", "device_busy=0.1").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere",), "nowhere does not exist"),
        (("run", "-o", "missing/page.html"), "missing/page.html cannot be written"),
        (("run", "--parquet", "run/rank-0.json.gz"), "is a file"),
        (("run", "--threshold", "luck=1"), "--threshold 'luck' is unknown"),
        (("run", "--threshold", "device_busy=much"), "device_busy takes a number"),
    ],
)
def test_a_wrong_request_says_what_is_wrong(report: Report, arguments: tuple[str, ...], said: str) -> None:
    done = report(*arguments)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_capture_that_cannot_be_read_is_named_and_the_others_are_judged(report: Report, tmp_path: Path) -> None:
    write(tmp_path / "run" / "rank-1.json.gz", 1, cut=60)
    done = report("run")
    assert done.returncode == 1
    assert "rank-1.json.gz" in done.stderr
    assert "An iteration takes" in done.stdout
    assert "rank-1.json.gz" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("run", ["x.txt", "broken"])
def test_a_run_of_which_nothing_can_be_read_leaves_the_last_page(report: Report, tmp_path: Path, run: str) -> None:
    (tmp_path / "report.html").write_text("the last page")
    (tmp_path / "x.txt").write_text("no trace")
    write(tmp_path / "broken" / "rank-0.json.gz", 0, cut=60)
    done = report(run)
    assert done.returncode == 1
    assert (tmp_path / "report.html").read_text() == "the last page"
    assert done.stdout == ""
    assert done.stderr.count("error: ") == 1


def test_of_several_runs_the_one_shown_is_named_first(report: Report, tmp_path: Path) -> None:
    for name in ("older", "newer"):
        write(tmp_path / "runs" / name / "rank-0.json.gz", 0)
    os.utime(tmp_path / "runs" / "older" / "rank-0.json.gz", (1, 1))
    done = report("runs")
    assert "newer" in done.stdout.splitlines()[0]
    page = (tmp_path / "report.html").read_text()
    assert page.index("newer") < page.index('id="verdict"'), "a notice above the verdict"
