"""The command `bridge-profiling bench`: its table, result file and exit code. It measures in a process of its own."""

import json
import re
import signal
import subprocess
from pathlib import Path

import pytest

from bridge_profiling.common.errors import ProfilingConfigError
from tests.cli.conftest import COMMAND
from tests.report.published import problems

CODE = '''
import signal
import time

def slow():
    print("slow", flush=True)
    while True:
        time.sleep(600)
        yield

def deaf():
    """A call that does not return, as one that waits for a hung device."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # in every thread: one of a library's can take a signal that one blocks
    return slow()

def data():
    print("made")
    return [float(index) for index in range(16)]
'''


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
    monkeypatch.setattr("bridge_profiling.cli.bench._measured", lambda request: (result, 0))

    def full(*_):
        raise ProfilingConfigError("bench.json cannot be written: No space left on device")

    monkeypatch.setattr("bridge_profiling.bench.results.write", full)
    done = typed("bench", "data-loader", "--loader", "mine:data", "-o", "bench.json")
    assert (done.returncode, "No space left" in done.stderr) == (2, True)
    assert "mine:data" in done.stdout


@pytest.mark.integration
@pytest.mark.parametrize(("loader", "said"), [("slow", "$"), ("deaf", r".* was killed: (.*\n)* .*mine.py")])
def test_a_signal_to_the_command_ends_the_measuring_process(loader, said):
    command = [*COMMAND, "bench", "data-loader", "--loader", f"mine:{loader}"]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while running.stderr.readline() != "slow\n":
        assert running.poll() is None
    running.send_signal(signal.SIGTERM)
    # Standard error is closed once the measuring process has ended too.
    assert re.match(said, running.communicate(timeout=60)[1])
    assert running.returncode == 143
