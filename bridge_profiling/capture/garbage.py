"""Python's garbage collections in a window: ranges in the capture, and totals for the manifest."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from time import perf_counter_ns

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

    def __enter__(self) -> GarbageCollections:
        self.totals = GarbageCollection()
        gc.callbacks.append(self._collect)
        return self

    def __exit__(self, *_: object) -> None:
        if self._collect in gc.callbacks:
            gc.callbacks.remove(self._collect)
        self._ranges.close()

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
