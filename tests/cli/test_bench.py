"""The command `bridge-profiling bench`: its table, result file and exit code. It measures in a process of its own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bridge_profiling.cli.bench import sizes_from
from bridge_profiling.cli.signals import wait_for
from bridge_profiling.common.errors import ProfilingConfigError
from tests.cli.conftest import COMMAND
from tests.report.published import problems

CODE = """
import time

class Slow:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        print("slow", flush=True)
        time.sleep(600)

def slow():
    return Slow()

def data():
    print("made")
    return [float(index) for index in range(16)]
"""


@pytest.fixture(autouse=True)
def user_code(folder):
    Path("mine.py").write_text(CODE)


@pytest.mark.integration
def test_results_are_printed_and_kept_in_one_file(process):
    links = "bench collectives --backend gloo --operations all-reduce --sizes 1KiB --seconds 0.05 -o bench.json"
    done = process(*links.split(), COLUMNS="200")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("communication of 2 ranks on 1 host, gloo")
    loader = "bench data-loader --loader mine:data --workers 0 --seconds 0.1 --batch-size 4 --json -o bench.json"
    done = process(*loader.split())
    assert json.loads(done.stdout)["rows"][0]["samples_per_batch"] == 4
    assert "made" in done.stderr, "what the user's code prints is kept apart from the answer"
    kept = json.loads(Path("bench.json").read_text())["results"]
    assert [problems("bench", result) for result in kept] == [[], []]
    assert [result["kind"] for result in kept] == ["collectives", "data_loader"]


def test_a_result_that_cannot_be_saved_is_still_printed(typed, monkeypatch):
    result = {
        "kind": "data_loader",
        "subject": "mine:data",
        "device": "cpu",
        "limitations": [],
        "rows": [],
        "recommendation": None,
    }
    monkeypatch.setattr("bridge_profiling.cli.bench._measured", lambda *_: (result, 0))

    def full(*_):
        raise ProfilingConfigError("bench.json cannot be written: No space left on device")

    monkeypatch.setattr("bridge_profiling.bench.results.write", full)
    done = typed("bench", "data-loader", "--loader", "mine:data", "-o", "bench.json")
    assert (done.returncode, "No space left" in done.stderr) == (2, True)
    assert "mine:data" in done.stdout


@pytest.mark.integration
def test_a_signal_to_the_command_ends_the_measuring_process():
    command = [*COMMAND, "bench", "data-loader", "--loader", "mine:slow"]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while running.stderr.readline() != "slow\n":
        assert running.poll() is None
    running.send_signal(signal.SIGTERM)
    # Standard error is closed once the measuring process has ended too.
    assert running.communicate(timeout=60)[1] == ""
    assert running.returncode == 143


@pytest.mark.integration
def test_a_process_that_ignores_the_signal_is_killed():
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"

    def start():
        deaf = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        deaf.stdout.readline()
        os.kill(os.getpid(), signal.SIGTERM)
        return deaf

    assert wait_for(start, {signal.SIGTERM: signal.SIGTERM}, kill_after_s=0.1) == (-signal.SIGKILL, signal.SIGTERM)


KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("1KiB:64KiB:4x", [KIB, 4 * KIB, 16 * KIB, 64 * KIB]), ("1MiB,1KB,8", [8, 1000, MIB]), ("1.5MiB", [3 * MIB // 2])],
)
def test_sizes(text, sizes):
    assert sizes_from(text) == sizes


WRONG_SIZES = ("", "big", "1KiB:", "4KiB:1KiB:2x", "1KiB:4KiB:1x", "1KiB:4KiB:2x:3", "0", "100GiB", "-1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        *((("collectives", f"--sizes={text}"), "Type --sizes 1KiB:256MiB:4x") for text in WRONG_SIZES),
        (("collectives", "--operations", "all_red"), "unknown operation 'all-red'. Type all-reduce"),
        (("collectives", "--nproc", "1"), "--nproc"),
        (("collectives", "--seconds", "0"), "--seconds 0 is not a positive time"),
        (("data-loader", "--loader", "train"), "does not name a factory. Type --loader module:factory"),
        (("data-loader", "--loader", "mine:data", "--workers", "0,two"), "--workers '0,two' is not a list"),
        (("data-loader", "--loader", "mine:data", "--prefetch", "0"), "--prefetch '0' is not a list of numbers of 1 or more"),
    ],
)
def test_what_cannot_be_measured_is_refused(typed, arguments, said):
    done = typed("bench", *arguments)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr
