"""Other processes as /proc shows them."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from bridge_profiling.common import processes
from bridge_profiling.common.processes import InactivityTimer, cpu_seconds, is_running, run_owned


def test_processor_time_is_what_a_process_has_used_and_nothing_where_there_is_none():
    before = cpu_seconds(os.getpid())
    while cpu_seconds(os.getpid()) < before + 0.2:
        pass
    assert cpu_seconds(int(Path("/proc/sys/kernel/pid_max").read_text()) + 1) == 0


@pytest.fixture
def used(monkeypatch):
    """Seconds on the clock and processor seconds of two processes; tests set them."""
    values = SimpleNamespace(now=0.0, first=0.0, second=5.0)
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: values.now))
    monkeypatch.setattr(processes, "cpu_seconds", lambda name: getattr(values, name))
    return values


@pytest.mark.parametrize(
    "steps",
    [
        # Earlier use is not activity, but starts the while.
        [(10, {}, False), (110, {}, False), (20, {}, True)],
        # A second of work starts the while again.
        [(10, {}, False), (119, {"first": 1.0}, False), (119, {"first": 1.5}, False), (10, {}, True)],
        # So does the end of a process.
        [(10, {}, False), (119, {"second": 0.0}, False), (119, {}, False)],
    ],
)
def test_idle_processes_expire_after_a_while(used, steps):
    timer = InactivityTimer(lambda: ["first", "second"], 120)
    for seconds, changes, expired in steps:
        vars(used).update(changes, now=used.now + seconds)
        assert timer.expired() is expired


@pytest.mark.integration
def test_a_process_runs_until_it_has_ended_even_if_nobody_has_waited_for_it():
    assert is_running(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.monotonic() + 30
    while is_running(child.pid):
        assert time.monotonic() < deadline
    assert child.returncode is None, "a zombie"
    child.wait()
    assert not is_running(child.pid)


@pytest.mark.integration
def test_a_command_runs_on_macos_where_no_signal_can_be_chosen(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(processes.fcntl, "F_SETSIG")
    assert run_owned([sys.executable, "-c", "print(7)"], seconds=60).stdout == "7\n"
