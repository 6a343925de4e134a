"""When one rank's device did not compute, and whether launches, other work or neither delayed it.

`idle_gaps` judges each gap between compute by the compute kernel that ends it:

- launch-starved: until the host call that launches that kernel returns, or until the kernel starts if that is earlier. A gap
  that no compute kernel ends is starved to its end. A kernel without a recorded launch never starves.
- blocked: the rest of the gap, if the kernel had to wait for something that ended after the gap started: communication or a
  copy before it on its own stream, or on a stream that its stream waited for.
- dependency-stalled: the rest of the gap otherwise.

nsys records in part which stream waits for which; Kineto only with CUDA synchronisation events. Without a record, a kernel is
assumed to have waited for the communication or copy that ended last before it started, if that was within `PROMPT_NS`, and if
the host made some stream wait after it launched the one and before it launched the other.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.facts.device import PROMPT_NS, DeviceWork, IdleGaps, Windows
from bridge_profiling.facts.intervals import EMPTY, Nanoseconds, rows_of, union, window
from bridge_profiling.facts.types import Answer
from bridge_profiling.traces.joins import taken
from bridge_profiling.traces.tables import NULL, to_int64
from bridge_profiling.traces.types import Caveat

#: Host calls that make a stream wait.
WAIT_CALLS = ("cudaStreamWaitEvent", "cuStreamWaitEvent", "hipStreamWaitEvent")


def host_rows(host_events: pa.Table) -> NDArray[np.bool_]:
    """Which host events `gaps` reads."""
    return rows_of(host_events["name"], *WAIT_CALLS)


def gaps(
    device_events: pa.Table, wait_calls: pa.Table, synchronizations: pa.Table, work: DeviceWork, windows: Windows
) -> IdleGaps:
    """When the device did not compute, from the first event or window to the last.

    Args:
        device_events: of one rank.
        wait_calls: host events with `name`, `start_ns` and `correlation`; only `WAIT_CALLS` are read.
        synchronizations: `traces.tables.SYNCHRONIZATIONS`.
        work: of the device.
        windows: of the iterations.
    """
    starts = np.concatenate((work.span.start_ns, windows.start_ns))
    ends = np.concatenate((work.span.end_ns, windows.end_ns))
    found = window(int(starts.min()), int(ends.max())) - work.compute if len(starts) else EMPTY
    events = _Events(device_events)
    waits = _recorded_waits(synchronizations)
    unrecorded = len(np.unique(events.stream[events.stream != NULL])) > 1 and not waits.num_rows
    if not len(found):
        return IdleGaps(EMPTY, np.empty(0, np.int64), EMPTY, EMPTY, EMPTY, unrecorded)
    begin, end = found.start_ns, found.end_ns
    next_kernel = events.compute_starting_at(end)
    launched = np.clip(np.where(next_kernel >= 0, taken(events.launched_ns, next_kernel), end), begin, end)
    waited_until = taken(events.waited_until_ns(waits), next_kernel)
    likely_until = events.likely_waited_until_ns(next_kernel, _unrecorded_waits_ns(wait_calls, waits))
    blocked = np.maximum(waited_until, likely_until) > begin
    return IdleGaps(
        gaps=found,
        next_kernel=next_kernel,
        launch_starved=union(begin, launched),
        blocked=union(launched[blocked], end[blocked]),
        dependency_stalled=union(launched[~blocked], end[~blocked]),
        waits_unrecorded=unrecorded,
    )


def idle_gaps(gaps: IdleGaps, spans: Windows) -> Answer:
    """One row per window: its time without compute, and the three parts that add up to it."""
    start, end = spans.start_ns, spans.end_ns
    table = pa.table(
        {
            "iteration": spans.numbers,
            "duration_us": (end - start) / 1e3,
            "non_compute_us": gaps.gaps.within_ns(start, end) / 1e3,
            **{name: part.within_ns(start, end) / 1e3 for name, part in gaps.by_reason.items()},
        }
    )
    if not gaps.waits_unrecorded:
        return Answer(table)
    text = (
        "the capture does not record which stream waits for which: what a kernel waited for on another stream is inferred from "
        "times and calls, and counts as dependency-stalled if that is unclear"
    )
    return Answer(table, (Caveat("stream_waits_unrecorded", text),))


class _Events:
    """A rank's device events as arrays, and what the kernels among them waited for."""

    def __init__(self, device_events: pa.Table) -> None:
        self.start_ns, self.end_ns = (device_events[name].to_numpy() for name in ("start_ns", "end_ns"))
        # An unrecorded launch comes before everything, so that it starves no kernel.
        self.launched_ns = to_int64(device_events["launch_end_ns"])
        self.launching_ns = to_int64(device_events["launch_start_ns"])
        self.correlation = to_int64(device_events["correlation"])
        self.stream = to_int64(device_events["stream"])
        self.computes = rows_of(device_events["kind"], "compute")
        self.device = to_int64(device_events["device"], 0)

    def compute_starting_at(self, time_ns: Nanoseconds) -> NDArray[np.int64]:
        """Row of the compute kernel that starts then, of several the one launched first; -1 if none does."""
        rows = np.flatnonzero(self.computes & (self.end_ns > self.start_ns))
        rows = rows[np.lexsort((self.launched_ns[rows], self.start_ns[rows]))]
        if not len(rows):
            return np.full(len(time_ns), -1)
        found = rows[np.minimum(np.searchsorted(self.start_ns[rows], time_ns), len(rows) - 1)]
        return np.where(self.start_ns[found] == time_ns, found, -1)

    def waited_until_ns(self, waits: pa.Table) -> Nanoseconds:
        """End of the last event that each event is known to have waited for, by its stream's order or a stream wait."""
        until = self._end_of_stream_before_ns()
        for rows, ended in self._stream_waits(waits):
            np.maximum.at(until, rows, ended)
        return until

    def likely_waited_until_ns(self, kernel: NDArray[np.int64], wait_calls_ns: Nanoseconds) -> Nanoseconds:
        """End of what each kernel probably waited for on another stream; NULL for none.

        Args:
            kernel: rows; -1 for none.
            wait_calls_ns: when the host made streams wait for something unrecorded, ascending.
        """
        others = np.flatnonzero(~self.computes & (self.launched_ns != NULL))
        others = others[np.argsort(self.end_ns[others], kind="stable")]
        if not len(others) or not len(self.start_ns):
            return np.full(len(kernel), NULL)
        start = taken(self.start_ns, kernel)
        last = np.searchsorted(self.end_ns[others], start, side="right") - 1
        other = others[np.maximum(last, 0)]
        calls_before_kernel = np.searchsorted(wait_calls_ns, taken(self.launching_ns, kernel))
        called = calls_before_kernel - np.searchsorted(wait_calls_ns, self.launched_ns[other]) > 0
        elsewhere = self.stream[other] != taken(self.stream, kernel)
        here = self.device[other] == taken(self.device, kernel)
        prompt = start - self.end_ns[other] <= PROMPT_NS
        waited = (kernel >= 0) & (last >= 0) & called & elsewhere & here & prompt
        return np.where(waited, self.end_ns[other], NULL)

    def _end_of_stream_before_ns(self) -> Nanoseconds:
        """When the work before each event on its stream ended."""
        order = np.lexsort((self.start_ns, self.stream, self.device))
        changes = (np.diff(self.stream[order]) != 0) | (np.diff(self.device[order]) != 0)
        before = np.full(len(order), NULL)
        for rows in np.split(order, np.flatnonzero(changes) + 1):
            before[rows[1:]] = np.maximum.accumulate(self.end_ns[rows])[:-1]
        return before

    def _stream_waits(self, waits: pa.Table) -> Iterator[tuple[NDArray[np.int64], Nanoseconds]]:
        """Events of each stream that waited, and when what they waited for ended.

        Correlations count a process's calls: they say what was enqueued before the event was recorded, and after the wait.
        """
        stream, wait, producer, record = (
            waits[name].to_numpy() for name in ("stream", "correlation", "producer_stream", "producer_correlation")
        )
        ended = np.full(len(wait), NULL)
        enqueued = {number: self._enqueued(number) for number in np.unique(np.concatenate((stream, producer)))}
        for number in np.unique(producer):
            rows, mine = enqueued[number], np.flatnonzero(producer == number)
            until = np.concatenate(([NULL], np.maximum.accumulate(self.end_ns[rows])))
            ended[mine] = until[np.searchsorted(self.correlation[rows], record[mine])]
        for number in np.unique(stream):
            rows, mine = enqueued[number], np.flatnonzero(stream == number)
            mine = mine[np.argsort(wait[mine], kind="stable")]
            first = np.searchsorted(self.correlation[rows], wait[mine], side="right")
            # If an event after the wait started before the end of what it waited for, it waited for something else.
            begins = np.append(self.start_ns[rows], np.iinfo(np.int64).max)
            real = ended[mine] <= begins[first]
            until = np.concatenate(([NULL], np.maximum.accumulate(np.where(real, ended[mine], NULL))))
            yield rows, until[np.searchsorted(wait[mine], self.correlation[rows])]

    def _enqueued(self, stream: int) -> NDArray[np.int64]:
        """Rows of a stream in the order in which the host enqueued them."""
        rows = np.flatnonzero((self.stream == stream) & (self.correlation != NULL))
        return rows[np.argsort(self.correlation[rows], kind="stable")]


def _recorded_waits(synchronizations: pa.Table) -> pa.Table:
    """Waits of streams for one another that the capture records completely."""
    resolved = rows_of(synchronizations["kind"], "stream_wait_event")
    for name in ("stream", "correlation", "producer_stream", "producer_correlation"):
        resolved &= synchronizations[name].is_valid().to_numpy()
    return synchronizations.filter(pa.array(resolved))


def _unrecorded_waits_ns(host_events: pa.Table, waits: pa.Table) -> Nanoseconds:
    """When the host made streams wait for something that the capture does not record; ascending."""
    calls = host_events.filter(pa.array(host_rows(host_events)))
    recorded = np.isin(to_int64(calls["correlation"]), waits["correlation"].to_numpy())
    return np.sort(calls["start_ns"].to_numpy()[~recorded])
