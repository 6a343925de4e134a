"""When the iterations of a loop began and ended. Each iteration runs what is here, so it does no more than take marks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from types import TracebackType

#: How many iterations' durations are kept, and go into a manifest.
_KEPT_DURATIONS = 1000


class IterationTimer:
    """When the last iterations began and ended.

    Attributes:
        around: the context manager around the next iteration; it has nothing but the end to mark unless `watched`.
        mark: appends an iteration's number, then the second at which it began. `around` appends that of its end, if it
            ends without an exception: three appends cost less than an object for each iteration (benchmarks/hook_overhead.py).
    """

    __slots__ = ("_marks", "_timing", "_watching", "around", "mark")

    def __init__(self, ended: Callable[[int, BaseException | None], None]) -> None:
        self._marks: deque[int | float] = deque(maxlen=3 * _KEPT_DURATIONS)
        self.mark = self._marks.append
        self.around = self._timing = _timing(self.mark)
        self._watching = _watching(self, ended)

    @property
    def watched(self) -> bool:
        """Whether the end of the iteration matters to more than its duration."""
        return self.around is self._watching

    @watched.setter
    def watched(self, watched: bool) -> None:
        self.around = self._watching if watched else self._timing

    def running(self) -> int | None:
        """The iteration that began last; None before the first."""
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


class _Around(AbstractContextManager):
    """The base of what is around an iteration: a copy marks nothing."""

    def __reduce__(self) -> tuple[type[AbstractContextManager], tuple[()]]:
        return nullcontext, ()


def _timing(mark: Callable[[float], None]) -> AbstractContextManager:
    """Marks the end of an iteration: with `ProfilingHook.iteration`, everything that runs in each of them.

    `with` looks both methods up in the class, so each hook has a class of its own: its static method needs no `self`, which
    saves a sixth of the whole (benchmarks/hook_overhead.py).
    """

    class Timing(_Around):
        # `iteration()` has read the clock already, so entering has nothing to do, and the cheapest no-op is a builtin.
        __enter__ = [].clear

        @staticmethod
        def __exit__(kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
            if kind is None:
                mark(perf_counter())

    return Timing()


def _watching(timer: IterationTimer, ended: Callable[[int, BaseException | None], None]) -> AbstractContextManager:
    """Marks the end as well, and then calls `ended` with the iteration's number and error if it is still `watched`."""
    end = _timing(timer.mark).__exit__

    class Watching(_Around):
        __enter__ = [].clear

        @staticmethod
        def __exit__(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
            end(kind, error, trace)
            if timer.watched:
                ended(timer.running() or 0, error)

    return Watching()
