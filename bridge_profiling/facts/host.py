"""What one rank's host did while it launched nothing: loaded data, saved, waited for the device, copied pageable memory.

Ranges and calls are recognised by name, on the threads that launch compute: another thread, such as a DataLoader's worker,
delays nothing by itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.facts import host_ranges
from bridge_profiling.facts.device import Windows
from bridge_profiling.facts.host_ranges import Ranges, launching_threads, on_threads, outermost_ranges
from bridge_profiling.facts.intervals import Intervals, Nanoseconds, coded, inside, rows_named, rows_of, union
from bridge_profiling.facts.names import ALLOCATING, COMPILING, GARBAGE, SYNCHRONIZING
from bridge_profiling.facts.types import Chosen
from bridge_profiling.traces.joins import places
from bridge_profiling.traces.tables import NULL, to_int64

#: Columns of host events that this module reads.
COLUMNS = ("category", "thread", "name", "start_ns", "end_ns", "operator")

#: A pageable copy of at most so many bytes is staged at once: its cost is the wait for the device, not the copy.
STAGED_BYTES = 1 << 16

#: A host that records no call and no operator for this long is doing something else than continuing after a wait.
SILENT_NS = 2_000_000

#: A synchronisation that starts within this time of a copy's call, on the same thread, waits for that copy.
_AFTER_COPY_NS = 200_000

_RANGES = ("annotation", "operator", "python")


@dataclass(frozen=True)
class HostActivity:
    """What the launching threads did.

    Args:
        ranges: by the `idle.Cause` that they show: calls that waited for the device, calls that got memory from the driver or
            gave it back other than to set something up, and copies of pageable memory with synchronisations that waited for
            them. Ranges of the other causes are inside no other range of the same cause.
        pageable_device: when the device carried such copies out.
        silent: when the threads recorded nothing for at least `SILENT_NS`.
    """

    ranges: dict[str, Ranges]
    pageable_device: Intervals
    silent: Intervals


class Operators:
    """Names of a rank's operators and annotations by id, as in `host_events.operator`; also collects them."""

    #: Columns of host events that are read.
    COLUMNS = ("category", "name", "operator")

    def __init__(self) -> None:
        self._ids: list[NDArray[np.signedinteger]] = [np.empty(0, np.int32)]
        self._codes = [np.empty(0, np.int32)]
        self._known: dict[str | None, int] = {}

    def add(self, block: pa.Table) -> None:
        """Take in the next host events."""
        ids = to_int64(block["operator"])
        rows = np.flatnonzero(rows_of(block["category"], "operator", "annotation") & (ids != NULL))
        ids = ids[rows]
        narrow = not len(ids) or (ids.min() >= 0 and ids.max() < 1 << 31)
        codes, names = coded(block["name"])
        code_of = [*(self._known.setdefault(name, len(self._known)) for name in names), -1]
        self._ids.append(ids.astype(np.int32) if narrow else ids)
        self._codes.append(np.array(code_of, np.int32)[codes[rows]])

    def result(self) -> Operators:
        """The names."""
        ids, codes = np.concatenate(self._ids), np.concatenate(self._codes)
        if (ids[1:] < ids[:-1]).any():  # readers number operators by their start
            order = np.argsort(ids, kind="stable")
            ids, codes = ids[order], codes[order]
        self._ids, self._codes = [ids], [codes]
        return self

    @property
    def names(self) -> list[str | None]:
        """The distinct names."""
        return list(self._known)

    def codes_of(self, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
        """Index of the name of each wanted operator; -1 for NULL and for an unknown id, or where it has no name."""
        (ids,), (codes,) = self._ids, self._codes
        if not len(ids):
            return np.full(len(wanted), -1)
        possible = (wanted >= ids[0]) & (wanted <= ids[-1])
        place = places(ids, np.where(possible, wanted, ids[0]).astype(ids.dtype), "right") - 1
        return np.where(possible & (ids[place] == wanted), codes[place], -1).astype(np.int64)


@dataclass(frozen=True)
class Activity:
    """What of the host events `host_activity` reads.

    Args:
        events: named ranges and calls, and those that last long enough to set something up.
        pauses: times of at least `SILENT_NS` between the records of launching threads.
    """

    events: pa.Table
    pauses: Intervals


class ActivityCollector:
    """Collects that."""

    def __init__(self, device_events: pa.Table, *, data_loading: str, checkpoint: str) -> None:
        self._threads = launching_threads(device_events)
        self._expressions = (data_loading, checkpoint, GARBAGE, COMPILING)
        self._chosen = Chosen(self._rows)
        self._pauses = [(np.empty(0, np.int64), np.empty(0, np.int64))]
        self._last: int | None = None  # until when the launching threads recorded something

    def add(self, block: pa.Table) -> None:
        """Take in the next host events."""
        self._chosen.add(block)

    def result(self) -> Activity:
        """What was collected."""
        begins, ends = zip(*self._pauses, strict=True)
        pauses = union(np.concatenate(begins), np.concatenate(ends))
        return Activity(self._chosen.result(), pauses)

    def _rows(self, block: pa.Table) -> NDArray[np.bool_]:
        category, name = block["category"], block["name"]
        start, end, thread = (to_int64(block[column]) for column in ("start_ns", "end_ns", "thread"))
        here = on_threads(block, self._threads)
        records = here & rows_of(category, "runtime", "operator")
        self._add_pauses(start, end, here, records)
        waits = here & rows_of(category, "runtime") & rows_of(name, *SYNCHRONIZING, *ALLOCATING)
        long = here & (end - start >= host_ranges.SETS_UP_NS)
        long |= here & rows_of(category, "annotation", "python") & (end - start >= SILENT_NS)
        chosen = rows_of(category, "overhead") & (here | (thread == 0))
        named = rows_named(name, lambda each: any(_matches(expression, each) for expression in self._expressions))
        chosen |= here & rows_of(category, *_RANGES) & named
        return chosen | waits | long

    def _add_pauses(self, start: Nanoseconds, end: Nanoseconds, here: NDArray[np.bool_], records: NDArray[np.bool_]) -> None:
        if self._last is None and here.any():
            self._last = int(start[here.argmax()])
        if records.any() and self._last is not None:
            until = start[records]
            begin = np.maximum.accumulate(np.concatenate(([self._last], end[records])))
            self._last, begin = int(begin[-1]), begin[:-1]
            pauses = until - begin >= SILENT_NS
            self._pauses.append((begin[pauses], until[pauses]))


def host_activity(
    activity: Activity,
    operators: Operators,
    device_events: pa.Table,
    starved: Intervals,
    spans: Windows,
    *,
    data_loading: str,
    checkpoint: str,
) -> HostActivity:
    """What a rank's launching threads did besides launching.

    Args:
        activity: of the same expressions.
        operators: of the same rank.
        device_events: of the same rank.
        starved: when the device waited for a launch.
        spans: the iterations.
        data_loading: regular expression, found anywhere in the names of data-loading ranges; case is ignored.
        checkpoint: the same for saving.
    """
    events = activity.events
    here = on_threads(events, launching_threads(device_events))
    # Profilers record their own work on thread 0 if they do not know whose time it takes.
    own = rows_of(events["category"], "overhead") & (here | (to_int64(events["thread"]) == 0))
    ranges = rows_of(events["category"], *_RANGES) & here
    runtime = here & rows_of(events["category"], "runtime")
    calls, call_thread = _calls(events, runtime & rows_of(events["name"], *SYNCHRONIZING), operators)
    allocating, _ = _calls(events, runtime & rows_of(events["name"], *ALLOCATING), operators)
    copies, copy_thread, on_device = _pageable_copies(device_events)
    start = calls.start_ns
    _, first, last = inside((call_thread, start - _AFTER_COPY_NS, start + 1), (copy_thread, copies.end_ns))
    of_copies = last > first
    set_up, initialized = host_ranges.initializing(events, device_events, starved)
    found = {
        "data_loading": _matching(events, ranges, data_loading),
        "checkpoint_stall": host_ranges.with_saving(
            _matching(events, ranges, checkpoint), activity.pauses, device_events, spans
        ),
        "profiler": outermost_ranges(events, own),
        "garbage_collection": _matching(events, ranges, GARBAGE),
        "recompilation": _matching(events, ranges, COMPILING),
        "initialization": initialized,
        "allocator_churn": allocating[~np.isin(allocating.start_ns, set_up.start_ns)],
        "host_sync": calls[~of_copies],
        "pageable_copy": host_ranges.joined(copies, calls[of_copies]),
    }
    if (pauses := host_ranges.pausing(events, here, activity.pauses, starved)) is not None:
        found["host_pause"] = pauses
    return HostActivity(found, on_device, activity.pauses)


def _pageable_copies(device_events: pa.Table) -> tuple[Ranges, NDArray[np.int64], Intervals]:
    """Calls that copied more pageable memory than is staged at once, their threads, and when the device copied."""
    copies = device_events.filter(pa.array(rows_of(device_events["kind"], "memcpy")))
    to_device = rows_of(copies["direction"], "HtoD") & rows_of(copies["from_memory"], "pageable")
    from_device = rows_of(copies["direction"], "DtoH") & rows_of(copies["to_memory"], "pageable")
    # A copy of unrecorded size counts if it took the device as long as so many bytes would.
    size = to_int64(copies["bytes"])
    took = to_int64(copies["end_ns"]) - to_int64(copies["start_ns"])
    large = np.where(size == NULL, took > STAGED_BYTES // 10, size > STAGED_BYTES)
    copies = copies.filter(pa.array((to_device | from_device) & large))
    on_device = union(to_int64(copies["start_ns"]), to_int64(copies["end_ns"]))
    copies = copies.filter(copies["launch_start_ns"].is_valid())
    start, end, thread = (to_int64(copies[name]) for name in ("launch_start_ns", "launch_end_ns", "launch_thread"))
    order = np.argsort(start, kind="stable")
    names = np.array(["a copy of pageable memory"] * len(start), object)
    return Ranges(names, start[order], end[order]), thread[order], on_device


def _calls(host_events: pa.Table, rows: NDArray[np.bool_], operators: Operators) -> tuple[Ranges, NDArray[np.int64]]:
    """Some runtime calls, named with the operator that made them, and their threads."""
    found = host_events.filter(pa.array(rows))
    callers = [*operators.names, None]
    codes = operators.codes_of(to_int64(found["operator"])).tolist()
    names = [
        call if callers[code] is None else f"{call} in {callers[code]}"
        for call, code in zip(found["name"].to_pylist(), codes, strict=True)
    ]
    ranges = Ranges(np.array(names, object), to_int64(found["start_ns"]), to_int64(found["end_ns"]))
    return ranges, to_int64(found["thread"])


def _matching(host_events: pa.Table, rows: NDArray[np.bool_], expression: str) -> Ranges:
    """The outermost of the ranges whose name matches. Compares each distinct name once."""
    mine = rows & rows_named(host_events["name"], partial(_matches, expression))
    return outermost_ranges(host_events, mine) if mine.any() else host_ranges.NO_RANGES


@lru_cache(maxsize=1 << 14)
def _matches(expression: str, name: str) -> bool:
    """Whether a name matches. Kept, because the ranks of a run have the same names."""
    return re.search(expression, name, re.IGNORECASE) is not None
