"""Flame graph of one rank: how long its host is in each stack, and how long its device works on what was launched there.

Ranges need not nest: an annotation that is entered in `__enter__` outlasts that Python frame. A range counts from when the
ranges have ended that it starts in and outlasts. So all of them nest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.facts.intervals import Nanoseconds, coded, depths, parents, ranged, rows_of, run_starts, self_times_ns
from bridge_profiling.facts.types import Answer, caveat
from bridge_profiling.traces.joins import places, rows_by_key, taken
from bridge_profiling.traces.tables import NULL, Integers, coded_column, integer_column, to_int64

#: Categories of host events that are frames; of equal ranges, the earlier category is the outer frame.
CATEGORIES = ("python", "annotation", "operator", "runtime")

_PYTHON, _ANNOTATION, _OPERATOR, _RUNTIME = range(len(CATEGORIES))

#: Each object's address would make a frame of its own.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

#: Ranges that mark iterations: their numbers would make stacks of each iteration.
_ITERATION = re.compile(r"(ProfilerStep|(?:train(?:ing)?[_ -])?(?:iteration|iter|step))[\s_#:-]*\d+", re.IGNORECASE)

#: Ranges that start inside so many others are left out: those that never end would make the stacks as deep as they are many.
DEEPEST = 1_000


def flame_graph(host_events: pa.Table, device_events: pa.Table, iterations: pa.Table, *, least_share: float = 0.0) -> Answer:
    """One row per stack of each thread, within the marked iterations, or the whole capture if none is marked.

    Frames are Python functions, annotations (`record_function`, NVTX), operators and runtime calls. Where Python stacks are
    recorded, the ranges that mark iterations are not frames. A row comes after that of the stack that it extends; threads, and
    stacks that extend the same one, are ordered by host time.

    Args:
        host_events: columns `COLUMNS` of `host`.
        device_events: of the same rank.
        iterations: of the same rank.
        least_share: leave out stacks with less than this share (0 to 1) of the rank's host time and of its device time.

    Returns:
        `thread`; `stack`: list of frames, the outermost first; `category` of the last frame, one of `CATEGORIES`; `count`: its
        calls; `self_ns`: host time in it alone; `total_ns`: with the frames that it calls; `device_ns`: sum of the device
        events that it launches itself; `device_total_ns`: with the frames that it calls. Work that a runtime call launches
        counts for the frame that makes the call.
    """
    frames = _frames(host_events, iterations)
    frames, depth, left_out = _nesting(frames)
    thread, time_ns, duration_ns = _launches(host_events, device_events, iterations)
    # A launch is an empty range: the frame that it is in is its parent.
    starts, ends = np.concatenate((frames.start_ns, time_ns)), np.concatenate((frames.end_ns, time_ns))
    parent = parents(np.concatenate((frames.thread, thread)), starts, ends)
    parent, launching = np.split(parent, [len(frames.thread)])
    known = launching >= 0
    tree = _Tree(frames, depth, parent, launching[known], duration_ns[known])
    caveats = []
    if not (frames.category == _PYTHON).any():
        caveats.append(caveat("no_python_stacks"))
    if unattributed_ns := int(duration_ns[~known].sum()):
        caveats.append(caveat("launching_stack_unknown", time_ms=unattributed_ns / 1e6))
    if left_out:
        caveats.append(caveat("stacks_too_deep", count=left_out, depth=DEEPEST))
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
    thread, start, end = ranged(host_events)
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


def _nesting(frames: _Frames) -> tuple[_Frames, Integers, int]:
    """The frames, each from when those have ended that it starts in and outlasts.

    With their depths, and the number of those that are too deep.
    """
    kept, depth, start_ns = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], frames.start_ns.copy()
    for rows in np.split(np.arange(len(start_ns)), run_starts(frames.thread)[1:]):
        start, end = frames.start_ns[rows], frames.end_ns[rows]
        rows = rows[(depths(start, end) < DEEPEST) | (end <= start)]
        start_ns[rows] = nesting_starts(start_ns[rows], frames.end_ns[rows])
        kept.append(rows[np.argsort(start_ns[rows], kind="stable")])
        depth.append(depths(start_ns[kept[-1]], frames.end_ns[kept[-1]]))
    rows = np.concatenate(kept)
    nested = replace(frames, start_ns=start_ns)
    chosen = {each.name: getattr(nested, each.name)[rows] for each in fields(nested) if each.name != "names"}
    return replace(nested, **chosen), np.concatenate(depth), len(start_ns) - len(rows)


def nesting_starts(start_ns: Nanoseconds, end_ns: Nanoseconds) -> Nanoseconds:
    """When each of one thread's ranges starts outside of the earlier ones that it outlasts.

    Args:
        start_ns: of the ranges, ascending.
        end_ns: of those that start together, the longest comes first.
    """
    rows, found = np.arange(len(start_ns)), start_ns.copy()
    # Ranges that start inside each one follow it, up to here.
    until = places(start_ns, end_ns)
    last_ns = np.maximum.reduceat(np.append(end_ns, NULL), np.column_stack((rows + 1, until)).ravel())[::2]
    for outer in np.flatnonzero((until > rows + 1) & (last_ns > end_ns)).tolist():
        inside = rows[outer + 1 : until[outer]]
        inside = inside[end_ns[inside] > end_ns[outer]]
        found[inside] = np.maximum(found[inside], end_ns[outer])
    return found


def _launches(
    host_events: pa.Table, device_events: pa.Table, iterations: pa.Table
) -> tuple[Integers, Nanoseconds, Nanoseconds]:
    """Thread and time of each launch in the captured iterations, NULL where unknown, and how long the device event took.

    An event without a launching call counts for its operator.
    """
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
    return thread[inside], time[inside], duration[inside]


class _Tree:
    """The distinct stacks of each thread: a node for each stack that a frame is the last of, by depth."""

    def __init__(
        self, frames: _Frames, depth: Integers, parent: Integers, launching: Integers, launched_ns: Nanoseconds
    ) -> None:
        """Make the nodes.

        Args:
            frames: ranges of the host, which nest.
            depth: how many frames each one is inside of.
            parent: the frame that each one is directly inside of; -1 for none.
            launching: the frame that launched each device event.
            launched_ns: duration of the event.
        """
        threads, thread = np.unique(frames.thread, return_inverse=True)
        names = max(len(frames.names), 1)
        node = np.zeros(len(parent), np.int64)
        keys, inside = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        self._levels: list[slice] = []
        count = 0
        by_depth = np.argsort(depth, kind="stable")
        for level, mine in enumerate(np.split(by_depth, np.cumsum(np.bincount(depth))[:-1])):
            outer = node[parent[mine]] if level else thread[mine]
            key, place = np.unique(outer * names + frames.name[mine], return_inverse=True)
            node[mine] = count + place
            keys.append(key)
            inside.append(key // names if level else np.full(len(key), -1))
            self._levels.append(slice(count, count + len(key)))
            count += len(key)
        self.name, self.parent = np.concatenate(keys) % names, np.concatenate(inside)
        self.depth = np.repeat(np.arange(len(keys)) - 1, [len(key) for key in keys])
        self.category, self.thread = np.zeros(count, np.int8), np.zeros(count, np.int64)
        self.category[node], self.thread[node] = frames.category, threads[thread]
        while (moved := (frames.category[launching] == _RUNTIME) & (parent[launching] >= 0)).any():
            launching = np.where(moved, parent[launching], launching)

        def total(values: NDArray, of_node: Integers) -> Integers:
            # Sums of less than 2**53 ns, 104 days, are exact.
            return np.bincount(of_node, values, minlength=count).astype(np.int64)

        self.count = np.bincount(node, minlength=count)
        self.self_ns = total(self_times_ns(parent, frames.start_ns, frames.end_ns), node)
        self.device_ns = total(launched_ns, node[launching])
        self.total_ns, self.device_total_ns = self._with_calls(self.self_ns), self._with_calls(self.device_ns)

    def _with_calls(self, values: Integers) -> Integers:
        """Each node's value plus those of all nodes inside."""
        found = values.copy()
        for level in self._levels[:0:-1]:
            np.add.at(found, self.parent[level], found[level])
        return found

    def _in_order(self, shown: NDArray[np.bool_]) -> Integers:
        """The nodes as the answer has them: threads, and nodes inside the same one, by host time. All are in shown ones."""
        known, thread = np.unique(self.thread, return_inverse=True)
        of_thread = np.bincount(thread, self.self_ns, len(known))[thread]
        inside: dict[int, list[int]] = {}
        # The last of each list, and so of the stack, is the next one.
        order = np.lexsort((-self.total_ns, thread, -of_thread))[::-1]
        for node in order[shown[order]].tolist():
            inside.setdefault(int(self.parent[node]), []).append(node)
        found, stack = [], inside.get(-1, [])
        while stack:
            found.append(stack.pop())
            stack.extend(inside.get(found[-1], ()))
        return np.array(found, np.int64)

    def table(self, frames: _Frames, least_share: float) -> pa.Table:
        """The answer."""
        shown = (self.total_ns > 0) | (self.count > 0)
        if least_share > 0:
            shares = ((self.total_ns, self.self_ns), (self.device_total_ns, self.device_ns))
            shown &= np.any([total >= max(least_share * own.sum(), 1) for total, own in shares], axis=0)
        rows = self._in_order(shown)
        return pa.table(
            {
                "thread": integer_column(self.thread[rows]),
                "stack": self._stacks(rows, frames.names),
                "category": coded_column(self.category[rows], CATEGORIES),
                "count": pa.array(self.count[rows], pa.int64()),
                "self_ns": self.self_ns[rows],
                "total_ns": self.total_ns[rows],
                "device_ns": self.device_ns[rows],
                "device_total_ns": self.device_total_ns[rows],
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
