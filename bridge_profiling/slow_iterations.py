"""The rule for slow iterations: longer than the median of recent ones by a factor."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

#: Fewer iterations have no typical duration.
MIN_ITERATIONS = 10


@dataclass(frozen=True)
class SlowThreshold:
    """The duration above which an iteration is slow, in the unit of the durations it comes from.

    Attributes:
        median: the typical duration.
        limit: longer iterations are slow.
        count: iterations that the median is of.
    """

    median: float
    limit: float
    count: int


def slow_threshold(durations: Sequence[float], factor: float, *, min_iterations: int = MIN_ITERATIONS) -> SlowThreshold | None:
    """The threshold that follows from typical iterations; None if there are fewer than `min_iterations`.

    Args:
        durations: of iterations that a profiler, a checkpoint or an evaluation did not slow down, in any unit.
        factor: an iteration is slow above this many medians.
        min_iterations: how many durations it takes.
    """
    if len(durations) < min_iterations:
        return None
    median = statistics.median(durations)
    return SlowThreshold(median, factor * median, len(durations))
