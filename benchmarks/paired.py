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
    return _interval(float(np.median(ratios)), ratios, _medians(ratios, np.random.default_rng(seed)))


def changed_ratio(before: Sequence[float], after: Sequence[float], *, seed: int = 0) -> Ratio:
    """The change of a ratio: the median after divided by the median before.

    For a process measured against a control in rounds: drift that affects both is in neither ratio.

    Args:
        before: ratios of the rounds before.
        after: ratios of the rounds after.
        seed: of the resampling.
    """
    generator = np.random.default_rng(seed)
    early, late = np.asarray(before, float), np.asarray(after, float)
    change = float(np.median(late) / np.median(early))
    if min(len(early), len(late)) < _FEWEST_TO_RESAMPLE:
        return Ratio(change, float(late.min() / early.max()), float(late.max() / early.min()), min(len(early), len(late)))
    resampled = _medians(late, generator) / _medians(early, generator)
    return Ratio(change, *_ends(resampled), min(len(early), len(late)))


def _interval(median: float, ratios: np.ndarray, resampled: np.ndarray) -> Ratio:
    if len(ratios) < _FEWEST_TO_RESAMPLE:
        return Ratio(median, float(ratios.min()), float(ratios.max()), len(ratios))
    return Ratio(median, *_ends(resampled), len(ratios))


def _medians(values: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """The medians of resamples of these values, drawn as circular runs of neighbours."""
    count = len(values)
    length = max(count // _RUNS, 1)
    starts = generator.integers(0, count, (_RESAMPLES, -(-count // length)))
    drawn = (starts[:, :, None] + np.arange(length)).reshape(_RESAMPLES, -1)[:, :count] % count
    return np.median(values[drawn], axis=1)


def _ends(resampled: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(resampled, [2.5, 97.5])
    return float(low), float(high)
