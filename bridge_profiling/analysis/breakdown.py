"""Where a rank's device time went: compute, communication, copies, idle. Unions over all streams, never sums.

- compute: kernels that are not communication; communication: kernels of NCCL, DeepEP, NVSHMEM, userbuffers and the like.
- busy: compute ∪ communication ∪ memcpy ∪ memset. idle: the rest of the span.
- exposed communication: communication outside compute ∪ memcpy ∪ memset, an upper bound of what hiding it could recover.
- overlapped communication: communication inside compute.
- the span runs from the first device event's start to the last one's end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.analysis.intervals import Intervals, union, window

#: What `breakdown` answers, in microseconds but for the counts.
COLUMNS = (
    "span_us",
    "busy_us",
    "idle_us",
    "compute_us",
    "communication_us",
    "exposed_communication_us",
    "overlapped_communication_us",
    "memcpy_us",
    "memset_us",
    "kernel_count",
    "communication_kernel_count",
)


@dataclass(frozen=True)
class DeviceWork:
    """When a rank's device did what.

    Args:
        compute: when a kernel that does not communicate ran.
        communication: when one that does ran.
        memcpy: when a copy ran.
        memset: when a memset ran.
        kernel_count: kernels, communication among them.
        communication_kernel_count: kernels that communicate.
    """

    compute: Intervals
    communication: Intervals
    memcpy: Intervals
    memset: Intervals
    kernel_count: int
    communication_kernel_count: int

    @cached_property
    def busy(self) -> Intervals:
        """When anything ran."""
        return self.communication | self._other

    @cached_property
    def exposed_communication(self) -> Intervals:
        """When communication ran and nothing else."""
        return self.communication - self._other

    @cached_property
    def overlapped_communication(self) -> Intervals:
        """When communication ran beside compute."""
        return self.communication & self.compute

    @cached_property
    def _other(self) -> Intervals:
        return self.compute | self.memcpy | self.memset

    @property
    def span(self) -> Intervals:
        """From the first device event's start to the last one's end; empty without device events."""
        busy = self.busy
        return window(int(busy.start_ns[0]), int(busy.end_ns[-1])) if len(busy) else busy


def device_work(device_events: pa.Table) -> DeviceWork:
    """When a rank's device did what.

    Args:
        device_events: `traces.tables.DEVICE_EVENTS` of one rank.
    """
    start, end = (device_events[name].to_numpy() for name in ("start_ns", "end_ns"))
    rows = {kind: rows_of(device_events["kind"], kind) for kind in ("compute", "communication", "memcpy", "memset")}
    sets = {kind: union(start[chosen], end[chosen]) for kind, chosen in rows.items()}
    communicating = int(rows["communication"].sum())
    return DeviceWork(**sets, kernel_count=int(rows["compute"].sum()) + communicating, communication_kernel_count=communicating)


def breakdown(work: DeviceWork) -> pa.Table:
    """One row: the columns of `COLUMNS`, over the whole capture.

    Args:
        work: of one rank.
    """
    span_ns, busy_ns = work.span.total_ns, work.busy.total_ns
    times = (
        span_ns,
        busy_ns,
        span_ns - busy_ns,
        work.compute.total_ns,
        work.communication.total_ns,
        work.exposed_communication.total_ns,
        work.overlapped_communication.total_ns,
        work.memcpy.total_ns,
        work.memset.total_ns,
    )
    values = [*(time_ns / 1e3 for time_ns in times), work.kernel_count, work.communication_kernel_count]
    return pa.table({name: [value] for name, value in zip(COLUMNS, values, strict=True)})


def rows_of(column: pa.ChunkedArray, *values: str) -> NDArray[np.bool_]:
    """Which rows of a column of names hold one of some values. Each name is compared once, not row by row."""
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    found = [np.zeros(0, np.bool_)]
    for chunk in encoded.chunks:
        wanted = np.array([name in values for name in chunk.dictionary.to_pylist()] + [False])
        # The place after the last name stands for null.
        found.append(wanted[chunk.indices.fill_null(len(wanted) - 1).to_numpy(zero_copy_only=False)])
    return np.concatenate(found)


def without_device(breakdown: pa.Table, source: str) -> list[int]:
    """Ranks whose trace has no work on a device, as of a training on CPUs, ascending.

    Args:
        breakdown: `Run.breakdown`.
        source: the profiler whose traces count.
    """
    return sorted(row["rank"] for row in breakdown.to_pylist() if row["source"] == source and not row["busy_us"])
