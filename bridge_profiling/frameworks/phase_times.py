"""Names and times parts of a step (`with phase("forward"):`). Loads no torch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from time import perf_counter_ns

from bridge_profiling.common.plain import is_set, whole_text
from bridge_profiling.frameworks.session import current_hook


@dataclass(frozen=True)
class PhaseTime:
    """Time of the phases of one name, on the host's clock.

    Args:
        count: number of phases.
        total_ns: time of all of them.
        min_ns: time of the shortest.
        max_ns: time of the longest.
        squares_ns: sum of the squares of the times.
        outermost_ns: time of all phases, of any name, that were inside no other.
    """

    count: int
    total_ns: int
    min_ns: int
    max_ns: int
    squares_ns: int = field(default=0, compare=False, repr=False)
    outermost_ns: int = field(default=0, compare=False, repr=False)

    @property
    def mean_ns(self) -> float:
        """Mean time."""
        return self.total_ns / self.count

    @property
    def std_ns(self) -> float | None:
        """Standard deviation of the time; None for a single phase."""
        if self.count < 2:
            return None
        # Of integers, so that nothing cancels out.
        return (max(self.count * self.squares_ns - self.total_ns**2, 0) / (self.count * (self.count - 1))) ** 0.5

    @property
    def share(self) -> float | None:
        """Share (0 to 1) of the time of all phases that were inside no other; None while these are still open."""
        return self.total_ns / self.outermost_ns if self.outermost_ns else None

    def __str__(self) -> str:
        mean, low, high, total = (value / 1e6 for value in (self.mean_ns, self.min_ns, self.max_ns, self.total_ns))
        deviation = "" if self.std_ns is None else f" ± {self.std_ns / 1e6:.3f}"
        share = "" if self.share is None else f", {self.share:.1%}"
        return f"{self.count} times, {mean:.3f} ms each{deviation} ({low:.3f} to {high:.3f}), {total:.1f} ms together{share}"


class PhaseTimes(dict[str, PhaseTime]):
    """Phases by name; printed one per line."""

    def __str__(self) -> str:
        width = max((len(name) for name in self), default=0)
        return "\n".join(f"{name:{width}}  {time}" for name, time in self.items())


_lock = threading.Lock()
_times: PhaseTimes = PhaseTimes()
_outermost_ns = 0
_inside = threading.local()


@contextmanager
def phase(name: str, *, synchronize: bool = False) -> Iterator[None]:
    """Name and time a part of a step. Phases may be nested, and run in several threads.

    The analysis knows `data-loading` and `checkpoint`; `host-to-device`, `forward`, `backward`, `optimizer`, `evaluation` and
    `logging` are also common.

    Args:
        name: name of the phase.
        synchronize: wait for the CUDA device before and after, so the time includes the device's; this slows the step down.
    """
    global _outermost_ns
    hook, name, synchronize = current_hook(), whole_text(name), is_set(synchronize)
    here = vars(_inside)  # of this thread, whichever one ends the phase
    outermost = not here.get("a_phase", False)
    here["a_phase"] = True
    try:
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
                    squares = before.squares_ns + took**2
                    _times[name] = PhaseTime(before.count + 1, before.total_ns + took, low, high, squares)
                    _outermost_ns += took if outermost else 0
    finally:
        if outermost:
            here["a_phase"] = False


def phase_times() -> PhaseTimes:
    """Times of all phases since the start, or since `reset_phase_times`, in the order in which they first ended."""
    with _lock:
        return PhaseTimes({name: replace(time, outermost_ns=_outermost_ns) for name, time in _times.items()})


def reset_phase_times() -> None:
    """Clear the times of all phases."""
    global _outermost_ns
    with _lock:
        _outermost_ns = 0
        _times.clear()


def _synchronize() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
