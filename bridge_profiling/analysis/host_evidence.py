"""What a rank's host was doing when it launched nothing: loading data, saving, waiting for the device, copying pageable memory.

Tells by the names of ranges and calls on the threads that launch compute; a thread that never does, as a DataLoader's worker,
holds nothing up by itself. Names are compared once each, not event by event.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.analysis.breakdown import rows_of
from bridge_profiling.analysis.intervals import EMPTY, Intervals, Nanoseconds, union
from bridge_profiling.traces.tables import NULL

#: Names of ranges in which a program waits for its data. `enumerate(DataLoader)#…` is torch's own, batch-generator Megatron's
#: timer. A Python frame is named "file(line): function".
DATA_LOADING = (
    r"(?<![a-z])(?:data[-_ ]?load(?:er|ing)?|load(?:ing)?[-_ ]?(?:data|batch)|batch[-_ ]?generator|"
    r"(?:get|next|fetch|read)[-_ ]?(?:micro[-_ ]?)?batch|data[-_ ]?(?:fetch|wait|iter(?:ator)?|time)|input[-_ ]?pipeline)"
    r"(?![a-z])|torch/utils/data/\S*: (?:__next__|_next_data|_get_data)"
)

#: Names of ranges in which a program writes a checkpoint. Activation checkpointing, which is recomputation, is none.
CHECKPOINT = (
    r"(?<![a-z])(?:(?:save|saving|write|writing|async)[-_ ]?(?:a[-_ ])?(?:checkpoint|ckpt|state[-_ ]?dict)(?:s|ing)?|"
    r"(?:checkpoint|ckpt)[-_ ]?(?:sav(?:e|ing)|writ(?:e|ing)|stall))(?![a-z])|^(?:checkpoint|checkpointing|ckpt)$|"
    r"torch/serialization\S*: (?:save|_save)|torch/distributed/checkpoint/\S*: \w*save\w*|dist_checkpointing/\S*: \w*save\w*"
)

#: Calls that return when the device is done. cudaFree waits for it too.
SYNCHRONIZING = tuple(
    prefix + name
    for prefix, names in (
        ("cuda", ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize", "Memcpy", "Memcpy2D", "Free", "FreeHost")),
        ("cu", ("StreamSynchronize", "CtxSynchronize", "EventSynchronize", "MemcpyHtoD_v2", "MemcpyDtoH_v2", "MemFree_v2")),
        ("hip", ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize", "Memcpy", "MemcpyWithStream", "Free")),
    )
    for name in names
)

#: Of host events, what is needed here.
COLUMNS = ("category", "thread", "name", "start_ns", "end_ns", "operator")

#: A pageable copy of no more bytes is staged at once: what costs time then is waiting for the device, not the copy.
STAGED_BYTES = 1 << 16

#: A host that records no call and no operator for so long does something else than go on after a wait.
SILENT_NS = 2_000_000

#: A synchronisation that begins so soon after a copy's call, on the same thread, waits for that copy.
_AFTER_COPY_NS = 200_000

_RANGES = ("annotation", "operator", "python")


@dataclass(frozen=True)
class Ranges:
    """Ranges of the threads that launch, by start; none is inside another one.

    Args:
        name: of each.
        start_ns: where each begins.
        end_ns: where each ends.
    """

    name: NDArray[np.object_]
    start_ns: Nanoseconds
    end_ns: Nanoseconds

    @property
    def time(self) -> Intervals:
        """When in any of them."""
        return union(self.start_ns, self.end_ns)

    def held(self, least_ns: int) -> Ranges:
        """Those that take no less."""
        rows = self.end_ns - self.start_ns >= least_ns
        return Ranges(self.name[rows], self.start_ns[rows], self.end_ns[rows])


@dataclass(frozen=True)
class HostEvidence:
    """What the launching threads did.

    Args:
        data_loading: ranges in which the program waited for data.
        checkpoint: ranges in which it saved.
        profiler: the profiler's own work, as it recorded it.
        synchronizing: calls that waited for the device.
        pageable: calls that copied pageable memory, and synchronisations that waited for such a copy.
        pageable_device: when the device carried such copies out.
        silent: when they made no call, and were in no operator, for `SILENT_NS` or longer.
    """

    data_loading: Ranges
    checkpoint: Ranges
    profiler: Ranges
    synchronizing: Ranges
    pageable: Ranges
    pageable_device: Intervals
    silent: Intervals


def host_evidence(
    host_events: pa.Table, device_events: pa.Table, *, data_loading: str = DATA_LOADING, checkpoint: str = CHECKPOINT
) -> HostEvidence:
    """What a rank's launching threads did besides launching.

    Args:
        host_events: the columns of `COLUMNS` of one rank.
        device_events: `traces.tables.DEVICE_EVENTS` of the same.
        data_loading: expression that names of data-loading ranges match, wherever they match, in any case.
        checkpoint: the same for saving.
    """
    computes = rows_of(device_events["kind"], "compute") & device_events["launch_thread"].is_valid().to_numpy()
    launching = np.unique(_integers(device_events["launch_thread"])[computes])
    thread = _integers(host_events["thread"])
    # Profilers record what they do themselves on thread 0 where they do not know whose time it takes.
    here = np.isin(thread, launching) if len(launching) else np.ones(len(thread), bool)
    own = rows_of(host_events["category"], "overhead") & (here | (thread == 0))
    ranges = rows_of(host_events["category"], *_RANGES) & here
    calls = _calls(host_events, here & rows_of(host_events["category"], "runtime"))
    copied = _pageable(device_events)
    of_copies = _waits_for_copy(calls, copied)
    pageable_calls = Ranges(
        np.array(["a copy of pageable memory"] * len(copied.start_ns), object), copied.start_ns, copied.end_ns
    )
    return HostEvidence(
        data_loading=_named(host_events, ranges, data_loading),
        checkpoint=_named(host_events, ranges, checkpoint),
        profiler=_taken(host_events, own),
        synchronizing=_of(calls, ~of_copies),
        pageable=_joined(pageable_calls, _of(calls, of_copies)),
        pageable_device=copied.device,
        silent=_silent(host_events, here),
    )


@dataclass(frozen=True)
class _Copies:
    """Calls that copy pageable memory of some size, and when the device did it."""

    start_ns: Nanoseconds
    end_ns: Nanoseconds
    thread: NDArray[np.int64]
    device: Intervals


@dataclass(frozen=True)
class _Calls:
    ranges: Ranges
    thread: NDArray[np.int64]


def _pageable(device_events: pa.Table) -> _Copies:
    copies = device_events.filter(pa.array(rows_of(device_events["kind"], "memcpy")))
    to_device = rows_of(copies["direction"], "HtoD") & rows_of(copies["from_memory"], "pageable")
    from_device = rows_of(copies["direction"], "DtoH") & rows_of(copies["to_memory"], "pageable")
    # A copy whose bytes are not recorded counts when it took the device as long as so many bytes do.
    size = _integers(copies["bytes"])
    took = _integers(copies["end_ns"]) - _integers(copies["start_ns"])
    large = np.where(size == NULL, took > STAGED_BYTES // 10, size > STAGED_BYTES)
    copies = copies.filter(pa.array((to_device | from_device) & large))
    device = union(_integers(copies["start_ns"]), _integers(copies["end_ns"]))
    copies = copies.filter(copies["launch_start_ns"].is_valid())
    start, end, thread = (_integers(copies[name]) for name in ("launch_start_ns", "launch_end_ns", "launch_thread"))
    order = np.argsort(start, kind="stable")
    return _Copies(start[order], end[order], thread[order], device)


def _calls(host_events: pa.Table, runtime: NDArray[np.bool_]) -> _Calls:
    """Calls that wait for the device; their names say in which operator."""
    found = host_events.filter(pa.array(runtime & rows_of(host_events["name"], *SYNCHRONIZING)))
    operators = names_of_operators(host_events, _integers(found["operator"]))
    names = [
        call if operator is None else f"{call} in {operator}"
        for call, operator in zip(found["name"].to_pylist(), operators, strict=True)
    ]
    ranges = Ranges(np.array(names, object), _integers(found["start_ns"]), _integers(found["end_ns"]))
    return _Calls(ranges, _integers(found["thread"]))


def _silent(host_events: pa.Table, here: NDArray[np.bool_]) -> Intervals:
    """The pauses between what launching threads recorded."""
    rows = here & rows_of(host_events["category"], "runtime", "operator")
    # The table is sorted by start.
    begin = np.maximum.accumulate(_integers(host_events["end_ns"])[rows])[:-1]
    end = _integers(host_events["start_ns"])[rows][1:]
    pauses = end - begin >= SILENT_NS
    return Intervals(begin[pauses], end[pauses])


def names_of_operators(host_events: pa.Table, wanted: NDArray[np.int64]) -> list[str | None]:
    """The name of each wanted operator; None for one that is not there, or where NULL is wanted.

    Args:
        host_events: of one rank.
        wanted: ids, as in `host_events.operator`.
    """
    if not len(wanted):
        return []
    ids, own = _integers(host_events["operator"]), rows_of(host_events["category"], "operator", "annotation")
    ascending = np.unique(wanted)
    place = np.minimum(np.searchsorted(ascending, ids), len(ascending) - 1)
    rows = np.flatnonzero(own & (ascending[place] == ids) & (ids != NULL))
    row_of = np.full(len(ascending), -1)
    row_of[place[rows]] = rows
    found = row_of[np.searchsorted(ascending, wanted)]
    return host_events["name"].take(pa.array(found, mask=found < 0)).to_pylist()


def _waits_for_copy(calls: _Calls, copies: _Copies) -> NDArray[np.bool_]:
    """Which synchronisations follow a pageable copy on its thread at once."""
    found = np.zeros(len(calls.thread), bool)
    for thread in np.unique(copies.thread):
        ends = np.sort(copies.end_ns[copies.thread == thread])
        mine = np.flatnonzero(calls.thread == thread)
        start = calls.ranges.start_ns[mine]
        last = np.searchsorted(ends, start, side="right") - 1
        found[mine] = (last >= 0) & (start - ends[np.maximum(last, 0)] <= _AFTER_COPY_NS)
    return found


def _named(host_events: pa.Table, rows: NDArray[np.bool_], expression: str) -> Ranges:
    pattern = re.compile(expression, re.IGNORECASE)
    every = host_events["name"].combine_chunks()
    if not pa.types.is_dictionary(every.type):
        every = every.dictionary_encode()
    names = (every if isinstance(every, pa.DictionaryArray) else every.chunk(0)).dictionary.to_pylist() if len(every) else []
    matching = [name for name in names if name is not None and pattern.search(name)]
    if not matching:
        return Ranges(np.empty(0, object), EMPTY.start_ns, EMPTY.end_ns)
    return _taken(host_events, rows & rows_of(host_events["name"], *matching))


def _taken(host_events: pa.Table, rows: NDArray[np.bool_]) -> Ranges:
    """Ranges by start, without those inside others of them."""
    found = host_events.filter(pa.array(rows))
    start, end = _integers(found["start_ns"]), _integers(found["end_ns"])
    order = np.lexsort((-end, start))
    start, end = start[order], end[order]
    outside = end > np.concatenate(([NULL], np.maximum.accumulate(end)[:-1])) if len(end) else np.zeros(0, bool)
    names = np.array(found["name"].to_pylist(), object)[order]
    return Ranges(names[outside], start[outside], end[outside])


def _of(calls: _Calls, rows: NDArray[np.bool_]) -> Ranges:
    ranges = calls.ranges
    return Ranges(ranges.name[rows], ranges.start_ns[rows], ranges.end_ns[rows])


def _joined(one: Ranges, other: Ranges) -> Ranges:
    start = np.concatenate((one.start_ns, other.start_ns))
    order = np.argsort(start, kind="stable")
    return Ranges(
        np.concatenate((one.name, other.name))[order], start[order], np.concatenate((one.end_ns, other.end_ns))[order]
    )


def _integers(column: pa.ChunkedArray) -> NDArray[np.int64]:
    return column.cast(pa.int64()).fill_null(NULL).to_numpy()
