"""Confidence intervals of medians, of the difference of two medians or two means, and of a slope.

Student's t distribution is computed here and tested against its density: SciPy would be larger than all other packages on the
analysis host together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

#: Confidence level of the intervals.
LEVEL = 0.95

#: Samples per side that a confidence interval needs.
ENOUGH_SAMPLES = 3

#: With fewer samples, the correlation of neighbors is unknown.
_ENOUGH_FOR_CORRELATION = 10

#: Fewer values that rise in order do so by chance in more than 5% of cases.
ENOUGH_FOR_TREND = 5

#: Upper limit of the correlation of neighbors.
_MOST_ALIKE = 0.95


@dataclass(frozen=True)
class Spread:
    """How much values differ, in their unit.

    Args:
        n: number of values, at least one.
        mean: mean.
        std: standard deviation of a sample; None for one value.
        min: lowest.
        max: highest.
    """

    n: int
    mean: float
    std: float | None
    min: float
    max: float


@dataclass(frozen=True)
class Change:
    """A change from one value to another, and its confidence interval if known.

    Args:
        base: value before.
        other: value after.
        low: lower bound of the change; None if unknown.
        high: upper bound.
    """

    base: float
    other: float
    low: float | None = None
    high: float | None = None

    @property
    def change(self) -> float:
        """Difference between after and before."""
        return self.other - self.base

    @property
    def relative(self) -> float | None:
        """The change as a share of the value before; None if that is 0."""
        return self.change / self.base if self.base else None

    @property
    def speedup(self) -> float | None:
        """How many times as fast, for durations: 1.12 is 12% more in the same time; None if the value after is 0."""
        return self.base / self.other if self.other else None

    @property
    def significant(self) -> bool | None:
        """Whether the confidence interval excludes 0; None without one."""
        if self.low is None or self.high is None:
            return None
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Estimate:
    """A value and its confidence interval if known.

    Args:
        value: the estimate.
        low: lower bound; None if unknown.
        high: upper bound.
    """

    value: float
    low: float | None = None
    high: float | None = None


def median_of(samples: Sequence[float]) -> Estimate:
    """The median of at least one sample, in order of time, with the confidence interval that `change_of_median` builds on."""
    values = np.asarray(samples, np.float64)
    median = float(np.median(values))
    if len(values) < ENOUGH_SAMPLES:
        return Estimate(median)
    reach = _reach([_variance_of_median(values) * _inflation(values)], [_effective(values)])
    return Estimate(median, median - reach, median + reach)


def spread_of(values: Sequence[float]) -> Spread:
    """The spread of at least one value."""
    known = np.asarray(values, np.float64)
    deviation = float(known.std(ddof=1)) if len(known) > 1 else None
    return Spread(len(known), float(known.mean()), deviation, float(known.min()), float(known.max()))


def trend_of(values: Sequence[float]) -> tuple[Estimate | None, str | None]:
    """The change from each median of a series to the next, or why none is supported.

    The least-squares slope, with Student's t of the residuals.
    """
    if len(values) < ENOUGH_FOR_TREND:
        return None, f"a trend needs {ENOUGH_FOR_TREND} runs with known iteration times"
    heights = np.asarray(values, np.float64)
    places = np.arange(len(heights)) - (len(heights) - 1) / 2
    weight = float(places @ places)
    slope = float(places @ heights) / weight
    line = _squares(heights - slope * places)
    freedom = len(heights) - 2
    residuals = heights - heights.mean() - slope * places
    reach = t_quantile((1 + LEVEL) / 2, freedom) * math.sqrt(float(residuals @ residuals) / freedom / weight)
    if slope - reach <= 0 <= slope + reach:
        return None, f"the {LEVEL:.0%} interval of the slope contains zero"
    jump = min(_squares(heights[:place]) + _squares(heights[place:]) for place in range(1, len(heights)))
    if jump <= line:
        return None, "one jump fits the medians at least as well as a slope"
    return Estimate(slope, slope - reach, slope + reach), None


def _squares(values: NDArray[np.float64]) -> float:
    """Sum of squared differences from the mean."""
    return float(((values - values.mean()) ** 2).sum())


def change_of_median(base: Sequence[float], other: Sequence[float]) -> Change:
    """The change of the median; an occasional slow iteration does not widen its confidence interval.

    Price and Bonett 2002, https://doi.org/10.1080/00949650212140 (variance of a median from order statistics around it), with
    Student's t instead of the normal quantile, since there can be as few as three samples. Correlation between neighboring
    samples, for example on a drifting machine, reduces their weight.

    Args:
        base: at least one sample, in order of time.
        other: at least one sample, in order of time.
    """
    before, after = np.asarray(base, np.float64), np.asarray(other, np.float64)
    medians = float(np.median(before)), float(np.median(after))
    if min(len(before), len(after)) < ENOUGH_SAMPLES:
        return Change(*medians)
    spread = [_variance_of_median(samples) * _inflation(samples) for samples in (before, after)]
    return _bounded(medians, spread, [_effective(before), _effective(after)])


def change_of_mean(base: Sequence[float], other: Sequence[float], *, enough: int = ENOUGH_SAMPLES) -> Change:
    """The change of the mean, with the confidence interval of Welch's t: variances may differ.

    Args:
        base: at least one sample.
        other: at least one sample.
        enough: samples per side for a confidence interval, at least 2.
    """
    before, after = np.asarray(base, np.float64), np.asarray(other, np.float64)
    means = float(before.mean()), float(after.mean())
    if min(len(before), len(after)) < enough:
        return Change(*means)
    spread = [float(samples.var(ddof=1)) / len(samples) for samples in (before, after)]
    return _bounded(means, spread, [len(before), len(after)])


def welch_p(base: Sequence[float], other: Sequence[float]) -> float:
    """Probability of as large a difference of the means by chance: Welch's t, two-sided. Needs two samples per side."""
    before, after = np.asarray(base, np.float64), np.asarray(other, np.float64)
    spread = [float(samples.var(ddof=1)) / len(samples) for samples in (before, after)]
    difference = abs(float(after.mean() - before.mean()))
    error = math.sqrt(sum(spread))
    if error == 0:
        return 0.0 if difference else 1.0
    return 2 * (1 - t_cdf(difference / error, _freedom(spread, [len(before), len(after)])))


@cache
def _quadrature() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Nodes and weights of Gauss and Legendre. They take 50 ms, which workers and most commands never need."""
    return np.polynomial.legendre.leggauss(200)


def t_cdf(t: float, freedom: float) -> float:
    """Student's t distribution: probability of a value up to t, for at least one degree of freedom.

    The density is a power of a cosine in the angle arctan(t/√freedom), which Gauss-Legendre quadrature integrates to ten
    digits (Abramowitz and Stegun 26.7.3 and 26.7.4 are its integral for whole degrees of freedom).
    """
    if math.isinf(freedom):
        return NormalDist().cdf(t)
    half = math.atan2(t, math.sqrt(freedom)) / 2
    nodes, weights = _quadrature()
    density = np.cos(half * (nodes + 1)) ** (freedom - 1)
    height = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    return min(max(0.5 + height * half * float(weights @ density), 0.0), 1.0)


@lru_cache(maxsize=1 << 10)
def t_quantile(probability: float, freedom: float) -> float:
    """Inverse of `t_cdf`, for a probability between 0 and 1."""
    if probability < 0.5:
        return -t_quantile(1 - probability, freedom)
    low, high = 0.0, 1.0
    while t_cdf(high, freedom) < probability:
        low, high = high, high * 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def _bounded(values: tuple[float, float], spread: Sequence[float], counts: Sequence[float]) -> Change:
    difference, reach = values[1] - values[0], _reach(spread, counts)
    return Change(*values, difference - reach, difference + reach)


def _reach(spread: Sequence[float], counts: Sequence[float]) -> float:
    """Half the width of the confidence interval, from the variance and the number of samples of each side."""
    error = math.sqrt(sum(spread))
    return t_quantile((1 + LEVEL) / 2, _freedom(spread, counts)) * error if error else 0.0


def _freedom(spread: Sequence[float], counts: Sequence[float]) -> float:
    """Welch's and Satterthwaite's degrees of freedom."""
    below = sum(each * each / (count - 1) for each, count in zip(spread, counts, strict=True))
    return sum(spread) ** 2 / below if below else math.inf


def _variance_of_median(samples: NDArray[np.float64]) -> float:
    count = len(samples)
    ordered = np.sort(samples)
    place = max(1, round((count + 1) / 2 - math.sqrt(count)))
    # Probability of so few samples or fewer on one side of the median, for either side.
    outside = min(2 * _binomial_tail(count, place - 1), 1 - 1e-12)
    distance = float(ordered[count - place] - ordered[place - 1])
    return (distance / (2 * NormalDist().inv_cdf(1 - outside / 2))) ** 2


def _binomial_tail(count: int, most: int) -> float:
    """Probability of at most `most` heads in `count` tosses of a fair coin."""
    log_all = count * math.log(2)
    logs = (math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1) - log_all for k in range(most + 1))
    return math.fsum(math.exp(log) for log in logs)


def _inflation(samples: NDArray[np.float64]) -> float:
    """Factor of the variance of an average due to first-order correlation of neighbors."""
    if len(samples) < _ENOUGH_FOR_CORRELATION:
        return 1.0
    # Correlation of ranks, not of values: one iteration that is ten times as long must not dominate.
    ranks = np.argsort(np.argsort(samples, kind="stable"), kind="stable") - (len(samples) - 1) / 2
    alike = float((ranks[1:] * ranks[:-1]).sum() / (ranks * ranks).sum())
    alike = min(max(alike, 0.0), _MOST_ALIKE)
    return (1 + alike) / (1 - alike)


def _effective(samples: NDArray[np.float64]) -> float:
    """Equivalent number of independent samples."""
    return max(len(samples) / _inflation(samples), 2.0)
