"""The rule for slow iterations: longer than the recent median by a factor. Captures, alerts and findings share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class SlowThreshold:
    """The duration above which an iteration is slow, in the unit of the durations that it was computed from.

    Attributes:
        above: the threshold.
        median: the median that it is a multiple of.
        count: how many durations the median is of.
    """

    above: float
    median: float
    count: int


def slow_threshold(durations: Sequence[float], *, factor: float, at_least: int) -> SlowThreshold | None:
    """The threshold after these iterations; None while there are too few.

    Args:
        durations: durations of recent iterations.
        factor: how many times the median an iteration must take to be slow.
        at_least: how many durations the median needs.
    """
    if len(durations) < at_least:
        return None
    usual = median(durations)
    return SlowThreshold(factor * usual, usual, len(durations))
