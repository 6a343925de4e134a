"""What a profiler recorded on the threads that launch: millions of events, in nine bytes each, for `profiler_cost`."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.facts.host import launching_threads, on_threads
from bridge_profiling.facts.host_names import ENQUEUING, FREEING, SYNCHRONIZING
from bridge_profiling.facts.intervals import Intervals, Nanoseconds, by_thread, names_in, rows_of, union
from bridge_profiling.traces.tables import to_int64

#: Columns of host events that are read.
COLUMNS = ("category", "thread", "name", "start_ns", "end_ns", "shapes")

#: Categories of host events that cost time; a kind is an index, or one of the two below.
CATEGORIES = ("operator", "runtime", "annotation", "python")

#: Runtime calls that put work on the device, and the profiler's own work.
ENQUEUES, OWN = len(CATEGORIES), len(CATEGORIES) + 1

#: Calls that launch one kernel: their durations show how fast a host is.
_LAUNCHES = ("cudaLaunchKernel", "hipLaunchKernel")

#: Launches and copies that take longer wait for the device: its queue is full.
_MAY_WAIT, _MAY_WAIT_NS = re.compile("Launch|Memcpy"), 100_000

#: Events whose cost is added up at a time: a multiple of the next number.
_AT_A_TIME = 1 << 20

#: Events in a row, and the most that recording them takes of their time. The densest measured trainings took 2.1 times as long
#: with the profiler as without.
_IN_A_ROW, _MOST = 256, 0.55


@dataclass(frozen=True)
class Recording:
    """Events by start, and what shows how fast the host is."""

    start_ns: Nanoseconds
    kind: NDArray[np.uint8]  # index of CATEGORIES, ENQUEUES or OWN
    own: NDArray[np.int64]  # rows of the profiler's own work
    own_ns: Nanoseconds  # how long that took
    waits: Intervals  # when the host waited for the device
    launches_ns: Nanoseconds  # durations of calls that launch one kernel
    gaps_ns: Nanoseconds  # from the end of each operator that contains no other one to the start of its thread's next one
    entries_ns: Nanoseconds  # from the start of each other operator to that of the first one that it contains
    with_shapes: bool  # whether operators' shapes were recorded

    def counts(self, first: NDArray[np.int64], last: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many events of each kind there are from each of some rows to another one."""
        windows = zip(first.tolist(), last.tolist(), strict=True)
        found = [np.bincount(self.kind[begin:end], minlength=OWN + 1) for begin, end in windows]
        return np.array(found, np.int64).reshape(len(first), OWN + 1)

    def cost_before(self, rows: NDArray[np.int64], cost_ns: NDArray[np.float64]) -> NDArray[np.float64]:
        """What the events before each row cost, by the cost of a kind; the profiler's own work costs as long as it took.

        Args:
            cost_ns: of each of CATEGORIES and of ENQUEUES; the profiler's own work counts only if it has a cost as well.
        """
        wanted, place = np.unique(rows, return_inverse=True)
        found, so_far = np.zeros(len(wanted)), 0.0
        by_kind = np.append(cost_ns, 0.0)[: OWN + 1]
        for begin in range(0, len(self.kind), _AT_A_TIME):
            some = slice(begin, min(begin + _AT_A_TIME, len(self.kind)))
            cost = self._limited(by_kind[self.kind[some]], some)
            if len(cost_ns) > OWN:
                own = slice(*np.searchsorted(self.own, (some.start, some.stop)))
                cost[self.own[own] - begin] = self.own_ns[own]
            # One sum after the other, as if all were added up at once.
            sums = np.cumsum(np.concatenate(([so_far], cost)))
            here = slice(*np.searchsorted(wanted, (some.start, some.stop)))
            found[here] = sums[wanted[here] - begin]
            so_far = sums[-1]
        found[wanted >= len(self.kind)] = so_far
        return found[place]

    def _limited(self, cost: NDArray[np.float64], some: slice) -> NDArray[np.float64]:
        """What some events cost, of `_IN_A_ROW` together no more than `_MOST` of the time from the first to the next ones."""
        first = np.arange(some.start, some.stop, _IN_A_ROW)
        took_ns = self.start_ns[np.minimum(first + _IN_A_ROW, len(self.start_ns) - 1)] - self.start_ns[first]
        spent_ns = np.add.reduceat(cost, first - some.start)
        share = np.minimum(_MOST * took_ns / np.maximum(spent_ns, 1.0), 1.0)
        return cost * np.repeat(share, _IN_A_ROW)[: len(cost)]


class Recorded:
    """Collects the events of the threads that launch a rank's compute."""

    def __init__(self, device_events: pa.Table) -> None:
        self._threads = launching_threads(device_events)
        self._start, self._kind = [np.empty(0, np.int64)], [np.empty(0, np.uint8)]
        self._own, self._own_ns = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        self._waits = [np.empty((0, 2), np.int64)]
        self._launches: list[Nanoseconds] = [np.empty(0, np.int64)]
        self._gaps: list[NDArray[np.integer]] = [np.empty(0, np.uint32)]
        self._entries: list[NDArray[np.integer]] = [np.empty(0, np.uint32)]
        self._rows, self._with_shapes = 0, False
        self._last_operators = np.empty((0, 3), np.int64)  # thread, start and end of each thread's last operator

    def add(self, block: pa.Table) -> None:
        """Take in the next rows."""
        self._with_shapes |= block["shapes"].null_count < block.num_rows
        kind = np.full(block.num_rows, OWN + 1, np.uint8)
        for code, category in enumerate(CATEGORIES):
            kind[rows_of(block["category"], category)] = code
        kind[rows_of(block["category"], "overhead")] = OWN
        rows = np.flatnonzero((kind <= OWN) & on_threads(block, self._threads))
        kind = kind[rows]
        start, end, thread = (to_int64(block[name])[rows] for name in ("start_ns", "end_ns", "thread"))
        names = names_in(block["name"])
        called = kind == CATEGORIES.index("runtime")
        full = (end - start >= _MAY_WAIT_NS) & rows_of(block["name"], *filter(_MAY_WAIT.search, names))[rows]
        waits = called & (full | rows_of(block["name"], *SYNCHRONIZING, *FREEING)[rows])
        kind[called & rows_of(block["name"], *filter(ENQUEUING.search, names))[rows]] = ENQUEUES
        own = np.flatnonzero(kind == OWN)
        self._start.append(start)
        self._kind.append(kind)
        self._own.append(own + self._rows)
        self._own_ns.append((end - start)[own])
        self._waits.append(np.column_stack((start[waits], end[waits])))
        self._launches.append((end - start)[rows_of(block["name"], *_LAUNCHES)[rows]])
        operators = kind == CATEGORIES.index("operator")
        self._add_operators(thread[operators], start[operators], end[operators])
        self._rows += len(rows)

    def _add_operators(self, thread: NDArray[np.int64], start: Nanoseconds, end: Nanoseconds) -> None:
        events = np.concatenate((self._last_operators, np.column_stack((thread, start, end))))
        events = events[by_thread(events[:, 0])]
        before, after = events[:-1], events[1:]
        same = after[:, 0] == before[:, 0]
        self._last_operators = events[~np.append(same, False)[: len(events)]]
        gaps = after[:, 1] - before[:, 2]
        self._gaps.append(_compact(gaps[same & (gaps >= 0)]))
        self._entries.append(_compact((after[:, 1] - before[:, 1])[same & (gaps < 0)]))

    def result(self) -> Recording:
        """The events."""
        waits = np.concatenate(self._waits)
        # One after another, so that not all are in memory twice.
        start, self._start = np.concatenate(self._start), []
        return Recording(
            start,
            np.concatenate(self._kind),
            np.concatenate(self._own),
            np.concatenate(self._own_ns),
            union(waits[:, 0], waits[:, 1]),
            np.concatenate(self._launches),
            np.concatenate(self._gaps),
            np.concatenate(self._entries),
            self._with_shapes,
        )


def _compact(times_ns: Nanoseconds) -> NDArray[np.integer]:
    """Most are microseconds."""
    return times_ns.astype(np.uint32) if times_ns.max(initial=0) < 1 << 32 else times_ns
