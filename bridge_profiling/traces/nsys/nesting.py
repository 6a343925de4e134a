"""The innermost range around each of many times, found block by block: only ranges that are still open go on to the next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge_profiling.traces.joins import places
from bridge_profiling.traces.tables import Integers


class Nesting:
    """The nested ranges of one thread, added in blocks by start."""

    def __init__(self) -> None:
        self._row = self._start = self._end = self._depth = np.empty(0, np.int64)
        self._ends = self._end  # ascending

    def add(self, row: Integers, start_ns: Integers, end_ns: Integers, since_ns: int) -> None:
        """Add a block of ranges by start, each of which ends after it. No earlier time than `since_ns` is asked for later."""
        kept = self._end > since_ns
        # The last one of each depth stays, too: it says that no earlier one of that depth is the innermost.
        last = len(kept) - 1 - np.unique(self._depth[::-1], return_index=True)[1]
        kept[last] = True
        self._end = np.append(self._end[kept], end_ns)
        self._ends = np.sort(self._end)
        # How many were open when each began.
        depth = np.arange(len(self._end) - len(row), len(self._end)) - places(self._ends, start_ns, "right")
        self._depth = np.append(self._depth[kept], depth)
        self._row = np.append(self._row[kept], row)
        self._start = np.append(self._start[kept], start_ns)

    def innermost(self, time_ns: Integers) -> Integers:
        """The row of the innermost range that contains each time; -1 where none does.

        It is the last to start among those as deep as the number of ranges that are open at the time.
        """
        opened = places(self._start, time_ns, "right") - places(self._ends, time_ns, "right")
        found = np.full(len(time_ns), -1)
        # Clocks that went backwards could give less than 0.
        levels = np.flatnonzero(np.bincount(np.maximum(opened, 0)))
        for level in levels[levels > 0].tolist():
            times = np.flatnonzero(opened == level)
            candidates = np.flatnonzero(self._depth == level - 1)
            if len(candidates):
                before = places(self._start[candidates], time_ns[times], "right") - 1
                place = candidates[np.maximum(before, 0)]
                found[times] = np.where((before >= 0) & (self._end[place] > time_ns[times]), self._row[place], -1)
        return found


def groups(keys: NDArray[Any]) -> Iterator[Integers]:
    """The places of each distinct key, ascending."""
    # A sort of 8 or 16 bits is a radix sort, and does not grow with the number of keys.
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    return iter(np.split(order, np.flatnonzero(ordered[1:] != ordered[:-1]) + 1) if len(keys) else ())
