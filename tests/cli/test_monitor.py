"""The command `bridge-profiling monitor`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.cli.conftest import COMMAND, Typed


@pytest.mark.integration
def test_it_serves_and_logs_until_ctrl_c(tmp_path: Path) -> None:
    path = tmp_path / "monitor.jsonl"
    options = ["--jsonl", str(path), "--port", "0", "--interval", "0.2", "--pids", str(os.getpid())]
    # Where SIGINT is ignored, as in a shell's background job, children would ignore it too.
    command = ["env", "--default-signal=INT", *COMMAND, "monitor", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        address = re.search(r"http://127\.0\.0\.1:\d+/metrics", process.stderr.readline()).group()
        served = ""
        while "process_resident_memory_bytes{" not in served:
            with urlopen(address, timeout=10) as answer:
                served = answer.read().decode()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    assert f'pid="{os.getpid()}"' in served
    assert "bridge_profiling_training" not in served
    sample = json.loads(path.read_text().splitlines()[0])
    assert (sample["training"], sample["processes"][0]["pid"]) == (None, os.getpid())


@pytest.mark.integration
def test_a_closed_pipe_ends_it_without_an_error() -> None:
    command = [*COMMAND, "monitor", "--jsonl", "-", "--interval", "0.05", "--gpus", "none"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert json.loads(process.stdout.readline())["kind"] == "sample"
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(timeout=60) == 0
    assert "Broken pipe" not in errors


def test_without_a_gpu_it_says_so_and_monitors_processes(typed: Typed) -> None:
    done = typed("monitor", "--interval", "0.1", "--duration", "0.25")
    assert done.returncode == 0
    if "GPUs are unavailable" not in done.stderr:
        pytest.skip("this machine has a GPU")
    assert "select others with --pids" in done.stderr
    assert done.stdout.count("GPUs unavailable") == 1
    assert re.search(r"GPUs unavailable: .*\n.* machine  CPU .*\n.* process \d+ .* GiB", done.stdout)


def test_it_prints_the_dashboard_and_the_rules(typed: Typed) -> None:
    done = typed("monitor", "--grafana")
    assert (done.returncode, json.loads(done.stdout)["title"]) == (0, "bridge_profiling")
    done = typed("monitor", "--alert-rules")
    assert (done.returncode, done.stdout.count("- alert: GpuIsIdle")) == (0, 1)
