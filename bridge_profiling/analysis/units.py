"""Which part of a sharded model each collective is for: FSDP's units and ZeRO's steps, by the ranges around their sending.

fully_shard names the ranges `FSDP::all_gather (layers.3)`; `integrations.communication_ranges` gives the same to what has none.
"""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bridge_profiling.analysis.breakdown import rows_of

#: Of host events, what `units` needs.
COLUMNS = ("category", "thread", "name", "start_ns", "end_ns")

#: A step and its unit. With several parameter groups in a module, fully_shard appends the group's size.
_STEP = re.compile(r"(?:FSDP|ZeRO)::(all_gather|post_backward_reduce|reduce)(?: \((.*?)\))?(?: \[pg=\d+\])?")

_STEPS = {"all_gather": "all_gather", "post_backward_reduce": "reduce", "reduce": "reduce"}


def units(host_events: pa.Table, device_events: pa.Table) -> pa.Table:
    """One row per unit and step, most device time first, then most host time.

    Args:
        host_events: `traces.tables.HOST_EVENTS` of one rank.
        device_events: `traces.tables.DEVICE_EVENTS` of the same.

    Returns:
        `unit` (a module's name; empty for the root's, and where the whole is sent at once), `step` (`all_gather` or `reduce`),
        `count` of its ranges, `host_us` in them, `communication_count` of device events launched in them, and `device_us` of
        those; null where none was, as on a CPU, where the host's time is the sending's.
    """
    annotations = host_events.filter(pa.array(rows_of(host_events["category"], "annotation")))
    names = annotations["name"].cast(pa.string()).combine_chunks().dictionary_encode()
    told = [_STEP.fullmatch(name) for name in names.dictionary.to_pylist()]
    wanted = np.array([match is not None for match in told], bool)
    codes = names.indices.to_numpy(zero_copy_only=False)
    chosen = annotations.filter(pa.array(wanted[codes] if len(codes) else np.zeros(0, bool)))
    codes = codes[wanted[codes]] if len(codes) else codes
    thread, start, end = (chosen[name].to_numpy() for name in ("thread", "start_ns", "end_ns"))
    sent, device_ns = _launched_inside(thread, start, end, device_events)
    found: dict[tuple[str, str], list[int]] = {}
    for row, code in enumerate(codes.tolist()):
        match = told[code]
        assert match is not None
        sums = found.setdefault((match[2] or "", _STEPS[match[1]]), [0, 0, 0, 0])
        for place, value in enumerate((1, int(end[row] - start[row]), int(sent[row]), int(device_ns[row]))):
            sums[place] += value
    rows = sorted(found.items(), key=lambda item: (-item[1][3], -item[1][1], item[0]))
    return pa.table(
        {
            "unit": pa.array([unit for (unit, _), _ in rows], pa.string()),
            "step": pa.array([step for (_, step), _ in rows], pa.string()),
            "count": pa.array([sums[0] for _, sums in rows], pa.int64()),
            "host_us": pa.array([sums[1] / 1e3 for _, sums in rows], pa.float64()),
            "communication_count": pa.array([sums[2] for _, sums in rows], pa.int64()),
            "device_us": pa.array([sums[3] / 1e3 if sums[2] else None for _, sums in rows], pa.float64()),
        }
    )


def _launched_inside(
    thread: NDArray[np.int64], start: NDArray[np.int64], end: NDArray[np.int64], device_events: pa.Table
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each range, how many communication events were launched in it on its thread, and how long they took."""
    sent, spent = np.zeros(len(start), np.int64), np.zeros(len(start), np.int64)
    launched = device_events.filter(pc.and_(pa.array(rows_of(device_events["kind"], "communication")), _known(device_events)))
    by, at = launched["launch_thread"].to_numpy(), launched["launch_start_ns"].to_numpy()
    taken = launched["end_ns"].to_numpy() - launched["start_ns"].to_numpy()
    for one in np.unique(thread):
        # Ranges of one thread follow each other: none of these steps is inside another.
        rows = np.flatnonzero(thread == one)
        rows = rows[np.argsort(start[rows], kind="stable")]
        events = np.flatnonzero(by == one)
        place = np.searchsorted(start[rows], at[events], side="right") - 1
        inside = (place >= 0) & (at[events] < end[rows[place]])
        np.add.at(sent, rows[place[inside]], 1)
        np.add.at(spent, rows[place[inside]], taken[events[inside]])
    return sent, spent


def _known(device_events: pa.Table) -> pa.ChunkedArray:
    return pc.and_(device_events["launch_thread"].is_valid(), device_events["launch_start_ns"].is_valid())
