"""CPU and memory of real processes, and what processes around a monitor leave of its outputs."""

import os
import subprocess
import sys
from time import sleep

import pytest

from bridge_profiling.monitor import Monitor
from bridge_profiling.monitor.metrics import PROCESS_METRICS
from bridge_profiling.monitor.processes import Machine, Processes

BUSY = "held = bytearray(100 << 20)\nprint(flush=True)\nwhile True: pass"
IDLE = "import time\nprint(flush=True)\ntime.sleep(600)"


@pytest.fixture
def start():
    """Starts Python programs that end with the test; each has printed a line, which is its `said`."""
    started = []

    def begin(code: str, *arguments: object) -> subprocess.Popen:
        process = subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True)
        started.append(process)
        process.said = process.stdout.readline().strip()
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.integration
def test_processes_and_the_machine_are_read(start):
    busy, idle = start(BUSY), start(IDLE)
    watched, machine = Processes([busy.pid, idle.pid]), Machine()
    assert machine.read().unavailable["cpu_ratio"] == "needs two samples"
    assert {one.unavailable["cpu_ratio"] for one in watched.read()} == {"needs two samples"}
    sleep(1)
    working, resting = (one.values for one in watched.read())
    of_machine = machine.read().values
    assert 0 < of_machine["cpu_ratio"] <= 1
    assert working["resident_memory_bytes"] < of_machine["memory_used_bytes"] < of_machine["memory_total_bytes"]
    # The machine may be busy with other work.
    assert working["cpu_ratio"] > 0.05 >= resting["cpu_ratio"]
    assert working["resident_memory_bytes"] - resting["resident_memory_bytes"] > 90 << 20
    assert working["anonymous_memory_bytes"] > 100 << 20
    assert [one.identity["pid"] for one in Processes().read()] == [os.getpid()]


@pytest.mark.integration
def test_a_process_that_has_ended_is_unavailable_not_zero(start):
    process = start(IDLE)
    watched = Processes([process.pid])
    watched.read()
    process.kill()
    # Its exit code has not been read, as for a data loader's worker that died: the system still lists it.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    zombie = watched.read()
    process.wait()
    for (ended,) in (zombie, watched.read()):
        assert (ended.values, ended.unavailable) == ({}, dict.fromkeys(PROCESS_METRICS, "the process has ended"))


@pytest.mark.integration
def test_a_process_forked_in_the_block_leaves_the_outputs_to_its_parent(tmp_path):
    path = tmp_path / "monitor.jsonl"
    with Monitor(jsonl=path, port=0, interval=60, gpus=[]) as monitor:
        while monitor.sample is None:
            sleep(0.002)
        child = os.fork()
        if not child:
            try:
                monitor.__exit__(None, None, None)
            finally:
                os._exit(0)
        assert os.waitpid(child, 0) == (child, 0)
    assert len(path.read_text().splitlines()) == 2
