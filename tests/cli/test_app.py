"""Flags that every command has, one style of errors, and completion."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge_profiling import __version__, cli
from bridge_profiling.run import Run
from tests.cli.test_analyze import on_a_terminal, write

Typed = Callable[..., subprocess.CompletedProcess]


@pytest.fixture
def typed(tmp_path: Path) -> Typed:
    """Runs the command in a fresh process, in a directory with one good rank."""
    write(tmp_path / "run" / "rank-0.json.gz", 0)

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "bridge_profiling.cli", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True, timeout=120)

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["repor"], "error: no such command 'repor'"),
        (["bench", "step"], "error: missing option '--step'"),
        (["analyze"], "error: missing argument 'RUN'. Type "),
        (["analyze", "nowhere"], "error: nowhere does not exist. Type "),
        (["report", "run", "-o", "nowhere/page.html"], "error: nowhere/page.html cannot be written. Type "),
        (["analyze", "--workers", "0", "run"], "error: invalid value for '--workers'"),
    ],
)
def test_a_usage_error_is_one_line_with_what_to_type(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bridge-profiling", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    assert printed.err.startswith(message)
    assert printed.err.count("\n") == 1


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "bridge_profiling.run", None)
    monkeypatch.setattr(sys, "argv", ["bridge-profiling", "analyze", str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="bridge_profiling"):
        cli.main()

    def missing(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'duckdb'", name="duckdb")

    monkeypatch.setattr("bridge_profiling.experiments.jobs.experiment_of", missing)
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert "needs duckdb, which is not installed. Type pip install '.[analysis]'" in capsys.readouterr().err


def test_the_version_is_printed(typed: Typed) -> None:
    assert typed("--version").stdout == f"bridge-profiling {__version__}\n"


@pytest.mark.parametrize("arguments", [("--quiet", "report", "run"), ("report", "run", "-q")])
def test_quiet_prints_the_answer_without_notes(typed: Typed, arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = typed(*arguments)
    assert done.returncode == 0, done.stderr
    assert "0.9 ms" in done.stdout
    assert "page:" not in done.stdout
    assert (tmp_path / "report.html").exists()


def test_without_a_page_only_the_verdict_is_printed(typed: Typed, tmp_path: Path) -> None:
    done = typed("report", "run", "--no-page")
    assert "0.9 ms" in done.stdout
    assert "page:" not in done.stdout
    assert not (tmp_path / "report.html").exists()


def test_colors_are_for_terminals_and_can_be_turned_off(typed: Typed, tmp_path: Path) -> None:
    assert "\x1b" not in typed("report", "run").stdout
    assert "\x1b" in typed("report", "run", FORCE_COLOR="1").stdout
    assert "\x1b" not in typed("report", "run", "--no-color", FORCE_COLOR="1").stdout
    assert "\x1b" not in typed("report", "run", FORCE_COLOR="1", NO_COLOR="1").stdout
    code, shown = on_a_terminal(["report", "run", "--no-color"], tmp_path)
    assert code == 0
    assert re.search(r"\x1b\[[0-9;]*m", shown) is None
    assert "0.9 ms" in shown


def test_shells_complete_commands(typed: Typed) -> None:
    done = typed(_PYTHON__M_BRIDGE_PROFILING_CLI_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS="bridge-profiling comp")
    assert "compare" in done.stdout


def test_a_report_of_unreadable_captures_leaves_the_page(typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("good")
    (tmp_path / "x.txt").write_text("text")
    done = typed("report", "x.txt")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: x.txt is not a Kineto trace")
    assert (tmp_path / "report.html").read_text() == "good"
    done = typed("merge", "x.txt")
    assert done.returncode == 1
    assert not (tmp_path / "all_ranks.json.gz").exists()


def test_of_several_windows_the_report_names_the_one_shown_first(typed: Typed, tmp_path: Path) -> None:
    for window in ("iter-2-4", "iter-5-7"):
        write(tmp_path / "several" / "torch" / window / "rank-0.pt.trace.json.gz", 0)
    os.utime(tmp_path / "several" / "torch" / "iter-2-4" / "rank-0.pt.trace.json.gz", (1, 1))
    assert "iter-5-7" in typed("report", "several").stdout.splitlines()[0]
    assert json.loads(typed("report", "several", "--json").stdout)["schema_version"] == 1


def test_a_run_shows_its_ranks_without_reading_them(tmp_path: Path) -> None:
    write(tmp_path / "rank-0.json.gz", 0)
    assert repr(Run(tmp_path)) == f"Run({str(tmp_path)!r}, 1 rank, kineto)"
