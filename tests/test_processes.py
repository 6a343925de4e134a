"""Other processes as /proc shows them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from bridge_profiling import processes
from bridge_profiling.processes import InactivityTimer, cpu_seconds, is_running


def test_processor_time_is_what_a_process_has_used_until_it_ends():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        while cpu_seconds(busy.pid) < 0.5:
            time.sleep(0.05)
        before = cpu_seconds(busy.pid)
        while cpu_seconds(busy.pid) < before + 0.2:
            time.sleep(0.05)
        busy.kill()
    assert cpu_seconds(busy.pid) == 0


@pytest.fixture
def used(monkeypatch):
    """Seconds on the clock and processor seconds of two processes; tests set them."""
    values = SimpleNamespace(now=0.0, first=0.0, second=5.0)
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: values.now))
    monkeypatch.setattr(processes, "cpu_seconds", lambda name: getattr(values, name))
    return values


def after(timer: InactivityTimer, used: SimpleNamespace, seconds: float, **changes: float) -> bool:
    """Whether the timer has expired this many seconds later, when the processes have used this."""
    used.now += seconds
    vars(used).update(changes)
    return timer.expired()


def test_idle_processes_expire_after_a_while(used):
    timer = InactivityTimer(lambda: ["first", "second"], 120)
    assert not after(timer, used, 10)
    assert not after(timer, used, 110)  # earlier use is no activity, but starts the while
    assert after(timer, used, 20)


def test_a_second_of_work_starts_the_while_again(used):
    timer = InactivityTimer(lambda: ["first", "second"], 120)
    after(timer, used, 10)
    assert not after(timer, used, 119, first=1.0)
    assert not after(timer, used, 119, first=1.5)
    assert after(timer, used, 10)


def test_so_does_the_end_of_a_process(used):
    timer = InactivityTimer(lambda: ["first", "second"], 120)
    after(timer, used, 10)
    assert not after(timer, used, 119, second=0.0)
    assert not after(timer, used, 119)


def test_so_does_a_reset(used):
    timer = InactivityTimer(lambda: [], 120)
    used.now = 119.0
    timer.reset()
    assert not after(timer, used, 119)
    assert after(timer, used, 2)


def test_a_process_runs_until_it_has_ended_even_if_nobody_has_waited_for_it():
    assert is_running(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.monotonic() + 30
    while is_running(child.pid):
        assert time.monotonic() < deadline
    assert child.returncode is None, "a zombie"
    child.wait()
    assert not is_running(child.pid)
