"""Copies of a rank: which way, of which memory, how many bytes, how fast."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from bridge_profiling.analysis.breakdown import rows_of

_KEYS = ("direction", "from_memory", "to_memory")


def copies(device_events: pa.Table) -> pa.Table:
    """One row per direction and pair of memories, most time first.

    `host_memory` is pinned or pageable for a copy that has a side on the host, else null. `bandwidth_gbs` is bytes over the
    copies' own time, 10⁹ bytes a second; null when the capture has no bytes.

    Args:
        device_events: `traces.tables.DEVICE_EVENTS` of one rank.
    """
    events = device_events.filter(pa.array(rows_of(device_events["kind"], "memcpy")))
    table = pa.table(
        {name: events[name].cast(pa.string()) for name in _KEYS}
        | {
            "bytes": events["bytes"],
            "duration_ns": pc.subtract(events["end_ns"], events["start_ns"]),
            # Of a copy without bytes the time is not what the others' bytes took.
            "counted_ns": pc.if_else(events["bytes"].is_valid(), pc.subtract(events["end_ns"], events["start_ns"]), 0),
        }
    )
    wanted = [("duration_ns", "count"), ("bytes", "sum"), ("duration_ns", "sum"), ("duration_ns", "max"), ("counted_ns", "sum")]
    found = table.group_by(list(_KEYS)).aggregate(wanted).sort_by([("duration_ns_sum", "descending")])
    counted_ns = found["counted_ns_sum"]
    total_bytes, known = found["bytes_sum"], pc.greater(counted_ns, 0)
    divisor = pc.if_else(known, counted_ns, 1).cast(pa.float64())
    return pa.table(
        {name: found[name] for name in _KEYS}
        | {
            "host_memory": pa.array(
                [_host_memory(*names) for names in zip(*(found[name].to_pylist() for name in _KEYS), strict=True)], pa.string()
            ),
            "count": found["duration_ns_count"],
            "bytes": total_bytes,
            "total_us": pc.divide(found["duration_ns_sum"].cast(pa.float64()), 1e3),
            "max_us": pc.divide(found["duration_ns_max"].cast(pa.float64()), 1e3),
            "bandwidth_gbs": pc.if_else(known, pc.divide(total_bytes.cast(pa.float64()), divisor), None),
        }
    )


def _host_memory(direction: str | None, from_memory: str | None, to_memory: str | None) -> str | None:
    side = {"HtoD": from_memory, "DtoH": to_memory}.get(direction or "")
    return side if side in ("pinned", "pageable") else None
