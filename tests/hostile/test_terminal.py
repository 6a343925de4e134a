"""Names reach a terminal and a page without characters that a terminal obeys, that reorder text, or that cannot be encoded."""

import unicodedata

import pytest

from bridge_profiling.cli import output
from bridge_profiling.common.errors import one_line
from bridge_profiling.monitor import JsonLines, Readings, Sample
from tests.hostile.runs import change_manifest, write_run
from tests.traces.kineto_files import write_ranks_called

#: What a terminal would obey, and what reorders, hides or breaks a line.
HOSTILE = {
    "color": "\x1b[31m",
    "title": "\x1b]0;owned\x07",
    "C1": "\x9b31m\x90\x9d",
    "bell, backspace, return, delete": "\x07\x08\r\x7f",
    "override, isolate, mark": "\u202egpj\u202c\u2066\u2069\u200e\u061c",
    "invisible": "\u200b\u2060\ufeff\U000e0041",
    "another line": "\nerror: fake\u2028\u2029\x85\x0b\x0c",
    "half a character": "\udc9b",
}


def _unsafe(text, allowed="\n"):
    return {character for character in text if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")} - set(allowed)


@pytest.mark.parametrize(
    "command",
    [
        *("report {} -o page.html", "analyze {} --json", "compare {} run -o page.html", "merge {} -o all.json"),
        "flamegraph {} --folded -o stacks.txt",
    ],
)
def test_no_command_prints_or_writes_a_hostile_name_as_it_is(typed, folder, tmp_path_factory, command):
    """The kernels, operators and ranges of a run are called by everything hostile that JSON can hold."""
    named = tmp_path_factory.mktemp("named")
    write_ranks_called("".join(text for key, text in HOSTILE.items() if key != "half a character"), named)
    done = typed(*command.format(named).split())
    assert done.returncode == 0, done.stderr
    assert not _unsafe(done.stdout + done.stderr)
    for path in folder.glob("*.*"):
        assert not _unsafe(path.read_text(), allowed="\n\t" if path.suffix == ".html" else "\n")


@pytest.mark.parametrize("arguments", ["report {}", "{}", "report run --{}", "flamegraph run --ranks {}", "trigger {}"])
def test_an_argument_is_repeated_in_errors_without_its_controls(typed, capsys, monkeypatch, arguments):
    shown = []
    monkeypatch.setattr("typer.echo", lambda text, err=False: shown.append(text))
    assert typed(*arguments.format("x\x1b[31m\x9b\u202e\x07.py").split()).returncode == 2
    assert not _unsafe("".join(shown))
    assert "\\x1b" in shown[-1]


def test_a_manifest_and_a_path_cannot_type_on_the_terminal(typed, folder):
    run = write_run(folder / "two\x1b[31m\u202e\x9b")
    hostile = "".join(HOSTILE.values())
    change_manifest(run, 1, host=hostile, status="partial", reason=hostile, command=[hostile], coordinates={hostile: [0, 1]})
    change_manifest(run, 0, rank=1, **{"window": hostile})
    for command in (("report", run.name, "-o", "page.html"), ("analyze", run.name), ("merge", run.name, "-o", "all.json")):
        done = typed(*command)
        assert done.returncode == 0
        assert not _unsafe(done.stdout + done.stderr)
    assert not _unsafe((folder / "page.html").read_text(), allowed="\n\t")


def test_logs_of_ranks_and_of_the_monitor_are_lines_of_text(capsys):
    hostile = "".join(HOSTILE.values())
    named = Readings({"gpu": "0", "pid": 7, "name": hostile}, {"power_watts": 500.0})
    sample = Sample(1_700_000_000.25, hostile, 3, (named,), (named,), unavailable={"gpus": hostile})
    JsonLines("-").write(sample)
    output.note(hostile)
    output.print_error(hostile)
    shown = "".join(capsys.readouterr()) + one_line(RuntimeError(hostile))
    assert not _unsafe(shown)
