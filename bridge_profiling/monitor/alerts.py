"""Alerts of a monitored training: memory that grows with the iterations, slow iterations, and readings beyond a limit."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median
from typing import NamedTuple

from bridge_profiling.monitor.metrics import Readings, Sample
from bridge_profiling.slow_iterations import slow_threshold

#: Every kind of alert.
ALERTS = (
    "device_memory_leak",
    "host_memory_leak",
    "slow_iteration",
    "sustained_slowdown",
    "no_iteration",
    "low_utilization",
    "memory_headroom",
    "gpu_temperature",
    "power_limit",
    "data_loading",
)

#: Number of stretches of iterations whose minimum memory is compared.
_STRETCHES = 12

#: Share of pairs of stretches that must have grown, as Kendall's tau: by chance one window in 200,000 reaches it.
_AGREEMENT = 0.85

#: With less memory in use no training runs on a GPU, and it may be idle.
_UNUSED_BYTES = 1 << 30

#: A training stalls if no iteration ends for this many times the median one.
_STALLED = 10

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


# -- readings beyond a limit ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When readings lead to an alert; None turns that alert off.

    Attributes:
        utilization_ratio: a GPU with memory in use is busy for less than this share of the time.
        memory_ratio: more than this share of a GPU's memory is in use.
        temperature_margin_celsius: a GPU is hotter than the temperature at which it slows down, less this.
        power_ratio: a GPU draws more than this share of its power limit, which then holds its clocks back.
        data_loading_ratio: iterations wait for data for more than this share of their time.
        stall_seconds: no iteration has ended for this long, and for ten times the recent median.
        period_seconds: readings are averaged over this time, except that of `stall_seconds`.
    """

    utilization_ratio: float | None = 0.5
    memory_ratio: float | None = 0.97
    temperature_margin_celsius: float | None = 3.0
    power_ratio: float | None = 0.98
    data_loading_ratio: float | None = 0.1
    stall_seconds: float | None = 300.0
    period_seconds: float = 60.0


class _Reading(NamedTuple):
    """A reading that has a limit; `message` takes the mean, the limit and the seconds."""

    kind: str
    subject: str
    value: float
    limit: float
    message: str
    sign: int = 1  # -1 for values that must not be below the limit


class LimitAlert:
    """Warns when the mean of a reading over a whole period is beyond its limit, and again after each further period.

    Args:
        limits: the limits; None for the defaults.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._periods: dict[tuple[str, str], deque[tuple[float, float]]] = {}

    def feed(self, sample: Sample) -> Iterator[Alert]:
        """Add a sample; yields the alerts that it leads to."""
        found = [reading for gpu in sample.gpus for reading in self._of_gpu(f"GPU {gpu.identity['gpu']}", gpu)]
        if sample.training is not None:
            found += self._of_training(sample.training)
            yield from self._stalled(sample.training)
        # A reading that is unavailable now starts its period anew.
        self._periods = {
            key: kept for key, kept in self._periods.items() if key in {(each.kind, each.subject) for each in found}
        }
        for reading in found:
            mean = self._mean(sample.unix_seconds, reading)
            if mean is not None and (mean - reading.limit) * reading.sign > 0:
                message = reading.message.format(mean=mean, limit=reading.limit, seconds=self.limits.period_seconds)
                yield Alert(reading.kind, f"{reading.subject} {message}", {"mean": round(mean, 4), "limit": reading.limit})

    def _mean(self, now: float, reading: _Reading) -> float | None:
        """The mean over a period once it is over, which starts the next one."""
        kept = self._periods.setdefault((reading.kind, reading.subject), deque())
        kept.append((now, reading.value))
        if now - kept[0][0] < self.limits.period_seconds:
            return None
        mean = sum(value for _, value in kept) / len(kept)
        kept.clear()
        return mean

    def _of_gpu(self, name: str, gpu: Readings) -> Iterator[_Reading]:
        limits, values = self.limits, gpu.values
        used, total = values.get("memory_used_bytes", 0.0), values.get("memory_total_bytes")
        if limits.utilization_ratio is not None and "utilization_ratio" in values and used > _UNUSED_BYTES:
            message = "was busy for {mean:.0%} of the last {seconds:.0f} s: bridge-profiling trigger and report show why"
            yield _Reading("low_utilization", name, values["utilization_ratio"], limits.utilization_ratio, message, -1)
        if limits.memory_ratio is not None and total:
            message = "has {mean:.0%} of its memory in use: bridge-profiling memory shows by what"
            yield _Reading("memory_headroom", name, used / total, limits.memory_ratio, message)
        hot = values.get("temperature_limit_celsius")
        if limits.temperature_margin_celsius is not None and hot is not None and "temperature_celsius" in values:
            message = "is at {mean:.0f} °C, and slows down soon: look at its cooling"
            limit = hot - limits.temperature_margin_celsius
            yield _Reading("gpu_temperature", name, values["temperature_celsius"], limit, message)
        allowed = values.get("power_limit_watts")
        if limits.power_ratio is not None and allowed and "power_watts" in values:
            message = "draws {mean:.0%} of its power limit, which holds its clocks back"
            yield _Reading("power_limit", name, values["power_watts"] / allowed, limits.power_ratio, message)

    def _of_training(self, training: Readings) -> Iterator[_Reading]:
        limit, share = self.limits.data_loading_ratio, training.values.get("data_loading_ratio")
        if limit is not None and share is not None:
            message = "waits for data for {mean:.0%} of an iteration: bridge-profiling bench data-loader measures the loader"
            yield _Reading("data_loading", "the training", share, limit, message)

    def _stalled(self, training: Readings) -> Iterator[Alert]:
        since = training.values.get("seconds_since_iteration", 0.0)
        usual = training.values.get("iteration_median_seconds", 0.0)
        if self.limits.stall_seconds is not None and since > max(self.limits.stall_seconds, _STALLED * usual):
            evidence = {"seconds_since_iteration": round(since, 1), "median_seconds": usual}
            yield Alert(
                "no_iteration", f"no iteration has ended for {since:,.0f} s; the recent median is {usual:.3g} s", evidence
            )
