"""Annotations in a memory snapshot (`record_function` of the program, torch's own of collectives) as host events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from bridge_profiling.traces.snapshot_replay import integer, text
from bridge_profiling.traces.tables import build, text_column


@dataclass(frozen=True)
class Annotation:
    """One range; microseconds."""

    name: str
    start: int
    end: int


def read_annotations(entries: Sequence[Mapping[str, Any]]) -> list[Annotation]:
    """The ranges of `external_annotations` by start, the longer first; what lacks its other half is left out.

    Args:
        entries: each is the start or the end of a range, in order.
    """
    begun: dict[tuple[Any, str], list[int]] = {}
    found = []
    for entry in entries:
        name, time = text(entry.get("name")), integer(entry.get("time_us"))
        if time is None:
            continue
        same = begun.setdefault((integer(entry.get("device")), name), [])
        if entry.get("stage") == "START":
            same.append(time)
        elif entry.get("stage") == "END" and same:
            start = same.pop()
            if start <= time:
                found.append(Annotation(name, start, time))
    return sorted(found, key=lambda each: (each.start, -each.end))


def annotation_tables(found: Sequence[Annotation], rank: int) -> dict[str, pa.Table]:
    """`host_events` of annotations; torch does not say which thread they are of. No table when there are none."""
    if not found:
        return {}
    columns = {
        "category": text_column(["annotation"] * len(found)),
        "name": text_column([each.name for each in found]),
        "start_ns": pa.array([each.start * 1000 for each in found], pa.int64()),
        "end_ns": pa.array([each.end * 1000 for each in found], pa.int64()),
    }
    return {"host_events": build("host_events", rank, columns)}
