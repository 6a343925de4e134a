"""What recording its events costs a rank's host, and how much of the device's idle time that explains.

Without the profiler, the host reaches each launch earlier: by the cost of the events that it recorded until then. The device
follows as far as it was idle for want of that launch. `replay` moves the launches of one rank earlier and computes both:

- The host's lead at a time is the cost of what it recorded since the capture began, except where it waited for the device:
  after a synchronization, it cannot be further ahead than the device is, nor than it was plus the time that it waited.
- The device's lead grows only in launch-starved gaps in which it is idle, and is at most the lead of the host at the launch
  that ends the gap. Compute, copies and communication take as long as they took.

Communication counts as work, so a rank's own lead is computed without the others. The exception is a stream whose communication
mostly overlaps kernels that were launched later, such as reductions of gradients in a backward pass: the next kernel does
not wait for it. The additional gain of waiting ranks is known only across ranks: `findings.grids` limits it by the slowest
rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.facts.device import DeviceWork, IdleGaps, Windows, until_next
from bridge_profiling.facts.host_ranges import launching_threads, on_threads
from bridge_profiling.facts.intervals import EMPTY, Intervals, Nanoseconds, by_thread, rows_named, rows_of, union
from bridge_profiling.facts.names import ENQUEUING, FREEING, SYNCHRONIZING
from bridge_profiling.traces.joins import places
from bridge_profiling.traces.tables import NULL, to_int64
from bridge_profiling.traces.types import texts

#: Columns of host events that are read.
COLUMNS = ("category", "thread", "name", "start_ns", "end_ns", "shapes")

#: Categories of host events that cost time; a kind is an index, or one of the two below.
CATEGORIES = ("operator", "runtime", "annotation", "python")

#: Runtime calls that put work on the device, and the profiler's own work.
ENQUEUES, OWN = len(CATEGORIES), len(CATEGORIES) + 1

#: Calls that launch one kernel: their durations show how fast a host is.
_LAUNCHES = ("cudaLaunchKernel", "hipLaunchKernel")

#: Launches and copies that take longer wait for the device: its queue is full.
_MAY_WAIT, _MAY_WAIT_NS = re.compile("Launch|Memcpy"), 100_000

#: Events whose cost is added up at a time: a multiple of the next number.
_AT_A_TIME = 1 << 20

#: Events in a row, and the most that recording them takes of their time. The densest measured trainings took 2.1 times as long
#: with the profiler as without.
_IN_A_ROW, _MOST_RECORDING = 256, 0.55


@dataclass(frozen=True)
class Recording:
    """Events by start, and what shows how fast the host is."""

    start_ns: Nanoseconds
    kind: NDArray[np.uint8]  # index of CATEGORIES, ENQUEUES or OWN
    own: NDArray[np.int64]  # rows of the profiler's own work
    own_ns: Nanoseconds  # how long that took
    waits: Intervals  # when the host waited for the device
    launches_ns: Nanoseconds  # durations of calls that launch one kernel
    gaps_ns: Nanoseconds  # from the end of each operator that contains no other one to the start of its thread's next one
    entries_ns: Nanoseconds  # from the start of each other operator to that of the first one that it contains
    with_shapes: bool  # whether operators' shapes were recorded

    def counts(self, first: NDArray[np.int64], last: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many events of each kind there are from each of some rows to another one."""
        windows = zip(first.tolist(), last.tolist(), strict=True)
        found = [np.bincount(self.kind[begin:end], minlength=OWN + 1) for begin, end in windows]
        return np.array(found, np.int64).reshape(len(first), OWN + 1)

    def cost_before(self, rows: NDArray[np.int64], cost_ns: NDArray[np.float64]) -> NDArray[np.float64]:
        """What the events before each row cost, by the cost of a kind; the profiler's own work costs as long as it took.

        Args:
            cost_ns: of each of CATEGORIES and of ENQUEUES; the profiler's own work counts only if it has a cost as well.
        """
        wanted, place = np.unique(rows, return_inverse=True)
        found, so_far = np.zeros(len(wanted)), 0.0
        by_kind = np.append(cost_ns, 0.0)[: OWN + 1]
        for begin in range(0, len(self.kind), _AT_A_TIME):
            some = slice(begin, min(begin + _AT_A_TIME, len(self.kind)))
            cost = self._limited(by_kind[self.kind[some]], some)
            if len(cost_ns) > OWN:
                own = slice(*np.searchsorted(self.own, (some.start, some.stop)))
                cost[self.own[own] - begin] = self.own_ns[own]
            # One sum after the other, as if all were added up at once.
            sums = np.cumsum(np.concatenate(([so_far], cost)))
            here = slice(*np.searchsorted(wanted, (some.start, some.stop)))
            found[here] = sums[wanted[here] - begin]
            so_far = sums[-1]
        found[wanted >= len(self.kind)] = so_far
        return found[place]

    def _limited(self, cost: NDArray[np.float64], some: slice) -> NDArray[np.float64]:
        """What some events cost, of `_IN_A_ROW` together no more than `_MOST` of the time from the first to the next ones."""
        first = np.arange(some.start, some.stop, _IN_A_ROW)
        took_ns = self.start_ns[np.minimum(first + _IN_A_ROW, len(self.start_ns) - 1)] - self.start_ns[first]
        spent_ns = np.add.reduceat(cost, first - some.start)
        share = np.minimum(_MOST_RECORDING * took_ns / np.maximum(spent_ns, 1.0), 1.0)
        return cost * np.repeat(share, _IN_A_ROW)[: len(cost)]


class Recorded:
    """Collects the events of the threads that launch a rank's compute."""

    def __init__(self, device_events: pa.Table) -> None:
        self._threads = launching_threads(device_events)
        # Columns of a recording, a row of arrays for each block of events.
        kinds = (np.int64, np.uint8, *[np.int64] * 5, np.uint32, np.uint32)
        self._blocks: list[tuple[NDArray[Any], ...]] = [tuple(np.empty(0, kind) for kind in kinds)]
        self._rows, self._with_shapes = 0, False
        self._last_operators = np.empty((0, 3), np.int64)  # thread, start and end of each thread's last operator

    def add(self, block: pa.Table) -> None:
        """Take in the next rows."""
        self._with_shapes |= block["shapes"].null_count < block.num_rows
        kind = np.full(block.num_rows, OWN + 1, np.uint8)
        for code, category in enumerate(CATEGORIES):
            kind[rows_of(block["category"], category)] = code
        kind[rows_of(block["category"], "overhead")] = OWN
        rows = np.flatnonzero((kind <= OWN) & on_threads(block, self._threads))
        kind = kind[rows]
        start, end, thread = (to_int64(block[name])[rows] for name in ("start_ns", "end_ns", "thread"))
        called = kind == CATEGORIES.index("runtime")
        full = (end - start >= _MAY_WAIT_NS) & rows_named(block["name"], _MAY_WAIT.search)[rows]
        waits = called & (full | rows_of(block["name"], *SYNCHRONIZING, *FREEING)[rows])
        kind[called & rows_named(block["name"], ENQUEUING.search)[rows]] = ENQUEUES
        own = np.flatnonzero(kind == OWN)
        took, operators = end - start, kind == CATEGORIES.index("operator")
        launches = took[rows_of(block["name"], *_LAUNCHES)[rows]]
        between = self._between_operators(thread[operators], start[operators], end[operators])
        self._blocks.append((start, kind, own + self._rows, took[own], start[waits], end[waits], launches, *between))
        self._rows += len(rows)

    def _between_operators(self, thread: NDArray[np.int64], start: Nanoseconds, end: Nanoseconds) -> list[NDArray[Any]]:
        """Gaps and entries of the next operators, see `Recording`."""
        events = np.concatenate((self._last_operators, np.column_stack((thread, start, end))))
        events = events[by_thread(events[:, 0])]
        before, after = events[:-1], events[1:]
        same = after[:, 0] == before[:, 0]
        self._last_operators = events[~np.append(same, False)[: len(events)]]
        gaps = after[:, 1] - before[:, 2]
        return [_compact(gaps[same & (gaps >= 0)]), _compact((after[:, 1] - before[:, 1])[same & (gaps < 0)])]

    def result(self) -> Recording:
        """The events."""
        columns = [list(blocks) for blocks in zip(*self._blocks, strict=True)]
        self._blocks.clear()
        # One after another, so that not all are in memory twice.
        each = (np.concatenate(columns.pop(0)) for _ in range(len(columns)))
        start, kind, own, own_ns, begin, end, launches, gaps, entries = each
        return Recording(start, kind, own, own_ns, union(begin, end), launches, gaps, entries, self._with_shapes)


def _compact(times_ns: Nanoseconds) -> NDArray[np.integer]:
    """Most are microseconds."""
    return times_ns.astype(np.uint32) if times_ns.max(initial=0) < 1 << 32 else times_ns


#: Three times show how fast this host is: the first quartile of calls that launch a kernel; the first decile of gaps between
#: operators, in which one record is finished and the next one is begun; and the median time from an operator to the first one
#: in it. A loop in Python makes the gaps longer, another choice of operators the last one. So many of them are enough, and a
#: host can be faster or slower than the measured ones by these factors.
_QUARTER, _TENTH, _HALF, _ENOUGH, _FASTEST, _SLOWEST = 0.25, 0.1, 0.5, 50, 0.4, 3.0

#: A stream's communication overlaps compute if more than this share of it does: of gradients 70% and more, while a reduction
#: that the next kernel needs never does.
_MOST = 0.6

_Float = NDArray[np.float64]


@dataclass(frozen=True)
class Rates:
    """Host time that each recorded event costs.

    On a host that needs `launch_ns` to launch a kernel, `gap_ns` from one operator to the next, and `entry_ns` from the start
    of an operator to that of the first one in it.
    """

    operator_ns: float
    runtime_ns: float  # of a call that puts work on the device
    call_ns: float  # of any other call
    annotation_ns: float
    python_ns: float
    shapes_ns: float  # what shapes add to an operator
    launch_ns: float
    gap_ns: float
    entry_ns: float

    def on_host(self, recording: Recording) -> Rates:
        """The rates of the host that recorded this.

        Another process slows the profiler's code more than launches or operators alone, so that both count.
        """
        launches = _slower(recording.launches_ns, _QUARTER, self.launch_ns)
        gaps, entries = _slower(recording.gaps_ns, _TENTH, self.gap_ns), _slower(recording.entries_ns, _HALF, self.entry_ns)
        factor = min(max(launches * float(np.sqrt(gaps * entries)), _FASTEST), _SLOWEST)
        return Rates(**{name: rate * factor for name, rate in vars(self).items()})


def _slower(times_ns: Nanoseconds, part: float, usual_ns: float) -> float:
    """How many times as long as usual it took a host; 1 if too few show it."""
    if len(times_ns) < _ENOUGH or not usual_ns:
        return 1.0
    # A clock of whole microseconds gives gaps of 0: less than it can tell is not known.
    return max(float(np.quantile(times_ns, part)), 0.1 * usual_ns) / usual_ns


@cache
def rates(source: str = "kineto") -> Rates:
    """The rates of a profiler in profiler_cost.toml."""
    table = texts(__package__, "profiler_cost.toml")
    own = table | table.get(source, {})
    return Rates(**{name: own[name] for name in Rates.__annotations__})


@dataclass(frozen=True)
class ProfilerCost:
    """The profiler's cost on one rank, and what is needed to launch its work earlier.

    Args:
        recording: events that cost the host time.
        rates: of this host.
        cost_ns: of an event, by its kind.
        ends_ns: of the device's events, ascending.
        idle: the device's idle time for want of launches.
        length_ns: of that, in each gap or part of one that has any.
        end_ns: of each such part, ascending.
        launched_ns: when the host had launched the kernel or the copy that ends it.
    """

    recording: Recording
    rates: Rates
    cost_ns: _Float
    ends_ns: Nanoseconds
    idle: Intervals
    length_ns: Nanoseconds
    end_ns: Nanoseconds
    launched_ns: Nanoseconds

    @cached_property
    def explained(self) -> Intervals:
        """Idle time of the device that the cost explains."""
        return self.ended_earlier(EMPTY)

    def ended_earlier(self, without: Intervals, *, repeats: bool = False) -> Intervals:
        """Idle time that ends earlier without the cost: at the end of each gap, as much as the device's lead grows there.

        Args:
            without: calls that the host makes no longer, and in which it waits no longer.
            repeats: the capture is of a loop: without the calls, the host is as far ahead of its device when the capture begins
                as when it ends.
        """
        if not len(self.length_ns) or not len(self.recording.start_ns):
            return EMPTY
        waits = self.recording.waits - without
        times_ns = np.concatenate((self.launched_ns, waits.end_ns))
        rows = np.concatenate([places(self.recording.start_ns, times, "right") for times in (self.launched_ns, waits.end_ns)])
        spent = self.recording.cost_before(rows, self.cost_ns) + without.before_ns(times_ns)
        at_launch, at_wait = np.split(spent, [len(self.launched_ns)])
        gained, ahead_ns = _gained(self, at_launch, waits, at_wait)
        if repeats:
            gained, _ = _gained(self, at_launch, waits, at_wait, ahead_ns)
        until = self.idle.before_ns(self.launched_ns)
        return self.idle & union(self.idle.when(until - np.rint(gained).astype(np.int64)), self.launched_ns)


def replay(recording: Recording, device_events: pa.Table, gaps: IdleGaps, work: DeviceWork, source: str) -> ProfilerCost:
    """What the profiler cost one rank.

    Args:
        recording: what it recorded on the threads that launch compute.
        device_events: of the same rank.
        gaps: in the device's compute.
        work: of the device.
        source: the profiler.
    """
    each = rates(source).on_host(recording)
    operator_ns = each.operator_ns + each.shapes_ns * recording.with_shapes
    # The last one is of the profiler's own work, which costs as long as it took.
    cost_ns = np.array([operator_ns, each.call_ns, each.annotation_ns, each.python_ns, each.runtime_ns, 0.0])
    idle = gaps.launch_starved - (work.communication - _beside_compute(device_events)) - work.memcpy - work.memset
    begin, end, event = _parts(gaps, device_events)
    length = idle.within_ns(begin, end)
    starved = np.flatnonzero(length)
    begin, end, event = begin[starved], end[starved], event[starved]
    launched = np.append(to_int64(device_events["launch_end_ns"]), NULL)[event]
    # What was launched before waited for something else, until it started.
    launched = np.where((launched > begin) & (launched < end), launched, end)
    ends = np.sort(device_events["end_ns"].to_numpy())
    return ProfilerCost(recording, each, cost_ns, ends, idle, length[starved], end, launched)


def recorded(cost: ProfilerCost, spans: Windows, iterations: pa.Table) -> pa.Table:
    """One row per window: what the events recorded on the launching threads cost the host, and where.

    `host_cost_ns`: of all events, and of each kind a column of its own; `explained_ns`: idle time of the device that the cost
    explains; `host_own_ns`: time of the host in the iteration, without that cost and without waiting for the device.
    """
    recording, cost_ns, each = cost.recording, cost.cost_ns, cost.rates
    first, last = (np.searchsorted(recording.start_ns, time_ns) for time_ns in (spans.start_ns, spans.end_ns))
    operators, _, annotations, frames, *_ = recording.counts(first, last).T.astype(np.float64)
    calls = np.isin(np.arange(len(cost_ns) - 1), (CATEGORIES.index("runtime"), ENQUEUES))
    costs = {
        "operators_cost_ns": operators * each.operator_ns,
        "shapes_cost_ns": operators * each.shapes_ns * recording.with_shapes,
        "cuda_calls_cost_ns": _cost_between(recording, cost_ns[:-1] * calls, first, last),
        "annotations_cost_ns": annotations * each.annotation_ns,
        "python_frames_cost_ns": frames * each.python_ns,
        "host_cost_ns": _cost_between(recording, cost_ns, first, last),
        "explained_ns": cost.explained.within_ns(spans.start_ns, spans.end_ns),
    }
    whole = {name: np.rint(times_ns).astype(np.int64) for name, times_ns in costs.items()}
    return pa.table({"iteration": spans.numbers, **whole, "host_own_ns": _host_own_ns(cost, spans, iterations)})


def _host_own_ns(cost: ProfilerCost, spans: Windows, iterations: pa.Table) -> pa.Array:
    """From an iteration's begin on the host to the next one's, without waits and the cost of recording; null where unknown."""
    if not iterations.num_rows:  # the span is that of the capture
        return pa.nulls(len(spans.start_ns), pa.int64())
    begin, until = until_next(iterations)
    first, last = (np.searchsorted(cost.recording.start_ns, time_ns) for time_ns in (begin, until))
    cost_ns = _cost_between(cost.recording, cost.cost_ns, first, last)
    own_ns = until - begin - cost.recording.waits.within_ns(begin, until) - cost_ns
    return pa.array(np.rint(own_ns), pa.int64())


def _cost_between(recording: Recording, cost_ns: _Float, first: NDArray[np.int64], last: NDArray[np.int64]) -> _Float:
    until = recording.cost_before(np.concatenate((first, last)), cost_ns)
    return until[len(first) :] - until[: len(first)]


def _parts(gaps: IdleGaps, device_events: pa.Table) -> tuple[Nanoseconds, Nanoseconds, NDArray[np.int64]]:
    """Begin and end of each part of a gap, and the row of what ends it; -1 for none.

    A copy to the host ends a part: a host that waits for it waits less if it is launched earlier.
    """
    copies = np.flatnonzero(rows_of(device_events["direction"], "DtoH"))
    began = device_events["start_ns"].to_numpy()[copies]
    inside = gaps.gaps.within_ns(began, began + 1) > 0
    end = np.concatenate((gaps.gaps.end_ns, began[inside]))
    event = np.concatenate((gaps.next_kernel, copies[inside]))
    order = np.argsort(end, kind="stable")
    end, event = end[order], event[order]
    begin = gaps.gaps.start_ns[np.searchsorted(gaps.gaps.end_ns, end)]
    begin[1:] = np.maximum(begin[1:], end[:-1])
    return begin, end, event


def _beside_compute(device_events: pa.Table) -> Intervals:
    """Communication of streams on which most of it overlaps kernels that were launched later."""
    start, end, launched = (to_int64(device_events[name]) for name in ("start_ns", "end_ns", "launch_end_ns"))
    computes = np.flatnonzero(rows_of(device_events["kind"], "compute"))
    own = np.flatnonzero(rows_of(device_events["kind"], "communication") & (launched != NULL))
    if not len(own) or not len(computes):
        return EMPTY
    computes = computes[np.argsort(start[computes], kind="stable")]
    last_launched = np.maximum.accumulate(launched[computes])
    first, until = (np.searchsorted(start[computes], time_ns[own]) for time_ns in (start, end))
    overlaps = (until > first) & (last_launched[np.maximum(until - 1, 0)] > launched[own])
    streams, place = np.unique(to_int64(device_events["stream"])[own], return_inverse=True)
    mostly = np.bincount(place, overlaps) > _MOST * np.bincount(place)
    mostly &= ~np.isin(streams, to_int64(device_events["stream"])[computes])
    rows = own[mostly[place]]
    return union(start[rows], end[rows])


def _gained(
    cost: ProfilerCost, spent_at_launch: _Float, waits: Intervals, spent_at_wait: _Float, ahead_ns: float = 0.0
) -> tuple[_Float, float]:
    """By how much the device's lead grows in each gap, from what the host had spent at its launch and at the end of each wait.

    And how far the host is ahead of the device at the end, if it is `ahead_ns` at the beginning.

    Between two waits, lead[n] = min(lead[n - 1] + length[n], host's lead at launch n). With `total`, the sum of lengths, that
    is a running minimum of the host's lead minus `total`.
    """
    length, end, launched, ends = cost.length_ns, cost.end_ns, cost.launched_ns, cost.ends_ns
    lead = np.zeros(len(length))
    total = np.concatenate(([0.0], np.cumsum(length)))
    # What each wait waited for, as far as the capture shows: the last event on the device that ended before the wait did.
    # The rest of the call takes as long as it took.
    last = np.searchsorted(ends, waits.end_ns, side="right") - 1
    until_ns = np.where(last >= 0, ends[last], waits.start_ns) if len(ends) else waits.start_ns
    waited_ns, slack_ns = np.maximum(until_ns - waits.start_ns, 0), np.maximum(waits.start_ns - until_ns, 0)
    # The host's lead at a time is what it had spent then plus this, by the number of waits before.
    base = np.full(len(waits) + 1, ahead_ns)
    waits_before = np.searchsorted(waits.end_ns, launched, side="right")
    done = np.searchsorted(end, until_ns, side="right")
    bounds = np.concatenate(([0], np.maximum.accumulate(done), [len(length)])).astype(np.int64)
    device_lead, host_lead = 0.0, 0.0
    for wait, (first, until) in enumerate(pairwise(bounds.tolist())):
        if until > first:
            gaps = slice(first, until)
            of_host = base[waits_before[gaps]] + spent_at_launch[gaps] + (end[gaps] - launched[gaps])
            so_far = total[first + 1 : until + 1]
            lead[gaps] = so_far + np.minimum(device_lead - total[first], np.minimum.accumulate(of_host - so_far))
            device_lead, host_lead = lead[until - 1], of_host[-1]
        if wait < len(waits):
            of_host_then = base[wait] + spent_at_wait[wait]
            base[wait + 1] = min(of_host_then + waited_ns[wait], device_lead + slack_ns[wait]) - spent_at_wait[wait]
    return np.clip(np.diff(lead, prepend=0.0), 0.0, length), max(host_lead - device_lead, 0.0)
