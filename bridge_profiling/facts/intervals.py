"""Exact arithmetic on sets of time intervals, nesting of ranges, sums over what happened in them, and columns of tables.

An interval is half open, `[start, end)`, in integer nanoseconds. The members of a set are sorted, disjoint, not adjacent and
not empty; `union` turns any intervals into a set.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bridge_profiling.traces.joins import distinct, places, start_order
from bridge_profiling.traces.tables import NULL, to_int64

Nanoseconds = NDArray[np.int64]
K = TypeVar("K")

#: So many names are compared with all rows one by one: that takes a tenth of looking a row's name up.
_FEW_NAMES = 4


@dataclass(frozen=True)
class Intervals:
    """A set of intervals, ascending."""

    start_ns: Nanoseconds
    end_ns: Nanoseconds

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def total_ns(self) -> int:
        """Total length."""
        return int((self.end_ns - self.start_ns).sum())

    def __or__(self, other: Intervals) -> Intervals:
        """Union."""
        if not len(other) or not len(self):
            return self if len(self) else other
        return union(np.concatenate((self.start_ns, other.start_ns)), np.concatenate((self.end_ns, other.end_ns)))

    def __and__(self, other: Intervals) -> Intervals:
        """Intersection."""
        if not len(self) or not len(other):
            return EMPTY
        return _between(
            (self.start_ns[other._holds(self.start_ns)], other.start_ns[self._surrounds(other.start_ns)]),
            (self.end_ns[other._reaches(self.end_ns)], other.end_ns[self._surrounds(other.end_ns)]),
        )

    def __sub__(self, other: Intervals) -> Intervals:
        """Difference."""
        if not len(self) or not len(other):
            return self
        return _between(
            (self.start_ns[~other._holds(self.start_ns)], other.end_ns[self._surrounds(other.end_ns)]),
            (self.end_ns[~other._reaches(self.end_ns)], other.start_ns[self._surrounds(other.start_ns)]),
        )

    def _holds(self, time_ns: Nanoseconds) -> NDArray[np.bool_]:
        """Which times are inside, or where an interval starts."""
        return places(self.start_ns, time_ns, "right") > places(self.end_ns, time_ns, "right")

    def _reaches(self, time_ns: Nanoseconds) -> NDArray[np.bool_]:
        """Which times are inside, or where an interval ends."""
        return places(self.start_ns, time_ns) > places(self.end_ns, time_ns)

    def _surrounds(self, time_ns: Nanoseconds) -> NDArray[np.bool_]:
        """Which times are inside, and not where an interval starts or ends."""
        return places(self.start_ns, time_ns) > places(self.end_ns, time_ns, "right")

    @cached_property
    def _lengths(self) -> Nanoseconds:
        """Length of the set before each interval, and its total length. Callers ask for hundreds of windows one by one."""
        return np.concatenate(([0], np.cumsum(self.end_ns - self.start_ns)))

    def before_ns(self, time_ns: Nanoseconds) -> Nanoseconds:
        """Length of the set before each time."""
        place = places(self.start_ns, time_ns, "right")
        if not len(self):
            return np.zeros(len(time_ns), np.int64)
        last = np.maximum(place - 1, 0)
        beyond = np.where(place > 0, np.maximum(self.end_ns[last] - time_ns, 0), 0)
        return self._lengths[place] - beyond

    def within_ns(self, start_ns: Nanoseconds, end_ns: Nanoseconds) -> Nanoseconds:
        """Length of the set inside each window. Windows may overlap; one that ends before it starts has 0."""
        return np.where(end_ns > start_ns, self.before_ns(end_ns) - self.before_ns(start_ns), 0)

    def when(self, amount_ns: Nanoseconds) -> Nanoseconds:
        """When each amount of a set that is not empty has passed; the set's end if it holds less."""
        lengths = np.cumsum(self.end_ns - self.start_ns)
        place = np.minimum(places(lengths, amount_ns), len(lengths) - 1)
        return self.end_ns[place] - np.maximum(lengths[place] - amount_ns, 0)


def union(start_ns: Nanoseconds, end_ns: Nanoseconds) -> Intervals:
    """The times covered by any of some intervals, which may be in any order; empty and negative ones are ignored."""
    real = end_ns > start_ns
    if not real.all():
        start_ns, end_ns = start_ns[real], end_ns[real]
    if not len(start_ns):
        return EMPTY
    if (start_ns[1:] < start_ns[:-1]).any():  # rows of tables are in order: checking takes a tenth of sorting
        order = np.argsort(start_ns, kind="stable")
        start_ns, end_ns = start_ns[order], end_ns[order]
    reached = np.maximum.accumulate(end_ns)
    first = np.concatenate(([True], start_ns[1:] > reached[:-1]))
    begins = np.flatnonzero(first)
    ends = np.append(begins[1:], len(start_ns)) - 1
    return Intervals(start_ns[begins], reached[ends])


EMPTY = Intervals(np.empty(0, np.int64), np.empty(0, np.int64))


def window(start_ns: int, end_ns: int) -> Intervals:
    """One interval as a set; the empty set if it ends before it starts."""
    return Intervals(np.array([start_ns], np.int64), np.array([end_ns], np.int64)) if end_ns > start_ns else EMPTY


class Lanes:
    """One axis for the times of several lanes, such as ranks: one lane after the other, so that one set holds them all.

    Many small sets cost a dozen calls each. The operations of `Intervals` on all lanes together give the same times.

    Args:
        start_ns: where each lane begins, in its own time.
        end_ns: where it ends.
    """

    def __init__(self, start_ns: Nanoseconds, end_ns: Nanoseconds) -> None:
        self._first_ns, self._last_ns = start_ns, np.maximum(start_ns, end_ns)
        length = self._last_ns - start_ns
        # One more, so that intervals of different lanes are not adjacent.
        self.start_ns = np.cumsum(length + 1) - length - 1
        self.end_ns = self.start_ns + length

    def place(self, lane: NDArray[np.int64], time_ns: Nanoseconds) -> Nanoseconds:
        """Times of lanes on the axis. A time outside of its lane is moved to the lane's begin or end."""
        return np.clip(time_ns, self._first_ns[lane], self._last_ns[lane]) - self._first_ns[lane] + self.start_ns[lane]

    def union(self, lane: NDArray[np.int64], start_ns: Nanoseconds, end_ns: Nanoseconds) -> Intervals:
        """The times of each lane that any of its intervals covers, within the lane."""
        return union(self.place(lane, start_ns), self.place(lane, end_ns))

    def lane_of(self, placed_ns: Nanoseconds) -> NDArray[np.int64]:
        """The lane of each time on the axis."""
        return np.searchsorted(self.start_ns, placed_ns, side="right") - 1


def outermost(start_ns: Nanoseconds, end_ns: Nanoseconds, lane: NDArray[np.integer[Any]] | None = None) -> NDArray[np.int64]:
    """Rows of the ranges that are inside no other one, or no other one of their lane; by lane and start."""
    lane = np.zeros(len(start_ns), np.int8) if lane is None else lane
    order = np.lexsort((-end_ns, start_ns, lane))
    begins = run_starts(lane[order])
    # The rank of each end instead of the end, so that one running maximum serves all lanes.
    end = np.unique(end_ns[order], return_inverse=True)[1]
    end += np.repeat(np.arange(len(begins)) * len(order), np.diff(begins, append=len(order)))
    return order[end > np.append(-1, np.maximum.accumulate(end))[:-1]]


def parents(thread: NDArray[np.int64], start_ns: Nanoseconds, end_ns: Nanoseconds) -> NDArray[np.int64]:
    """Row of each range's parent: the innermost range of its thread that is open when it starts; -1 for none.

    Of ranges that start together the longer one is the parent; of equal ranges, the earlier row.
    """
    found = np.full(len(start_ns), -1)
    order = by_thread(thread)
    for each in np.split(order, run_starts(thread[order])[1:]):
        rows = each[start_order(start_ns[each], end_ns[each])]
        start, end = start_ns[rows], end_ns[rows]
        place = _nested(start, end)
        inside = place >= 0
        if (end[inside] > end[place[inside]]).any():
            place = _open(start.tolist(), end.tolist())
            inside = place >= 0
        found[rows[inside]] = rows[place[inside]]
    return found


def by_thread(thread: NDArray[np.int64]) -> NDArray[np.int64]:
    """The order of rows by thread; those of one thread keep their order."""
    known, place = distinct(thread)
    # NumPy sorts 16 bits by counting, in a tenth of the time of 64 bits.
    return np.argsort(place.astype(np.int16) if len(known) < 1 << 15 else place, kind="stable")


def run_starts(values: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """First index of each run of equal values."""
    return np.flatnonzero(np.append(True, values[1:] != values[:-1])[: len(values)])


def runs(values: NDArray[np.integer[Any]]) -> list[slice]:
    """Runs of equal values."""
    return [slice(*bounds) for bounds in pairwise([*run_starts(values).tolist(), len(values)])]


def self_times_ns(parent: NDArray[np.int64], start_ns: Nanoseconds, end_ns: Nanoseconds) -> Nanoseconds:
    """Duration of each range without the ranges directly inside it; `parent` as from `parents`."""
    duration = end_ns - start_ns
    inside = parent >= 0
    # A range can outlast its parent, for example if it ends in a callback. The rest is not the parent's time.
    within = np.minimum(end_ns[inside], end_ns[parent[inside]]) - start_ns[inside]
    own = duration.copy()
    np.subtract.at(own, parent[inside], within)
    return own


def depths(start_ns: Nanoseconds, end_ns: Nanoseconds) -> NDArray[np.int64]:
    """How many of one thread's ranges, by start and the longest first, are open when each one starts."""
    lasting = end_ns > start_ns
    depth: NDArray[np.int64] = np.cumsum(lasting) - lasting - places(np.sort(end_ns[lasting]), start_ns, "right")
    return depth


def _nested(start: Nanoseconds, end: Nanoseconds) -> NDArray[np.int64]:
    """Parents of one thread's properly nested ranges, by start and the longest first; wrong if ranges overlap partly."""
    lasting, depth = end > start, depths(start, end)
    place = np.full(len(start), -1)
    outside = np.flatnonzero((depth == 0) & lasting)
    for level in range(1, int(depth.max(initial=0)) + 1):
        rows = np.flatnonzero(depth == level)
        before = places(outside, rows) - 1
        place[rows] = np.where(before >= 0, outside[np.maximum(before, 0)] if len(outside) else -1, -1)
        outside = rows[lasting[rows]]
    return place


def _open(start: list[int], end: list[int]) -> NDArray[np.int64]:
    """Parents of one thread's ranges, which may overlap partly."""
    place: list[int] = []
    stack: list[int] = []
    for row, begin in enumerate(start):
        while stack and end[stack[-1]] <= begin:
            stack.pop()
        place.append(stack[-1] if stack else -1)
        stack.append(row)
    return np.array(place, np.int64)


def _between(starts_ns: Sequence[Nanoseconds], ends_ns: Sequence[Nanoseconds]) -> Intervals:
    """The set whose members start and end at these times, in any order."""
    # Each part ascends: a stable sort merges them.
    return Intervals(np.sort(np.concatenate(starts_ns), kind="stable"), np.sort(np.concatenate(ends_ns), kind="stable"))


def rows_of(column: pa.ChunkedArray, *values: str) -> NDArray[np.bool_]:
    """Which rows of a column of names hold one of some values. Compares each distinct name once."""
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    names, found = frozenset(values), [np.zeros(0, np.bool_)]
    for chunk in encoded.chunks:
        wanted = np.array([name in names for name in chunk.dictionary.to_pylist()] + [False])
        # Index of null: the place after the last name.
        indices = (chunk.indices.fill_null(len(wanted) - 1) if chunk.null_count else chunk.indices).to_numpy(
            zero_copy_only=False
        )
        codes = np.flatnonzero(wanted).tolist()
        chosen = wanted[indices] if len(codes) > _FEW_NAMES else np.zeros(len(indices), np.bool_)
        for code in codes if len(codes) <= _FEW_NAMES else ():
            chosen |= indices == code
        found.append(chosen)
    return np.concatenate(found)


def rows_named(column: pa.ChunkedArray, judge: Callable[[str], object]) -> NDArray[np.bool_]:
    """Which rows of a column of names hold one that a function accepts. It is called once for each name."""
    return rows_of(column, *filter(judge, names_in(column)))


def judged(codes: NDArray[np.int64], names: Iterable[str | None], judge: Callable[[str], object]) -> NDArray[np.bool_]:
    """The same for the columns of `coded`; rows without a name have the code -1."""
    return np.array([*(bool(name and judge(name)) for name in names), False], bool)[codes]


def names_in(column: pa.ChunkedArray) -> list[str]:
    """The names that a column can hold: all of its dictionaries. Looking which of them rows have takes 40 times as long."""
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    names = dict.fromkeys(name for chunk in encoded.chunks for name in chunk.dictionary.to_pylist())
    return [name for name in names if name is not None]


def coded(column: pa.ChunkedArray) -> tuple[NDArray[np.int64], list[str | None]]:
    """A column of names as an index of each row, -1 for null, and the names."""
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    chunks = encoded.unify_dictionaries().chunks
    codes = [chunk.indices.fill_null(-1).to_numpy(zero_copy_only=False) for chunk in chunks]
    return np.concatenate([np.zeros(0, np.int64), *codes]), chunks[0].dictionary.to_pylist() if chunks else []


def grouped(rows: Iterable[dict[str, Any]], *names: str) -> dict[Any, list[dict[str, Any]]]:
    """Rows by the value of a column, or by the values of several, in order of first appearance."""
    key = itemgetter(*names)
    found: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def plain(table: pa.Table) -> pa.Table:
    """A table whose texts are in no dictionaries."""
    types = [(each.name, each.type.value_type if pa.types.is_dictionary(each.type) else each.type) for each in table.schema]
    return table.cast(pa.schema(types))


def totals(table: pa.Table, keys: Sequence[str], **columns: tuple[str | list[str], str]) -> pa.Table:
    """A row per group of rows with the same keys, in an order that only the rows decide.

    Args:
        table: the rows.
        keys: names of columns.
        columns: the other columns of the result, each a column and how it is aggregated: `total_ns=("ns", "sum")`.
    """
    # Groups of several chunks would be in another order.
    whole = table.unify_dictionaries().combine_chunks()
    found = whole.group_by(list(keys), use_threads=False).aggregate(list(columns.values()))
    return plain(found.rename_columns([*keys, *columns]))


def summed(values: Iterable[tuple[K, float]]) -> dict[K, float]:
    """Values added up by key; 0 for other keys."""
    found: dict[K, float] = defaultdict(float)
    for key, value in values:
        found[key] += value
    return found


def grid(table: pa.Table, column: str, iterations: Sequence[int | None], ranks: Sequence[int]) -> NDArray[np.float64]:
    """A column of a table with `rank` and `iteration` as an array of iterations by ranks; NaN where a rank has no value.

    Values of the same rank and iteration are added up.
    """
    wanted = {"iteration": iterations, "rank": ranks}
    places = [
        pc.index_in(table[name], pa.array(values, pa.int32())).fill_null(-1).to_numpy() for name, values in wanted.items()
    ]
    known = (places[0] >= 0) & (places[1] >= 0) & table[column].is_valid().to_numpy()
    cells = places[0][known], places[1][known]
    found = np.full((len(iterations), len(ranks)), np.nan)
    found[cells] = 0.0
    np.add.at(found, cells, table[column].to_numpy()[known])
    return found


Threads = NDArray[np.int64]

#: Threads, starts (inclusive) and ends (exclusive) of ranges; threads and times of what can be inside them.
Ranged = tuple[Threads, Nanoseconds, Nanoseconds]
At = tuple[Threads, Nanoseconds]


def ranged(events: pa.Table) -> Ranged:
    """Events of the host as ranges."""
    thread, start, end = (to_int64(events[name]) for name in ("thread", "start_ns", "end_ns"))
    return thread, start, end


def inside(ranges: Ranged, at: At) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Which times are inside each range on its thread; NULL is inside no range.

    Returns:
        Rows of the times by thread and time; for each range, the place of its first one among them, and that after its last.
    """
    (thread, *bounds), (at_thread, at_ns) = ranges, at
    order = np.flatnonzero(at_ns != NULL)
    order = order[np.lexsort((at_ns[order], at_thread[order]))]
    at_thread, at_ns = at_thread[order], at_ns[order]
    first, last = np.zeros((2, len(thread)), np.int64)
    for one in np.unique(thread):
        rows, mine = np.flatnonzero(thread == one), slice(*at_thread.searchsorted((one, one + 1)))
        for place, bound in zip((first, last), bounds, strict=True):
            place[rows] = mine.start + places(at_ns[mine], bound[rows])
    return order, first, last


def sums_inside(ranges: Ranged, at: At, amounts: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each range, the sum of the amounts at the times that are `inside` it: a row each, with their columns."""
    order, first, last = inside(ranges, at)
    before = np.zeros((len(order) + 1, amounts.shape[1]), np.int64)
    np.cumsum(amounts[order], axis=0, out=before[1:])
    return before[last] - before[first]


def launched_inside(ranges: Ranged, device_events: pa.Table, *more: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many device events were launched in each range on its thread, their durations added up, and more sums: a row each."""
    duration = device_events["end_ns"].to_numpy() - device_events["start_ns"].to_numpy()
    at_thread, at_ns = (to_int64(device_events[name]) for name in ("launch_thread", "launch_start_ns"))
    return sums_inside(ranges, (at_thread, at_ns), np.column_stack((np.ones(len(duration), np.int64), duration, *more))).T
