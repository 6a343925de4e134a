"""Device events and host events as tables, made in blocks of rows on each use."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.traces.iterations import Iterations
from bridge_profiling.traces.joins import Launches, start_order, taken
from bridge_profiling.traces.kinds import COMMUNICATION
from bridge_profiling.traces.nsys.events import Calls, DeviceWork
from bridge_profiling.traces.nsys.packed import Packed
from bridge_profiling.traces.nsys.ranges import Ranges
from bridge_profiling.traces.nsys.report import THREAD_BITS, THREAD_MASK
from bridge_profiling.traces.tables import NULL, Integers, build, coded_column

_CATEGORIES = ("operator", "annotation", "runtime", "overhead")


class DeviceEvents:
    """Work on the device, made in blocks: its 15 columns would take five times the memory of what they are made from."""

    def __init__(
        self,
        work: DeviceWork,
        calls: Calls,
        launches: Launches,
        operator: Packed,
        iterations: Iterations,
        base: int,
        rank: int,
        block_rows: int,
    ) -> None:
        """`operator` is that of each call, `base` is added to all times."""
        self._work, self._calls, self._launches, self._operator = work, calls, launches, operator
        self._iterations, self._base, self._rank, self._block_rows = iterations, base, rank, block_rows
        self.communication = np.flatnonzero(work.of_kind(COMMUNICATION))

    def __len__(self) -> int:
        return max(-(-len(self._work.start_ns) // self._block_rows), 1)

    def __call__(self) -> Iterator[pa.Table]:
        """The blocks."""
        count = len(self._work.start_ns)
        for begin in range(0, max(count, 1), self._block_rows):
            yield self.table(np.arange(begin, min(begin + self._block_rows, count)))

    def issued_ns(self, rows: Integers) -> Integers:
        """When events were issued."""
        return self._launches.issued_ns[rows]

    def launch_thread(self, rows: Integers) -> Integers:
        """The globalTid of their launches; NULL where unknown."""
        return taken(self._calls.thread, self._launches.row[rows])

    def table(self, rows: Integers) -> pa.Table:
        """Some events."""
        work, calls = self._work, self._calls
        call, name = self._launches.row[rows], work.name[rows]
        start, launched = work.start_ns[rows], taken(calls.start_ns, call)
        collective = np.full(len(rows), NULL)
        place = np.minimum(self.communication.searchsorted(rows), max(len(self.communication) - 1, 0))
        if len(self.communication):
            collective = np.where(self.communication[place] == rows, place, NULL)
        columns = {
            **{column: getattr(work, column)[rows] for column in ("device", "stream", "correlation", "graph", "bytes")},
            "kind": coded_column(name, [name.kind for name in work.names]),
            "backend": coded_column(name, [name.backend for name in work.names]),
            "name": coded_column(name, [name.text for name in work.names]),
            "start_ns": start,
            "end_ns": start + work.duration_ns[rows],
            "operator": taken(self._operator, call),
            "launch_start_ns": launched,
            "launch_end_ns": np.where(launched == NULL, NULL, launched + taken(calls.duration_ns, call)),
            "launch_thread": thread_of(self.launch_thread(rows)),
            "iteration": self._iterations.containing(self.issued_ns(rows)),
            "collective": collective,
            **{
                column: coded_column(name, [getattr(name.copy, column, None) for name in work.names])
                for column in ("direction", "from_memory", "to_memory")
            },
            "configuration": coded_column(work.configuration[rows], work.configurations),
        }
        return build("device_events", self._rank, columns, self._base)


class HostEvents:
    """Ranges, calls and the profiler's own work as host events by start, made in blocks: 1 GB of them would take 2 GB."""

    def __init__(
        self, ranges: Ranges, calls: Calls, overhead: Calls, operator: Packed, base: int, rank: int, block_rows: int
    ) -> None:
        """`operator` is that of each call, `base` is added to all times."""
        self._ranges, self._calls, self._overhead = ranges, calls, overhead
        self._operator, self._base, self._rank = operator, base, rank
        self._category = np.where(np.array(ranges.operator, bool), 0, 1).astype(np.int8)
        # Events that start together are in one block.
        starts = (ranges.start_ns, calls.start_ns, overhead.start_ns)
        times = np.unique(np.concatenate([start[block_rows::block_rows] for start in starts]))
        bounds = [[0, *start.searchsorted(times).tolist(), len(start)] for start in starts]
        self._blocks = [tuple(map(slice, first, last)) for first, last in pairwise(zip(*bounds, strict=True))]

    def __len__(self) -> int:
        return len(self._blocks)

    def __call__(self) -> Iterator[pa.Table]:
        """The blocks."""
        return (build("host_events", self._rank, self._columns(*block), self._base) for block in self._blocks)

    def _columns(self, *block: slice) -> dict[str, Any]:
        ranges, calls, overhead = self._ranges, self._calls, self._overhead
        of_ranges, of_calls, of_overhead = block
        kinds = ((ranges, of_ranges), (calls, of_calls), (overhead, of_overhead))
        start = np.concatenate([events.start_ns[rows] for events, rows in kinds])
        duration = np.concatenate([events.duration_ns[rows] for events, rows in kinds])
        order = start_order(start, duration)
        sizes = [rows.stop - rows.start for rows in block]

        def by_start(*values: NDArray[Any] | int) -> NDArray[Any]:
            whole = [np.broadcast_to(value, size) for value, size in zip(values, sizes, strict=True)]
            return np.concatenate(whole)[order]

        thread = by_start(ranges.thread[of_ranges], calls.thread[of_calls], overhead.thread[of_overhead])
        range_names, first = ranges.name[of_ranges], len(ranges.names)
        columns = {
            "start_ns": start[order],
            "end_ns": start[order] + duration[order],
            "process": np.where(thread == NULL, NULL, (thread >> THREAD_BITS) & THREAD_MASK),
            "thread": thread_of(thread),
            "category": coded_column(by_start(self._category[range_names], 2, 3), _CATEGORIES),
            "name": coded_column(
                by_start(range_names, calls.name[of_calls] + first, overhead.name[of_overhead] + (first + len(calls.names))),
                [*ranges.names, *calls.names, *overhead.names],
            ),
            "correlation": by_start(NULL, calls.correlation[of_calls], NULL),
            # A range's own number, from 1.
            "operator": by_start(np.arange(of_ranges.start, of_ranges.stop) + 1, self._operator[of_calls], NULL),
        }
        sequence = ranges.sequence[of_ranges]
        if (sequence != NULL).any():
            columns["sequence"] = by_start(sequence, NULL, NULL)
        if any(ranges.shapes):
            columns["shapes"] = coded_column(by_start(range_names, -1, -1), ranges.shapes)
        return columns


def thread_of(global_tid: Integers) -> Integers:
    """The operating system's thread ids in globalTids; NULL stays."""
    return np.where(global_tid == NULL, NULL, global_tid & THREAD_MASK)
