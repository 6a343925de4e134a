"""Ranges of the threads that launch compute, also those that have no range of their own but show in what a thread does.

- Saving: it copies a model's states to the host, one after the other. `torch.save` copies each tensor to pageable memory,
  waits, and writes it, so that the host launches no compute until it is done. `torch.distributed.checkpoint` copies to
  page-locked memory.
- Initialization: on first use it sets up the driver or a library, such as contexts, handles, modules with kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.facts.device import Windows
from bridge_profiling.facts.intervals import EMPTY, Intervals, Nanoseconds, outermost, rows_of, union
from bridge_profiling.facts.names import SYNCHRONIZING, WHOLE
from bridge_profiling.traces.tables import NULL, to_int64


@dataclass(frozen=True)
class Ranges:
    """Named ranges of the launching threads, by start."""

    name: NDArray[np.object_]
    start_ns: Nanoseconds
    end_ns: Nanoseconds

    @property
    def time(self) -> Intervals:
        """When the host was in any of them."""
        return union(self.start_ns, self.end_ns)

    def lasting(self, least_ns: int) -> Ranges:
        """The ranges that last at least so long."""
        return self[self.end_ns - self.start_ns >= least_ns]

    def __getitem__(self, rows: NDArray[np.bool_] | NDArray[np.int64]) -> Ranges:
        return Ranges(self.name[rows], self.start_ns[rows], self.end_ns[rows])


NO_RANGES = Ranges(np.empty(0, object), EMPTY.start_ns, EMPTY.end_ns)


def launching_threads(device_events: pa.Table) -> list[int]:
    """Threads that launch compute; none if no launch is recorded."""
    computes = rows_of(device_events["kind"], "compute") & device_events["launch_thread"].is_valid().to_numpy()
    found: list[int] = np.unique(to_int64(device_events["launch_thread"])[computes]).tolist()
    return found


def on_threads(host_events: pa.Table, threads: Sequence[int]) -> NDArray[np.bool_]:
    """Which host events are on some threads; all of them if there are none."""
    thread = to_int64(host_events["thread"])
    # Few threads launch: a comparison with each takes a fifth of `np.isin`.
    return np.logical_or.reduce([thread == one for one in threads]) if threads else np.ones(len(thread), bool)


def outermost_ranges(host_events: pa.Table, rows: NDArray[np.bool_]) -> Ranges:
    """The chosen events that are inside no other chosen one."""
    found = host_events.filter(pa.array(rows))
    start, end = to_int64(found["start_ns"]), to_int64(found["end_ns"])
    return Ranges(np.array(found["name"].to_pylist(), object), start, end)[outermost(start, end)]


def joined(one: Ranges, other: Ranges) -> Ranges:
    """Both, by start."""
    both = (np.concatenate(pair) for pair in zip(vars(one).values(), vars(other).values(), strict=True))
    ranges = Ranges(*both)
    return ranges[np.argsort(ranges.start_ns, kind="stable")]


#: The name of a pause that no range explains, where other pauses have one.
NOTHING_RECORDED = "nothing that is recorded"


def pausing(host_events: pa.Table, here: NDArray[np.bool_], pauses: Intervals, starved: Intervals) -> Ranges | None:
    """The pauses by what the host was in: Python functions or ranges of the program's own. None if nothing shows that.

    Of what takes most of the time that the device loses in a pause, the longest names it that is no longer than the pause, with
    the shortest in it: `prepare (resize)`. What is longer launched something, too, and names it only if nothing else does.

    Args:
        host_events: of all ranges and functions that last as long as a pause.
        here: which of them are of threads that launch compute.
        pauses: of these threads.
        starved: when the device waited for a launch.
    """
    mine = host_events.filter(pa.array(here & rows_of(host_events["category"], "annotation", "python")))
    names = mine["name"].to_pylist()
    named = np.array([name is not None and not WHOLE.match(name) for name in names], bool)
    start, end = to_int64(mine["start_ns"]), to_int64(mine["end_ns"])
    found = np.full(len(pauses), NOTHING_RECORDED, object)
    lost = starved.within_ns(pauses.start_ns, pauses.end_ns)
    for place, (began, ended, most) in enumerate(zip(pauses.start_ns, pauses.end_ns, lost, strict=True)):
        near = np.flatnonzero(named & (start < ended) & (end > began))
        inside_ns = starved.within_ns(np.maximum(start[near], began), np.minimum(end[near], ended))
        covering = near[2 * inside_ns > max(most, 1)]
        covering = covering[np.argsort(start[covering] - end[covering], kind="stable")]  # the longest first
        within = covering[(start[covering] >= began) & (end[covering] <= ended)]
        chosen = [within[0], within[-1]] if len(within) else covering[-1:]
        parts = dict.fromkeys(names[each] for each in chosen)
        found[place] = " (".join(parts) + ")" * (len(parts) - 1) or NOTHING_RECORDED
    return Ranges(found, pauses.start_ns, pauses.end_ns) if (found != NOTHING_RECORDED).any() else None


#: A name for such copies that the finding recognises.
COPIES = "copies of states to the host, one after the other"

#: Least number and bytes of copies in a row: logs copy a few numbers, an output is one or two tensors.
_COPIES, _BYTES = 8, 1 << 20

#: Writing begins this soon after a copy, or after other writing; a copy, this soon after its file is open.
_NEXT_NS = 1_000_000


def with_saving(checkpoint: Ranges, silent: Intervals, device_events: pa.Table, spans: Windows) -> Ranges:
    """The ranges of saving, and copies in a row outside of them with the pauses around them, to open a file or write it.

    A loop that copies in most iterations does not save, and of a single iteration that is unknown.
    """
    found = _copies_in_a_row(silent, device_events)
    struck = np.unique(np.searchsorted(spans.start_ns, found.start_ns, side="right"))
    if not len(found.name) or 2 * len(struck) > len(spans.start_ns) or len(spans.start_ns) < 2:
        return checkpoint
    return joined(checkpoint, _before_named(found, checkpoint))


def _before_named(found: Ranges, named: Ranges) -> Ranges:
    """What of each range comes before named ones: states are often gathered before the range begins in which they are saved.

    That part has the name of the range that follows in it.
    """
    following = np.searchsorted(named.start_ns, found.start_ns)
    next_ns = np.append(named.start_ns, np.iinfo(np.int64).max)[following]
    name = np.where(next_ns <= found.end_ns, np.append(named.name, np.array([None], object))[following], found.name)
    clipped = Ranges(name, found.start_ns, np.minimum(found.end_ns, next_ns))
    inside = named.time.within_ns(found.start_ns, found.start_ns + 1) > 0
    return clipped[~inside & (clipped.end_ns > clipped.start_ns)]


def _copies_in_a_row(silent: Intervals, device_events: pa.Table) -> Ranges:
    out = rows_of(device_events["direction"], "DtoH")
    launched = to_int64(device_events["launch_start_ns"])
    relevant = np.flatnonzero((out | rows_of(device_events["kind"], "compute")) & (launched != NULL))
    relevant = relevant[np.argsort(launched[relevant], kind="stable")]
    copies = out[relevant]
    if copies.sum() < _COPIES:
        return NO_RANGES
    change = np.flatnonzero(np.diff(np.concatenate(([0], copies.astype(np.int8), [0]))))
    begin, last = change[::2], change[1::2] - 1
    size = np.concatenate(([0], np.cumsum(np.where(copies, np.maximum(to_int64(device_events["bytes"])[relevant], 0), 0))))
    long = (last - begin + 1 >= _COPIES) & (size[last + 1] - size[begin] >= _BYTES)
    start, last = launched[relevant][begin[long]], relevant[last[long]]
    end = np.maximum(*(to_int64(device_events[name])[last] for name in ("launch_end_ns", "end_ns")))
    for place in range(len(end)):
        # A host opens a file, and gets the first memory to copy to.
        pause = np.searchsorted(silent.start_ns, start[place]) - 1
        while pause >= 0 and start[place] - silent.end_ns[pause] <= _NEXT_NS:
            start[place] = silent.start_ns[pause]
            pause -= 1
        # It writes what it copied last, waits for a file, and so on.
        pause = np.searchsorted(silent.end_ns, end[place], side="right")
        while pause < len(silent) and silent.start_ns[pause] - end[place] <= _NEXT_NS:
            end[place] = silent.end_ns[pause]
            pause += 1
    return Ranges(np.array([COPIES] * len(start), object), start, end)


#: A call that does not wait for the device, and holds the host of an idle device for so long, sets something up. Loading a
#: library's kernels took 0.3 to 4 s in the captures seen, usual calls take microseconds.
SETS_UP_NS = 100_000_000

#: An operator that spends this share of its time in such calls is setting up for all of it.
_MOSTLY = 0.5

#: Calls that take as long as the memory they are about is large.
_BY_SIZE = ("Memcpy", "Memset", "Host")


def initializing(host_events: pa.Table, device_events: pa.Table, starved: Intervals) -> tuple[Ranges, Ranges]:
    """Calls that set something up, and the outermost of them and of the operators that mostly consist of such calls.

    Args:
        host_events: `host.COLUMNS`, of all events that last so long.
        device_events: of the same rank.
        starved: when the device waited for a launch.
    """
    took = host_events["end_ns"].to_numpy() - host_events["start_ns"].to_numpy()
    long = np.flatnonzero((took >= SETS_UP_NS) & on_threads(host_events, launching_threads(device_events)))
    if not len(long):
        return NO_RANGES, NO_RANGES
    events = host_events.take(pa.array(long))
    calls = rows_of(events["category"], "runtime") & ~rows_of(events["name"], *SYNCHRONIZING)
    calls &= np.array([not any(part in name for part in _BY_SIZE) for name in events["name"].to_pylist()], bool)
    idle = starved - union(device_events["start_ns"].to_numpy(), device_events["end_ns"].to_numpy())
    start, end = events["start_ns"].to_numpy(), events["end_ns"].to_numpy()
    calls[calls] = idle.within_ns(start[calls], end[calls]) >= SETS_UP_NS
    ids, in_calls = to_int64(events["operator"]), union(start[calls], end[calls]).within_ns(start, end)
    operators = rows_of(events["category"], "operator") & np.isin(ids, ids[calls]) & (ids != NULL)
    operators &= in_calls >= _MOSTLY * (end - start)
    return outermost_ranges(events, calls), outermost_ranges(events, calls | operators)
