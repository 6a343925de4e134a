"""Tells which iteration of a rank is slow: longer than the recent median by a set factor.

The training's thread compares each duration with one number; that number is computed beside it, about once a second.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bridge_profiling.capture.window_capture import NEVER

#: How many iterations the median is of, and how many it takes at least.
_MEDIAN_OF, _AT_LEAST = 50, 10

#: How many iterations after a capture none is taken for slow: the next median is to be of others.
COOL_DOWN = 50


@dataclass(frozen=True)
class SlowIteration:
    """An iteration that took longer than it should.

    Attributes:
        iteration: its number.
        duration_ns: how long it took.
        median_ns: of those before it.
        count: how many those were.
    """

    iteration: int
    duration_ns: int
    median_ns: int
    count: int

    def told(self, rank: int) -> str:
        """The reason in a manifest."""
        return (
            f"iteration {self.iteration} took {self.duration_ns / 1e6:.1f} ms, {self.duration_ns / self.median_ns:.1f} x the"
            f" median {self.median_ns / 1e6:.1f} ms of the {self.count} iterations before it, on rank {rank}"
        )


class SlowWatch:
    """What is slow on one rank, by now.

    Args:
        factor: how many times the median.
        excluded: whether an iteration paid for a profiler, a checkpoint or an evaluation.
    """

    def __init__(self, factor: float, excluded: Callable[[int], bool]) -> None:
        self._factor, self._excluded = factor, excluded
        self._median, self._count = 0, 0
        self._seen: SlowIteration | None = None
        self._quiet_before = 0

    def threshold(self, durations: Sequence[tuple[int, int]]) -> int:
        """Nanoseconds above which an iteration is slow; NEVER while too few have been seen.

        Args:
            durations: `(iteration, nanoseconds)` of the last ones.
        """
        # The very first pays for what is only done once.
        plain = [duration for iteration, duration in durations[1:] if not self._excluded(iteration)][-_MEDIAN_OF:]
        if len(plain) < _AT_LEAST:
            return NEVER
        self._median, self._count = int(statistics.median(plain)), len(plain)
        return int(self._median * self._factor)

    def saw(self, iteration: int, duration_ns: int) -> None:
        """An iteration took longer than the threshold. Called by the training's thread."""
        if self._seen is None and iteration >= self._quiet_before and not self._excluded(iteration):
            self._seen = SlowIteration(iteration, duration_ns, self._median, self._count)

    def take(self) -> SlowIteration | None:
        """What was seen since this was asked last."""
        seen, self._seen = self._seen, None
        return seen

    def be_quiet_before(self, iteration: int) -> None:
        """Take nothing for slow before this iteration: the median is to be of others than the last time."""
        self._quiet_before = max(self._quiet_before, iteration)
        self._seen = None
