"""Timing of a step: the number of calls, and the statistics of repeated measurements, compared with tables and simulations."""

import itertools
import math
import random

import pytest

from bridge_profiling.bench import step as bench_step
from bridge_profiling.bench.results import LEVEL, estimate
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


@pytest.mark.parametrize("samples", [6, None])
def test_warm_up_iterations_do_not_count(clock, samples):
    timing = measure_step(clock, warmup=2, iterations=8, samples_per_iteration=samples)
    assert (timing.warmup, timing.iterations, timing.device) == (2, 8, "cpu")
    assert (timing.seconds.median, timing.seconds.mean, timing.seconds.low, timing.seconds.high) == (2, 2, 1, 3)
    assert timing.iterations_per_s.median == 0.5
    assert timing.samples_per_s is None if samples is None else timing.samples_per_s.median == 3


def test_it_stops_at_the_time_limit_and_counts_at_least_one(clock):
    assert measure_step(clock, warmup=2, iterations=100, max_seconds=10).iterations == 6
    assert measure_step(clock, warmup=0, iterations=100, max_seconds=0).iterations == 1


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        # n = 10: the second smallest and the second largest hold the median with 97.9%, the third with 89.1% only.
        ([10, 1, 9, 2, 8, 3, 7, 4, 6, 5], (10, 5.5, 5.5, 2, 9)),
        ([4, 2, 6, 1, 5, 3], (6, 3.5, 3.5, 1, 6)),
        # Fewer than six have no bounds.
        ([1, 1, 2, 2, 4], (5, 2, 2, None, None)),
        ([3], (1, 3, 3, None, None)),
    ],
)
def test_median_mean_and_bounds_agree_with_tables(samples, expected):
    found = estimate(samples)
    assert (found.count, found.median, found.mean, found.low, found.high) == expected


def test_bounds_hold_the_true_median_as_often_as_promised():
    # A skewed distribution, as for times; its median is ln 2.
    draws = random.Random(7)
    found = [estimate([draws.expovariate(1.0) for _ in range(25)]) for _ in range(2000)]
    assert sum(one.low <= math.log(2) <= one.high for one in found) / 2000 >= LEVEL - 0.01


def test_a_rate_is_the_inverse_with_swapped_bounds():
    rate = estimate([0.1, 0.1, 0.2, 0.2, 0.4, 0.5]).inverted(8)
    assert (rate.median, rate.mean, rate.low, rate.high) == pytest.approx((40, 8 / 0.25, 16, 80))
