"""What /proc tells of other processes."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from bridge_profiling import processes
from bridge_profiling.processes import Stillness, cpu_seconds


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
    """Seconds on the clock, and processor seconds of two processes, to be set."""
    told = SimpleNamespace(now=0.0, first=0.0, second=5.0)
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: told.now))
    monkeypatch.setattr(processes, "cpu_seconds", lambda name: getattr(told, name))
    return told


def after(still: Stillness, used: SimpleNamespace, seconds: float, **changes: float) -> bool:
    """Whether the stillness lasts when so much later the processes have used this."""
    used.now += seconds
    vars(used).update(changes)
    return still.lasts()


def test_what_does_nothing_is_still_after_a_while(used):
    still = Stillness(lambda: ["first", "second"], 120)
    assert not after(still, used, 10)
    assert not after(still, used, 110)  # what they had used before counts for nothing, but begins the while
    assert after(still, used, 20)


def test_a_second_of_work_begins_the_while_anew(used):
    still = Stillness(lambda: ["first", "second"], 120)
    after(still, used, 10)
    assert not after(still, used, 119, first=1.0)
    assert not after(still, used, 119, first=1.5)
    assert after(still, used, 10)


def test_one_that_ends_does_so_too(used):
    still = Stillness(lambda: ["first", "second"], 120)
    after(still, used, 10)
    assert not after(still, used, 119, second=0.0)
    assert not after(still, used, 119)


def test_what_is_known_from_elsewhere_counts(used):
    still = Stillness(lambda: [], 120)
    used.now = 119.0
    still.interrupt()
    assert not after(still, used, 119)
    assert after(still, used, 2)
