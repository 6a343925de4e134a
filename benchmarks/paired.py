"""Ratios of paired measurements, with 95% intervals.

A ratio here is the median of the ratios of pairs. Each pair (two consecutive iterations, or the blocks of one round) runs under
the same conditions, so slow drift cancels within it, unlike in a ratio of two medians. The median is robust against iterations
that a machine's other work stretches, unlike a mean. The interval is a percentile bootstrap over runs of
neighbouring pairs (a circular block bootstrap: Politis and Romano 1992), since a machine may favour one side for a while, and
neighbouring pairs then carry less information than independent ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: Resamples of a bootstrap.
_RESAMPLES = 2000

#: Minimum number of runs of neighbours, from this many pairs on; fewer say too little about how runs differ.
_RUNS = 25

#: With fewer pairs a bootstrap has too few values, and the interval is the whole observed range: it contains the median
#: of five in 94 of 100 cases.
_FEWEST_TO_RESAMPLE = 6


@dataclass(frozen=True)
class Ratio:
    """A ratio and the interval that contains the true one in 95 of 100 such measurements.

    Attributes:
        median: the ratio.
        low: the interval's lower end.
        high: its upper end.
        pairs: number of pairs.
    """

    median: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.median:.4f} ({self.low:.4f} to {self.high:.4f}, {self.pairs} pairs)"


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float], *, seed: int = 0) -> Ratio:
    """The ratio of paired measurements.

    Args:
        numerators: one side's measurements.
        denominators: the other side's, in the same order: entry i of both is a pair.
        seed: of the resampling.
    """
    ratios = np.asarray(numerators, float) / np.asarray(denominators, float)
    ends = ratios.min(), ratios.max()
    if len(ratios) >= _FEWEST_TO_RESAMPLE:
        ends = np.percentile(_medians(ratios, np.random.default_rng(seed)), [2.5, 97.5])
    return Ratio(float(np.median(ratios)), *map(float, ends), len(ratios))


def _medians(values: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """The medians of resamples of these values, drawn as circular runs of neighbours."""
    count = len(values)
    length = max(count // _RUNS, 1)
    starts = generator.integers(0, count, (_RESAMPLES, -(-count // length)))
    drawn = (starts[:, :, None] + np.arange(length)).reshape(_RESAMPLES, -1)[:, :count] % count
    return np.median(values[drawn], axis=1)
