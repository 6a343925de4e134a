"""Intervals hold what they promise: Student's t against its own density, coverage against drawn samples."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bridge_profiling.analysis.compare.statistics import change_of_mean, change_of_median, t_cdf, t_quantile, welch_p


def _density(t: float, freedom: float) -> float:
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    return scale * (1 + t * t / freedom) ** (-(freedom + 1) / 2)


@pytest.mark.parametrize("freedom", [1, 2.5, 4, 30, 400])
@pytest.mark.parametrize("t", [0.1, 1.0, 2.7, 12.0])
def test_t_is_the_integral_of_its_density(t: float, freedom: float) -> None:
    places = np.linspace(0, t, 20_001)
    values = np.array([_density(place, freedom) for place in places])
    width = places[1] - places[0]
    simpson = width / 3 * (values[0] + values[-1] + 4 * values[1:-1:2].sum() + 2 * values[2:-1:2].sum())
    assert t_cdf(t, freedom) == pytest.approx(0.5 + simpson, abs=1e-9)
    assert t_cdf(-t, freedom) == pytest.approx(0.5 - simpson, abs=1e-9)


# Table of any textbook.
@pytest.mark.parametrize(
    ("probability", "freedom", "value"),
    [
        (0.975, 1, 12.7062),
        (0.975, 4, 2.7764),
        (0.975, 30, 2.0423),
        (0.995, 2, 9.9248),
        (0.95, 10, 1.8125),
        (0.975, math.inf, 1.96),
    ],
)
def test_quantiles_are_those_of_the_tables(probability: float, freedom: float, value: float) -> None:
    assert t_quantile(probability, freedom) == pytest.approx(value, abs=5e-5)
    assert t_quantile(1 - probability, freedom) == pytest.approx(-value, abs=5e-5)


@pytest.mark.parametrize("counts", [(3, 3), (4, 12), (40, 25)])
def test_an_interval_of_medians_holds_the_truth_as_often_as_it_says(counts: tuple[int, int]) -> None:
    """Of iterations with a slow one now and then; the true change is 7."""
    chance = np.random.default_rng(11)

    def draw(count: int, center: float) -> list[float]:
        return (center + chance.normal(0, 3, count) + (chance.random(count) < 0.1) * 200).tolist()

    trials = [change_of_median(draw(counts[0], 100), draw(counts[1], 107)) for _ in range(300)]
    held = sum(each.low <= 7 <= each.high for each in trials)
    assert held >= 0.92 * len(trials)


def test_neighbours_that_are_alike_count_for_less() -> None:
    """A machine that drifts slowly: independent samples' intervals would hold the truth half of the time."""
    chance = np.random.default_rng(5)

    def drift(count: int = 60) -> list[float]:
        values = [chance.normal(0, 1)]
        for step in chance.normal(0, 1, count - 1):
            values.append(0.8 * values[-1] + step)
        return [100 + value for value in values]

    trials = [change_of_median(drift(), drift()) for _ in range(200)]
    assert sum(each.low <= 0 <= each.high for each in trials) >= 0.88 * len(trials)


def test_two_samples_of_a_side_say_nothing_about_how_sure() -> None:
    change = change_of_median([1.0, 2.0], [5.0, 6.0, 7.0])
    assert (change.change, change.low, change.high, change.significant) == (4.5, None, None, None)


def test_the_same_samples_twice_are_no_change() -> None:
    samples = [3.0, 1.0, 2.0, 5.0]
    change = change_of_median(samples, samples)
    assert change.change == 0
    assert change.significant is False
    assert welch_p(samples, samples) == pytest.approx(1.0)


def test_welch_is_that_of_its_worked_example() -> None:
    """Ten of mean 19.4 and twenty of mean 21.6: t = -2.22, 24.5 degrees of freedom, p = 0.036.

    https://en.wikipedia.org/wiki/Welch%27s_t-test, the third example.
    """
    first = [19.8, 20.4, 19.6, 17.8, 18.5, 18.9, 18.3, 18.9, 19.5, 22.0]
    second = [
        28.2,
        26.6,
        20.1,
        23.3,
        25.2,
        22.1,
        17.7,
        27.6,
        20.6,
        13.7,
        23.2,
        17.5,
        20.6,
        18.0,
        23.9,
        21.6,
        24.3,
        20.4,
        24.0,
        13.2,
    ]
    assert welch_p(first, second) == pytest.approx(0.0360, abs=2e-4)
    change = change_of_mean(first, second)
    assert change.significant is True
    assert change.low < 2.2 < change.high


def test_equal_samples_that_differ_are_sure() -> None:
    assert welch_p([1.0, 1.0, 1.0], [2.0, 2.0, 2.0]) == 0.0
    assert change_of_median([1.0] * 3, [2.0] * 3).significant is True
