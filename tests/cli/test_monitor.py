"""The command `bridge-profiling monitor`."""

import json
import os
import re
import signal
import subprocess
from urllib.request import urlopen

import pytest

from tests.cli.conftest import COMMAND


@pytest.mark.integration
def test_it_serves_and_logs_until_ctrl_c(tmp_path):
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
    sample = json.loads(path.read_text().splitlines()[0])
    assert (sample["training"], sample["processes"][0]["pid"]) == (None, os.getpid())


def test_without_a_gpu_it_says_so_and_monitors_processes(typed):
    done = typed("monitor", "--interval", "0.1", "--duration", "0.25")
    assert done.returncode == 0
    if "GPUs are unavailable" not in done.stderr:
        pytest.skip("this machine has a GPU")
    sample = json.loads(done.stdout.splitlines()[0])
    assert (sample["gpus"], sample["unavailable"]["gpus"] in done.stderr) == (None, True)
    assert sample["machine"]["memory_used_bytes"] > 0 < sample["processes"][0]["resident_memory_bytes"]
