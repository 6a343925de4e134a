"""The command `bridge-profiling bench`: its table, result file and exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from bridge_profiling.cli import app
from bridge_profiling.errors import ProfilingConfigError
from tests.ports import free_port

STEP = """
import time

def make():
    print("made")
    return lambda: time.sleep(0.001)

def failing():
    def step():
        raise ValueError("shape mismatch")
    return step

def slow():
    print("slow", flush=True)
    return lambda: time.sleep(600)

class Data:
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return float(index)
"""


@pytest.fixture
def bench(tmp_path):
    """Runs the command in a fresh process, in a directory with a user's module."""
    (tmp_path / "mine.py").write_text(STEP)

    def run(*arguments, **environment):
        command = [sys.executable, "-m", "bridge_profiling.cli", "bench", *arguments]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=os.environ | {"COLUMNS": "200"} | environment,
            capture_output=True,
            text=True,
            timeout=240,
        )

    return run


def test_a_step_and_a_loader_are_printed_and_kept_in_one_file(bench, tmp_path):
    done = bench("step", "--step", "mine:make", "--iterations", "8", "--warmup", "1", "--samples", "4", "-o", "bench.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("step mine:make, cpu\n")
    assert "8 after 1 to warm up" in done.stdout
    assert done.stdout.endswith("result: bench.json\n")
    assert "made" in done.stderr, "what the user's code prints stands beside the answer"
    arguments = (
        "--loader",
        "mine:Data",
        "--workers",
        "0",
        "--no-pin-memory",
        "--seconds",
        "0.1",
        "--batch-size",
        "4",
        "--json",
    )
    done = bench("data-loader", *arguments, "-o", "bench.json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"][0]["samples_per_batch"] == 4
    kept = json.loads((tmp_path / "bench.json").read_text())["results"]
    assert [result["kind"] for result in kept] == ["step", "data_loader"]
    assert kept[0]["rows"][0]["time_us"]["median"] >= 1000


@pytest.mark.system
def test_under_a_launcher_only_rank_0_prints_the_result(bench, tmp_path):
    """Starts both ranks with torchrun's variables."""
    launched = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    arguments = ("collectives", "--operations", "all-reduce", "--sizes", "4KiB", "--seconds", "0.05", "--backend", "gloo")
    command = [sys.executable, "-m", "bridge_profiling.cli", "bench", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
    running = [subprocess.Popen(command, env=os.environ | launched | {"RANK": rank}, **pipes) for rank in ("0", "1")]
    said = [process.communicate(timeout=240) for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    assert "communication of 2 ranks on 1 host, gloo" in said[0][0]
    assert said[1][0] == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("collectives", "--sizes", "huge"), "'huge' is not a size"),
        (("collectives", "--operations", "all-red"), "unknown operation 'all-red'"),
        (("step", "--step", "mine"), "does not name a factory"),
        (("data-loader", "--loader", "mine:Data", "--workers", "many"), "'many' is not a list of numbers"),
        (("step", "--step", "mine:make", "-o", "mine.py"), "mine.py is not a result file of bridge-profiling bench"),
        (("step", "--step", "mine:make", "-o", "mine.py"), "Use another file with -o, or remove this one"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_starts(arguments, said, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(STEP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("something was started"))
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert isinstance(done.exception, ProfilingConfigError)
    assert said in str(done.exception)


def test_a_file_that_cannot_be_written_is_refused_before_the_measurement(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("something was started"))
    done = CliRunner().invoke(app, ["bench", "copies", "-o", "nowhere/bench.json"])
    assert isinstance(done.exception, ProfilingConfigError)
    assert "nowhere/bench.json cannot be written" in str(done.exception)


def test_a_result_that_cannot_be_saved_is_still_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = {"kind": "copies", "device": "NVIDIA H200", "limitations": [], "rows": []}
    # The package's attribute of this name is the command, not the module.
    monkeypatch.setattr(sys.modules["bridge_profiling.cli.bench"], "_measured", lambda request: (result, 0))

    def full(*_):
        raise ProfilingConfigError("bench.json cannot be written: No space left on device")

    monkeypatch.setattr("bridge_profiling.bench.results.write", full)
    done = CliRunner().invoke(app, ["bench", "copies", "-o", "bench.json"])
    assert isinstance(done.exception, ProfilingConfigError)
    assert "copies, NVIDIA H200" in done.output


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_the_command_ends_the_measuring_process(tmp_path, number, code):
    (tmp_path / "mine.py").write_text(STEP)
    command = [sys.executable, "-m", "bridge_profiling.cli", "bench", "step", "--step", "mine:slow"]
    running = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while running.stderr.readline() != "slow\n":
        assert running.poll() is None
    running.send_signal(number)
    # Standard error is closed once the measuring process has ended too.
    assert running.communicate(timeout=60) == (None, "")
    assert running.returncode == code


def test_an_error_in_user_code_is_one_line(bench):
    done = bench("step", "--step", "mine:failing")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: --step mine:failing: the step failed: ValueError: shape mismatch (")
    assert line.endswith("mine.py:10)")


def test_without_a_device_copies_are_unavailable(bench):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    done = bench("copies")
    assert done.returncode == 4
    assert done.stderr.startswith("error: no CUDA device: unavailable")
