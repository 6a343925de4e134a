"""Names and times the parts of a step: `with phase("forward"):`. Loads no torch.

Where one of this package's hooks captures, the phase is a range in the capture as well. Always, its time by the host's clock is
added up; on a GPU that is the time to launch the work, unless `synchronize=True` waits for the device at both ends.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter_ns

from bridge_profiling.easy.current import current_hook


@dataclass(frozen=True)
class PhaseTime:
    """What the phases of one name took, by the host's clock.

    Args:
        count: how many there were.
        total_ns: all of them together.
        min_ns: the shortest.
        max_ns: the longest.
    """

    count: int
    total_ns: int
    min_ns: int
    max_ns: int

    @property
    def mean_ns(self) -> float:
        """One of them."""
        return self.total_ns / self.count

    def __str__(self) -> str:
        mean, low, high, total = (value / 1e6 for value in (self.mean_ns, self.min_ns, self.max_ns, self.total_ns))
        return f"{self.count} times, {mean:.3f} ms each ({low:.3f} to {high:.3f}), {total:.1f} ms together"


class PhaseTimes(dict[str, PhaseTime]):
    """Phases by name; printed as lines."""

    def __str__(self) -> str:
        width = max((len(name) for name in self), default=0)
        return "\n".join(f"{name:{width}}  {time}" for name, time in self.items())


_lock = threading.Lock()
_times: PhaseTimes = PhaseTimes()


@contextmanager
def phase(name: str, *, synchronize: bool = False) -> Iterator[None]:
    """Name and time a part of a step. Phases may lie inside each other, and run in several threads.

    The names that the analysis knows are `data-loading` and `checkpoint`; usual are also `host-to-device`, `forward`,
    `backward`, `optimizer`, `evaluation` and `logging`.

    Args:
        name: of the phase.
        synchronize: wait for the CUDA device before and after, so that the time is the device's as well; that costs speed.
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
            _add(name, perf_counter_ns() - started)


def phase_times() -> PhaseTimes:
    """What phases took since the start, or since `reset_phase_times`, in the order in which they first ended."""
    with _lock:
        return PhaseTimes(_times)


def reset_phase_times() -> None:
    """Forget what phases took."""
    with _lock:
        _times.clear()


def _add(name: str, took_ns: int) -> None:
    with _lock:
        before = _times.get(name)
        if before is None:
            _times[name] = PhaseTime(1, took_ns, took_ns, took_ns)
            return
        low, high = min(before.min_ns, took_ns), max(before.max_ns, took_ns)
        _times[name] = PhaseTime(before.count + 1, before.total_ns + took_ns, low, high)


def _synchronize() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
