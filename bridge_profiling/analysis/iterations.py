"""Iterations as the device lived them: where each begins and ends there, and where its time went.

An iteration's window on the device is its host range (ProfilerStep, NVTX), moved to what it launched: it ends when the host
range and the last compute kernel that was launched in it are over, and begins where the one before ends, or where its own host
range begins if that is later. With a synchronisation at the end of each iteration, windows are the host ranges; where the host
runs ahead, they follow the device by as much as it lags. Windows never overlap, so their times can be added up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bridge_profiling.analysis.breakdown import DeviceWork, rows_of
from bridge_profiling.analysis.intervals import Intervals, Nanoseconds
from bridge_profiling.analysis.launches import ComputeAbsent

#: With fewer iterations than this, boundary ones count too: else nothing would be left.
ENOUGH_ITERATIONS = 3


@dataclass(frozen=True)
class Windows:
    """Iterations of one rank, ascending.

    Args:
        iteration: numbers.
        boundary: whether each overlaps the profiler's start, stop or flush.
        start_ns: where each begins on the device.
        end_ns: where each ends there.
    """

    iteration: NDArray[np.int32]
    boundary: NDArray[np.bool_]
    start_ns: Nanoseconds
    end_ns: Nanoseconds


def windows(iterations: pa.Table, device_events: pa.Table) -> Windows:
    """Where each iteration begins and ends on the device.

    Args:
        iterations: `traces.tables.ITERATIONS` of one rank.
        device_events: `traces.tables.DEVICE_EVENTS` of the same.
    """
    number, boundary, start, end = (iterations[name].to_numpy() for name in ("iteration", "boundary", "start_ns", "end_ns"))
    if not len(number):
        return Windows(number, boundary, start, end)
    over = np.maximum(end, _last_compute_ns(number, device_events, end))
    # An iteration that launched nothing new ends no earlier than the one before it did.
    over = np.maximum.accumulate(over)
    begins = np.maximum(start, np.concatenate((start[:1], over[:-1])))
    return Windows(number, boundary, begins, over)


def iterations(windows: Windows, work: DeviceWork, absent: ComputeAbsent) -> pa.Table:
    """One row per iteration: its window, and the device time in it.

    `duration_us` = `compute_us` + `launch_starved_us` + `blocked_us` + `dependency_stalled_us` = busy + `idle_us`.

    Args:
        windows: of one rank.
        work: what its device did.
        absent: why it did not compute when it did not.
    """
    start, end = windows.start_ns, windows.end_ns

    def within(intervals: Intervals) -> NDArray[np.float64]:
        return intervals.within_ns(start, end) / 1e3

    return pa.table(
        {
            "iteration": pa.array(windows.iteration, pa.int32()),
            "boundary": pa.array(windows.boundary, pa.bool_()),
            "start_ns": start,
            "end_ns": end,
            "duration_us": (end - start) / 1e3,
            "compute_us": within(work.compute),
            "communication_us": within(work.communication),
            "exposed_communication_us": within(work.exposed_communication),
            "overlapped_communication_us": within(work.overlapped_communication),
            "memcpy_us": within(work.memcpy),
            "memset_us": within(work.memset),
            "idle_us": (end - start - work.busy.within_ns(start, end)) / 1e3,
            "launch_starved_us": within(absent.launch_starved),
            "blocked_us": within(absent.blocked),
            "dependency_stalled_us": within(absent.dependency_stalled),
        }
    )


def steady(iterations: pa.Table) -> pa.Table:
    """Of one rank's iterations those that count in medians: not the boundary ones, but all of fewer than three.

    Args:
        iterations: what `iterations` gave for one rank.
    """
    inside = iterations.filter(pc.invert(iterations["boundary"]))
    return inside if iterations.num_rows >= ENOUGH_ITERATIONS and inside.num_rows else iterations


def typical(iterations: pa.Table) -> pa.Table:
    """One row: the median of each time over one rank's steady iterations, and how many they are. No row without iterations.

    Medians of parts do not add up to the median of the whole.

    Args:
        iterations: what `iterations` gave for one rank.
    """
    counted = steady(iterations)
    times = [name for name in counted.column_names if name.endswith("_us")]
    if not counted.num_rows:
        return pa.table({"iterations": pa.array([], pa.int64())} | {name: pa.array([], pa.float64()) for name in times})
    medians = {name: [float(np.median(counted[name].to_numpy()))] for name in times}
    return pa.table({"iterations": pa.array([counted.num_rows], pa.int64())} | medians)


def typical_of_each(iterations: pa.Table) -> pa.Table:
    """`typical` of each capture: its columns after `rank` and `source`.

    Args:
        iterations: those of many captures, with the columns `rank` and `source`.
    """
    captures = iterations.select(["rank", "source"]).group_by(["rank", "source"], use_threads=False).aggregate([])
    found = []
    for capture in captures.to_pylist():
        mine = iterations.filter(
            pc.and_(pc.equal(iterations["rank"], capture["rank"]), pc.equal(iterations["source"], capture["source"]))
        )
        row = typical(mine)
        rank, source = pa.array([capture["rank"]], pa.int32()), pa.array([capture["source"]], pa.string())
        found.append(row.add_column(0, "source", source).add_column(0, "rank", rank))
    return pa.concat_tables(found) if found else captures


def _last_compute_ns(number: NDArray[np.int32], device_events: pa.Table, default: Nanoseconds) -> Nanoseconds:
    """When the last compute kernel of each iteration is over; the default for an iteration without one."""
    mine = rows_of(device_events["kind"], "compute") & device_events["iteration"].is_valid().to_numpy()
    events = device_events.filter(pa.array(mine))
    order = np.argsort(number, kind="stable")
    place = order[np.minimum(np.searchsorted(number[order], events["iteration"].to_numpy()), len(number) - 1)]
    last = default.copy()
    np.maximum.at(last, place, events["end_ns"].to_numpy())
    return last
