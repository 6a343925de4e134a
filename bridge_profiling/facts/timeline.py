"""Device activity over time: a lane per stream of each rank, all ranks on one clock, in a picture's resolution.

Events shorter than the resolution are merged into segments, which have a count and the name of the longest event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bridge_profiling.facts.intervals import grouped, outermost, rows_of, run_starts
from bridge_profiling.facts.phases import PHASES, WHOLE
from bridge_profiling.traces import cache
from bridge_profiling.traces.types import RankInfo

#: Kinds of segments; `Segments.kind` is an index of it.
KINDS = ("compute", "communication", "memcpy", "memset", "annotation")

#: Name of the lane of host annotations.
HOST_LANE = "host annotations"

#: A range of the program's own that covers more of the iteration than this share, with others inside, is around the iteration.
_AROUND = 0.95

_DEVICE = ["kind", "name", "device", "stream", "start_ns", "end_ns"]
_HOST = ["category", "name", "thread", "start_ns", "end_ns"]


@dataclass(frozen=True)
class Window:
    """The part of a rank's time that a picture shows."""

    rank: int  # global rank
    iteration: int | None  # its number; None for a whole capture without marked iterations
    start_ns: int  # begin on the rank's clock
    end_ns: int  # end on the rank's clock
    zero_ns: int  # the picture's time 0 on the rank's clock


@dataclass(frozen=True)
class Segments:
    """One rank's part of a picture."""

    window: Window  # the part of time
    lanes: list[str]  # names of the lanes, from the top down
    lane: NDArray[np.int64]  # of each segment, an index of `lanes`
    kind: NDArray[np.int64]  # of each segment, an index of `KINDS`
    name: list[str]  # of the longest event of each segment
    start_ns: NDArray[np.int64]  # after the picture's time 0
    duration_ns: NDArray[np.int64]  # from the first event's start to the last one's end
    count: NDArray[np.int64]  # events in each segment

    def __len__(self) -> int:
        return len(self.start_ns)


def windows_of(iterations: pa.Table, source: str, offsets: pa.Table | None) -> dict[int | None, dict[int, Window]]:
    """Each iteration's window on each rank; time 0 is the first begin of the iteration on any rank.

    Args:
        iterations: the fact of that name.
        source: profiler whose captures are shown.
        offsets: `clock_offsets`; None leaves each rank's times as they are.
    """
    rows = grouped((row for row in iterations.to_pylist() if row["source"] == source), "iteration")
    return {
        number: _windows(number, {row["rank"]: (row["start_ns"], row["end_ns"]) for row in rows[number]}, offsets)
        for number in sorted(rows, key=lambda number: -1 if number is None else number)
    }


def _windows(iteration: int | None, spans: Mapping[int, tuple[int, int]], offsets: pa.Table | None) -> dict[int, Window]:
    """Windows of one iteration from its begin and end on each rank's clock."""
    shift = {} if offsets is None else dict(zip(offsets["rank"].to_pylist(), offsets["offset_ns"].to_pylist(), strict=True))
    zero = min(start + shift.get(rank, 0) for rank, (start, _) in spans.items())
    return {rank: Window(rank, iteration, *span, zero - shift.get(rank, 0)) for rank, span in sorted(spans.items())}


def whole_captures(entries: Sequence[tuple[RankInfo, Path]], offsets: pa.Table | None) -> dict[int | None, dict[int, Window]]:
    """Windows of captures without marked iterations: each from its first device event to its last.

    Args:
        entries: `Captures.entries`.
        offsets: `clock_offsets`; None leaves each rank's times as they are.
    """
    spans: dict[int, tuple[int, int]] = {}
    for info, entry in entries:
        tables = cache.open_entry(entry)
        events = None if tables is None else tables.columns("device_events", ["start_ns", "end_ns"])
        if events is not None and events.num_rows:
            spans[info.rank] = (pc.min(events["start_ns"]).as_py(), pc.max(events["end_ns"]).as_py())
    return {None: _windows(None, spans, offsets)} if spans else {}


def segments(entry: Path, windows: Sequence[Window], resolution_ns: Mapping[int | None, int], *, host: bool) -> list[Segments]:
    """One rank's segments in some of its windows.

    Args:
        entry: folder of the rank's Parquet tables.
        windows: of that rank.
        resolution_ns: by iteration: shorter events and gaps are merged.
        host: whether to add a lane of host annotations.
    """
    tables = cache.open_entry(entry)
    if tables is None:
        return []
    events = tables.columns("device_events", _DEVICE)
    ranges = tables.columns("host_events", _HOST) if host else None
    if ranges is not None:
        ranges = ranges.filter(pa.array(rows_of(ranges["category"], "annotation")))
    return [_segments(events, ranges, window, resolution_ns[window.iteration]) for window in windows]


def _segments(events: pa.Table, ranges: pa.Table | None, window: Window, resolution_ns: int) -> Segments:
    inside = events.filter(_overlaps(events, window))
    kinds = np.zeros(inside.num_rows, np.int64)
    for code, kind in enumerate(KINDS):
        kinds[rows_of(inside["kind"], kind)] = code
    device, stream = (inside[name].fill_null(0).to_numpy() for name in ("device", "stream"))
    keys = sorted(set(zip(device.tolist(), stream.tolist(), strict=True)))
    several = len({key[0] for key in keys}) > 1
    lanes, pieces = [], []
    if ranges is not None and (annotations := _outermost(ranges.filter(_overlaps(ranges, window)), window)).num_rows:
        lanes.append(HOST_LANE)
        pieces.append(_merged(annotations, np.full(annotations.num_rows, KINDS.index("annotation")), 0, window, resolution_ns))
    for key in keys:
        chosen = (device == key[0]) & (stream == key[1])
        pieces.append(_merged(inside.filter(pa.array(chosen)), kinds[chosen], len(lanes), window, resolution_ns))
        lanes.append(f"stream {key[1]}" + (f" of device {key[0]}" if several else ""))
    names = [name for _, piece_names in pieces for name in piece_names]
    lane, kind, start_ns, duration_ns, count = np.concatenate([_NOTHING, *(columns for columns, _ in pieces)], axis=1)
    return Segments(window, lanes, lane, kind, names, start_ns, duration_ns, count)


def _overlaps(events: pa.Table, window: Window) -> pa.ChunkedArray:
    return pc.and_(pc.less(events["start_ns"], window.end_ns), pc.greater(events["end_ns"], window.start_ns))


def _outermost(ranges: pa.Table, window: Window) -> pa.Table:
    """Outermost annotations of the thread with the most, without those around the whole iteration.

    A phase stays, however long: data loading that takes all of the iteration is what the picture has to show.
    """
    if not ranges.num_rows:
        return ranges
    length = window.end_ns - window.start_ns
    start, end = ranges["start_ns"].to_numpy(), ranges["end_ns"].to_numpy()
    covered = np.minimum(end, window.end_ns) - np.maximum(start, window.start_ns)
    thread = ranges["thread"].to_numpy()
    values, counts = np.unique(thread, return_counts=True)
    mine = thread == values[counts.argmax()]
    for row in np.flatnonzero(mine & (covered >= _AROUND * length)).tolist():
        name, inside = ranges["name"][row].as_py() or "", mine & (start >= start[row]) & (end <= end[row])
        mine[row] = name in PHASES or not (WHOLE.match(name) or inside.sum() > 1)
    ranges = ranges.filter(pa.array(mine))
    return ranges.take(pa.array(outermost(start[mine], end[mine])))


#: Lane, kind, start, duration and count of no segments.
_NOTHING = np.zeros((5, 0), np.int64)


def _merged(
    events: pa.Table, kind: NDArray[np.int64], lane: int, window: Window, resolution_ns: int
) -> tuple[NDArray[np.int64], list[str]]:
    """A lane's segments: rows of lane, kind, start, duration and count; and names.

    A long event is a segment. Short ones that start within the same cell of the picture are one segment, of the kind with the
    most time. Such segments of one kind without a visible gap between them are merged again. So a lane has at most two segments
    per cell.
    """
    if not events.num_rows:
        return _NOTHING, []
    start = np.maximum(events["start_ns"].to_numpy(), window.start_ns)
    end = np.minimum(events["end_ns"].to_numpy(), window.end_ns)
    short = end - start < resolution_ns
    cell = np.where(short, (start - window.start_ns) // resolution_ns, -1 - np.arange(len(start)))
    first = run_starts(cell)
    group = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(start))))
    spent = np.zeros((len(first), len(KINDS)))
    np.add.at(spent, (group, kind), end - start + 1)
    kinds, begin, until = spent.argmax(axis=1), start[first], np.maximum.reduceat(end, first)
    seen = (begin[1:] - np.maximum.accumulate(until)[:-1] >= resolution_ns) | (kinds[1:] != kinds[:-1])
    apart = np.cumsum(np.concatenate(([0], seen | ~short[first][1:] | ~short[first][:-1])))
    outer = run_starts(apart)
    count = np.diff(np.append(first[outer], len(start)))
    # Sorted by duration within each segment, the longest event is the last.
    order = np.lexsort((end - start, apart[group]))
    longest = order[np.cumsum(count) - 1]
    names = ["" if name is None else name for name in events["name"].take(pa.array(longest)).to_pylist()]
    last = np.maximum.reduceat(until, outer)
    return np.array([np.full(len(outer), lane), kinds[outer], begin[outer] - window.zero_ns, last - begin[outer], count]), names
