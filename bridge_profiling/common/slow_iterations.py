"""The rule for slow iterations: longer than the recent median by a factor. Captures, alerts and findings share it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

#: How many recent iterations the median of a SlowWatch covers, and the fewest it needs.
_MEDIAN_OF, _AT_LEAST = 50, 10

#: After a capture, this many iterations are not reported, so that the next median is of other iterations.
COOL_DOWN = 50


@dataclass(frozen=True)
class SlowThreshold:
    """The duration above which an iteration is slow, and the median of `count` durations that it is a multiple of."""

    above: float
    median: float
    count: int


def slow_threshold(durations: Sequence[float], *, factor: float, at_least: int) -> SlowThreshold | None:
    """The threshold, `factor` times the median of these durations; None for fewer than `at_least`."""
    if len(durations) < at_least:
        return None
    usual = median(durations)
    return SlowThreshold(factor * usual, usual, len(durations))


class SlowWatch:
    """Finds iterations of one rank slower than `factor` medians of recent ones, without those that `is_disturbed` excludes."""

    def __init__(self, factor: float, is_disturbed: Callable[[int], bool]) -> None:
        self._factor, self._is_disturbed = factor, is_disturbed
        self._threshold: SlowThreshold | None = None
        self._next = 0

    def check(self, durations: Sequence[tuple[int, int]]) -> str | None:
        """Compare each `(iteration, nanoseconds)` since the last call with those before; describe the first slow one."""
        threshold = self._threshold
        # The first iteration includes one-time work.
        typical = [(iteration, duration) for iteration, duration in durations[1:] if not self._is_disturbed(iteration)]
        slow = [one for one in typical if threshold is not None and one[0] >= self._next and one[1] > threshold.above]
        recent = [duration for _, duration in typical[-_MEDIAN_OF:]]
        self._threshold = slow_threshold(recent, factor=self._factor, at_least=_AT_LEAST)
        if durations:
            self.ignore_before(durations[-1][0] + 1)
        if threshold is None or not slow:
            return None
        iteration, duration = slow[0]
        self.ignore_before(iteration + COOL_DOWN)
        return (
            f"iteration {iteration} took {duration / 1e6:.1f} ms, {duration / threshold.median:.1f} x the median"
            f" {threshold.median / 1e6:.1f} ms of the {threshold.count} iterations before it"
        )

    def ignore_before(self, iteration: int) -> None:
        """Do not report iterations before this one."""
        self._next = max(self._next, iteration)
