"""Watches one rank for slow iterations (slow_iterations.py at the top level has the rule).

The training's thread compares each duration with one number; the listener's thread computes that number about once a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bridge_profiling.capture.window import NEVER
from bridge_profiling.slow_iterations import slow_threshold

#: How many iterations the median covers, and the fewest it needs.
_MEDIAN_OF, _AT_LEAST = 50, 10

#: How many iterations after a capture none counts as slow, so that the next median covers others.
COOL_DOWN = 50


@dataclass(frozen=True)
class SlowIteration:
    """A slow iteration.

    Attributes:
        iteration: its number.
        duration_ns: its duration.
        median_ns: the median of the iterations before it.
        count: how many iterations that median covers.
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
    """The slow iterations of one rank.

    Args:
        factor: how many times the median.
        excluded: whether an iteration paid for a profiler, a checkpoint or an evaluation.
    """

    def __init__(self, factor: float, excluded: Callable[[int], bool]) -> None:
        self._factor, self._excluded = factor, excluded
        self._median_ns, self._count = 0, 0
        self._seen: SlowIteration | None = None
        self._quiet_before = 0

    def threshold(self, durations: Sequence[tuple[int, int]]) -> int:
        """Nanoseconds above which an iteration is slow; NEVER while too few have run.

        Args:
            durations: `(iteration, nanoseconds)` of the last iterations.
        """
        # The very first iteration includes one-time work.
        plain = [duration for iteration, duration in durations[1:] if not self._excluded(iteration)][-_MEDIAN_OF:]
        slow = slow_threshold(plain, factor=self._factor, at_least=_AT_LEAST)
        if slow is None:
            return NEVER
        self._median_ns, self._count = int(slow.median), slow.count
        return int(slow.above)

    def saw(self, iteration: int, duration_ns: int) -> None:
        """Note an iteration that took longer than the threshold. Called by the training's thread."""
        if self._seen is None and iteration >= self._quiet_before and not self._excluded(iteration):
            self._seen = SlowIteration(iteration, duration_ns, self._median_ns, self._count)

    def take(self) -> SlowIteration | None:
        """The slow iteration since the last call, if any."""
        seen, self._seen = self._seen, None
        return seen

    def be_quiet_before(self, iteration: int) -> None:
        """Count no iteration before this one as slow, so that the next median covers others."""
        self._quiet_before = max(self._quiet_before, iteration)
        self._seen = None
