"""Types commands: in this process, in a process of their own, and on a terminal."""

import contextvars
import os
import subprocess
import sys
from unittest import mock

import pytest

from bridge_profiling import cli
from tests.traces.conftest import captures
from tests.traces.kineto_files import packed, steps

__all__ = ["captures"]

COMMAND = [sys.executable, "-m", "bridge_profiling.cli"]


def write(path, rank, cut=None, *, device=True):
    """A rank's trace of two iterations, cut off after some bytes; with a kernel in each, or on a CPU alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(packed(steps(*([250] if device else [None]) * 2), distributedInfo={"rank": rank})[:cut])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with one good rank in `run`."""
    write(tmp_path / "run" / "rank-0.json.gz", 0)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def typed(folder, monkeypatch, capsys):
    """Runs a command in this process, which also reads the captures."""

    def run(*arguments, **environment):
        monkeypatch.setattr(sys, "argv", ["bridge-profiling", *arguments])
        capsys.readouterr()
        # --quiet and --no-color last as long as the command.
        with mock.patch.dict(os.environ, environment), pytest.raises(SystemExit) as ended:
            contextvars.copy_context().run(cli.main)
        return subprocess.CompletedProcess(arguments, ended.value.code, *capsys.readouterr())

    return run


@pytest.fixture
def process(folder):
    """Runs a command in a process of its own."""

    def run(*arguments, **environment):
        return subprocess.run([*COMMAND, *arguments], env=os.environ | environment, capture_output=True, text=True, timeout=240)

    return run
