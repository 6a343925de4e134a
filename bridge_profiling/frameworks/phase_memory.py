"""Device memory of each phase of a captured iteration, for the manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

#: Columns of the table.
_COLUMNS = ("iteration", "phase", "before_bytes", "after_bytes", "peak_bytes")


@dataclass(eq=False)
class _Phase:
    before_bytes: int = 0
    peak_bytes: int = 0


class PhaseMemory:
    """Device memory of each phase of a captured iteration: allocated before and after it, and at its peak.

    One row per phase, in the order in which phases end. The caching allocator keeps one peak, so each phase resets it: inside
    the window, `torch.cuda.max_memory_allocated()` called by the training counts from the last phase. Outside the window
    nothing is read or reset. The counters are on the host, so reading them synchronizes nothing.
    """

    def __init__(self, current_and_peak: Callable[[], tuple[int, int]]) -> None:
        self._current_and_peak = current_and_peak
        self._open: list[_Phase] = []
        self.table: dict[str, Any] = {"device": "cuda", **{column: [] for column in _COLUMNS}}

    @contextmanager
    def around(self, iteration: int, name: str, one: AbstractContextManager) -> Iterator[None]:
        """Measure a phase inside its range `one`."""
        phase = _Phase()
        # A failed device raises here first; the training must get that error from its own calls.
        with suppress(RuntimeError):
            phase.before_bytes = self._read()
            self._open.append(phase)
        try:
            with one:
                yield
        finally:
            if phase in self._open:
                with suppress(RuntimeError):
                    after = self._read()
                    row = (iteration, name, phase.before_bytes, after, max(phase.peak_bytes, after))
                    for column, value in zip(_COLUMNS, row, strict=True):
                        self.table[column].append(value)
                self._open.pop()

    def _read(self) -> int:
        """The bytes allocated now; the peak since the last reading applies to every open phase."""
        current, peak = self._current_and_peak()
        for phase in self._open:
            phase.peak_bytes = max(phase.peak_bytes, peak)
        return current


def memory_of_this_process() -> PhaseMemory | None:
    """Memory of this process's CUDA device; None without one, because unknown is not zero."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return PhaseMemory(_cuda)


def _cuda() -> tuple[int, int]:
    # The flat form of these statistics takes several times as long to build.
    allocated = torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]
    torch.cuda.reset_peak_memory_stats()
    return allocated["current"], allocated["peak"]
