"""Python's garbage collections in a window: ranges in the capture, and totals for the manifest."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from time import perf_counter_ns
from typing import Any

from bridge_profiling.capture.signals import raised_by_handler
from bridge_profiling.manifest import GarbageCollection

#: The youngest generation that gets a range. Collections of the first one take microseconds, and there are hundreds of them.
_OLD_ENOUGH = 1

#: Opens a range of that name in each profiler that records.
EnterRanges = Callable[[str], ExitStack]


class GarbageCollections(AbstractContextManager["GarbageCollections"]):
    """Watches collections of all threads between `__enter__` and `__exit__`, which may be called twice.

    Args:
        enter_ranges: called when a collection of an older generation begins. The stack is closed when it ends.

    Attributes:
        totals: what was collected; None before `__enter__`.
    """

    def __init__(self, enter_ranges: EnterRanges) -> None:
        self.totals: GarbageCollection | None = None
        self._enter_ranges = enter_ranges
        self._ranges = ExitStack()
        self._began_ns: int | None = None
        self._callback = self._collect
        self._unraisable: Callable[[Any], Any] | None = None
        self._lost: BaseException | None = None

    def __enter__(self) -> GarbageCollections:
        self.totals, self._unraisable, sys.unraisablehook = GarbageCollection(), sys.unraisablehook, self._dropped
        gc.callbacks.append(self._callback)
        return self

    def __exit__(self, *_: object) -> None:
        if self._callback in gc.callbacks:
            gc.callbacks.remove(self._callback)
        if sys.unraisablehook == self._dropped and self._unraisable is not None:
            sys.unraisablehook = self._unraisable
        self._ranges.close()

    def raise_lost(self) -> None:
        """Raise what a signal's handler raised in our callback, where Python drops it."""
        error, self._lost = self._lost, None
        if error is not None:
            raise error

    def _collect(self, phase: str, info: dict[str, int]) -> None:
        # One collection at a time, and both calls are in the thread that collects.
        if phase == "start":
            if info["generation"] >= _OLD_ENOUGH:
                self._ranges = self._enter_ranges(f"garbage-collection {info['generation']}")
            self._began_ns = perf_counter_ns()
        elif self._began_ns is not None and self.totals is not None:
            took_ns, self._began_ns = perf_counter_ns() - self._began_ns, None
            self._ranges.pop_all().close()
            self.totals.add(info["generation"], took_ns)

    def _dropped(self, unraisable: Any) -> None:
        if unraisable.object == self._callback and raised_by_handler(unraisable.exc_value):
            self._lost = unraisable.exc_value
        elif self._unraisable is not None:
            self._unraisable(unraisable)
