"""Stacks of ranges: which ranges of a thread are open at each time, outermost first.

Ranges need not nest: an annotation that is entered in `__enter__` outlasts that Python frame. Of the ranges open at a time, the
one that started first is the outermost; when it ends, those inside it move outward. A range therefore has a piece for each set
of ranges that it is inside of, and pieces nest.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bridge_profiling.facts.intervals import Nanoseconds

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
