"""The command `bridge-profiling monitor`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from urllib.request import urlopen

import pytest

from bridge_profiling.cli import main

COMMAND = [sys.executable, "-m", "bridge_profiling.cli", "monitor"]


def test_it_serves_and_logs_until_ctrl_c(tmp_path):
    path = tmp_path / "monitor.jsonl"
    command = [*COMMAND, "--jsonl", str(path), "--port", "0", "--interval", "0.2", "--pids", str(os.getpid())]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    address = re.search(r"http://127\.0\.0\.1:\d+/metrics", process.stderr.readline()).group()
    served = ""
    while "process_resident_memory_bytes{" not in served:
        with urlopen(address, timeout=10) as answer:
            served = answer.read().decode()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 0
    process.stderr.close()
    assert f'pid="{os.getpid()}"' in served
    assert "bridge_profiling_training" not in served
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    assert samples[0]["training"] is None
    assert samples[0]["processes"][0]["pid"] == os.getpid()


def test_without_a_gpu_it_says_so_and_monitors_processes():
    done = subprocess.run(
        [*COMMAND, "--interval", "0.1", "--duration", "0.25"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"LD_LIBRARY_PATH": "/nowhere"},
    )
    assert done.returncode == 0
    if "GPUs are unavailable" not in done.stderr:
        pytest.skip("this machine has a GPU")
    assert "select others with --pids" in done.stderr
    assert re.search(r"GPUs unavailable: .*\n.* process \d+ .* GiB", done.stdout)


def test_a_closed_pipe_ends_it_without_an_error():
    process = subprocess.Popen(
        [*COMMAND, "--jsonl", "-", "--interval", "0.05", "--gpus", "none"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert json.loads(process.stdout.readline())["kind"] == "sample"
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=60) == 0
    process.stderr.close()
    assert "Broken pipe" not in errors


def test_it_prints_the_dashboard(monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "--grafana")
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["title"] == "bridge_profiling"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pids", "1,x"], "'x' is not a process id"),
        (["--interval", "0"], "interval=0.0 is not a valid time"),
        (["--jsonl", "/proc/nowhere/file"], "/proc/nowhere/file cannot be written"),
        (["--port", "99999"], "--port"),
        (["--duration", "inf"], "inf is not a valid number of seconds"),
    ],
)
def test_a_wrong_request_is_refused(options, message, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, *options)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def run(monkeypatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bridge-profiling", "monitor", *options])
    main()
