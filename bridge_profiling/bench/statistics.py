"""Repeated measurements: how many to take, timing on a device, and the median with its bounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

#: Probability with which the bounds hold the true median.
LEVEL = 0.95

#: Target duration of a sample, and its largest number of operations: long enough for any clock, and few enough for a device's
#: queue.
_SAMPLE_S, _MAX_OPERATIONS = 0.002, 50

_MAX_SAMPLES = 30


@dataclass(frozen=True)
class Estimate:
    """Statistics of a repeated measurement.

    Args:
        count: number of samples.
        median: in the unit of the samples.
        mean: of the samples.
        low: lower bound of the median at `LEVEL`; None for fewer than six samples, which give no such bound.
        high: upper bound.
    """

    count: int
    median: float
    mean: float
    low: float | None
    high: float | None

    def scaled(self, factor: float) -> Estimate:
        """The same in another unit; `factor` is above 0."""
        bounds = [None if bound is None else bound * factor for bound in (self.low, self.high)]
        return Estimate(self.count, self.median * factor, self.mean * factor, *bounds)

    def inverted(self, amount: float = 1.0) -> Estimate:
        """The rate that follows from a time: `amount` per sample over it. The mean rate covers all samples together."""
        low, high = (None if bound is None or bound <= 0 else amount / bound for bound in (self.high, self.low))
        median, mean = (amount / time if time else math.inf for time in (self.median, self.mean))
        return Estimate(self.count, median, mean, low, high)

    def as_json(self) -> dict[str, float | int | None]:
        """The numbers with six digits, more than the precision of any clock."""
        numbers = {"median": self.median, "mean": self.mean, "low": self.low, "high": self.high}
        return {"count": self.count} | {name: None if n is None else float(f"{n:.6g}") for name, n in numbers.items()}


def estimate(samples: Sequence[float]) -> Estimate:
    """The median of at least one sample, with bounds that assume no distribution.

    The number of samples below the median is binomial, so the k-th smallest and the k-th largest hold the median between them
    with a probability that is summed up here (Conover, Practical Nonparametric Statistics, section 3.2). Samples are taken to
    be independent.
    """
    ordered, count = sorted(samples), len(samples)
    outside, low, high = 0.0, None, None
    for below in range(count // 2):
        outside += 2 * math.comb(count, below) / 2**count
        if outside > 1 - LEVEL:
            break
        low, high = ordered[below], ordered[-1 - below]
    return Estimate(count, statistics.median(ordered), statistics.fmean(ordered), low, high)


def plan(once_s: float, budget_s: float, *, min_samples: int) -> tuple[int, int]:
    """Operations per sample, and number of samples, for an operation that takes `once_s` and a total of about `budget_s`."""
    operations = int(min(max(_SAMPLE_S / once_s, 1), _MAX_OPERATIONS))
    return operations, int(min(max(budget_s / (once_s * operations), min_samples), _MAX_SAMPLES))


def device_seconds(call: Callable[[], object], count: int, *, hold_cycles: int = 0) -> float:
    """Seconds of `count` calls in sequence by the clock of the CUDA device, which first waits for `hold_cycles`."""
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    if hold_cycles:
        torch.cuda._sleep(hold_cycles)
    before.record()
    for _ in range(count):
        call()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / 1e3
