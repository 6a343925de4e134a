"""How fast a training step is: repeated, warmed up, with bounds. On a GPU the host may run ahead, as it does in training."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bridge_profiling.bench.samples import Estimate, estimate


@dataclass(frozen=True)
class StepTiming:
    """A step's pace.

    Args:
        warmup: iterations before the first that counts.
        seconds: of one iteration.
        device: whose clock counted: `cuda` or `cpu`.
        samples_per_iteration: what one iteration works off; None when that is not said.
    """

    warmup: int
    seconds: Estimate
    device: str
    samples_per_iteration: int | None = None

    @property
    def iterations(self) -> int:
        """Iterations that counted."""
        return self.seconds.count

    @property
    def iterations_per_s(self) -> Estimate:
        """How many a second."""
        return self.seconds.inverted()

    @property
    def samples_per_s(self) -> Estimate | None:
        """Samples worked off a second; None when it is not said how many an iteration has."""
        return None if self.samples_per_iteration is None else self.seconds.inverted(self.samples_per_iteration)


def measure_step(
    step: Callable[[], object],
    *,
    warmup: int = 5,
    iterations: int = 30,
    max_seconds: float | None = None,
    samples_per_iteration: int | None = None,
) -> StepTiming:
    """Call a step again and again and time each call.

    Where CUDA is in use after the warm-up, events on the current stream mark where iterations end, and nothing waits for them
    before the last: an iteration is then as long as the device takes for it, or the host when it is the slower of the two.
    Elsewhere the clock of the host is read between calls.

    Args:
        step: one iteration; what it returns is not looked at.
        warmup: calls before the first that counts, at least 0: they compile, allocate and tune.
        iterations: calls that count, at least 1; of fewer than 6 no bounds can be told.
        max_seconds: stop early when calls that count have taken so long; at least one counts.
        samples_per_iteration: what one call works off.
    """
    for _ in range(warmup):
        step()
    cuda = _cuda_in_use()
    samples = _by_clock(step, iterations, max_seconds) if cuda is None else _by_events(step, iterations, max_seconds, cuda)
    return StepTiming(warmup, estimate(samples), "cpu" if cuda is None else "cuda", samples_per_iteration)


def _by_clock(step: Callable[[], object], iterations: int, max_seconds: float | None) -> list[float]:
    samples: list[float] = []
    started = before = time.perf_counter()
    while len(samples) < iterations and not _too_long(samples, before - started, max_seconds):
        step()
        now = time.perf_counter()
        samples.append(now - before)
        before = now
    return samples


def _by_events(step: Callable[[], object], iterations: int, max_seconds: float | None, cuda: Any) -> list[float]:
    cuda.synchronize()
    started = time.perf_counter()
    marks = [_mark(cuda)]
    while len(marks) <= iterations and not _too_long(marks[1:], time.perf_counter() - started, max_seconds):
        step()
        marks.append(_mark(cuda))
    cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]


def _mark(cuda: Any) -> Any:
    event = cuda.Event(enable_timing=True)
    event.record()
    return event


def _too_long(done: list[Any], seconds: float, max_seconds: float | None) -> bool:
    return bool(done) and max_seconds is not None and seconds > max_seconds


def _cuda_in_use() -> Any:
    """`torch.cuda` where this process works on a CUDA device; None elsewhere. Imports no torch: who uses CUDA has done so."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None
