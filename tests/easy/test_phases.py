"""`with phase("forward")`: timed always, a range where something captures."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge_profiling.easy import auto_profile, phase, phase_times, reset_phase_times
from tests.easy.scripts import ranges


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    reset_phase_times()
    yield
    reset_phase_times()


def test_times_are_added_up_by_name() -> None:
    for seconds in (0.02, 0.001):
        with phase("forward"), phase("attention"):
            time.sleep(seconds)
    times = phase_times()
    assert list(times) == ["attention", "forward"]
    forward = times["forward"]
    assert forward.count == 2
    assert forward.total_ns == forward.min_ns + forward.max_ns
    assert forward.max_ns >= 20_000_000 > forward.min_ns >= 1_000_000
    assert forward.mean_ns * 2 == forward.total_ns
    assert times["attention"].total_ns <= forward.total_ns
    assert str(times).splitlines()[1].startswith("forward    2 times, ")


def test_an_exception_passes_and_its_phase_counts() -> None:
    with pytest.raises(KeyError), phase("forward"):
        raise KeyError
    assert phase_times()["forward"].count == 1


def test_threads_lose_no_count() -> None:
    def work() -> None:
        for _ in range(500):
            with phase("data-loading", synchronize=True):
                pass

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert phase_times()["data-loading"].count == 4000


def test_a_phase_is_a_range_of_the_capture_around_it(tmp_path: Path) -> None:
    @auto_profile(warmup=1, iterations=2, output_dir=tmp_path, summary=False)
    def step() -> None:
        with phase("evaluation"):
            pass

    for _ in range(5):
        step()
    assert ranges(tmp_path, folder="iter-1-3") == ["ProfilerStep#1", "evaluation", "ProfilerStep#2", "evaluation"]
    assert phase_times()["evaluation"].count == 5


def test_it_decorates_a_function_too() -> None:
    @phase("logging")
    def log() -> int:
        return 7

    assert [log(), log()] == [7, 7]
    assert phase_times()["logging"].count == 2
