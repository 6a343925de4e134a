"""Why one rank's device did not compute: the causes of its idle time.

`idle_causes` cuts the parts of `idle_gaps`: starved time by what the host did. Each nanosecond belongs to one cause:

- starved_beside_communication: communication ran, and ended before the next kernel started. Neither the host nor communication
  alone is responsible. If the host was in a call that waited for the device, the time is blocked_by_communication instead.
- checkpoint_stall, data_loading: a launching thread was in such a range (`host`), or saved outside of one (`saving`). In a
  data-loading range, the time in the call of a copy or synchronisation belongs to that call. Time after a range, as below.
- profiler: the profiler recorded that it did work of its own.
- garbage_collection, recompilation: a launching thread was in such a range (`host`), or had been in one, as for host_sync.
- initialization: it set up the driver or a library on first use (`initialization`).
- host_sync, pageable_copy, allocator_churn: time in such a call, and after it. A call that holds the host for D delays what is
  launched after it by D. So at most D of the starved time after it belongs to it. Delays of calls in a row (`_IN_A_ROW_NS`) are
  added up, others are not: the one that reaches farthest counts. Time goes to the last call before it. A host that then records
  nothing for long does something else: that time does not belong to the call. After a call that waits for the device, the next
  launch takes its time however short the wait was: host_sync also has up to `_GET_GOING_NS` of a gap in which such a call ends.
  Calls to the allocator, and waits that come `SEVERAL` times, also have the time that would not be lost without them:
  `profiler_cost.ProfilerCost` shows how far ahead the host would be.
- small_kernels: the kernel that ends the gap is in a run of kernels that on average take the device less time than launching
  one takes the host. Dependency-stalled time before such a kernel belongs here too.
- host_pause: the host recorded nothing for at least `host.SILENT_NS`.
- host_launch: the rest. The host was late for no recorded reason.

Blocked time is cut by what ran: communication or copies, and of these pageable ones (pageable_copy), and memsets and copies
within the device. Starved time under a copy or memset that no call or range above explains is there too: the device works.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.facts.device import IdleGaps, Windows
from bridge_profiling.facts.host import HostActivity, Operators
from bridge_profiling.facts.host_ranges import Ranges
from bridge_profiling.facts.intervals import EMPTY, Intervals, Nanoseconds, rows_of, union
from bridge_profiling.facts.kernels import in_small_runs
from bridge_profiling.facts.profiler_cost import ProfilerCost
from bridge_profiling.facts.types import schema
from bridge_profiling.traces.tables import NULL, to_int64

#: A shorter call delays the host too little to matter.
HELD_NS = 20_000

#: Calls that follow one another after at most so long are one stop of the host.
_IN_A_ROW_NS = 200_000

#: A host that waits for its device so many times in an iteration never gets far ahead of it.
OFTEN = 10

#: A loop has fewer waits, for its loss, its log and the norm of its gradients: Megatron-Core's has five, now and then one more.
SEVERAL = 5.5

#: The most time from the end of a host's wait to its next launch: Python, an operator or two and the launch.
_GET_GOING_NS = 200_000

#: Names per cause and iteration that get a row each; the others share one row without a name.
_NAMES = 5

#: Intervals and ranges that are counted at a time.
_PIECES = 1 << 20

#: Ranges per iteration with a loss of their own; the last one includes those after it.
_RANGES = 256


class Cause(StrEnum):
    """Why a device did not compute, and the part of an iteration that such time is in."""

    part: str

    data_loading = "data_loading", "data_loading_ns"
    host_sync = "host_sync", "host_sync_ns"
    pageable_copy = "pageable_copy", "pageable_copy_ns"
    checkpoint_stall = "checkpoint_stall", "checkpoint_ns"
    profiler = "profiler", "profiler_ns"
    garbage_collection = "garbage_collection", "host_launch_ns"
    recompilation = "recompilation", "host_launch_ns"
    initialization = "initialization", "host_launch_ns"
    allocator_churn = "allocator_churn", "host_sync_ns"
    small_kernels = "small_kernels", "small_kernels_ns"
    host_pause = "host_pause", "host_launch_ns"
    host_launch = "host_launch", "host_launch_ns"
    starved_beside_communication = "starved_beside_communication", "communication_ns"
    blocked_by_communication = "blocked_by_communication", "communication_ns"
    blocked_by_copy = "blocked_by_copy", "copy_ns"
    blocked_by_device_copy = "blocked_by_device_copy", "copy_ns"
    dependency_stalled = "dependency_stalled", "dependency_stalled_ns"

    def __new__(cls, name: str, part: str = "") -> Self:
        """A cause with its part of an iteration."""
        found = str.__new__(cls, name)
        found._value_, found.part = name, part
        return found


#: Causes that ranks can lose time to in turns: one rank in one range, another in the next.
_IN_TURNS = (Cause.data_loading, Cause.checkpoint_stall, Cause.garbage_collection, Cause.recompilation)

#: Causes that starved time in their ranges belongs to, the first one first: torch.compile collects garbage, too.
_IN_RANGES = (
    *(Cause.checkpoint_stall, Cause.profiler, Cause.recompilation, Cause.garbage_collection, Cause.initialization),
    *(Cause.pageable_copy, Cause.allocator_churn, Cause.host_sync, Cause.data_loading),
)

#: Causes that starved time after their ranges belongs to.
_DELAYING = (
    *(Cause.checkpoint_stall, Cause.data_loading, Cause.host_sync, Cause.pageable_copy, Cause.allocator_churn),
    *(Cause.garbage_collection, Cause.recompilation),
)


def idle_causes(
    gaps: IdleGaps,
    device_events: pa.Table,
    host: HostActivity,
    operators: Operators,
    spans: Windows,
    profiler: ProfilerCost,
) -> pa.Table:
    """One row per window, cause and name, most time first. A cause's rows add up to its time.

    Columns: iteration; between: whether the row is about the time from the end of that iteration's window to the start of the
    next one; cause; name: of the range or call, else "before" the operator that launched the next kernel, null for the names
    that cost less than others; count: gaps, or pieces of them; start_ns: of the longest; lost_ns: time without compute; calls
    and host_ns: ranges or calls of that name that started in the window (of those that wait for the device, only `_stalling`
    ones) and the launching threads' time in them, null if only gaps show the cause; lost_each_ns: of data loading
    and saving, on the first of the cause's rows, the loss in each range, in order; profiler_ns: likewise, the part of all of
    them that the cost of recording explains.
    """
    evidence = {Cause(name): ranges for name, ranges in host.ranges.items()}
    stalling = _stalling(evidence[Cause.host_sync], gaps.gaps)
    numbers, iterations = spans.numbers, len(spans.start_ns)
    number, between = pa.chunked_array([numbers, numbers[:-1]]), np.arange(2 * iterations - 1) >= iterations
    firsts = np.concatenate((spans.start_ns, spans.end_ns[:-1]))
    lasts = np.concatenate((spans.end_ns, spans.start_ns[1:]))
    names, launched_by = _launchers(gaps, device_events, operators)
    tables = [_IDLE_CAUSES.empty_table()]
    often = len(stalling.name) >= SEVERAL * iterations
    times = _times_by_cause(gaps, device_events, host, evidence, profiler, often=often, repeats=iterations > 1)
    evidence[Cause.host_sync] = stalling
    for cause, time in times.items():
        ranges = evidence.get(cause)
        if not len(time) and (ranges is None or not len(ranges.name)):
            continue  # most causes of most ranks
        if ranges is None:
            code = launched_by[np.searchsorted(gaps.gaps.end_ns, time.end_ns)]
            pieces = _Pieces(names, _Spans(time.start_ns, time.end_ns, code))
        else:
            pieces = _in_ranges(time, ranges)
        explained = time & profiler.explained
        explained_ns = explained.before_ns(lasts) - explained.before_ns(firsts)
        for windows in pieces.portions(firsts, lasts):
            window, columns = pieces.by_name(firsts[windows], lasts[windows])
            window += windows.start
            opens = np.diff(window, prepend=-1) > 0
            columns |= {"iteration": number.take(window), "between": between[window], "cause": [str(cause)] * len(window)}
            columns["profiler_ns"] = pa.array(explained_ns[window], mask=~opens)
            each = zip(window.tolist(), (opens & (cause in _IN_TURNS)).tolist(), strict=True)
            columns["lost_each_ns"] = [pieces.each_ns(firsts[at], lasts[at]) if listed else None for at, listed in each]
            tables.append(pa.Table.from_pydict(columns, schema=_IDLE_CAUSES))
    return pa.concat_tables(tables).combine_chunks()


_IDLE_CAUSES = schema(
    *("iteration", "between", "cause", "name", "count", "start_ns"),
    *("lost_ns", "calls", "host_ns", "lost_each_ns", "profiler_ns"),
    lost_each_ns=pa.list_(pa.int64()),
)


def _times_by_cause(
    gaps: IdleGaps,
    device_events: pa.Table,
    host: HostActivity,
    evidence: Mapping[Cause, Ranges],
    profiler: ProfilerCost,
    *,
    often: bool,
    repeats: bool,
) -> dict[Cause, Intervals]:
    """The time of every cause; the sets are disjoint and together are the gaps.

    Args:
        evidence: ranges that show a cause.
        often: the host waits for the device several times in an iteration.
        repeats: several iterations are captured.
    """
    start, end = (device_events[name].to_numpy() for name in ("start_ns", "end_ns"))
    communicates, copies = rows_of(device_events["kind"], "communication"), rows_of(device_events["kind"], "memcpy", "memset")
    ended_in_gap = communicates & (gaps.gaps.within_ns(end - 1, end) > 0)
    while_communicating = gaps.launch_starved & union(start[ended_in_gap], end[ended_in_gap])
    spent = {cause: ranges.time for cause, ranges in evidence.items()}
    waiting_call = while_communicating & spent[Cause.host_sync]
    times = {Cause.starved_beside_communication: while_communicating - waiting_call}
    left = gaps.launch_starved - while_communicating

    def take(cause: Cause, time: Intervals) -> None:
        nonlocal left
        times[cause] = times.get(cause, EMPTY) | (left & time)
        left = left - time

    for cause in _IN_RANGES:
        take(cause, spent[cause])
    # The device works: a launch that came earlier would have waited.
    copied = union(start[copies], end[copies])
    copying = left & copied
    left = left - copying
    small = np.append(in_small_runs(device_events), False)[gaps.next_kernel]
    before_small = Intervals(gaps.gaps.start_ns[small], gaps.gaps.end_ns[small])
    take(Cause.host_sync, _opened_by(gaps.gaps, evidence[Cause.host_sync].end_ns) - host.silent)
    for cause in (Cause.allocator_churn, *([Cause.host_sync] if often else [])):
        if len(evidence[cause].name):
            take(cause, profiler.ended_earlier(spent[cause], repeats=repeats) - profiler.explained - host.silent)
    take(Cause.small_kernels, before_small)
    stops = {cause: evidence[cause].lasting(HELD_NS) for cause in _DELAYING}
    inside = times[Cause.allocator_churn]
    for cause in _IN_TURNS:
        inside = inside | times[cause]
    for cause, time in _delayed_by(stops, gaps.launch_starved - copying, inside).items():
        take(cause, time - host.silent)
    take(Cause.host_pause, host.silent)
    times[Cause.host_launch] = left
    communication = union(start[communicates], end[communicates])
    # What it waited for may have ended before its launch: then nothing ran.
    ran = (communication | copied).within_ns(gaps.blocked.start_ns, gaps.blocked.end_ns) > 0
    blocked = Intervals(gaps.blocked.start_ns[ran], gaps.blocked.end_ns[ran])
    by_copy = _by_copy(blocked, communication, copied)
    times[Cause.blocked_by_communication] = (blocked - by_copy) | waiting_call
    # Saving copies states to the host: these copies have a reason.
    times[Cause.checkpoint_stall] |= by_copy & spent[Cause.checkpoint_stall]
    by_copy = by_copy - spent[Cause.checkpoint_stall]
    times[Cause.pageable_copy] |= by_copy & host.pageable_device
    within = rows_of(device_events["kind"], "memset") | (copies & rows_of(device_events["direction"], "DtoD"))
    by_copy, others = by_copy - host.pageable_device, copies & ~within
    between_memories = _by_copy(blocked, communication, union(start[others], end[others]))
    times[Cause.blocked_by_copy] = (by_copy & between_memories) - union(start[within], end[within])
    # With copies that ran as the host was late: nothing shows that compute would have waited for them.
    times[Cause.blocked_by_device_copy] = (by_copy - times[Cause.blocked_by_copy]) | copying
    stalled = gaps.dependency_stalled | (gaps.blocked - blocked)
    times[Cause.small_kernels] |= stalled & before_small
    times[Cause.dependency_stalled] = stalled - before_small
    return times


def _opened_by(gaps: Intervals, ends_ns: Nanoseconds) -> Intervals:
    """From the last of some times in each gap to the gap's end, or to `_GET_GOING_NS` later."""
    ascending = np.sort(ends_ns)
    last = np.searchsorted(ascending, gaps.end_ns) - 1
    inside = (last >= 0) & (ascending[np.maximum(last, 0)] >= gaps.start_ns) if len(ascending) else np.zeros(len(gaps), bool)
    begin = ascending[last[inside]]
    return union(begin, np.minimum(gaps.end_ns[inside], begin + _GET_GOING_NS))


def _stalling(calls: Ranges, gaps: Intervals) -> Ranges:
    """Calls that held the host for `HELD_NS`, and the last one in each gap if the device then idles for so long."""
    if not len(calls.name) or not len(gaps):
        return calls.lasting(HELD_NS)
    gap = np.minimum(np.searchsorted(gaps.end_ns, calls.end_ns, side="right"), len(gaps) - 1)
    opens = (gaps.start_ns[gap] <= calls.end_ns) & (gaps.end_ns[gap] - calls.end_ns >= HELD_NS)
    last = opens & np.append((gap[1:] != gap[:-1]) | ~opens[1:], True)
    return calls[last | (calls.end_ns - calls.start_ns >= HELD_NS)]


def _delayed_by(stops: Mapping[Cause, Ranges], starved: Intervals, inside: Intervals) -> dict[Cause, Intervals]:
    """Starved time that calls and ranges delayed: after each as much as it held the host, less what starved `inside` of it.

    A host that stops again is as late as the longest stop made it, less what starved since. So a later stop does not end that.
    """
    start = np.concatenate([ranges.start_ns for ranges in stops.values()])
    end = np.concatenate([ranges.end_ns for ranges in stops.values()])
    cause = np.repeat(np.arange(len(stops)), [len(ranges.start_ns) for ranges in stops.values()])
    order = np.argsort(end, kind="stable")
    start, end, cause = start[order], end[order], cause[order]
    if not len(end) or not len(starved):
        return {}
    next_start = np.append(np.maximum(start[1:], end[:-1]), np.iinfo(np.int64).max)
    held = np.maximum(end - start - inside.within_ns(start, end), 0)
    before = starved.before_ns(end)
    reached = np.maximum.accumulate(_reached(before, held, np.append(True, start[1:] - end[:-1] > _IN_A_ROW_NS)))
    until = np.minimum(np.where(reached > before, starved.when(reached), end), next_start)
    return {name: union(end[cause == place], until[cause == place]) for place, name in enumerate(stops)}


def _reached(before: Nanoseconds, held: Nanoseconds, first: NDArray[np.bool_]) -> Nanoseconds:
    """How much starved time there is until the delay of each stop has passed, with those before it in the same row.

    Args:
        before: starved time before each stop's end.
        held: how long it held the host.
        first: whether it begins a row.
    """
    row = np.cumsum(first) - 1
    total = np.cumsum(held)
    # The largest so far of each row: rows are set apart by more than any two values differ.
    free = before - (total - held)
    apart = row * (np.ptp(free) + 1)
    return total + np.maximum.accumulate(free + apart) - apart


def _by_copy(blocked: Intervals, communication: Intervals, copies: Intervals) -> Intervals:
    """Blocked time due to copies and no communication. An interval without communication belongs to its copies as a whole."""
    alone = (blocked & copies) - communication
    communicating = communication.within_ns(blocked.start_ns, blocked.end_ns)
    whole = (communicating == 0) & (copies.within_ns(blocked.start_ns, blocked.end_ns) > 0)
    return alone | Intervals(blocked.start_ns[whole], blocked.end_ns[whole])


@dataclass(frozen=True)
class _Spans(Intervals):
    """Intervals of time by start, each with the code of a name. Those of ranges may overlap."""

    code: NDArray[np.int64]

    @cached_property
    def _reached(self) -> Nanoseconds:
        return np.maximum.accumulate(self.end_ns)

    def near(self, start_ns: Nanoseconds, end_ns: Nanoseconds) -> tuple[Nanoseconds, Nanoseconds]:
        """The place of the first span that can be between two moments each, and the number of those that can."""
        first = np.searchsorted(self._reached, start_ns, side="right")
        return first, np.maximum(np.searchsorted(self.start_ns, end_ns) - first, 0)

    def between(
        self, start_ns: Nanoseconds, end_ns: Nanoseconds
    ) -> tuple[NDArray[np.int64], Nanoseconds, Nanoseconds, NDArray[np.int64]]:
        """Windows, starts, lengths and codes of what is between two moments each, cut there."""
        window, place = _numbered(*self.near(start_ns, end_ns))
        inside = self.end_ns[place] > start_ns[window]
        window, place = window[inside], place[inside]
        begin = np.maximum(self.start_ns[place], start_ns[window])
        return window, begin, np.minimum(self.end_ns[place], end_ns[window]) - begin, self.code[place]


_NO_RANGES = _Spans(EMPTY.start_ns, EMPTY.end_ns, np.empty(0, np.int64))


@dataclass(frozen=True)
class _Pieces:
    """Time of a cause and the host's ranges that show it, each with an index into the names.

    Args:
        names: None stands for anything without a name.
        time: without compute.
        host: `_NO_RANGES` if gaps alone show the cause.
    """

    names: Sequence[str | None]
    time: _Spans
    host: _Spans = _NO_RANGES

    def portions(self, start_ns: Nanoseconds, end_ns: Nanoseconds) -> Iterator[slice]:
        """Windows in a row that have up to `_PIECES` intervals and ranges together, or are a single one."""
        near = self.time.near(start_ns, end_ns)[1] + self.host.near(start_ns, end_ns)[1]
        cuts = (np.flatnonzero(np.diff(np.cumsum(near) // _PIECES)) + 1).tolist()
        return (slice(first, last) for first, last in pairwise([0, *cuts, len(near)]))

    def by_name(self, start_ns: Nanoseconds, end_ns: Nanoseconds) -> tuple[NDArray[np.int64], dict[str, Any]]:
        """Columns of `idle_causes`, and the window of each row.

        A window, between two moments, has a row for each of the names with most time in it, and one for the others.
        """
        window, begin, length, code = self.time.between(start_ns, end_ns)
        in_window, _, spent, spent_in = self.host.between(start_ns, end_ns)
        first, last = (np.searchsorted(self.host.start_ns, moment) for moment in (start_ns, end_ns))
        called_in, call = _numbered(first, np.maximum(last - first, 0))
        pairs = [window * len(self.names) + code, in_window * len(self.names) + spent_in]
        pairs.append(called_in * len(self.names) + self.host.code[call])
        used, place = np.unique(np.concatenate(pairs), return_inverse=True)
        of_time, of_host, of_call = np.split(place, np.cumsum([len(each) for each in pairs[:2]]))
        lost, host = np.bincount(of_time, length, len(used)), np.bincount(of_host, spent, len(used))
        # Pairs of a window and a name, those of each window by time; the last of the rows is of several names.
        order = np.lexsort((-host, -lost, used // len(self.names)))
        order = order[(lost[order] > 0) | (host[order] > 0)]
        window, name = np.divmod(used[order], len(self.names))
        opens = np.flatnonzero(np.diff(window, prepend=-1))
        in_order = np.arange(len(order)) - np.repeat(opens, np.diff(opens, append=len(order)))
        row = np.cumsum(in_order <= _NAMES) - 1
        rows = int(row[-1]) + 1 if len(row) else 0
        row_of = np.full(len(used), -1)
        row_of[order] = row
        shown = np.flatnonzero(row_of[of_time] >= 0)
        mine = row_of[of_time[shown]]
        by_length = np.lexsort((-length[shown], mine))
        known, longest = np.unique(mine[by_length], return_index=True)
        start = np.full(rows, NULL)
        start[known] = begin[shown[by_length[longest]]]
        head, several = in_order <= _NAMES, np.bincount(row, minlength=rows) > 1
        no_ranges = self.host is _NO_RANGES
        calls = np.bincount(of_call, minlength=len(used))[order]
        return window[head], {
            "name": [
                None if many else self.names[code] for code, many in zip(name[head].tolist(), several.tolist(), strict=True)
            ],
            "count": np.bincount(mine, minlength=rows),
            "start_ns": pa.array(start, mask=start == NULL),
            "lost_ns": np.bincount(row, lost[order], rows),
            "calls": pa.nulls(rows) if no_ranges else np.bincount(row, calls, rows).astype(np.int64),
            "host_ns": pa.nulls(rows) if no_ranges else np.bincount(row, host[order], rows),
        }

    def each_ns(self, start_ns: int, end_ns: int) -> list[int]:
        """The loss in each range that starts between two moments, in order."""
        began = slice(*np.searchsorted(self.host.start_ns, (start_ns, end_ns)))
        lost = self.time.within_ns(self.host.start_ns[began], self.host.end_ns[began])
        return [*lost[: _RANGES - 1].tolist(), *([int(lost[_RANGES - 1 :].sum())] if len(lost) >= _RANGES else [])]


def _launchers(gaps: IdleGaps, device_events: pa.Table, operators: Operators) -> tuple[list[str | None], NDArray[np.int64]]:
    """Distinct names of the operators that launched the kernels which end the gaps, and the index of each gap's."""
    operator = np.append(to_int64(device_events["operator"]), NULL)[gaps.next_kernel]
    code, names = operators.codes_of(operator), operators.names
    # By the first operator of each name, as they are numbered.
    order = np.argsort(operator, kind="stable")
    used, first, place = np.unique(code[order], return_index=True, return_inverse=True)
    ranked = np.argsort(first)
    index = np.empty(len(code), np.int64)
    index[order] = np.argsort(ranked)[place]
    return [None if each < 0 else f"before {names[each]}" for each in used[ranked].tolist()], index


def _in_ranges(time: Intervals, ranges: Ranges) -> _Pieces:
    if not len(ranges.name):
        return _Pieces([None], _Spans(time.start_ns, time.end_ns, np.zeros(len(time), np.int64)))
    names, codes = np.unique(ranges.name.astype(str), return_inverse=True)
    # Time in a range belongs to the last one that started; time after a call, to the call before it.
    last = np.maximum(np.searchsorted(ranges.start_ns, time.start_ns, side="right") - 1, 0)
    spans = _Spans(time.start_ns, time.end_ns, codes[last])
    return _Pieces(names.tolist(), spans, _Spans(ranges.start_ns, ranges.end_ns, codes))


def _numbered(first: NDArray[np.int64], count: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Numbers that follow one another from each of the first ones, with the place of that one."""
    place = np.repeat(np.arange(len(count)), count)
    return place, np.arange(len(place)) + np.repeat(first - (np.cumsum(count) - count), count)
