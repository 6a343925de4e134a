"""Alerts of readings beyond a limit: GPUs that are idle, full, hot or at their power limit, and a training that waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from bridge_profiling.monitor.alerts import Alert
from bridge_profiling.monitor.metrics import Readings, Sample

#: With less memory in use no training runs on a GPU, and it may be idle.
_UNUSED_BYTES = 1 << 30

#: A training stalls if no iteration ends for this many times the median one.
_STALLED = 10


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
