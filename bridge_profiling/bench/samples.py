"""What repeated measurements say: their median, and between which bounds it lies. Knows nothing of what was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

#: How often such bounds hold the true median.
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A measurement that was repeated.

    Args:
        count: how often.
        median: of the samples, in their unit.
        mean: of the samples.
        low: lower bound of the median, at `LEVEL`; None of fewer than six samples, which cannot give such a bound.
        high: upper bound.
    """

    count: int
    median: float
    mean: float
    low: float | None
    high: float | None

    def scaled(self, factor: float) -> Estimate:
        """The same in another unit.

        Args:
            factor: above 0, by which all are multiplied.
        """
        bounds = [None if bound is None else bound * factor for bound in (self.low, self.high)]
        return Estimate(self.count, self.median * factor, self.mean * factor, *bounds)

    def inverted(self, amount: float = 1.0) -> Estimate:
        """A rate of a time: `amount` over it. The mean rate is that of all the time together.

        Args:
            amount: done in one sample.
        """
        low, high = (None if bound is None or bound <= 0 else amount / bound for bound in (self.high, self.low))
        return Estimate(self.count, _over(amount, self.median), _over(amount, self.mean), low, high)


def estimate(samples: Sequence[float]) -> Estimate:
    """The median with bounds that need no distribution: order statistics around it, as far out as a fair coin demands.

    The number of samples below the median is binomial, so the k-th smallest and the k-th largest hold the median between them
    with a probability that is summed up here (Conover, Practical Nonparametric Statistics, section 3.2). Samples are taken to
    be independent.

    Args:
        samples: at least one.
    """
    ordered = sorted(samples)
    place = _place(len(ordered))
    low, high = (None, None) if place is None else (ordered[place], ordered[-1 - place])
    return Estimate(len(ordered), statistics.median(ordered), statistics.fmean(ordered), low, high)


def _place(count: int) -> int | None:
    """The innermost place from either end whose samples still bound the median at `LEVEL`; None when even the ends do not."""
    outside, place = 0.0, None
    for below in range(count // 2):
        outside += 2 * math.comb(count, below) / 2**count
        if outside > 1 - LEVEL:
            break
        place = below
    return place


def _over(amount: float, time: float) -> float:
    return amount / time if time else math.inf
