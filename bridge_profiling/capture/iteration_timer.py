"""What runs in every iteration of a training, whether it is profiled or not: two clock readings and one comparison."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter_ns
from types import TracebackType
from typing import ClassVar, Protocol

#: How many iterations' durations are kept, and go into a manifest.
KEPT_DURATIONS = 1000


class Watcher(Protocol):
    """Who is told of iterations that call for more."""

    def iteration_ended(self, iteration: int, error: BaseException | None) -> None:
        """One that is watched has ended. Raises nothing."""


class IterationTimer:
    """Times one iteration after the other; with `iteration()` above, all that runs in every iteration of a training."""

    __slots__ = ("_hook", "_keep", "durations", "iteration", "started", "watched")

    def __init__(self, hook: Watcher) -> None:
        self._hook = hook
        self.durations: deque[tuple[int, int]] = deque(maxlen=KEPT_DURATIONS)
        self._keep = self.durations.append
        self.iteration = 0
        self.started = 0
        self.watched = False

    # `iteration()` has read the clock already, so entering has nothing to do, and the cheapest nothing is a builtin:
    # a Python function here costs a sixth of the whole (benchmarks/hook_overhead.py).
    __enter__: ClassVar[Callable[[], None]] = [].clear

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._keep((self.iteration, perf_counter_ns() - self.started))
        if self.watched:
            self._hook.iteration_ended(self.iteration, error)
