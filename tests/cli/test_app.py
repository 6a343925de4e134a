"""Flags that every command has, one style of errors, and completion."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

USAGE_ERRORS = [
    ("repor", "no such command 'repor'"),
    ("analyze nowhere", "nowhere does not exist. Type "),
    ("analyze run --workers 0", "invalid value for '--workers'"),
    ("analyze run --ray-address auto", "--ray-address needs the ray engine. Type --engine ray"),
    ("merge run -o run", "run cannot be written. Type -o"),
    ("report run -o nowhere/page.html", "nowhere/page.html cannot be written. Type "),
    ("monitor --interval 0", "--interval 0.0 is not a time"),
    ("report run --threshold data_loding=1", "--threshold 'data_loding' is unknown. Type --threshold data_loading"),
    ("report run --threshold cause=nan", "--threshold cause takes a number, not 'nan'"),
    ("report run --threshold data_loading_ranges=(", r"--threshold data_loading_ranges takes a regular expression, not '\('"),
    ("flamegraph run -o text", "text exists and is not a speedscope file.*another file with -o, or remove this one"),
    ("compare run run --fail-over five", ".*Type for example 5%"),
    ("monitor --jsonl /proc/nowhere/file", "/proc/nowhere/file cannot be written"),
    (
        "bench collectives -o text",
        "text is not a result file of bridge-profiling bench.*another file with -o, or remove this one",
    ),
    ("trigger run --wait --timeout 0", "--wait and --timeout 0 exclude each other"),
]


@pytest.mark.parametrize(("line", "message"), USAGE_ERRORS)
def test_a_usage_error_is_one_line_with_what_to_type(typed, folder, line, message):
    (folder / "text").write_text("no result")
    done = typed(*line.split())
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert re.match(f"error: {message}", done.stderr), done.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("analyze empty", "empty holds no capture: no Kineto trace, nsys report or memory snapshot is under it"),
        ("report text", "text is not a Kineto trace"),
        ("merge text -o all.json", "text is not a Kineto trace"),
        ("flamegraph broken -o all.json", ".*rank-0.json.gz"),
        ("memory run", "run records no memory. Profile with profiling.record_memory_history=true"),
    ],
)
def test_a_run_of_which_nothing_can_be_read_leaves_the_last_page(typed, folder, line, message):
    for path in ("empty/notes", "text", "broken/rank-0.json.gz", "report.html"):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text("text")
    done = typed(*line.split())
    # merge and flamegraph say as well that nothing is left to write.
    assert (done.returncode, done.stdout, done.stderr.count("error: ")) == (1, "", 1 + line.startswith(("merge", "flamegraph")))
    assert re.match(f"error: {message}", done.stderr), done.stderr
    assert (folder / "report.html").read_text() == "text"
    assert not (folder / "all.json").exists()


def test_a_missing_package_is_named_with_the_command_that_installs_it(typed, monkeypatch):
    def missing(*_):
        raise ModuleNotFoundError("No module named 'duckdb'", name="duckdb")

    monkeypatch.setattr("bridge_profiling.experiments.jobs.experiment_of", missing)
    done = typed("analyze", "run")
    assert done.returncode == 2
    assert "needs duckdb, which is not installed. Type pip install '.[analysis]'" in done.stderr


@pytest.mark.parametrize(("line", "page"), [("--quiet report run", True), ("report run --no-page", False)])
def test_the_answer_stands_alone_when_quiet_or_without_a_page(typed, folder, line, page):
    done = typed(*line.split())
    assert done.returncode == 0, done.stderr
    assert "0.9 ms" in done.stdout
    assert "page:" not in done.stdout
    assert (folder / "report.html").exists() is page


def test_colors_are_for_terminals_and_can_be_turned_off(typed):
    forced = {"FORCE_COLOR": "1"}
    options = (([], {}), ([], forced), (["--no-color"], forced), ([], forced | {"NO_COLOR": "1"}))
    colored = ["\x1b" in typed("report", "run", *flags, **environ).stdout for flags, environ in options]
    assert colored == [False, True, False, False]


@pytest.mark.integration
def test_shells_complete_commands_and_see_the_exit_code(process):
    environment = {"_BRIDGE_PROFILING_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "bridge-profiling compare --str"}
    script = Path(sys.executable).with_name("bridge-profiling")
    assert "--strict" in subprocess.run([script], env=os.environ | environment, capture_output=True, text=True).stdout
    done = process()
    assert (done.returncode, done.stdout.split()[0], done.stderr) == (2, "Usage:", "")
