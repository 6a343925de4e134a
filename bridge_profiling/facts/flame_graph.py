"""Flame graph of one rank: how long its host is in each stack, and how long its device works on what was launched there.

Ranges need not nest: an annotation that is entered in `__enter__` outlasts that Python frame. Of the ranges open at a time, the
one that started first is the outermost; when it ends, those inside it move outward. A range therefore has a piece for each set
of ranges that it is inside of, and pieces nest.
"""

from __future__ import annotations

import heapq
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.facts.caveats import caveat
from bridge_profiling.facts.intervals import Nanoseconds, coded, rows_of, run_starts
from bridge_profiling.facts.types import Answer
from bridge_profiling.traces.joins import rows_by_key, taken
from bridge_profiling.traces.tables import NULL, Integers, coded_column, integer_column, to_int64

#: Categories of host events that are frames; of equal ranges, the earlier category is the outer frame.
CATEGORIES = ("python", "annotation", "operator", "runtime")

_PYTHON, _ANNOTATION, _OPERATOR, _RUNTIME = range(len(CATEGORIES))

#: Each object's address would make a frame of its own.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

#: Ranges that mark iterations: their numbers would make stacks of each iteration.
_ITERATION = re.compile(r"(ProfilerStep|(?:train(?:ing)?[_ -])?(?:iteration|iter|step))[\s_#:-]*\d+", re.IGNORECASE)


def flame_graph(host_events: pa.Table, device_events: pa.Table, iterations: pa.Table, *, least_share: float = 0.0) -> Answer:
    """One row per stack of each thread, within the marked iterations, or the whole capture if none is marked.

    Frames are Python functions, annotations (`record_function`, NVTX), operators and runtime calls. Where Python stacks are
    recorded, the ranges that mark iterations are not frames. A row comes after that of the stack that it extends; threads, and
    stacks that extend the same one, are ordered by host time.

    Args:
        host_events: columns `COLUMNS` of `attribution.host`.
        device_events: of the same rank.
        iterations: of the same rank.
        least_share: leave out stacks with less than this share (0 to 1) of the rank's host time and of its device time.

    Returns:
        `thread`; `stack`: list of frames, the outermost first; `category` of the last frame, one of `CATEGORIES`; `count`: its
        calls; `self_us`: host time in it alone; `total_us`: with the frames that it calls; `device_us`: sum of the device
        events that it launches itself; `device_total_us`: with the frames that it calls. Work that a runtime call launches
        counts for the frame that makes the call.
    """
    frames = _frames(host_events, iterations)
    calls = _Calls(frames)
    launches = _launches(host_events, device_events, iterations)
    tree = _Tree(frames, calls, launches)
    caveats = []
    if not (frames.category == _PYTHON).any():
        caveats.append(caveat("no_python_stacks"))
    if tree.unattributed_ns:
        caveats.append(caveat("launching_stack_unknown", time_ms=tree.unattributed_ns / 1e6))
    if calls.left_out:
        caveats.append(caveat("stacks_too_deep", count=calls.left_out, depth=DEEPEST))
    return Answer(tree.table(frames, least_share), tuple(caveats))


@dataclass(frozen=True)
class _Frames:
    """Host ranges by thread and start, the outermost first, cut to the captured iterations."""

    thread: Integers
    start_ns: Nanoseconds
    end_ns: Nanoseconds
    category: NDArray[np.int8]  # index of CATEGORIES
    name: Integers  # index of names
    names: list[str]


def _frames(host_events: pa.Table, iterations: pa.Table) -> _Frames:
    first_ns, last_ns = _window(iterations)
    code, categories = coded(host_events["category"])
    category = np.array([*(CATEGORIES.index(each) if each in CATEGORIES else -1 for each in categories), -1], np.int8)[code]
    thread, start, end = (to_int64(host_events[name]) for name in ("thread", "start_ns", "end_ns"))
    name, names, marks = _named_alike(host_events["name"])
    chosen = np.flatnonzero((category >= 0) & (start < last_ns) & (end > first_ns))
    category, name, thread = category[chosen], name[chosen], thread[chosen]
    start, end = np.maximum(start[chosen], first_ns), np.minimum(end[chosen], last_ns)
    rows = np.lexsort((category, -end, start, thread))
    if (category == _PYTHON).any():
        rows = rows[~(marks[name] & (category == _ANNOTATION))[rows]]
    return _Frames(thread[rows], start[rows], end[rows], category[rows], name[rows], names)


def _window(iterations: pa.Table) -> tuple[int, int]:
    """From the first iteration's start to the last one's end; all of time if none is marked."""
    if not iterations.num_rows:
        return NULL, np.iinfo(np.int64).max
    return int(to_int64(iterations["start_ns"]).min()), int(to_int64(iterations["end_ns"]).max())


def _named_alike(column: pa.ChunkedArray) -> tuple[Integers, list[str], NDArray[np.bool_]]:
    """Codes and names of frames, and which names mark iterations. Addresses and the numbers of iterations are left out."""
    code, written = coded(column)
    known: dict[str, int] = {}
    code_of, marks = [], set()
    for each in [*written, "?"]:
        name, is_mark = _frame(each or "?")
        code_of.append(known.setdefault(name, len(known)))
        if is_mark:
            marks.add(code_of[-1])
    codes = np.array(code_of)[code]
    return codes, list(known), np.isin(np.arange(len(known)), list(marks))


@lru_cache(maxsize=1 << 14)
def _frame(name: str) -> tuple[str, bool]:
    """An event's name as a frame, and whether it marks an iteration."""
    name = _ADDRESS.sub("", name)
    mark = _ITERATION.fullmatch(name)
    return (mark[1], True) if mark else (name, False)


class _Calls:
    """The pieces of all threads' ranges, as `analysis.stacks` makes them: a call is a range in its place in a stack."""

    def __init__(self, frames: _Frames) -> None:
        self._threads: list[tuple[int, int, Stacks]] = []
        parts: list[tuple[NDArray[Any], ...]] = [(np.zeros(0, np.int32),) * 5]
        count = 0
        for rows in np.split(np.arange(len(frames.thread), dtype=np.int32), run_starts(frames.thread)[1:]):
            if not len(rows):
                continue
            found = stacks(frames.start_ns[rows], frames.end_ns[rows])
            self._threads.append((int(frames.thread[rows[0]]), count, found))
            parent = np.where(found.parent >= 0, found.parent + np.int32(count), np.int32(-1))
            parts.append((rows[found.row], parent, found.depth, found.longest, found.self_ns))
            count += len(found.row)
        self.row, self.parent, self.depth, longest, self.self_ns = map(np.concatenate, zip(*parts, strict=True))
        self.longest = longest.astype(bool)
        self.left_out = sum(found.left_out for _, _, found in self._threads)

    def innermost(self, thread: Integers, time_ns: Nanoseconds) -> Integers:
        """The innermost call of each thread at each time; -1 for none."""
        place = np.full(len(time_ns), -1)
        for each, offset, found in self._threads:
            rows = np.flatnonzero(thread == each)
            inner = found.innermost(time_ns[rows])
            place[rows] = np.where(inner >= 0, inner + offset, -1)
        return place


@dataclass(frozen=True)
class _Launches:
    """Where and when device events were launched, NULL where that is unknown, and how long they took."""

    thread: Integers
    time_ns: Nanoseconds
    duration_ns: Nanoseconds


def _launches(host_events: pa.Table, device_events: pa.Table, iterations: pa.Table) -> _Launches:
    """Launches within the captured iterations. An event without a launching call counts for its operator."""
    start, thread, time = (to_int64(device_events[name]).copy() for name in ("start_ns", "launch_thread", "launch_start_ns"))
    duration = to_int64(device_events["end_ns"]) - start
    unknown = np.flatnonzero((time == NULL) | (thread == NULL))
    if len(unknown):
        operators = host_events.filter(pa.array(rows_of(host_events["category"], "operator", "annotation")))
        row = rows_by_key(to_int64(operators["operator"]), to_int64(device_events["operator"])[unknown])
        thread[unknown], time[unknown] = (taken(to_int64(operators[name]), row) for name in ("thread", "start_ns"))
    first_ns, last_ns = _window(iterations)
    issued = np.where(time == NULL, start, time)
    inside = (issued >= first_ns) & (issued < last_ns)
    return _Launches(thread[inside], time[inside], duration[inside])


class _Tree:
    """The distinct stacks of each thread: a node for each stack that a call is the last frame of, by depth."""

    def __init__(self, frames: _Frames, calls: _Calls, launches: _Launches) -> None:
        threads, thread = np.unique(frames.thread, return_inverse=True)
        names = max(len(frames.names), 1)
        node = np.zeros(len(calls.row), np.int64)
        by_depth = np.argsort(calls.depth.astype(np.int32), kind="stable")
        keys, parents = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        self._levels: list[slice] = []
        count = 0
        for depth, mine in enumerate(np.split(by_depth, np.cumsum(np.bincount(calls.depth))[:-1])):
            row = calls.row[mine]
            inside = node[calls.parent[mine]] if depth else thread[row]
            key, place = np.unique(inside * names + frames.name[row], return_inverse=True)
            node[mine] = count + place
            keys.append(key)
            parents.append(key // names if depth else np.full(len(key), -1))
            self._levels.append(slice(count, count + len(key)))
            count += len(key)
        self.name, self.parent = np.concatenate(keys) % names, np.concatenate(parents)
        self.depth = np.repeat(np.arange(len(keys)) - 1, [len(key) for key in keys])
        self.category, self.thread = np.zeros(count, np.int8), np.zeros(count, np.int64)
        self.category[node], self.thread[node] = frames.category[calls.row], threads[thread[calls.row]]

        def total(values: NDArray, of_node: Integers) -> Integers:
            return np.bincount(of_node, values, minlength=count).astype(np.int64)

        self.count = np.bincount(node[calls.longest], minlength=count)
        self.self_ns = total(calls.self_ns, node)
        place = calls.innermost(launches.thread, launches.time_ns)
        known = place >= 0
        self.unattributed_ns = int(launches.duration_ns[~known].sum())
        place = place[known]
        while (moved := (frames.category[calls.row[place]] == _RUNTIME) & (calls.parent[place] >= 0)).any():
            place = np.where(moved, calls.parent[place], place)
        self.device_ns = total(launches.duration_ns[known], node[place])
        self.total_ns, self.device_total_ns = self._with_calls(self.self_ns), self._with_calls(self.device_ns)

    def _with_calls(self, values: Integers) -> Integers:
        """Each node's value plus those of all nodes inside."""
        found = values.copy()
        for level in self._levels[:0:-1]:
            np.add.at(found, self.parent[level], found[level])
        return found

    def _positions(self) -> Integers:
        """Place of each node in the order of the answer: threads, and nodes inside the same one, by host time."""
        count = len(self.name)
        size, position = self._with_calls(np.ones(count, np.int64)), np.zeros(count, np.int64)
        for depth, level in enumerate(self._levels):
            if depth:
                group, before = self.parent[level], position[self.parent[level]] + 1
            else:
                _, group = np.unique(self.thread[level], return_inverse=True)
                by_time = np.argsort(-np.bincount(group, self.total_ns[level]), kind="stable")
                group, before = np.argsort(by_time)[group], np.zeros(len(group), np.int64)
            order = np.lexsort((-self.total_ns[level], group))
            earlier = np.cumsum(size[level][order]) - size[level][order]
            if depth:
                _, first, place = np.unique(group[order], return_index=True, return_inverse=True)
                earlier -= earlier[first][place]
            position[level.start + order] = earlier
            position[level] += before
        return position

    def table(self, frames: _Frames, least_share: float) -> pa.Table:
        """The answer."""
        shown = (self.total_ns > 0) | (self.count > 0)
        if least_share > 0:
            shares = ((self.total_ns, self.self_ns), (self.device_total_ns, self.device_ns))
            shown &= np.any([total >= max(least_share * own.sum(), 1) for total, own in shares], axis=0)
        rows = np.argsort(self._positions())
        rows = rows[shown[rows]]
        return pa.table(
            {
                "thread": integer_column(self.thread[rows]),
                "stack": self._stacks(rows, frames.names),
                "category": coded_column(self.category[rows], CATEGORIES),
                "count": pa.array(self.count[rows], pa.int64()),
                "self_us": self.self_ns[rows] / 1e3,
                "total_us": self.total_ns[rows] / 1e3,
                "device_us": self.device_ns[rows] / 1e3,
                "device_total_us": self.device_total_ns[rows] / 1e3,
            }
        )

    def _stacks(self, rows: Integers, names: list[str]) -> pa.ListArray:
        ends = np.cumsum(self.depth[rows] + 1)
        values, node, place = np.zeros(ends[-1] if len(ends) else 0, np.int64), rows, ends - 1
        while len(node):
            values[place] = self.name[node]
            inside = self.parent[node] >= 0
            node, place = self.parent[node][inside], place[inside] - 1
        return pa.ListArray.from_arrays(pa.array(np.append(0, ends), pa.int32()), coded_column(values, names))


#: Numbers of ranges, edges and pieces; int64 would take a third more memory.
Rows = NDArray[np.int32]

#: Ranges that start inside so many others are left out: those that never end would make the stacks as deep as they are many.
DEEPEST = 1_000


@dataclass(frozen=True)
class Stacks:
    """The pieces of one thread's ranges.

    Args:
        row: range of each piece.
        parent: piece that it is directly inside of; -1 for none.
        depth: number of pieces that it is inside of.
        longest: whether it is the longest piece of its range, which has exactly one.
        self_ns: time in which it is the innermost.
        left_out: ranges deeper than `DEEPEST`, which have no piece.
    """

    row: Rows
    parent: Rows
    depth: Rows
    longest: NDArray[np.bool_]
    self_ns: Nanoseconds
    left_out: int
    _edge_ns: Nanoseconds
    _innermost: Rows

    def innermost(self, time_ns: Nanoseconds) -> Rows:
        """The innermost piece at each time; -1 for none. Ranges are half open."""
        if not len(self._edge_ns):
            return np.full(len(time_ns), -1, np.int32)
        place = np.searchsorted(self._edge_ns, time_ns, side="right") - 1
        return np.where(place >= 0, self._innermost[place], np.int32(-1))


def stacks(start_ns: Nanoseconds, end_ns: Nanoseconds) -> Stacks:
    """The stacks of one thread's ranges, which are sorted by start; of those that start together, the outermost comes first.

    An empty range is a piece inside the ranges that are open then; nothing is inside of it.
    """
    lasting = _rows(end_ns > start_ns)
    edges = _Edges(start_ns[lasting], end_ns[lasting])
    shallow = edges.depth[edges.opened] < DEEPEST
    left_out = int(len(lasting) - shallow.sum())
    if left_out:
        lasting = lasting[shallow]
        edges = _Edges(start_ns[lasting], end_ns[lasting])
    found = _pieces(edges, left_out)
    empty = _rows(end_ns <= start_ns)
    inside = found.innermost(start_ns[empty])
    return replace(
        found,
        row=np.concatenate((lasting[found.row], empty)),
        parent=np.concatenate((found.parent, inside)),
        depth=np.concatenate((found.depth, np.append(found.depth + 1, np.int32(0))[inside])),
        longest=np.concatenate((found.longest, np.ones(len(empty), bool))),
        self_ns=np.concatenate((found.self_ns, np.zeros(len(empty), np.int64))),
    )


def _rows(which: NDArray[np.bool_]) -> Rows:
    return np.flatnonzero(which).astype(np.int32)


class _Edges:
    """Starts and ends of ranges in time, as opening and closing brackets.

    A slot is a pair of matching brackets. Slots nest even where ranges do not: then another range's end closes the slot.
    """

    def __init__(self, start_ns: Nanoseconds, end_ns: Nanoseconds) -> None:
        count = len(start_ns)
        numbers = np.arange(count, dtype=np.int32)
        # Of ranges that end together, the one that started last ends first.
        closing = (count - 1 - np.argsort(end_ns[::-1], kind="stable")).astype(np.int32)
        ends = end_ns[closing]
        self.opened: Rows = (numbers + np.searchsorted(ends, start_ns, side="right")).astype(np.int32)
        closed = numbers + np.searchsorted(start_ns, ends, side="left")
        self.row, self.time_ns = np.empty(2 * count, np.int32), np.empty(2 * count, np.int64)
        self.row[self.opened], self.row[closed] = numbers, closing
        self.time_ns[self.opened], self.time_ns[closed] = start_ns, ends
        self.opens = np.zeros(2 * count, bool)
        self.opens[self.opened] = True
        self.depth: Rows = np.cumsum(np.where(self.opens, 1, -1), dtype=np.int32) - self.opens

        by_depth = np.argsort(self.depth, kind="stable").astype(np.int32)
        self.first, self.last = by_depth[0::2], by_depth[1::2]
        self.slot = np.empty(2 * count, np.int32)
        self.slot[self.first] = self.slot[self.last] = numbers
        # The first slot inside another one follows its opening bracket; the others have the parent of the one before.
        before = np.maximum(self.first - 1, 0)
        leading = self.opens[before] & (self.first > 0)
        outermost = self.depth[self.first] == 0
        filled = np.maximum.accumulate(np.where(leading | outermost, numbers, np.int32(0)))
        self.parent: Rows = np.where(outermost, np.int32(-1), self.slot[before])[filled]

    def shared_slots(self) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Which slots hold several ranges in turn, and these: slot, first and last edge with the range there, its row.

        Nearly all ranges nest, have a slot of their own, and take no time here.
        """
        shared = self.row[self.first] != self.row[self.last]
        holder: dict[int, tuple[int, int]] = {}
        place: dict[int, int] = {}
        found: list[tuple[int, int, int, int]] = []
        waiting = np.sort(self.last[shared]).tolist()  # a heap
        while waiting:
            edge = heapq.heappop(waiting)
            row, slot = int(self.row[edge]), int(self.slot[edge])
            target = place.get(row, int(self.slot[self.opened[row]]))
            chain = [slot]
            while chain[-1] != target:
                chain.append(int(self.parent[chain[-1]]))
            for each in chain:
                if not shared[each]:
                    shared[each] = True
                    heapq.heappush(waiting, int(self.last[each]))
                if each not in holder:
                    opening = int(self.first[each])
                    holder[each] = opening, int(self.row[opening])
                begin, held = holder[each]
                found.append((each, begin, edge, held))
            # The range ends, and those inside it move outward by one slot.
            for outer, inner in pairwise(chain[::-1]):
                moved = holder[inner][1]
                holder[outer], place[moved] = (edge, moved), outer
        return shared, np.array(sorted(found), np.int64).reshape(-1, 4)


def _pieces(edges: _Edges, left_out: int) -> Stacks:
    count = len(edges.row)
    shared, cuts = edges.shared_slots()
    whole = _rows(~shared)
    cut_keys = cuts[:, 0] * count + cuts[:, 1]
    # The last one is of slot -1, which stands for none.
    piece_of, is_shared = np.full(len(shared) + 1, -1, np.int32), np.append(shared, False)
    piece_of[whole] = np.arange(len(whole), dtype=np.int32)

    def piece_at(slot: Rows, edge: Rows) -> Rows:
        found = piece_of[slot]
        rows = np.flatnonzero(is_shared[slot])
        keys = slot[rows].astype(np.int64) * count + edge[rows]
        found[rows] = len(whole) + np.searchsorted(cut_keys, keys, side="right") - 1
        return found

    slot, begin, end, row = (
        np.concatenate((alone, of_cuts.astype(np.int32)))
        for alone, of_cuts in zip(
            (whole, edges.first[whole], edges.last[whole], edges.row[edges.first[whole]]), cuts.T, strict=True
        )
    )
    longest = np.ones(len(row), bool)
    of_cuts = np.arange(len(whole), len(row))
    by_length = of_cuts[np.lexsort(((edges.time_ns[begin] - edges.time_ns[end])[of_cuts], row[of_cuts]))]
    longest[by_length[1:]] = np.diff(row[by_length]) != 0
    innermost = piece_at(np.where(edges.opens, edges.slot, edges.parent[edges.slot]), np.arange(count, dtype=np.int32))
    inside = np.flatnonzero(innermost[:-1] >= 0)
    # Sums of less than 2**53 ns, 104 days, are exact.
    self_ns = np.bincount(innermost[inside], np.diff(edges.time_ns)[inside], minlength=len(row)).astype(np.int64)
    return Stacks(
        row=row,
        parent=piece_at(edges.parent[slot], begin),
        depth=edges.depth[edges.first[slot]],
        longest=longest,
        self_ns=self_ns,
        left_out=left_out,
        _edge_ns=edges.time_ns,
        _innermost=innermost,
    )
