"""Batches that the launching thread prepares itself, with operators on tensors of the CPU.

A thread that records operators for milliseconds, launches nothing and does not wait computes on the CPU. If what it enqueues
next is a copy to the device, it prepared what it copied. Two cases look alike and are others: numbers that were copied from the
device before, from which metrics are computed, and an optimizer whose states are in the host's memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.facts.intervals import EMPTY, Intervals, Nanoseconds, rows_of, union
from bridge_profiling.traces.tables import to_int64

#: Least time of operators in a row without a launch, and the most time from one of them to the next. Operators on the device
#: launch within tens of microseconds; copies within the host's memory take milliseconds.
_LEAST_NS, _IN_A_ROW_NS = 2_000_000, 100_000

#: Operators take at least this share of the time until the copy.
_MOST = 0.5

#: A larger copy from the device has more than a loss or two.
_FEW_BYTES = 64

#: Before any time: a call that has not been seen.
_UNKNOWN = -(1 << 62)


@dataclass(frozen=True)
class Stretches:
    """Operators in a row that launch nothing and do not wait, by start.

    Args:
        time: of each.
        after_ns: start of the last call before it that enqueued work; `_UNKNOWN` if there was none.
        before_ns: likewise of the first one after it.
    """

    time: Intervals
    after_ns: Nanoseconds
    before_ns: Nanoseconds


class StretchCollector:
    """Collects stretches from blocks of records by start: operators, and calls that enqueue work or wait for the device."""

    def __init__(self) -> None:
        self._found = [np.empty((0, 3), np.int64)]
        self._next: list[Nanoseconds] = []
        self._settled = 0  # blocks whose stretches have a next call
        self._begin, self._reached, self._last = _UNKNOWN, _UNKNOWN, _UNKNOWN
        self._called = True  # the record before this block, or what is before the capture

    def add(self, start: Nanoseconds, end: Nanoseconds, called: NDArray[np.bool_], enqueues: NDArray[np.bool_]) -> None:
        """Take in the next records.

        Args:
            start: of each.
            end: of each.
            called: whether it is a call.
            enqueues: whether it is one that enqueues work.
        """
        if not len(start):
            return
        reached = np.maximum.accumulate(np.concatenate(([self._reached], end)))
        after = np.concatenate(([self._called], called))
        breaks = np.flatnonzero(called | after[:-1] | (start - reached[:-1] > _IN_A_ROW_NS))
        begin = np.concatenate(([self._begin], start[breaks]))
        until = np.minimum(reached[breaks], start[breaks])
        calls = start[enqueues]
        if len(calls):
            for unsettled in self._next[self._settled :]:
                unsettled[unsettled == _UNKNOWN] = calls[0]
            self._settled = len(self._next)
        # What is between two breaks is a call, or operators; the first part may have begun in a block before.
        operators = ~np.concatenate(([self._called], called[breaks]))[:-1]
        long = np.flatnonzero(operators & (until - begin[:-1] >= _LEAST_NS) & (begin[:-1] != _UNKNOWN))
        known = np.concatenate(([self._last], calls, [_UNKNOWN]))
        following = np.searchsorted(calls, until[long]) + 1
        self._found.append(np.column_stack((begin[long], until[long], known[following - 1])))
        self._next.append(known[following])
        self._begin, self._reached, self._called = int(begin[-1]), int(reached[-1]), bool(called[-1])
        self._last = int(known[-2])

    def result(self) -> Stretches:
        """The stretches; the last one is without an end, and is none."""
        found = np.concatenate(self._found)
        return Stretches(Intervals(found[:, 0], found[:, 1]), found[:, 2], np.concatenate([EMPTY.start_ns, *self._next]))


def preparing(stretches: Stretches, device_events: pa.Table) -> Intervals:
    """When a batch was prepared: from the first stretch to the copy of what it computed."""
    launched = to_int64(device_events["launch_start_ns"])
    to_device = rows_of(device_events["direction"], "HtoD")
    numbers = rows_of(device_events["direction"], "DtoH") & (to_int64(device_events["bytes"], 0) > _FEW_BYTES)
    mine = np.isin(stretches.before_ns, launched[to_device]) & ~np.isin(stretches.after_ns, launched[numbers])
    copies, place = np.unique(stretches.before_ns[mine], return_inverse=True)
    if not len(copies):
        return EMPTY
    begin = np.full(len(copies), np.iinfo(np.int64).max)
    np.minimum.at(begin, place, stretches.time.start_ns[mine])
    computed = np.bincount(place, (stretches.time.end_ns - stretches.time.start_ns)[mine])
    mostly = computed >= _MOST * (copies - begin)
    return union(begin[mostly], copies[mostly])
