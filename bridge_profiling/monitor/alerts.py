"""What a monitored training is warned of: memory that grows with the iterations, and iterations that have become slow."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median

from bridge_profiling.slow_iterations import slow_threshold

#: Every kind of alert there is.
ALERTS = ("device_memory_leak", "host_memory_leak", "slow_iteration", "sustained_slowdown")

#: Memory is compared between so many stretches of iterations, each by its least.
_STRETCHES = 12

#: The share of pairs of stretches that must have grown, as Kendall's tau: by chance one window in 200,000 has it.
_AGREEMENT = 0.85

_MIB = 1 << 20


@dataclass(frozen=True)
class Alert:
    """A warning.

    Attributes:
        kind: one of ALERTS.
        message: what was seen and what to look at, in a sentence or two.
        evidence: the numbers behind it, with their units in their names.
    """

    kind: str
    message: str
    evidence: dict[str, float]

    def as_json(self) -> dict:
        """The alert, as a record of the JSON log has it."""
        return {"alert": self.kind, "message": self.message, "evidence": self.evidence}


class LeakAlert:
    """Warns when memory grows from iteration to iteration, and goes on growing.

    A window of iterations is cut into twelve stretches. The least memory within each is what the allocator falls back to, so
    neither the ups and downs within an iteration nor a sawtooth of the allocator count. The slope over these twelve is the
    median of all pairs' slopes (Theil-Sen), and nearly every pair must have grown: a single step up, as a warm-up, an
    evaluation or a checkpoint makes, is no leak. After an alert a whole new window has to be seen.

    Args:
        memory: `device` or `host`.
        bytes_per_iteration: growth from which it warns.
        window: iterations that are looked at, at least 12.
        warm_up: iterations at the beginning that are not.
    """

    def __init__(
        self, memory: str = "device", *, bytes_per_iteration: float = 64 * 1024, window: int = 120, warm_up: int = 20
    ) -> None:
        self.memory, self.bytes_per_iteration = memory, bytes_per_iteration
        self._stretch, self._warm_up = max(window // _STRETCHES, 1), warm_up
        self._first: int | None = None
        self._open: list[tuple[int, float]] = []
        self._least: deque[tuple[int, float]] = deque(maxlen=_STRETCHES)

    def feed(self, iteration: int, in_use: float) -> Alert | None:
        """Note a reading, and warn when it completes a window that grew.

        Args:
            iteration: the last one that had ended when memory was read.
            in_use: bytes.
        """
        if self._first is None or iteration < self._first:
            self._first = iteration
        if iteration - self._first < self._warm_up:
            return None
        if self._open and iteration < self._open[-1][0]:
            # The loop has gone back: another training in the same process.
            self._open.clear()
            self._least.clear()
        # Two readings at least: one alone may have met the top of an iteration.
        if len(self._open) >= 2 and iteration - self._open[0][0] >= self._stretch:
            self._least.append(min(self._open, key=lambda reading: reading[1]))
            self._open.clear()
        self._open.append((iteration, in_use))
        return self._judge() if len(self._open) == 1 and len(self._least) == _STRETCHES else None

    def _judge(self) -> Alert | None:
        pairs = list(combinations(self._least, 2))
        slope = median((later - earlier) / max(at - before, 1) for (before, earlier), (at, later) in pairs)
        grown = sum((later > earlier) - (later < earlier) for (_, earlier), (_, later) in pairs)
        if slope < self.bytes_per_iteration or grown < _AGREEMENT * len(pairs):
            return None
        (first, least), (last, most) = self._least[0], self._least[-1]
        self._least.clear()
        look = "profiling.record_memory_history=true shows by whom" if self.memory == "device" else "look for what a step keeps"
        return Alert(
            f"{self.memory}_memory_leak",
            f"{self.memory} memory grows by {slope / _MIB:.2f} MiB an iteration: from {least / _MIB:,.0f} to {most / _MIB:,.0f}"
            f" MiB between iterations {first} and {last}; {look}",
            {
                "bytes_per_iteration": round(slope),
                "first_iteration": first,
                "last_iteration": last,
                "first_bytes": least,
                "last_bytes": most,
            },
        )


class SlowIterationAlert:
    """Warns of an iteration that is slower than the recent ones, and of a training that has become slower as a whole.

    Args:
        factor: an iteration is slow from so many times the median of the recent ones.
        sustained_factor: a training is, when half a window takes so many times the best there has been; of each half, the
            slowest tenth does not count. It is said once; again only after the pace has recovered.
        window: recent iterations that count.
        warm_up: iterations at the beginning that do not.
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
        """Note iterations, oldest first, and warn of those that are slow.

        Args:
            iterations: number and seconds of each.
        """
        skipped = min(self._warm_up, len(iterations))
        self._warm_up -= skipped
        found: list[Alert | None] = []
        # A median for each few iterations and not for each: thousands may come at a time.
        for start in range(skipped, len(iterations), self._enough):
            some = iterations[start : start + self._enough]
            found.append(self._slow_one(some))
            for iteration, seconds in some:
                self._recent.append(seconds)
                self._half.append(seconds)
                if len(self._half) == self._half_length:
                    found.append(self._sustained(iteration))
                    self._half.clear()
        return [alert for alert in found if alert is not None]

    def _slow_one(self, some: Sequence[tuple[int, float]]) -> Alert | None:
        slow = slow_threshold(self._recent, factor=self.factor, at_least=self._enough)
        iteration, seconds = max(some, key=lambda one: one[1])
        if slow is None or seconds <= slow.above:
            return None
        usual = slow.median
        others = sum(1 for one in some if one[1] > slow.above) - 1
        also = f", and {others} more of these {len(some)}" if others else ""
        return Alert(
            "slow_iteration",
            f"iteration {iteration} took {seconds * 1e3:,.1f} ms, {seconds / usual:.1f} times the recent median of"
            f" {usual * 1e3:,.1f} ms{also}",
            {"iteration": iteration, "seconds": seconds, "median_seconds": usual, "ratio": round(seconds / usual, 3)},
        )

    def _sustained(self, iteration: int) -> Alert | None:
        # No median: where long and short steps take turns, it would be now of the ones, now of the others.
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
            f" {best * 1e3:,.1f} ms that this training has reached before",
            {"iteration": iteration, "mean_seconds": now, "best_mean_seconds": best, "ratio": round(now / best, 3)},
        )


class Bounded:
    """Lets through one alert of a kind in a while, and counts the others.

    Args:
        seconds: the least time between two of a kind.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last: dict[str, float] = {}
        self.counts = dict.fromkeys(ALERTS, 0)

    def admit(self, alert: Alert, now: float) -> bool:
        """Count an alert, and say whether it is due.

        Args:
            alert: the alert.
            now: seconds of any clock that only goes forward.
        """
        self.counts[alert.kind] += 1
        if now - self._last.get(alert.kind, -self._seconds) < self._seconds:
            return False
        self._last[alert.kind] = now
        return True
