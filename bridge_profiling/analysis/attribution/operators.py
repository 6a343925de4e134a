"""Host operators of one rank, and the units of a sharded model: how often they run, and at what cost."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bridge_profiling.analysis.attribution.launches import launched_inside
from bridge_profiling.analysis.intervals import parents, rows_of, self_times_ns

#: A step and its unit, as fully_shard names its ranges, and our integrations those of libraries that name none.
#: With several parameter groups in a module, fully_shard appends the group's size.
_STEP = re.compile(r"(?:FSDP|ZeRO)::(all_gather|post_backward_reduce|reduce)(?: \((.*?)\))?(?: \[pg=\d+\])?")


def operators(
    host_events: pa.Table, device_events: pa.Table, *, category: str = "operator", shapes: bool = False, stacks: bool = False
) -> pa.Table:
    """One row per name (and input shapes, and call stack; null if not recorded), most own time first.

    `total_us` adds up the calls' durations, `self_us` is without the ranges of the same category directly inside.
    `device_total_us` adds up the device events launched inside on the same thread, and `device_self_us` those of them launched
    in no operator or annotation further in: torch's `device_time_total` and `self_device_time_total`.
    """
    keys = ["name", *(["shapes"] if shapes else []), *(["stack"] if stacks else [])]
    events = host_events.filter(pa.array(rows_of(host_events["category"], category)))
    thread, start, end = (events[name].to_numpy() for name in ("thread", "start_ns", "end_ns"))
    device_ns = _device_ns(events["operator"], device_events) if category != "runtime" else np.zeros(len(start), np.int64)
    table = pa.table(
        {key: events[key].cast(pa.string()) for key in keys}
        | {
            "duration_ns": end - start,
            "self_ns": self_times_ns(parents(thread, start, end), start, end),
            "device_ns": device_ns,
            # What an operator launched counts even if the time of the launch was not recorded.
            "device_total_ns": np.maximum(device_ns, launched_inside(thread, start, end, device_events)[1]),
        }
    )
    wanted = [("duration_ns", "count"), *((name, "sum") for name in ("self_ns", "duration_ns", "device_ns", "device_total_ns"))]
    found = table.group_by(keys).aggregate([*wanted, ("duration_ns", "max")])
    found = found.sort_by([("self_ns_sum", "descending"), *((key, "ascending") for key in keys)])

    count = found["duration_ns_count"]
    return pa.table(
        {key: found[key] for key in keys}
        | {
            "count": count,
            "self_us": _microseconds(found["self_ns_sum"]),
            "total_us": _microseconds(found["duration_ns_sum"]),
            "mean_us": pc.divide(_microseconds(found["duration_ns_sum"]), count.cast(pa.float64())),
            "max_us": _microseconds(found["duration_ns_max"]),
            "device_self_us": _microseconds(found["device_ns_sum"]),
            "device_total_us": _microseconds(found["device_total_ns_sum"]),
        }
    )


def units(host_events: pa.Table, device_events: pa.Table) -> pa.Table:
    """Communication of a sharded model, one row per FSDP unit or ZeRO step, most device time first, then most host time.

    Returns:
        `unit` (a module's name; empty for the root's, or if everything is sent at once), `step` (`all_gather` or `reduce`),
        `count` and `host_us` of its ranges, `communication_count` and `device_us` of the device events launched in them.
        `device_us` is null without such events: on a CPU, the host's time is that of the communication.
    """
    annotations = host_events.filter(pa.array(rows_of(host_events["category"], "annotation")))
    steps = {name: match for name in annotations["name"].unique().to_pylist() if (match := _STEP.fullmatch(name or ""))}
    chosen = annotations.filter(pa.array(rows_of(annotations["name"], *steps)))
    thread, start, end = (chosen[name].to_numpy() for name in ("thread", "start_ns", "end_ns"))
    communication = device_events.filter(pa.array(rows_of(device_events["kind"], "communication")))
    launched, device_ns = launched_inside(thread, start, end, communication)
    matches = [steps[name] for name in chosen["name"].to_pylist()]
    table = pa.table(
        {
            "unit": pa.array([match[2] or "" for match in matches], pa.string()),
            "step": pa.array(["all_gather" if match[1] == "all_gather" else "reduce" for match in matches], pa.string()),
            "host_ns": end - start,
            "launched": launched,
            "device_ns": device_ns,
        }
    )
    wanted = [("host_ns", "count"), *((name, "sum") for name in ("host_ns", "launched", "device_ns"))]
    found = table.group_by(["unit", "step"]).aggregate(wanted)
    order = [("device_ns_sum", "descending"), ("host_ns_sum", "descending"), ("unit", "ascending"), ("step", "ascending")]
    found = found.sort_by(order)
    return pa.table(
        {
            "unit": found["unit"],
            "step": found["step"],
            "count": found["host_ns_count"],
            "host_us": _microseconds(found["host_ns_sum"]),
            "communication_count": found["launched_sum"],
            "device_us": pc.if_else(pc.greater(found["launched_sum"], 0), _microseconds(found["device_ns_sum"]), None),
        }
    )


def _microseconds(time_ns: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.divide(time_ns.cast(pa.float64()), 1e3)


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
