"""Names and times the parts of a step: `with phase("forward"):`. Loads no torch.

While this package captures, a phase is also a range in the capture. Its time on the host's clock is always recorded; on a GPU
that is the time to launch the work, unless `synchronize=True` waits for the device at both ends.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter_ns

from bridge_profiling.integrations.driver import current_hook


@dataclass(frozen=True)
class PhaseTime:
    """Time of the phases of one name, on the host's clock.

    Args:
        count: number of phases.
        total_ns: time of all of them.
        min_ns: time of the shortest.
        max_ns: time of the longest.
    """

    count: int
    total_ns: int
    min_ns: int
    max_ns: int

    @property
    def mean_ns(self) -> float:
        """Mean time."""
        return self.total_ns / self.count

    def __str__(self) -> str:
        mean, low, high, total = (value / 1e6 for value in (self.mean_ns, self.min_ns, self.max_ns, self.total_ns))
        return f"{self.count} times, {mean:.3f} ms each ({low:.3f} to {high:.3f}), {total:.1f} ms together"


class PhaseTimes(dict[str, PhaseTime]):
    """Phases by name; printed one per line."""

    def __str__(self) -> str:
        width = max((len(name) for name in self), default=0)
        return "\n".join(f"{name:{width}}  {time}" for name, time in self.items())


_lock = threading.Lock()
_times: PhaseTimes = PhaseTimes()


@contextmanager
def phase(name: str, *, synchronize: bool = False) -> Iterator[None]:
    """Name and time a part of a step. Phases may be nested, and run in several threads.

    The analysis knows `data-loading` and `checkpoint`; `host-to-device`, `forward`, `backward`, `optimizer`, `evaluation` and
    `logging` are also common.

    Args:
        name: name of the phase.
        synchronize: wait for the CUDA device before and after, so the time includes the device's; this slows the step down.
    """
    hook = current_hook()
    with nullcontext() if hook is None else hook.range(name):
        if synchronize:
            _synchronize()
        started = perf_counter_ns()
        try:
            yield
        finally:
            if synchronize:
                _synchronize()
            took = perf_counter_ns() - started
            with _lock:
                before = _times.get(name) or PhaseTime(0, 0, took, took)
                low, high = min(before.min_ns, took), max(before.max_ns, took)
                _times[name] = PhaseTime(before.count + 1, before.total_ns + took, low, high)


def phase_times() -> PhaseTimes:
    """Times of all phases since the start, or since `reset_phase_times`, in the order in which they first ended."""
    with _lock:
        return PhaseTimes(_times)


def reset_phase_times() -> None:
    """Clear the times of all phases."""
    with _lock:
        _times.clear()


def _synchronize() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
