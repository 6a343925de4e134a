"""Where a command runs: its output's encoding, closed or full outputs, little memory, warnings as errors, no home directory."""

import contextlib
import errno
import io
import os
import pwd
import signal
import sys
import warnings

import duckdb
import pyarrow as pa
import pytest

from bridge_profiling.cli import runs
from bridge_profiling.facts import engines
from bridge_profiling.report import page
from bridge_profiling.traces import cache
from tests.cli.conftest import write


@pytest.fixture(scope="module")
def read_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("environments")
    write(folder / "run" / "rank-0.json.gz", 0)
    return folder


@pytest.fixture
def folder(read_once, monkeypatch):
    """One for all tests: what a command writes does not concern the next one, and the run stays as it is."""
    monkeypatch.chdir(read_once)
    return read_once


COMMANDS = ["analyze run", "report run --no-page", "report run --json", "compare run run", "doctor"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-16"])
@pytest.mark.parametrize("command", COMMANDS)
def test_an_encoding_that_lacks_our_characters_gets_others(typed, monkeypatch, command, encoding):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding, errors="strict"))
    done = typed(*command.split())
    assert (done.returncode in (0, 1), done.stderr) == (True, "")
    assert written.getvalue().decode(encoding)


@pytest.mark.parametrize("command", ["analyze run", "report run --json", "doctor --json", "--help"])
def test_an_output_that_takes_nothing_is_one_error(typed, monkeypatch, command):
    monkeypatch.setattr(sys, "stdout", None)
    closed = typed(*command.split())
    assert (closed.returncode, closed.stderr.splitlines()) == (1, [closed.stderr.strip()])
    assert closed.stderr.startswith("error: standard output is closed")
    full = open("/dev/full", "w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", full)
    done = typed(*command.split())
    with contextlib.suppress(OSError):
        full.close()
    assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")


SHORTAGES = {
    "Python's memory": MemoryError(),
    "Arrow's memory": pa.ArrowMemoryError("malloc of size 1 failed"),
    "DuckDB's memory": duckdb.OutOfMemoryException("could not allocate block"),
    "memory of a library": ImportError("libarrow.so: failed to map segment from shared object"),
    "the system's memory": OSError(errno.ENOMEM, "Cannot allocate memory"),
    "threads": RuntimeError("can't start new thread"),
    "DuckDB's disk": duckdb.IOException("Could not write file: No space left on device\n\nLINE 1"),
}


@pytest.mark.parametrize("error", SHORTAGES.values(), ids=SHORTAGES)
def test_what_the_machine_is_short_of_is_one_line(typed, monkeypatch, error):
    def fail(*given):
        raise error

    monkeypatch.setattr(runs, "_locate", fail)
    done = typed("analyze", "run")
    assert (done.returncode, done.stderr.count("\n"), done.stderr.startswith("error: ")) == (1, 1, True)
    [outcome] = engines.here(fail, [None])
    assert f"error: {outcome.error}\n" == done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_warnings_can_be_errors(typed, command):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert typed(*command.split()).returncode in (0, 1)


def test_a_user_without_a_home_directory_is_answered(typed, monkeypatch):
    def unknown(number):
        raise KeyError(number)

    monkeypatch.delenv("HOME")
    for name in ("XDG_CACHE_HOME", cache.DIRECTORY_VARIABLE, "NEMORUN_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert typed("analyze", "run").returncode == 0


def test_tables_to_keep_that_cannot_be_written_are_an_error_after_the_answer(typed, folder, monkeypatch):
    write = cache.write_blocks

    def full(blocks, schema, path):
        if folder / "tables" in path.absolute().parents:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "Error writing bytes to file. Detail: [errno 28] No space left on device")
        write(blocks, schema, path)

    monkeypatch.setattr(cache, "write_blocks", full)
    done = typed("analyze", "run", "--parquet", "tables")
    assert (done.returncode, "Device time" in done.stdout) == (1, True)
    assert done.stderr == "error: tables lacks the tables of rank 0, which cannot be written: No space left on device\n"
    assert not any((folder / "tables").iterdir())


@pytest.mark.parametrize(("reason", "code"), [(errno.ENOSPC, 1), (errno.EDQUOT, 1), (errno.EACCES, 2)])
def test_a_file_of_the_users_on_a_full_disk_is_a_failure(typed, monkeypatch, reason, code):
    def fail(path, write):
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(page, "write_atomically", fail)
    for command in ("report run -o page.html", "merge run -o all.json", "flamegraph run -o flame.json"):
        done = typed(*command.split())
        assert (done.returncode, os.strerror(reason) in done.stderr, done.stderr.count("\n")) == (code, True, 1)


def test_a_monitor_whose_file_lacks_samples_fails(typed, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *given: None)
    command = "monitor --duration 0.1 --interval 0.05 --jsonl"
    assert typed(*command.split(), "/dev/full").returncode == 1
    assert typed(*command.split(), "samples.jsonl").returncode == 0
