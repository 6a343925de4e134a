"""What each rank's compute-absent time is owed to, cut by what the host did.

`launches` says that a device was starved, blocked or stalled; here the starved time is cut once more. Each nanosecond belongs
to one cause, and the causes together are the compute-absent time:

- beside communication: the host was late, but communication ran that was over before the next kernel began; neither alone is to
  blame, so a host-side cause is never given time in which communication ran that compute may have waited for. Where the host
  itself waited for the device meanwhile, in a call, communication held it up as well, and the time counts as blocked by it.
- checkpoint_stall, data_loading: a launching thread was in a range of that kind (`host_evidence`). Of a data-loading range,
  time in a copy's or synchronisation's own call is the call's.
- profiler: the profiler recorded that it did work of its own there.
- small_kernels: gaps before kernels in a run of kernels which take the device less time in the mean than a launch takes the
  host: no host stays ahead of those. What the device itself needs between two such kernels belongs to it too.
- host_sync, pageable_copy: time in such a call, and what follows from it. A call that holds the host for D takes a lead of D
  from it: without the call, everything launched after it comes D earlier. So of the starved time between one such call and the
  next, at most the first D are owed to it. Leads are not added up: where several calls could go, the last one counts. A host
  that then records nothing at all for long does something else, and that time is not owed to the call.
- host_launch: the rest. The host was late for no reason that the capture names.

Blocked time is cut by what ran: communication, or copies. Of these, pageable ones count as pageable_copy, and those within the
device apart, as they are work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.analysis.breakdown import rows_of
from bridge_profiling.analysis.host_evidence import HostEvidence, Ranges, names_of_operators
from bridge_profiling.analysis.intervals import EMPTY, Intervals, Nanoseconds, union
from bridge_profiling.analysis.launches import ComputeAbsent
from bridge_profiling.traces.tables import NULL


class Cause(StrEnum):
    """Why a device did not compute."""

    data_loading = "data_loading"
    host_sync = "host_sync"
    pageable_copy = "pageable_copy"
    checkpoint_stall = "checkpoint_stall"
    profiler = "profiler"
    small_kernels = "small_kernels"
    host_launch = "host_launch"
    starved_beside_communication = "starved_beside_communication"
    blocked_by_communication = "blocked_by_communication"
    blocked_by_copy = "blocked_by_copy"
    blocked_by_device_copy = "blocked_by_device_copy"
    dependency_stalled = "dependency_stalled"


#: What launching a kernel takes the host, at the least; 4.5 to 6 µs on a host of H200s.
LAUNCH_NS = 5_000

#: Kernels in a row, of which the mean decides whether a host can keep ahead of them.
_RUN = 32

#: A call that holds the host for less takes no lead from it that is worth a word.
HELD_NS = 20_000


@dataclass(frozen=True)
class Absences:
    """Compute-absent time by cause; the sets are apart.

    Args:
        times: of every cause.
        gap_end_ns: where the gaps between compute end, ascending.
        launched_by: place among the launchers of the operator whose kernel ends each gap.
        launchers: names of operators; None where none is known.
    """

    times: Mapping[Cause, Intervals]
    gap_end_ns: Nanoseconds
    launched_by: NDArray[np.int64]
    launchers: Sequence[str | None]


def absences(absent: ComputeAbsent, device_events: pa.Table, host_events: pa.Table, host: HostEvidence) -> Absences:
    """Cut a rank's compute-absent time by cause.

    Args:
        absent: why its device did not compute.
        device_events: `traces.tables.DEVICE_EVENTS`.
        host_events: the columns of `host_evidence.COLUMNS`.
        host: what its launching threads did.
    """
    gaps = absent.launch_starved | absent.blocked | absent.dependency_stalled
    start, end = (device_events[name].to_numpy() for name in ("start_ns", "end_ns"))
    communicates, copies = rows_of(device_events["kind"], "communication"), rows_of(device_events["kind"], "memcpy")
    over = communicates & (gaps.within_ns(end - 1, end) > 0)
    kernel = _kernel_after(gaps, device_events)
    beside = absent.launch_starved & union(start[over], end[over])
    holding = beside & host.synchronizing.time
    times = {Cause.starved_beside_communication: beside - holding}
    left = absent.launch_starved - beside

    def take(cause: Cause, time: Intervals) -> None:
        nonlocal left
        if not len(time):
            times.setdefault(cause, EMPTY)
            return
        times[cause] = times.get(cause, EMPTY) | (left & time)
        left = left - time

    take(Cause.checkpoint_stall, host.checkpoint.time)
    take(Cause.profiler, host.profiler.time)
    take(Cause.pageable_copy, host.pageable.time)
    take(Cause.host_sync, host.synchronizing.time)
    take(Cause.data_loading, host.data_loading.time)
    small = _small(device_events)
    ended_by_small = (kernel >= 0) & small[np.maximum(kernel, 0)] if len(small) else np.zeros(len(gaps), bool)
    before_small = Intervals(gaps.start_ns[ended_by_small], gaps.end_ns[ended_by_small])
    take(Cause.small_kernels, before_small)
    stops = {Cause.host_sync: host.synchronizing.held(HELD_NS), Cause.pageable_copy: host.pageable.held(HELD_NS)}
    for cause, time in _owed_to_stops(left - host.silent, stops).items():
        take(cause, time - host.silent)
    times[Cause.host_launch] = left
    blocked_by_copy = _by_copy(absent.blocked, union(start[communicates], end[communicates]), union(start[copies], end[copies]))
    times[Cause.blocked_by_communication] = (absent.blocked - blocked_by_copy) | holding
    times[Cause.pageable_copy] |= blocked_by_copy & host.pageable_device
    within = copies & rows_of(device_events["direction"], "DtoD")
    times[Cause.blocked_by_device_copy] = (blocked_by_copy - host.pageable_device) & union(start[within], end[within])
    times[Cause.blocked_by_copy] = blocked_by_copy - host.pageable_device - times[Cause.blocked_by_device_copy]
    times[Cause.small_kernels] |= absent.dependency_stalled & before_small
    times[Cause.dependency_stalled] = absent.dependency_stalled - before_small
    operator = np.append(device_events["operator"].cast(pa.int64()).fill_null(NULL).to_numpy(), NULL)[kernel]
    ids, launched_by = np.unique(operator, return_inverse=True)
    names = names_of_operators(host_events, ids)
    return Absences(times, gaps.end_ns, *_told_apart(names, launched_by))


def _told_apart(names: Sequence[str | None], code: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[str | None]]:
    """Codes of equal names made equal, and the distinct names."""
    distinct = list(dict.fromkeys(names))
    place = {name: number for number, name in enumerate(distinct)}
    return np.array([place[name] for name in names], np.int64)[code], distinct


def _kernel_after(gaps: Intervals, device_events: pa.Table) -> NDArray[np.int64]:
    """Row of the compute kernel that ends each gap; -1 for none."""
    start, end = (device_events[name].to_numpy() for name in ("start_ns", "end_ns"))
    rows = np.flatnonzero(rows_of(device_events["kind"], "compute") & (end > start))
    rows = rows[np.argsort(start[rows], kind="stable")]
    if not len(rows):
        return np.full(len(gaps), -1)
    found = rows[np.minimum(np.searchsorted(start[rows], gaps.end_ns), len(rows) - 1)]
    return np.where(start[found] == gaps.end_ns, found, -1)


def _small(device_events: pa.Table) -> NDArray[np.bool_]:
    """Which compute kernels are in a run of kernels that take the device less time than launching them takes the host."""
    found = np.zeros(device_events.num_rows, bool)
    rows = np.flatnonzero(rows_of(device_events["kind"], "compute"))
    start, end = (device_events[name].to_numpy()[rows] for name in ("start_ns", "end_ns"))
    rows = rows[np.argsort(start, kind="stable")]
    took = (end - start)[np.argsort(start, kind="stable")]
    if len(rows) < _RUN:
        return found
    sums = np.concatenate(([0], np.cumsum(took)))
    small_run = (sums[_RUN:] - sums[:-_RUN]) < _RUN * LAUNCH_NS
    # A kernel is in such a run when any run that it is part of is one.
    begins = np.concatenate(([0], np.cumsum(small_run)))
    place = np.arange(len(rows))
    first, last = np.maximum(place - _RUN + 1, 0), np.minimum(place, len(small_run) - 1)
    found[rows] = (begins[last + 1] - begins[first]) > 0
    return found


def _owed_to_stops(left: Intervals, stops: Mapping[Cause, Ranges]) -> dict[Cause, Intervals]:
    """Of starved time what is owed to calls that held the host: after each as much as it held it, until the next."""
    start = np.concatenate([ranges.start_ns for ranges in stops.values()])
    end = np.concatenate([ranges.end_ns for ranges in stops.values()])
    cause = np.repeat(np.arange(len(stops)), [len(ranges.start_ns) for ranges in stops.values()])
    order = np.argsort(end, kind="stable")
    start, end, cause = start[order], end[order], cause[order]
    if not len(end) or not len(left):
        return {}
    next_start = np.append(np.maximum(start[1:], end[:-1]), np.iinfo(np.int64).max)
    until = np.minimum(_when(left, left.before_ns(end) + (end - start)), next_start)
    return {name: union(end[cause == place], until[cause == place]) for place, name in enumerate(stops)}


def _when(intervals: Intervals, amount_ns: Nanoseconds) -> Nanoseconds:
    """When so much of a set has passed; the end of the set where it holds less."""
    lengths = np.cumsum(intervals.end_ns - intervals.start_ns)
    place = np.minimum(np.searchsorted(lengths, amount_ns), len(lengths) - 1)
    return intervals.end_ns[place] - np.maximum(lengths[place] - amount_ns, 0)


def _by_copy(blocked: Intervals, communication: Intervals, copies: Intervals) -> Intervals:
    """Of blocked time what copies, and no communication, blocked; what nothing ran in goes with what did in its interval."""
    alone = (blocked & copies) - communication
    communicating = communication.within_ns(blocked.start_ns, blocked.end_ns)
    whole = (communicating == 0) & (copies.within_ns(blocked.start_ns, blocked.end_ns) > 0)
    return alone | Intervals(blocked.start_ns[whole], blocked.end_ns[whole])
