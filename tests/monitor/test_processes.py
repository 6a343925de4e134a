"""CPU and memory of real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from time import monotonic, sleep

import psutil
import pytest

from bridge_profiling.monitor import processes
from bridge_profiling.monitor.metrics import PROCESS_METRICS
from bridge_profiling.monitor.processes import Processes

BUSY = "import time\nheld = bytearray(100 << 20)\nprint(flush=True)\nwhile True: pass"
IDLE = "import time\nprint(flush=True)\ntime.sleep(600)"


@pytest.fixture
def start():
    """Starts Python programs that end with the test."""
    started = []

    def begin(code: str) -> subprocess.Popen:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


def test_a_busy_process_has_a_higher_cpu_ratio_than_an_idle_one(start):
    busy, idle = start(BUSY), start(IDLE)
    watched = Processes([busy.pid, idle.pid])
    first = watched.read()
    assert [one.unavailable["cpu_ratio"] for one in first] == ["needs two samples"] * 2
    until = monotonic() + 1
    while monotonic() < until:
        sleep(0.05)
    second = {one.identity["pid"]: one.values for one in watched.read()}
    # The machine may be busy with other work.
    assert second[busy.pid]["cpu_ratio"] > 0.05
    assert second[idle.pid]["cpu_ratio"] <= 0.05
    assert second[busy.pid]["resident_memory_bytes"] - second[idle.pid]["resident_memory_bytes"] > 90 << 20
    assert second[busy.pid]["anonymous_memory_bytes"] > 100 << 20


def test_a_process_that_has_ended_is_unavailable_not_zero(start):
    process = start(IDLE)
    watched = Processes([process.pid])
    watched.read()
    process.kill()
    # Its exit code has not been read, as for a data loader's worker that died: the system still lists it.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    (ended,) = watched.read()
    assert ended.unavailable == dict.fromkeys(PROCESS_METRICS, "the process has ended")
    process.wait()
    (gone,) = watched.read()
    assert gone.values == {}
    assert gone.unavailable == dict.fromkeys(PROCESS_METRICS, "the process has ended")


def test_a_process_name_that_is_not_valid_text_can_be_written(monkeypatch):
    monkeypatch.setattr(psutil.Process, "name", lambda self: b"tr\xe4in".decode(errors="surrogateescape"))
    own, *_ = Processes().read()
    assert own.identity["name"] == "tr?in"


def test_children_are_found_and_dropped_when_they_end(start, monkeypatch):
    monkeypatch.setattr(processes, "_COST_MULTIPLE", 0)
    watched = Processes()
    child = start(IDLE)
    found = {one.identity["pid"]: one.identity for one in watched.read()}
    assert found[os.getpid()].get("parent") is None
    assert found[child.pid]["parent"] == os.getpid()
    child.kill()
    child.wait()
    assert child.pid not in {one.identity["pid"] for one in watched.read()}


def test_without_psutil_the_reason_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    watched = Processes()
    assert watched.read() == ()
    assert watched.unavailable == "psutil is not installed (pip install psutil)"
