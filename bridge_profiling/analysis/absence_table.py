"""Compute-absent time as rows: by iteration, cause and what shows it. A few rows a rank, whatever the capture's size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.analysis.absences import HELD_NS, Absences, Cause
from bridge_profiling.analysis.host_evidence import HostEvidence, Ranges
from bridge_profiling.analysis.intervals import Intervals, Nanoseconds

#: Names of each cause that are told apart in an iteration; the others are one row without a name.
_NAMES = 5

_SCHEMA = pa.schema(
    [
        ("iteration", pa.int32()),
        ("between", pa.bool_()),
        ("cause", pa.string()),
        ("name", pa.string()),
        ("count", pa.int64()),
        ("start_ns", pa.int64()),
        ("lost_us", pa.float64()),
        ("calls", pa.int64()),
        ("host_us", pa.float64()),
        ("lost_each_us", pa.list_(pa.float32())),
    ]
)

#: Causes that ranks can lose time to in turns: one of them in one range, another in the next.
_IN_TURNS = (Cause.data_loading, Cause.checkpoint_stall)

#: Ranges of an iteration that are told apart; what is lost in later ones is the last one's.
_RANGES = 256


def absence_table(
    found: Absences, host: HostEvidence, iteration: np.ndarray, start_ns: Nanoseconds, end_ns: Nanoseconds
) -> pa.Table:
    """One row per window, cause, and name of what shows it, most time first; a cause's rows add up to its time.

    Columns: iteration; between: the row is of the time from the end of that iteration's window to the next one's begin, which
    no iteration holds; cause; name: of the range or call, else "before" the operator that launched what came next, null for
    names that cost less than others; count: gaps, or pieces of them; start_ns: of the longest; lost_us: compute-absent time;
    calls and host_us: ranges or calls of that name that began in the window, of those that wait for the device only such as
    held the host at all, and the time that launching threads spent in them, whether the device computed meanwhile or not; null
    where nothing but gaps shows a cause; lost_each_us: of data loading and saving, on the first of the cause's rows, what was
    lost in each range, in order.

    Args:
        found: what `absences` gave.
        host: what the launching threads did.
        iteration: numbers of the windows' iterations; null for the whole capture.
        start_ns: where each window begins.
        end_ns: where each ends.
    """
    evidence = {
        Cause.data_loading: host.data_loading,
        Cause.checkpoint_stall: host.checkpoint,
        Cause.profiler: host.profiler,
        Cause.host_sync: host.synchronizing.held(HELD_NS),
        Cause.pageable_copy: host.pageable,
    }
    numbers = iteration.to_pylist() if isinstance(iteration, pa.Array) else iteration.tolist()
    begins, ends = start_ns.tolist(), end_ns.tolist()
    windows = [(number, False, begin, end) for number, begin, end in zip(numbers, begins, ends, strict=True)]
    windows += [(number, True, end, begin) for number, end, begin in zip(numbers[:-1], ends[:-1], begins[1:], strict=True)]
    rows: list[dict[str, object]] = []
    for cause, time in found.times.items():
        pieces = _pieces(time, evidence.get(cause), found)
        for number, between, begin, end in windows:
            mine = list(pieces.by_name(begin, end))
            if mine and cause in _IN_TURNS:
                mine[0]["lost_each_us"] = pieces.each_us(begin, end)
            rows += [{"iteration": number, "between": between, "cause": str(cause), **row} for row in mine]
    return pa.Table.from_pylist(rows, schema=_SCHEMA)


@dataclass(frozen=True)
class _Pieces:
    """Intervals of a cause and the ranges that show it, each with the place of its name.

    Args:
        names: None stands for what nothing names.
        time: the intervals.
        code: place of each interval's name.
        ranges: the ranges; None where gaps alone show the cause.
        range_code: place of each range's name.
    """

    names: Sequence[str | None]
    time: Intervals
    code: NDArray[np.int64]
    ranges: Ranges | None
    range_code: NDArray[np.int64]

    def by_name(self, start_ns: int, end_ns: int) -> Iterator[dict[str, object]]:
        """Rows for the names with most time between two moments, and one for what is left."""
        begin, length, code = _between(self.time.start_ns, self.time.end_ns, self.code, start_ns, end_ns)
        lost = np.bincount(code, weights=length, minlength=len(self.names))
        host, calls = self._on_the_host(start_ns, end_ns)
        order = np.lexsort((-host, -lost))
        order = order[(lost[order] > 0) | (host[order] > 0)]
        for codes in [*([each] for each in order[:_NAMES].tolist()), order[_NAMES:].tolist()]:
            if not codes:
                continue
            mine = np.flatnonzero(np.isin(code, codes))
            yield {
                "name": self.names[codes[0]] if len(codes) == 1 else None,
                "count": len(mine),
                "start_ns": int(begin[mine[np.argmax(length[mine])]]) if len(mine) else None,
                "lost_us": float(lost[codes].sum()) / 1e3,
                "calls": None if self.ranges is None else int(calls[codes].sum()),
                "host_us": None if self.ranges is None else float(host[codes].sum()) / 1e3,
            }

    def each_us(self, start_ns: int, end_ns: int) -> list[float]:
        """What was lost in each range that began between two moments, in order."""
        if self.ranges is None:
            return []
        began = (self.ranges.start_ns >= start_ns) & (self.ranges.start_ns < end_ns)
        lost = self.time.within_ns(self.ranges.start_ns[began], self.ranges.end_ns[began]) / 1e3
        return [*lost[: _RANGES - 1].tolist(), *([float(lost[_RANGES - 1 :].sum())] if len(lost) >= _RANGES else [])]

    def _on_the_host(self, start_ns: int, end_ns: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Time in the ranges of each name between two moments, and how many began there."""
        if self.ranges is None:
            return np.zeros(len(self.names)), np.zeros(len(self.names), np.int64)
        begin, end = self.ranges.start_ns, self.ranges.end_ns
        _, spent, code = _between(begin, end, self.range_code, start_ns, end_ns)
        began = self.range_code[(begin >= start_ns) & (begin < end_ns)]
        host = np.bincount(code, weights=spent.astype(np.float64), minlength=len(self.names)).astype(np.float64)
        return host, np.bincount(began, minlength=len(self.names)).astype(np.int64)


def _pieces(time: Intervals, ranges: Ranges | None, found: Absences) -> _Pieces:
    if ranges is None:
        code = found.launched_by[np.searchsorted(found.gap_end_ns, time.end_ns)]
        names = [None if name is None else f"before {name}" for name in found.launchers]
        return _Pieces(names, time, code, None, np.empty(0, np.int64))
    if not len(ranges.name):
        return _Pieces([None], time, np.zeros(len(time), np.int64), None, np.empty(0, np.int64))
    found_names, codes = np.unique(ranges.name.astype(str), return_inverse=True)
    # Time in a range is of the last one that began; time after a call is owed to the call before it.
    last = np.maximum(np.searchsorted(ranges.start_ns, time.start_ns, side="right") - 1, 0)
    return _Pieces(found_names.tolist(), time, codes[last], ranges, codes)


def _between(
    start: Nanoseconds, end: Nanoseconds, code: NDArray[np.int64], start_ns: int, end_ns: int
) -> tuple[Nanoseconds, Nanoseconds, NDArray[np.int64]]:
    """Begins, lengths and codes of what lies between two moments, cut there."""
    mine = (end > start_ns) & (start < end_ns)
    begin = np.maximum(start[mine], start_ns)
    return begin, np.minimum(end[mine], end_ns) - begin, code[mine]
