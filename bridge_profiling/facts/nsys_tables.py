"""What only nsys records of a rank: system calls of the threads that launch work, and memory that CUDA allocated."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from bridge_profiling.facts.intervals import Intervals, coded, outermost, union
from bridge_profiling.facts.parts import counted_iterations
from bridge_profiling.traces.tables import NULL, fields, to_int64

_SYSTEM_CALLS = pa.schema(
    [
        ("name", pa.string()),
        *fields(pa.int64(), "iterations"),
        *fields(pa.float64(), "calls", "time_us", "share", "longest_us"),
        *fields(pa.int64(), "longest_start_ns"),
    ]
)

_CUDA_MEMORY = pa.schema(
    [
        ("device", pa.int32()),
        ("memory", pa.string()),
        *fields(pa.int64(), "allocations", "frees", "in_iterations", "iterations", "allocated_bytes"),
        *fields(pa.int64(), "peak_bytes", "end_bytes"),
    ]
)


def system_calls(calls: pa.Table, device_events: pa.Table, iterations: pa.Table) -> pa.Table:
    """System calls (`--trace=osrt`) by name, of the threads that launch work on a device, else of all, most time first.

    Returns:
        `calls` and `time_us`: means of an iteration, `share` of its duration; without marked iterations, sums over the whole
        capture, `iterations` 0 and `share` null. Of calls inside each other the outermost counts. `longest_…`: the longest
        call. Empty unless recorded.
    """
    if not calls.num_rows:
        return _SYSTEM_CALLS.empty_table()
    launching = np.setdiff1d(to_int64(device_events["launch_thread"]), [NULL])
    thread, start, end = (to_int64(calls[name]) for name in ("thread", "start_ns", "end_ns"))
    mine = np.isin(thread, launching) if len(launching) else np.ones(len(thread), bool)
    code, names = coded(calls["name"])
    marked, count = _counted(iterations)
    rows = []
    for one in np.unique(thread[mine]):
        of_thread = np.flatnonzero(mine & (thread == one))
        rows.append(of_thread[outermost(end[of_thread])])
    chosen = np.concatenate([np.zeros(0, np.int64), *rows])
    if count:
        within = marked.within_ns(start[chosen], end[chosen])
        chosen, within = chosen[within > 0], within[within > 0]
    else:
        within = (end - start)[chosen]
    found = []
    for each in np.unique(code[chosen]).tolist():
        here = code[chosen] == each
        longest = chosen[here][within[here].argmax()]
        time_us = float(within[here].sum()) / 1e3 / max(count, 1)
        found.append(
            {
                "name": names[each],
                "iterations": count,
                "calls": float(here.sum()) / max(count, 1),
                "time_us": time_us,
                "share": time_us * count * 1e3 / marked.total_ns if count else None,
                "longest_us": float(end[longest] - start[longest]) / 1e3,
                "longest_start_ns": int(start[longest]),
            }
        )
    found.sort(key=lambda row: (-row["time_us"], row["name"]))
    return pa.Table.from_pylist(found, schema=_SYSTEM_CALLS)


def cuda_memory(events: pa.Table, iterations: pa.Table) -> pa.Table:
    """Allocations by CUDA (`--cuda-memory-usage=true`) by device and kind of memory, the highest peak first.

    Returns:
        `memory`: device, pinned, managed, pageable, array or unknown; device static or managed static for variables in the
        modules of kernels. `allocations`, `frees`: number in the report; nsys also reports those of before a window, with the
        window's start as their time. `in_iterations`: allocations and frees in the `iterations` that count. `peak_bytes` and
        `end_bytes`: allocated less freed, as far as reported. Empty unless recorded.
    """
    if not events.num_rows:
        return _CUDA_MEMORY.empty_table()
    marked, count = _counted(iterations)
    time, device, amount = (to_int64(events[name]) for name in ("time_ns", "device", "bytes"))
    code, names = coded(events["memory"])
    inside = marked.before_ns(time + 1) > marked.before_ns(time)
    found = []
    for one, kind in sorted(set(zip(device.tolist(), code.tolist(), strict=True))):
        here = (device == one) & (code == kind)
        level = np.cumsum(amount[here])
        found.append(
            {
                "device": one if one != NULL else None,
                "memory": names[kind],
                "allocations": int((amount[here] > 0).sum()),
                "frees": int((amount[here] < 0).sum()),
                "in_iterations": int(inside[here].sum()),
                "iterations": count,
                "allocated_bytes": int(np.maximum(amount[here], 0).sum()),
                "peak_bytes": max(int(level.max()), 0),
                "end_bytes": int(level[-1]),
            }
        )
    found.sort(key=lambda row: -row["peak_bytes"])
    return pa.Table.from_pylist(found, schema=_CUDA_MEMORY)


def _counted(iterations: pa.Table) -> tuple[Intervals, int]:
    """The iterations that count, and their number: without those at the profiler's start and stop if enough others exist."""
    counted = counted_iterations(iterations)
    start, end = (to_int64(iterations[name])[counted] for name in ("start_ns", "end_ns"))
    return union(start, end), int(counted.sum())
