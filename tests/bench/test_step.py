"""Timing of a step: the number of calls, and the statistics of their times."""

from __future__ import annotations

import itertools

import pytest

from bridge_profiling.bench import step as bench_step
from bridge_profiling.bench.step import measure_step


@pytest.fixture
def clock(monkeypatch):
    """A clock that each step advances: by 9 s during the warm-up, then by 1, 3, 1, 3, … seconds."""
    now = [0.0]
    monkeypatch.setattr(bench_step.time, "perf_counter", lambda: now[0])
    takes = itertools.chain([9.0, 9.0], itertools.cycle([1.0, 3.0]))

    def step():
        now[0] += next(takes)

    return step


def test_warm_up_iterations_do_not_count(clock):
    timing = measure_step(clock, warmup=2, iterations=8, samples_per_iteration=6)
    assert (timing.warmup, timing.iterations, timing.device) == (2, 8, "cpu")
    assert (timing.seconds.median, timing.seconds.mean, timing.seconds.low, timing.seconds.high) == (2, 2, 1, 3)
    assert timing.iterations_per_s.median == 0.5
    assert timing.samples_per_s.median == 3


def test_it_stops_at_the_time_limit_and_counts_at_least_one(clock):
    assert measure_step(clock, warmup=2, iterations=100, max_seconds=10).iterations == 6
    assert measure_step(clock, warmup=0, iterations=100, max_seconds=0).iterations == 1


def test_an_exception_of_the_step_is_passed_on():
    with pytest.raises(ZeroDivisionError):
        measure_step(lambda: 1 / 0)


def test_an_unknown_number_of_samples_gives_no_rate(clock):
    assert measure_step(clock, iterations=2).samples_per_s is None
