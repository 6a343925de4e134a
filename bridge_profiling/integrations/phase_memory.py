"""How much device memory each phase of a captured iteration left allocated, and reached.

The caching allocator keeps one peak, so each phase resets it: inside the window `torch.cuda.max_memory_allocated()` of the
training's own counts anew. Outside it nothing is read and nothing reset. The counters are the host's: no synchronization.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from types import TracebackType

import torch


@dataclass
class _Phase:
    iteration: int
    name: str
    before_bytes: int
    peak_bytes: int = 0


@dataclass
class PhaseMemory:
    """A row for every phase of every captured iteration, in the order in which they end.

    Args:
        current_and_peak: bytes allocated now, and at most since the last reset; resets that peak.
        rows: columns of equal length; `table` gives them.
    """

    current_and_peak: Callable[[], tuple[int, int]]
    iteration: list[int] = field(default_factory=list)
    phase: list[str] = field(default_factory=list)
    before_bytes: list[int] = field(default_factory=list)
    after_bytes: list[int] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._open: list[_Phase] = []

    @property
    def table(self) -> dict[str, object]:
        """The columns, which grow as phases end."""
        return {
            "device": "cuda",
            "iteration": self.iteration,
            "phase": self.phase,
            "before_bytes": self.before_bytes,
            "after_bytes": self.after_bytes,
            "peak_bytes": self.peak_bytes,
        }

    def around(self, iteration: int, name: str, one: AbstractContextManager) -> AbstractContextManager:
        """The range, measured."""
        return _Measured(self, iteration, name, one)

    def _begin(self, iteration: int, name: str) -> None:
        self._open.append(_Phase(iteration, name, self._read()))

    def _end(self) -> None:
        try:
            after = self._read()
        finally:
            one = self._open.pop()
        self.iteration.append(one.iteration)
        self.phase.append(one.name)
        self.before_bytes.append(one.before_bytes)
        self.after_bytes.append(after)
        self.peak_bytes.append(max(one.peak_bytes, after))

    def _read(self) -> int:
        """What is allocated now; the peak since the last reading is one of every phase that is open."""
        current, peak = self.current_and_peak()
        for one in self._open:
            one.peak_bytes = max(one.peak_bytes, peak)
        return current


class _Measured(AbstractContextManager):
    __slots__ = ("_iteration", "_memory", "_name", "_range", "_reading")

    def __init__(self, memory: PhaseMemory, iteration: int, name: str, one: AbstractContextManager) -> None:
        self._memory, self._iteration, self._name, self._range = memory, iteration, name, one

    def __enter__(self) -> None:
        # A device that has failed says so here too; training is to hear of it from its own calls.
        self._reading = False
        with suppress(RuntimeError):
            self._memory._begin(self._iteration, self._name)
            self._reading = True
        self._range.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._range.__exit__(kind, error, trace)
        if self._reading:
            with suppress(RuntimeError):
                self._memory._end()


def of_this_process() -> PhaseMemory | None:
    """Memory of this process's CUDA device, or None where there is none: then nothing is known, which is not zero."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return PhaseMemory(_cuda)


def _cuda() -> tuple[int, int]:
    # The flat form of these statistics takes several times as long to build.
    allocated = torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]
    torch.cuda.reset_peak_memory_stats()
    return allocated["current"], allocated["peak"]
