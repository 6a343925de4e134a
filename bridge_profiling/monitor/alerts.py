"""Alerts of a monitored training: memory that grows with the iterations, and slow iterations."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median

from bridge_profiling.common.slow_iterations import slow_threshold

#: Every kind of alert. Limits of single readings are rules for Prometheus: alert_rules.yml.
ALERTS = ("device_memory_leak", "host_memory_leak", "slow_iteration", "sustained_slowdown")

#: Number of stretches of iterations whose minimum memory is compared.
_STRETCHES = 12

#: Share of pairs of stretches that must have grown, as Kendall's tau: by chance one window in 200,000 reaches it.
_AGREEMENT = 0.85

_MIB = 1 << 20


@dataclass(frozen=True)
class Alert:
    """A warning.

    Attributes:
        kind: one of ALERTS.
        message: the observation and where to look, in one or two sentences.
        evidence: the numbers behind it, with their units in their names.
    """

    kind: str
    message: str
    evidence: dict[str, float]


class LeakAlert:
    """Warns when memory grows from iteration to iteration without end.

    A window of iterations is divided into twelve stretches. The minimum of each stretch is the level that the allocator falls
    back to, so neither variation within an iteration nor the sawtooth of an allocator counts. The slope over these twelve is
    the median of the slopes of all pairs (Theil-Sen), and nearly every pair must have grown: a single step up, such as after a
    warm-up, an evaluation or a checkpoint, is not a leak. After an alert a whole new window is needed for the next one.

    Args:
        memory: `device` or `host`.
        bytes_per_iteration: smallest growth that leads to an alert.
        window: iterations examined, at least 12.
        warm_up: iterations ignored at the beginning.
    """

    def __init__(
        self, memory: str = "device", *, bytes_per_iteration: float = 64 * 1024, window: int = 120, warm_up: int = 20
    ) -> None:
        self.memory, self.bytes_per_iteration = memory, bytes_per_iteration
        self._stretch, self._warm_up = max(window // _STRETCHES, 1), warm_up
        self._first: int | None = None
        self._open: list[tuple[int, float]] = []
        self._minima: deque[tuple[int, float]] = deque(maxlen=_STRETCHES)

    def feed(self, iteration: int, in_use: float) -> Alert | None:
        """Add bytes in use after an iteration; returns an alert if they complete a window that grew."""
        if self._first is None or iteration < self._first:
            self._first = iteration
        if iteration - self._first < self._warm_up:
            return None
        if self._open and iteration < self._open[-1][0]:
            # The loop has gone back: another training in the same process.
            self._open.clear()
            self._minima.clear()
        # At least two readings: a single one may have been taken at the peak of an iteration.
        if len(self._open) >= 2 and iteration - self._open[0][0] >= self._stretch:
            self._minima.append(min(self._open, key=lambda reading: reading[1]))
            self._open.clear()
        self._open.append((iteration, in_use))
        return self._leak() if len(self._open) == 1 and len(self._minima) == _STRETCHES else None

    def _leak(self) -> Alert | None:
        pairs = list(combinations(self._minima, 2))
        slope = median((later - earlier) / max(at - before, 1) for (before, earlier), (at, later) in pairs)
        grown = sum((later > earlier) - (later < earlier) for (_, earlier), (_, later) in pairs)
        if slope < self.bytes_per_iteration or grown < _AGREEMENT * len(pairs):
            return None
        (first, first_bytes), (last, last_bytes) = self._minima[0], self._minima[-1]
        self._minima.clear()
        hint = "find its owner with profiling.record_memory_history=true"
        return Alert(
            f"{self.memory}_memory_leak",
            f"{self.memory} memory grows by {slope / _MIB:.2f} MiB per iteration: from {first_bytes / _MIB:,.0f} to"
            f" {last_bytes / _MIB:,.0f} MiB between iterations {first} and {last};"
            f" {hint if self.memory == 'device' else 'look for objects that a step keeps'}",
            {
                "bytes_per_iteration": round(slope),
                "first_iteration": first,
                "last_iteration": last,
                "first_bytes": first_bytes,
                "last_bytes": last_bytes,
            },
        )


def usual_leaks(memory: str) -> tuple[LeakAlert, LeakAlert]:
    """Two alerts for one kind of memory: a slow leak needs 140 iterations to show, one that fills a GPU soon needs 34."""
    return LeakAlert(memory), LeakAlert(memory, bytes_per_iteration=8 * _MIB, window=24, warm_up=10)


class SlowIterationAlert:
    """Warns when an iteration is slower than the recent ones, and when the training as a whole becomes slower.

    Args:
        factor: an iteration is slow if it takes this many times the median of the recent ones.
        sustained_factor: the training is slow if half a window takes this many times the best half so far; the slowest tenth
            of each half does not count. Reported once, and again only after the training has recovered.
        window: number of recent iterations.
        warm_up: iterations ignored at the beginning.
    """

    def __init__(self, *, factor: float = 2.0, sustained_factor: float = 1.3, window: int = 50, warm_up: int = 10) -> None:
        self.factor, self.sustained_factor = factor, sustained_factor
        self._warm_up, self._enough = warm_up, max(window // 5, 3)
        self._recent: deque[float] = deque(maxlen=window)
        self._half: list[float] = []
        self._half_length = max(window // 2, 3)
        self._best: float | None = None
        self._slow = False

    def feed(self, iterations: Sequence[tuple[int, float]]) -> list[Alert]:
        """Add the number and seconds of iterations, oldest first; returns alerts for the slow ones."""
        skipped = min(self._warm_up, len(iterations))
        self._warm_up -= skipped
        found: list[Alert | None] = []
        # One median per group instead of one per iteration: thousands may arrive at a time.
        for start in range(skipped, len(iterations), self._enough):
            group = iterations[start : start + self._enough]
            found.append(self._slow_iteration(group))
            for iteration, seconds in group:
                self._recent.append(seconds)
                self._half.append(seconds)
                if len(self._half) == self._half_length:
                    found.append(self._slowdown(iteration))
                    self._half.clear()
        return [alert for alert in found if alert is not None]

    def _slow_iteration(self, group: Sequence[tuple[int, float]]) -> Alert | None:
        limit = slow_threshold(self._recent, factor=self.factor, at_least=self._enough)
        slow = [timed for timed in group if limit is not None and timed[1] > limit.above]
        if limit is None or not slow:
            return None
        iteration, seconds = max(slow, key=lambda timed: timed[1])
        usual = limit.median
        also = f", and {len(slow) - 1} more of these {len(group)}" if len(slow) > 1 else ""
        return Alert(
            "slow_iteration",
            f"iteration {iteration} took {seconds * 1e3:,.1f} ms, {seconds / usual:.1f} times the recent median of"
            f" {usual * 1e3:,.1f} ms{also}",
            {"iteration": iteration, "seconds": seconds, "median_seconds": usual, "ratio": round(seconds / usual, 3)},
        )

    def _slowdown(self, iteration: int) -> Alert | None:
        # No median: if long and short steps alternate, it would jump from the one kind to the other.
        now = fmean(sorted(self._half)[: -(-9 * len(self._half) // 10)])
        best = self._best = now if self._best is None else min(self._best, now)
        if now < (1 + self.sustained_factor) / 2 * best:
            self._slow = False
        if self._slow or now < self.sustained_factor * best:
            return None
        self._slow = True
        return Alert(
            "sustained_slowdown",
            f"the last {self._half_length} iterations took {now * 1e3:,.1f} ms each, {now / best:.2f} times the"
            f" {best * 1e3:,.1f} ms that this training reached before",
            {"iteration": iteration, "mean_seconds": now, "best_mean_seconds": best, "ratio": round(now / best, 3)},
        )
