"""Intervals hold what they promise: Student's t against its own density, coverage against drawn samples."""

import math

import numpy as np
import pytest

from bridge_profiling.analysis.compare.statistics import change_of_mean, change_of_median, t_quantile, welch_p


# Table of any textbook.
@pytest.mark.parametrize(
    ("probability", "freedom", "value"),
    [(0.975, 1, 12.7062), (0.975, 30, 2.0423), (0.995, 2, 9.9248), (0.95, 10, 1.8125), (0.975, math.inf, 1.96)],
)
def test_quantiles_are_those_of_the_tables(probability, freedom, value):
    assert t_quantile(probability, freedom) == pytest.approx(value, abs=5e-5)
    assert t_quantile(1 - probability, freedom) == pytest.approx(-value, abs=5e-5)


@pytest.mark.parametrize("counts", [(3, 3), (12, 7)])
def test_an_interval_of_medians_holds_the_truth_as_often_as_it_says(counts):
    """Of iterations with a slow one now and then; the true change is 7."""
    chance = np.random.default_rng(11)

    def draw(count, center):
        return (center + chance.normal(0, 3, count) + (chance.random(count) < 0.1) * 200).tolist()

    trials = [change_of_median(draw(counts[0], 100), draw(counts[1], 107)) for _ in range(150)]
    assert sum(each.low <= 7 <= each.high for each in trials) >= 0.92 * len(trials)


def test_neighbours_that_are_alike_count_for_less():
    """A machine that drifts slowly: independent samples' intervals would hold the truth half of the time."""
    chance = np.random.default_rng(5)

    def drift():
        values = [chance.normal(0, 1)]
        for step in chance.normal(0, 1, 59):
            values.append(0.8 * values[-1] + step)
        return [100 + value for value in values]

    trials = [change_of_median(drift(), drift()) for _ in range(100)]
    assert sum(each.low <= 0 <= each.high for each in trials) >= 0.88 * len(trials)


def test_two_samples_of_a_side_say_nothing_about_confidence():
    change = change_of_median([1.0, 2.0], [5.0, 6.0, 7.0])
    assert (change.change, change.low, change.high, change.significant) == (4.5, None, None, None)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [([3.0, 1.0, 2.0, 5.0], [3.0, 1.0, 2.0, 5.0], (0, False, 1.0)), ([1.0] * 3, [2.0] * 3, (1, True, 0.0))],
)
def test_equal_samples_are_certainly_alike_or_certainly_different(first, second, expected):
    change = change_of_median(first, second)
    assert (change.change, change.significant, pytest.approx(welch_p(first, second))) == expected


def test_welch_is_that_of_its_worked_example():
    """Ten of mean 19.4 and twenty of mean 21.6: t = -2.22, 24.5 degrees of freedom, p = 0.036.

    https://en.wikipedia.org/wiki/Welch%27s_t-test, the third example.
    """
    first = np.array([198, 204, 196, 178, 185, 189, 183, 189, 195, 220]) / 10
    second = np.array([282, 266, 201, 233, 252, 221, 177, 276, 206, 137, 232, 175, 206, 180, 239, 216, 243, 204, 240, 132]) / 10
    assert welch_p(first, second) == pytest.approx(0.0360, abs=2e-4)
    change = change_of_mean(first, second)
    assert change.significant is True
    assert change.low < 2.2 < change.high
