"""Host operators of a rank: how often each was called, with what shapes, from where, at what cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bridge_profiling.analysis.breakdown import rows_of
from bridge_profiling.analysis.intervals import parents, self_times_ns

#: Kinds of host ranges that can be asked for.
CATEGORIES = ("operator", "annotation", "runtime", "python")


def operator_columns(*, shapes: bool = False, stacks: bool = False, **_: Any) -> list[str]:
    """Of host events, what `operators` needs with some options."""
    return ["category", "thread", "start_ns", "end_ns", "operator", *_keys(shapes, stacks)]


def operators(
    host_events: pa.Table,
    device_events: pa.Table,
    *,
    category: str = "operator",
    shapes: bool = False,
    stacks: bool = False,
) -> pa.Table:
    """One row per name (and shapes, and call stack), most own time first.

    `total_us` adds up the calls' durations, `self_us` is without the ranges of the same category directly inside, and
    `device_us` adds up the device events that were launched inside, but in no operator or annotation further in.

    Args:
        host_events: `traces.tables.HOST_EVENTS` of one rank.
        device_events: `traces.tables.DEVICE_EVENTS` of the same.
        category: which host ranges: operator, annotation, runtime or python.
        shapes: tell calls with other input shapes apart; `shapes` is null where none were recorded.
        stacks: tell calls from other places apart; `stack` is null where none were recorded.
    """
    keys = _keys(shapes, stacks)
    events = host_events.filter(pa.array(rows_of(host_events["category"], category)))
    thread, start, end = (events[name].to_numpy() for name in ("thread", "start_ns", "end_ns"))
    table = pa.table(
        {key: events[key].cast(pa.string()) for key in keys}
        | {
            "duration_ns": end - start,
            "self_ns": self_times_ns(parents(thread, start, end), start, end),
            "device_ns": _device_ns(events["operator"], device_events) if category != "runtime" else np.zeros(len(start), int),
        }
    )
    wanted = [("duration_ns", "count"), *((name, "sum") for name in ("self_ns", "duration_ns", "device_ns"))]
    found = table.group_by(keys).aggregate([*wanted, ("duration_ns", "max")])
    found = found.sort_by([("self_ns_sum", "descending"), *((key, "ascending") for key in keys)])
    count = found["duration_ns_count"]
    return pa.table(
        {key: found[key] for key in keys}
        | {
            "count": count,
            "self_us": _us(found["self_ns_sum"]),
            "total_us": _us(found["duration_ns_sum"]),
            "mean_us": pc.divide(_us(found["duration_ns_sum"]), count.cast(pa.float64())),
            "max_us": _us(found["duration_ns_max"]),
            "device_us": _us(found["device_ns_sum"]),
        }
    )


def _keys(shapes: bool, stacks: bool) -> list[str]:
    """What calls are told apart by."""
    return ["name", *(["shapes"] if shapes else []), *(["stack"] if stacks else [])]


def _us(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.divide(column.cast(pa.float64()), 1e3)


def _device_ns(operator: pa.ChunkedArray, device_events: pa.Table) -> NDArray[np.int64]:
    """Device time that each operator launched itself."""
    launched = device_events.filter(device_events["operator"].is_valid())
    ids = operator.fill_null(-1).to_numpy()
    spent = np.zeros(len(ids), np.int64)
    if not len(ids):
        return spent
    order = np.argsort(ids, kind="stable")
    wanted = launched["operator"].to_numpy()
    place = order[np.minimum(np.searchsorted(ids[order], wanted), len(ids) - 1)]
    mine = ids[place] == wanted
    duration = launched["end_ns"].to_numpy() - launched["start_ns"].to_numpy()
    np.add.at(spent, place[mine], duration[mine])
    return spent
