"""What the loop's thread shares with others: its inbox, and the log of its iterations.

Each iteration runs what is here, so it does no more than compare a number and take marks.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

from bridge_profiling.capture.signals import exit_is_pending, woken_on_exit

#: Later than every iteration: there is nothing more to do.
NEVER = sys.maxsize

#: How many iterations' durations are kept, and go into a manifest.
_KEPT_DURATIONS = 1000

#: CPython compares integers below 2**30 by an instruction of its own, which takes 12 of 280 ns off an idle iteration. One after
#: this edge looks for windows like one at any other edge.
_LAST_EDGE = (1 << 30) - 1


class Inbox:
    """What other threads and signal handlers leave for the loop, which looks at its next iteration.

    Attributes:
        edge: the first iteration that needs more than timing.
        posted: captures to make.
        withdrawn: names of requests whose capture is dropped unless it has begun.
        closing: why another thread asks the loop's thread to close the hook.
    """

    __slots__ = ("__weakref__", "closing", "edge", "posted", "withdrawn")

    def __init__(self) -> None:
        self.edge, self.closing = _LAST_EDGE, ""
        self.posted: deque[Any] = deque()
        self.withdrawn: deque[str] = deque()
        woken_on_exit.add(self)

    def wake(self) -> None:
        """Have the loop look. Called from any thread or signal handler, after something was left here."""
        self.edge = 0

    def sleep_until(self, edge: int) -> None:
        """Let the loop look again at this edge, or at once if something has arrived meanwhile."""
        self.edge = min(edge, _LAST_EDGE)
        # After the assignment: this sees everything that came before it, and whatever comes later wakes the loop.
        if self.posted or self.withdrawn or self.closing or exit_is_pending():
            self.edge = 0


class IterationLog:
    """When the last iterations began and ended.

    Attributes:
        mark: appends an iteration's number, then the second at which it began. `Span` appends that of its end, if it ends
            without an exception: three appends cost less than an object for each iteration (benchmarks/hook_overhead.py).
    """

    __slots__ = ("_marks", "mark")

    def __init__(self) -> None:
        self._marks: deque[int | float] = deque(maxlen=3 * _KEPT_DURATIONS)
        self.mark = self._marks.append

    def running(self) -> int | None:
        """The iteration that began last; None before the first. Any thread may ask."""
        return next((_number(mark) for mark in reversed(self._marks.copy()) if type(mark) is not float), None)

    def durations(self) -> list[tuple[int, int]]:
        """`(iteration, nanoseconds)` of the last iterations that ended, the oldest first. Any thread may ask."""
        durations: list[tuple[int, int]] = []
        iteration = began = None
        for mark in self._marks.copy():
            if type(mark) is not float:
                iteration, began = _number(mark), None
            elif began is None:
                began = mark
            elif iteration is not None:
                durations.append((iteration, round((mark - began) * 1e9)))
        return durations[-_KEPT_DURATIONS:]


def _number(mark: int | float) -> int | None:
    """An iteration's number; None where a loop counts with negative infinity, which is not worth a check in each iteration."""
    try:
        return int(mark)
    except (ValueError, OverflowError):
        return None


class Span(AbstractContextManager):
    """The base of what is around an iteration: a copy marks nothing."""

    def __reduce__(self) -> tuple[type[AbstractContextManager], tuple[()]]:
        return nullcontext, ()


def timing_span(mark: Callable[[float], None]) -> Span:
    """Marks the end of an iteration: with `ProfilingHook.iteration`, everything that runs in an idle one.

    `with` looks both methods up in the class, so each hook has a class of its own: its static method needs no `self`, which
    saves a sixth of the whole (benchmarks/hook_overhead.py).
    """

    class Timing(Span):
        # `iteration()` has read the clock already, so entering has nothing to do, and the cheapest no-op is a builtin.
        __enter__ = [].clear

        @staticmethod
        def __exit__(kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
            if kind is None:
                mark(perf_counter())

    return Timing()
