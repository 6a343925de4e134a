"""One rank's device: when it computed, communicated and copied, in each iteration, and what delayed it when it did not compute.

Times are unions over all streams, never sums. An iteration's window on the device is its host range, moved to the work that it
launched: it ends when the host range and the last compute kernel launched in it have ended, and starts where the window before
it ends, or where its own host range starts if that is later. Windows never overlap, so their times can be added up. What was
launched before the first iteration is in none.

`gaps` judges each gap between compute by the compute kernel that ends it:

- launch-starved: until the host call that launches that kernel returns, or until the kernel starts if that is earlier. A gap
  that no compute kernel ends is starved to its end. A kernel without a recorded launch never starves, nor does a device whose
  clock disagrees with the host's.
- blocked: the rest of the gap, if the kernel had to wait for something that ended after the gap started: communication or a
  copy before it on its own stream, or on a stream that its stream waited for.
- dependency-stalled: the rest of the gap otherwise.

nsys records in part which stream waits for which; Kineto only with CUDA synchronisation events. Without a record, a kernel is
assumed to have waited for the communication or copy that ended last before it started, if that was within `PROMPT_NS`, and if
the host made some stream wait after it launched the one and before it launched the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.facts.intervals import EMPTY, Intervals, Nanoseconds, rows_of, union, window
from bridge_profiling.facts.types import Answer, caveat
from bridge_profiling.traces.joins import taken
from bridge_profiling.traces.tables import NULL, to_int64

#: Number of the window that is the whole capture, where no iteration is marked.
WHOLE_CAPTURE = -1

#: Work that waited starts this soon after what it waited for; 2 to 4 µs are usual on an H200.
PROMPT_NS = 10_000


@dataclass(frozen=True)
class DeviceWork:
    """When a rank's device did what. Kernels compute or communicate (NCCL, DeepEP, NVSHMEM, userbuffers and the like)."""

    compute: Intervals
    communication: Intervals
    memcpy: Intervals
    memset: Intervals
    kernel_count: int
    communication_kernel_count: int
    by_device: dict[int, Intervals]  # when each device did anything; empty where the process has one

    @cached_property
    def busy(self) -> Intervals:
        """When anything ran."""
        return self.communication | self._other

    @cached_property
    def times(self) -> dict[str, Intervals]:
        """By column of `breakdown` and `iterations`."""
        return {
            "compute_ns": self.compute,
            "communication_ns": self.communication,
            # Communication and nothing else: an upper bound on the time that hiding it would save.
            "exposed_communication_ns": self.communication - self._other,
            "overlapped_communication_ns": self.communication & self.compute,
            "memcpy_ns": self.memcpy,
            "memset_ns": self.memset,
        }

    @cached_property
    def _other(self) -> Intervals:
        return self.compute | self.memcpy | self.memset

    @property
    def span(self) -> Intervals:
        """From the first device event's start to the last one's end; empty without device events."""
        busy = self.busy
        return window(int(busy.start_ns[0]), int(busy.end_ns[-1])) if len(busy) else busy


@dataclass(frozen=True)
class Windows:
    """Iterations of one rank, ascending, with their windows on the device; or its whole capture, as `WHOLE_CAPTURE`."""

    iteration: NDArray[np.int32]
    boundary: NDArray[np.bool_]
    start_ns: Nanoseconds
    end_ns: Nanoseconds

    @property
    def numbers(self) -> pa.Array:
        """The iterations as a column; null for a whole capture."""
        return pa.array(self.iteration, pa.int32(), mask=self.iteration == WHOLE_CAPTURE)


@dataclass(frozen=True)
class IdleGaps:
    """When a device did not compute, by reason (see `idle`). The three sets are disjoint.

    Args:
        gaps: the union of the three, one interval per gap between compute.
        next_kernel: row in `device_events` of the compute kernel that ends each gap; -1 if none does.
        waits_unrecorded: whether there are several streams and no record of which waits for which.
    """

    gaps: Intervals
    next_kernel: NDArray[np.int64]
    launch_starved: Intervals
    blocked: Intervals
    dependency_stalled: Intervals
    waits_unrecorded: bool

    @property
    def by_reason(self) -> dict[str, Intervals]:
        """The three sets by column of `iterations` and `idle_gaps`."""
        return {
            "launch_starved_ns": self.launch_starved,
            "blocked_ns": self.blocked,
            "dependency_stalled_ns": self.dependency_stalled,
        }


def device_work(device_events: pa.Table) -> DeviceWork:
    """When the device did what."""
    start, end = (device_events[name].to_numpy() for name in ("start_ns", "end_ns"))
    rows = {kind: rows_of(device_events["kind"], kind) for kind in ("compute", "communication", "memcpy", "memset")}
    communicating = int(rows["communication"].sum())
    device = to_int64(device_events["device"], 0)
    devices = np.unique(device)
    several = devices.tolist() if len(devices) > 1 else []
    return DeviceWork(
        **{kind: union(start[chosen], end[chosen]) for kind, chosen in rows.items()},
        kernel_count=int(rows["compute"].sum()) + communicating,
        communication_kernel_count=communicating,
        by_device={each: union(start[device == each], end[device == each]) for each in several},
    )


def windows(iterations: pa.Table, device_events: pa.Table) -> Windows:
    """The device windows of the iterations in the table `iterations`."""
    number, boundary, start, end = (iterations[name].to_numpy() for name in ("iteration", "boundary", "start_ns", "end_ns"))
    if not len(number):
        return Windows(number, boundary, start, end)
    # An iteration that launched no compute ends no earlier than the one before it.
    ends = np.maximum.accumulate(np.maximum(end, _last_compute_ns(number, device_events, end)))
    before = np.minimum(np.maximum(start[:1], _left_before_ns(number[0], device_events)), ends[:1])
    return Windows(number, boundary, np.maximum(start, np.concatenate((before, ends[:-1]))), ends)


def until_next(iterations: pa.Table) -> tuple[Nanoseconds, Nanoseconds]:
    """When the host begins each iteration, and when the next one; or when it ends the iteration, if no next one follows."""
    number, begin, end = (to_int64(iterations[name]) for name in ("iteration", "start_ns", "end_ns"))
    return begin, np.append(np.where(np.diff(number) == 1, begin[1:], end[:-1]), end[-1:])


def spans(windows: Windows, work: DeviceWork) -> Windows:
    """The windows, or the whole capture if there are none."""
    if len(windows.iteration):
        return windows
    span = work.span
    return Windows(np.full(len(span), WHOLE_CAPTURE, np.int32), np.zeros(len(span), bool), span.start_ns, span.end_ns)


def breakdown(work: DeviceWork) -> Answer:
    """One row for the whole capture. Idle is the rest of the span; kernel counts include communication.

    `least_busy_ns`: when the device was busy that was least so, of a process with several.
    """
    span_ns, busy_ns = work.span.total_ns, work.busy.total_ns
    each_ns = {device: busy.total_ns for device, busy in work.by_device.items()}
    table = pa.table(
        {
            "span_ns": [span_ns],
            "busy_ns": [busy_ns],
            "least_busy_ns": [min(each_ns.values(), default=busy_ns)],
            "idle_ns": [span_ns - busy_ns],
            **{name: [time.total_ns] for name, time in work.times.items()},
            "kernel_count": [work.kernel_count],
            "communication_kernel_count": [work.communication_kernel_count],
        }
    )
    if not each_ns:
        return Answer(table)
    shares = ", ".join(f"{device}: {busy_ns / span_ns:.0%}" for device, busy_ns in each_ns.items())
    return Answer(table, (caveat("several_devices", count=len(each_ns), shares=shares),))


def iterations(windows: Windows, work: DeviceWork, gaps: IdleGaps) -> pa.Table:
    """One row per iteration: its window, and the device time in it.

    `duration_ns` = `compute_ns` + `launch_starved_ns` + `blocked_ns` + `dependency_stalled_ns` = busy + `idle_ns`.
    """
    start, end = windows.start_ns, windows.end_ns
    return pa.table(
        {
            "iteration": windows.numbers,
            "boundary": pa.array(windows.boundary, pa.bool_()),
            "start_ns": start,
            "end_ns": end,
            "duration_ns": end - start,
            **{name: intervals.within_ns(start, end) for name, intervals in work.times.items()},
            "idle_ns": end - start - work.busy.within_ns(start, end),
            **{name: intervals.within_ns(start, end) for name, intervals in gaps.by_reason.items()},
        }
    )


def ranks_without_work(breakdown: pa.Table, source: str) -> list[int]:
    """Ranks whose trace, by one profiler, has no work on a device, as in training on CPUs; ascending."""
    return sorted(row["rank"] for row in breakdown.to_pylist() if row["source"] == source and not row["busy_ns"])


def _last_compute_ns(number: NDArray[np.int32], device_events: pa.Table, default: Nanoseconds) -> Nanoseconds:
    """When the last compute kernel of each iteration ends; the default for an iteration without one."""
    mine = rows_of(device_events["kind"], "compute") & device_events["iteration"].is_valid().to_numpy()
    events = device_events.select(["iteration", "end_ns"]).filter(pa.array(mine))
    order = np.argsort(number, kind="stable")
    place = order[np.minimum(np.searchsorted(number[order], events["iteration"].to_numpy()), len(number) - 1)]
    last = default.copy()
    np.maximum.at(last, place, events["end_ns"].to_numpy())
    return last


def _left_before_ns(first: int, device_events: pa.Table) -> int:
    """When the device is done with what no iteration launched, before the first kernel of the first iteration; or `NULL`."""
    computes, iteration = rows_of(device_events["kind"], "compute"), to_int64(device_events["iteration"])
    start, end = device_events["start_ns"].to_numpy(), device_events["end_ns"].to_numpy()
    own = start[computes & (iteration == first)]
    return int(end[computes & (iteration == NULL) & (start < own.min())].max(initial=NULL)) if len(own) else NULL


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
    recorded = rows_of(synchronizations["kind"], "stream_wait_event")
    for name in ("stream", "correlation", "producer_stream", "producer_correlation"):
        recorded &= synchronizations[name].is_valid().to_numpy()
    waits = synchronizations.filter(pa.array(recorded))
    unrecorded = len(np.unique(events.stream[events.stream != NULL])) > 1 and not waits.num_rows
    if not len(found):
        return IdleGaps(EMPTY, np.empty(0, np.int64), EMPTY, EMPTY, EMPTY, unrecorded)
    begin, end = found.start_ns, found.end_ns
    next_kernel = events.compute_starting_at(end)
    # Threads that launched at unknown times: the clocks of device and host disagree, so that nothing shows a late host.
    untimed = device_events["launch_thread"].null_count < len(device_events) and (events.launched_ns == NULL).all()
    until = begin if untimed else end
    launched = np.clip(np.where(next_kernel >= 0, taken(events.launched_ns, next_kernel), until), begin, end)
    waited_until = taken(events.waited_until_ns(waits), next_kernel)
    # When the host made streams wait for something that the capture does not record.
    calls = wait_calls.filter(pa.array(host_rows(wait_calls)))
    unknown = ~np.isin(to_int64(calls["correlation"]), waits["correlation"].to_numpy())
    likely_until = events.likely_waited_until_ns(next_kernel, np.sort(calls["start_ns"].to_numpy()[unknown]))
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
            "duration_ns": end - start,
            "non_compute_ns": gaps.gaps.within_ns(start, end),
            **{name: part.within_ns(start, end) for name, part in gaps.by_reason.items()},
        }
    )
    return Answer(table, (caveat("stream_waits_unrecorded"),) if gaps.waits_unrecorded else ())


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
