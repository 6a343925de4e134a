"""Statistics of repeated measurements, compared with tables and with simulations."""

from __future__ import annotations

import random

import pytest

from bridge_profiling.bench.results import LEVEL, estimate


def test_median_mean_and_bounds_of_ten_samples_agree_with_tables():
    # n = 10: the second smallest and the second largest hold the median with 97.9%, the third with 89.1% only.
    found = estimate([10, 1, 9, 2, 8, 3, 7, 4, 6, 5])
    assert (found.count, found.median, found.mean, found.low, found.high) == (10, 5.5, 5.5, 2, 9)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_fewer_than_six_samples_have_no_bounds(count):
    found = estimate([3.0] * count)
    assert (found.median, found.low, found.high) == (3.0, None, None)


def test_six_samples_are_bounded_by_their_ends():
    assert (estimate([4, 2, 6, 1, 5, 3]).low, estimate([4, 2, 6, 1, 5, 3]).high) == (1, 6)


def test_bounds_hold_the_true_median_as_often_as_promised():
    # A skewed distribution, as for times; its median is ln 2.
    draws = random.Random(7)
    held = 0
    for _ in range(2000):
        found = estimate([draws.expovariate(1.0) for _ in range(25)])
        held += found.low <= 0.6931471805599453 <= found.high
    assert held / 2000 >= LEVEL - 0.01


def test_a_rate_is_the_inverse_with_swapped_bounds():
    rate = estimate([0.1, 0.1, 0.2, 0.2, 0.4, 0.5]).inverted(8)
    assert rate.median == pytest.approx(40)
    assert rate.mean == pytest.approx(8 / 0.25)
    assert (rate.low, rate.high) == (pytest.approx(16), pytest.approx(80))
