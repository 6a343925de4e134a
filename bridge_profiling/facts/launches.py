"""Sums over the device work that was launched while a range of the host was open."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.facts.intervals import Nanoseconds
from bridge_profiling.traces.joins import places
from bridge_profiling.traces.tables import NULL, to_int64

Threads = NDArray[np.int64]


def sums_inside(
    thread: Threads,
    start_ns: Nanoseconds,
    end_ns: Nanoseconds,
    *,
    at_thread: Threads,
    at_ns: Nanoseconds,
    amounts: NDArray[np.int64],
) -> NDArray[np.int64]:
    """For each range, the sum of the amounts at those times that are inside it on its thread.

    Args:
        thread: of each range.
        start_ns: of each range, inclusive.
        end_ns: of each range, exclusive.
        at_thread: of each time.
        at_ns: the times; NULL is inside no range.
        amounts: a row for each time.

    Returns:
        A row for each range, with the columns of `amounts`.
    """
    sums = np.zeros((len(thread), amounts.shape[1]), np.int64)
    for one in np.unique(thread):
        rows, mine = np.flatnonzero(thread == one), np.flatnonzero((at_thread == one) & (at_ns != NULL))
        if len(mine):
            mine = mine[np.argsort(at_ns[mine], kind="stable")]
            before = np.zeros((len(mine) + 1, amounts.shape[1]), np.int64)
            np.cumsum(amounts[mine], axis=0, out=before[1:])
            first, last = (places(at_ns[mine], bound[rows]) for bound in (start_ns, end_ns))
            sums[rows] = before[last] - before[first]
    return sums


def launched_inside(
    thread: Threads, start_ns: Nanoseconds, end_ns: Nanoseconds, device_events: pa.Table
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many device events were launched in each range on its thread, and the sum of their durations."""
    duration = device_events["end_ns"].to_numpy() - device_events["start_ns"].to_numpy()
    sums = sums_inside(
        thread,
        start_ns,
        end_ns,
        at_thread=to_int64(device_events["launch_thread"]),
        at_ns=to_int64(device_events["launch_start_ns"]),
        amounts=np.column_stack((np.ones(len(duration), np.int64), duration)),
    )
    return sums[:, 0], sums[:, 1]
