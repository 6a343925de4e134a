"""Why a device does not compute when it does not: starved by the host, blocked by other work, or stalled.

Compute-absent time is a window without its compute. Each gap is judged by the compute kernel that ends it:

- launch-starved: until the host's launching call of that kernel returns (or the kernel starts). A gap that no compute kernel
  ends is starved to its end.
- blocked: the rest of the gap, when what the kernel had to wait for ended after the gap began: communication or a copy before
  it on its own stream, or on a stream that its stream was told to wait for.
- dependency-stalled: the rest of the gap otherwise.

The three are apart and together are the compute-absent time, to the nanosecond. A kernel without a recorded launch is never
called starved.

Which stream waits for which is recorded by nsys in part, and by Kineto with CUDA synchronisation events only. Without a record,
a kernel is taken to have waited for the communication or copy that ended last before it started, if that was within
`PROMPT_NS`, and if the host told some stream to wait after it launched the one and before it launched the other: no stream
waits untold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.analysis.breakdown import DeviceWork, rows_of
from bridge_profiling.analysis.intervals import EMPTY, Intervals, Nanoseconds, union, window
from bridge_profiling.traces.joins import taken
from bridge_profiling.traces.tables import NULL
from bridge_profiling.traces.types import RankTables

#: A kernel that waited starts this soon after what it waited for; 2 to 4 µs are usual on an H200.
PROMPT_NS = 10_000

#: Host calls by which a stream is told to wait.
WAIT_CALLS = ("cudaStreamWaitEvent", "cuStreamWaitEvent", "hipStreamWaitEvent")

#: Of host events, what is needed here.
HOST_COLUMNS = ("name", "start_ns", "correlation")

#: Before every time.
_NEVER = NULL


@dataclass(frozen=True)
class ComputeAbsent:
    """When a device did not compute, by why. The three sets are apart.

    Args:
        launch_starved: the next compute kernel had not been launched.
        blocked: it had, and waited for communication or a copy.
        dependency_stalled: it had, and nothing is known that it waited for.
    """

    launch_starved: Intervals
    blocked: Intervals
    dependency_stalled: Intervals


def compute_absent(tables: RankTables, work: DeviceWork, start_ns: int, end_ns: int) -> ComputeAbsent:
    """Why a device did not compute, between two times.

    Args:
        tables: of one rank.
        work: what `device_work` made of its events.
        start_ns: where to begin, not after the first compute kernel's start.
        end_ns: where to end.
    """
    gaps = window(start_ns, end_ns) - work.compute
    if not len(gaps):
        return ComputeAbsent(EMPTY, EMPTY, EMPTY)
    events = _Events(tables.device_events)
    begin, end = gaps.start_ns, gaps.end_ns
    next_kernel = events.compute_starting_at(end)
    launched = np.clip(np.where(next_kernel >= 0, taken(events.launched_ns, next_kernel), end), begin, end)
    waits = recorded_waits(tables["synchronizations"])
    waited_until = taken(events.waited_until_ns(waits), next_kernel)
    likely_until = events.likely_waited_until_ns(next_kernel, _unrecorded_waits_ns(tables.host_events, waits))
    blocked = np.maximum(waited_until, likely_until) > begin
    return ComputeAbsent(
        union(begin, launched),
        union(launched[blocked], end[blocked]),
        union(launched[~blocked], end[~blocked]),
    )


def recorded_waits(synchronizations: pa.Table) -> pa.Table:
    """The waits of streams for one another of which the capture says who waits for what.

    Args:
        synchronizations: `traces.tables.SYNCHRONIZATIONS` of one rank.
    """
    resolved = rows_of(synchronizations["kind"], "stream_wait_event")
    for name in ("stream", "correlation", "producer_stream", "producer_correlation"):
        resolved &= synchronizations[name].is_valid().to_numpy()
    return synchronizations.filter(pa.array(resolved))


def launches(absent: ComputeAbsent, iteration: np.ndarray, start_ns: Nanoseconds, end_ns: Nanoseconds) -> pa.Table:
    """One row per window: its compute-absent time, and the three parts it is the sum of.

    Args:
        absent: of one rank.
        iteration: numbers of the windows' iterations; null for the whole capture.
        start_ns: where each window begins.
        end_ns: where each ends.
    """
    parts = [
        intervals.within_ns(start_ns, end_ns)
        for intervals in (absent.launch_starved, absent.blocked, absent.dependency_stalled)
    ]
    return pa.table(
        {
            "iteration": pa.array(iteration, pa.int32()),
            "duration_us": (end_ns - start_ns) / 1e3,
            "compute_absent_us": sum(parts) / 1e3,
            "launch_starved_us": parts[0] / 1e3,
            "blocked_us": parts[1] / 1e3,
            "dependency_stalled_us": parts[2] / 1e3,
        }
    )


class _Events:
    """A rank's device events as arrays, and what the kernels among them waited for.

    Args:
        device_events: `traces.tables.DEVICE_EVENTS`.
    """

    def __init__(self, device_events: pa.Table) -> None:
        self.start_ns, self.end_ns = (device_events[name].to_numpy() for name in ("start_ns", "end_ns"))
        # A launch that was not recorded lies before everything, so it starves no kernel.
        self.launched_ns = _filled(device_events["launch_end_ns"], _NEVER)
        self.launching_ns = _filled(device_events["launch_start_ns"], _NEVER)
        self.correlation = _filled(device_events["correlation"], _NEVER)
        self.stream = _filled(device_events["stream"], _NEVER)
        self.computes = rows_of(device_events["kind"], "compute")
        self.device = _filled(device_events["device"], 0)

    def compute_starting_at(self, time_ns: Nanoseconds) -> NDArray[np.int64]:
        """Row of the compute kernel that starts then, of several the one launched first; -1 where none does."""
        rows = np.flatnonzero(self.computes & (self.end_ns > self.start_ns))
        rows = rows[np.lexsort((self.launched_ns[rows], self.start_ns[rows]))]
        if not len(rows):
            return np.full(len(time_ns), -1)
        found = rows[np.minimum(np.searchsorted(self.start_ns[rows], time_ns), len(rows) - 1)]
        return np.where(self.start_ns[found] == time_ns, found, -1)

    def waited_until_ns(self, waits: pa.Table) -> Nanoseconds:
        """When the last thing ended that each event is known to have waited for, by its stream's order or a stream wait."""
        until = self._end_of_stream_before_ns()
        for rows, over in self._stream_waits(waits):
            np.maximum.at(until, rows, over)
        return until

    def likely_waited_until_ns(self, kernel: NDArray[np.int64], wait_calls_ns: Nanoseconds) -> Nanoseconds:
        """When what each kernel seems to have waited for on another stream was over; before everything where nothing was.

        Args:
            kernel: rows; -1 for none.
            wait_calls_ns: when the host told streams to wait for it is not known what, ascending.
        """
        others = np.flatnonzero(~self.computes & (self.launched_ns != _NEVER))
        others = others[np.argsort(self.end_ns[others], kind="stable")]
        if not len(others) or not len(self.start_ns):
            return np.full(len(kernel), _NEVER)
        start = taken(self.start_ns, kernel)
        last = np.searchsorted(self.end_ns[others], start, side="right") - 1
        other = others[np.maximum(last, 0)]
        told = np.searchsorted(wait_calls_ns, taken(self.launching_ns, kernel)) - np.searchsorted(
            wait_calls_ns, self.launched_ns[other]
        )
        elsewhere = self.stream[other] != taken(self.stream, kernel)
        here = self.device[other] == taken(self.device, kernel)
        prompt = start - self.end_ns[other] <= PROMPT_NS
        waited = (kernel >= 0) & (last >= 0) & (told > 0) & elsewhere & here & prompt
        return np.where(waited, self.end_ns[other], _NEVER)

    def _end_of_stream_before_ns(self) -> Nanoseconds:
        """When the work before each event on its stream was over."""
        order = np.lexsort((self.start_ns, self.stream, self.device))
        changes = (np.diff(self.stream[order]) != 0) | (np.diff(self.device[order]) != 0)
        before = np.full(len(order), _NEVER)
        for rows in np.split(order, np.flatnonzero(changes) + 1):
            before[rows[1:]] = np.maximum.accumulate(self.end_ns[rows])[:-1]
        return before

    def _stream_waits(self, waits: pa.Table) -> Iterator[tuple[NDArray[np.int64], Nanoseconds]]:
        """Events of each stream that was told to wait, with when what it waited for was over.

        Correlations count a process's calls, so they say what was enqueued before the event was recorded, and after the wait.
        """
        stream, wait, producer, record = (
            waits[name].to_numpy() for name in ("stream", "correlation", "producer_stream", "producer_correlation")
        )
        over = np.full(len(wait), _NEVER)
        enqueued = {number: self._enqueued(number) for number in np.unique(np.concatenate((stream, producer)))}
        for number in np.unique(producer):
            rows, mine = enqueued[number], np.flatnonzero(producer == number)
            until = np.concatenate(([_NEVER], np.maximum.accumulate(self.end_ns[rows])))
            over[mine] = until[np.searchsorted(self.correlation[rows], record[mine])]
        for number in np.unique(stream):
            rows, mine = enqueued[number], np.flatnonzero(stream == number)
            mine = mine[np.argsort(wait[mine], kind="stable")]
            first = np.searchsorted(self.correlation[rows], wait[mine], side="right")
            # An event after the wait that began before the end of what it waited for: then it waited for something else.
            begins = np.append(self.start_ns[rows], np.iinfo(np.int64).max)
            real = over[mine] <= begins[first]
            until = np.concatenate(([_NEVER], np.maximum.accumulate(np.where(real, over[mine], _NEVER))))
            yield rows, until[np.searchsorted(wait[mine], self.correlation[rows])]

    def _enqueued(self, stream: int) -> NDArray[np.int64]:
        """Rows of a stream in the order in which the host enqueued them."""
        rows = np.flatnonzero((self.stream == stream) & (self.correlation != _NEVER))
        return rows[np.argsort(self.correlation[rows], kind="stable")]


def _unrecorded_waits_ns(host_events: pa.Table, waits: pa.Table) -> Nanoseconds:
    """When the host told streams to wait, without a record of what for; ascending."""
    calls = host_events.filter(pa.array(rows_of(host_events["name"], *WAIT_CALLS)))
    recorded = np.isin(_filled(calls["correlation"], _NEVER), waits["correlation"].to_numpy())
    return np.sort(calls["start_ns"].to_numpy()[~recorded])


def _filled(column: pa.ChunkedArray, value: int) -> NDArray[np.int64]:
    return column.cast(pa.int64()).fill_null(value).to_numpy()
