"""What one rank's host did while it launched nothing: loaded data, saved, waited for the device, copied pageable memory.

Ranges and calls are recognised by name, on the threads that launch compute: another thread, such as a DataLoader's worker,
delays nothing by itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.analysis.intervals import EMPTY, Intervals, Nanoseconds, coded, names_in, outermost, rows_of, union
from bridge_profiling.traces.joins import start_order
from bridge_profiling.traces.tables import NULL, to_int64

#: Names of ranges in which a program waits for its data. `enumerate(DataLoader)#…` is torch's, batch-generator Megatron's
#: timer. A Python frame is named "file(line): function".
DATA_LOADING = (
    r"(?<![a-z])(?:data[-_ ]?load(?:er|ing)?|load(?:ing)?[-_ ]?(?:data|batch)|batch[-_ ]?generator|"
    r"(?:get|next|fetch|read)[-_ ]?(?:micro[-_ ]?)?batch|data[-_ ]?(?:fetch|wait|iter(?:ator)?|time)|input[-_ ]?pipeline)"
    r"(?![a-z])|torch/utils/data/\S*: (?:__next__|_next_data|_get_data)"
)

#: Names of ranges in which a program writes a checkpoint. Activation checkpointing is recomputation and does not match.
CHECKPOINT = (
    r"(?<![a-z])(?:(?:save|saving|write|writing|async)[-_ ]?(?:a[-_ ])?(?:checkpoint|ckpt|state[-_ ]?dict)(?:s|ing)?|"
    r"(?:checkpoint|ckpt)[-_ ]?(?:sav(?:e|ing)|writ(?:e|ing)|stall)|save[-_ ]?(?:model|weights|pretrained))(?![a-z])|"
    r"^(?:checkpoint|checkpointing|ckpt|(?:torch\.)?sav(?:e|ing))$|safetensors/\S*: save_file|"
    r"torch/serialization\S*: (?:save|_save)|torch/distributed/checkpoint/\S*: \w*save\w*|dist_checkpointing/\S*: \w*save\w*"
)

#: Names of ranges in which Python collects garbage; the first is the hook's. Automatic collections leave no frame in a stack.
GARBAGE = r"garbage[-_ ]collect(?:ion|ing)|(?<![a-z])gc[-_. ]collect(?![a-z])|<built-in function collect>|^gc$"

#: Names of ranges in which torch.compile works: those of `torch._dynamo.utils.dynamo_timed`, and frames of its stacks.
COMPILING = (
    r"\(dynamo_timed\)|torch/_dynamo/convert_frame\S*: _?compile|torch/_inductor/compile_fx\S*: compile_fx|"
    r"triton/compiler/\S*: compile|torch/_inductor/\S*: benchmark_all_configs"
)

#: Calls that return when the device has finished.
SYNCHRONIZING = tuple(
    prefix + name
    for prefix, names in (
        ("cuda", ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize", "Memcpy", "Memcpy2D")),
        ("cu", ("StreamSynchronize", "CtxSynchronize", "EventSynchronize", "MemcpyHtoD_v2", "MemcpyDtoH_v2")),
        ("hip", ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize", "Memcpy", "MemcpyWithStream")),
    )
    for name in names
)

#: Calls that give memory back to the driver, and wait for the device.
FREEING = (
    *("cudaFree", "cudaFreeHost", "cudaHostUnregister", "cuMemFree_v2", "cuMemRelease", "cuMemUnmap"),
    *("hipFree", "hipHostFree"),
)

#: Calls that get memory from the driver or give it back.
ALLOCATING = (
    *FREEING,
    *("cudaMalloc", "cudaHostAlloc", "cudaMallocHost", "cudaHostRegister"),
    *("cuMemAlloc_v2", "cuMemCreate", "cuMemMap", "cuMemSetAccess"),
    *("hipMalloc", "hipHostMalloc"),
)

#: Columns of host events that this module reads.
COLUMNS = ("category", "thread", "name", "start_ns", "end_ns", "operator")

#: A pageable copy of at most so many bytes is staged at once: its cost is the wait for the device, not the copy.
STAGED_BYTES = 1 << 16

#: A host that records no call and no operator for this long is doing something else than continuing after a wait.
SILENT_NS = 2_000_000

#: An operator pauses if it records nothing for so long, and for so many times what operators of its name take, of which there
#: are so many. Copies within the host's memory take some milliseconds.
_STUCK_NS, _STUCK, _ENOUGH_ALIKE = 10_000_000, 10, 4

#: A synchronisation that starts within this time of a copy's call, on the same thread, waits for that copy.
_AFTER_COPY_NS = 200_000

_RANGES = ("annotation", "operator", "python")


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


@dataclass(frozen=True)
class HostActivity:
    """What the launching threads did."""

    data_loading: Ranges  # ranges in which the program waited for data; no range is inside another one
    checkpoint: Ranges  # ranges in which it saved, likewise
    profiler: Ranges  # the profiler's own work, as the profiler recorded it, likewise
    collecting: Ranges  # ranges in which Python collected garbage, likewise
    compiling: Ranges  # ranges in which torch.compile worked, likewise
    synchronizing: Ranges  # calls that waited for the device
    allocating: Ranges  # calls that got memory from the driver or gave it back
    pageable: Ranges  # calls that copied pageable memory, and synchronisations that waited for such a copy
    pageable_device: Intervals  # when the device carried such copies out
    silent: Intervals  # when the threads recorded nothing for at least `SILENT_NS`, between or unusually inside operators


def host_activity(host_events: pa.Table, device_events: pa.Table, *, data_loading: str, checkpoint: str) -> HostActivity:
    """What a rank's launching threads did besides launching.

    Args:
        host_events: `COLUMNS`.
        device_events: of the same rank.
        data_loading: regular expression, found anywhere in the names of data-loading ranges; case is ignored.
        checkpoint: the same for saving.
    """
    here = on_launching_threads(host_events, device_events)
    # Profilers record their own work on thread 0 if they do not know whose time it takes.
    own = rows_of(host_events["category"], "overhead") & (here | (to_int64(host_events["thread"]) == 0))
    ranges = rows_of(host_events["category"], *_RANGES) & here
    runtime = here & rows_of(host_events["category"], "runtime")
    calls, call_thread = _calls(host_events, runtime & rows_of(host_events["name"], *SYNCHRONIZING))
    allocating, _ = _calls(host_events, runtime & rows_of(host_events["name"], *ALLOCATING))
    copies, copy_thread, on_device = _pageable_copies(device_events)
    of_copies = _follow_copies(calls, call_thread, copies, copy_thread)
    return HostActivity(
        data_loading=_matching(host_events, ranges, data_loading),
        checkpoint=_matching(host_events, ranges, checkpoint),
        profiler=outermost_ranges(host_events, own),
        collecting=_matching(host_events, ranges, GARBAGE),
        compiling=_matching(host_events, ranges, COMPILING),
        synchronizing=calls[~of_copies],
        allocating=allocating,
        pageable=joined(copies, calls[of_copies]),
        pageable_device=on_device,
        silent=_silent(host_events, here),
    )


def on_launching_threads(host_events: pa.Table, device_events: pa.Table) -> NDArray[np.bool_]:
    """Which host events are on threads that launch compute; all of them if no launch is recorded."""
    computes = rows_of(device_events["kind"], "compute") & device_events["launch_thread"].is_valid().to_numpy()
    launching = np.unique(to_int64(device_events["launch_thread"])[computes])
    thread = to_int64(host_events["thread"])
    if not len(launching):
        return np.ones(len(thread), bool)
    # Few threads launch: for 11 million events, a comparison with each takes a fifth of `np.isin`.
    return np.logical_or.reduce([thread == one for one in launching.tolist()])


def _rows_of_operators(host_events: pa.Table, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """The row of each wanted operator, an id as in `host_events.operator`; -1 for NULL and for an unknown id."""
    ids, own = to_int64(host_events["operator"]), rows_of(host_events["category"], "operator", "annotation")
    rows = np.flatnonzero(own & (ids != NULL))
    if not len(rows):
        return np.full(len(wanted), -1)
    # Readers number operators by their start, so this is sorted already, and a stable sort does not move anything.
    rows = rows[np.argsort(ids[rows], kind="stable")]
    found = rows[np.maximum(np.searchsorted(ids[rows], wanted, side="right") - 1, 0)]
    return np.where(ids[found] == wanted, found, -1)


def numbered_operators(host_events: pa.Table, wanted: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[str | None]]:
    """The index of the name of each wanted operator, -1 for NULL and for an unknown id; and the names."""
    codes, names = coded(host_events["name"])
    return np.append(codes, -1)[_rows_of_operators(host_events, wanted)], names


def names_of_operators(host_events: pa.Table, wanted: NDArray[np.int64]) -> list[str | None]:
    """The name of each wanted operator, as in `_rows_of_operators`; None where there is none."""
    if not len(wanted):
        return []
    found = _rows_of_operators(host_events, wanted)
    return host_events["name"].take(pa.array(found, mask=found < 0)).to_pylist()


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


def _calls(host_events: pa.Table, rows: NDArray[np.bool_]) -> tuple[Ranges, NDArray[np.int64]]:
    """Some runtime calls, named with the operator that made them, and their threads."""
    found = host_events.filter(pa.array(rows))
    operators = names_of_operators(host_events, to_int64(found["operator"]))
    names = [
        call if operator is None else f"{call} in {operator}"
        for call, operator in zip(found["name"].to_pylist(), operators, strict=True)
    ]
    ranges = Ranges(np.array(names, object), to_int64(found["start_ns"]), to_int64(found["end_ns"]))
    return ranges, to_int64(found["thread"])


def _follow_copies(
    calls: Ranges, call_thread: NDArray[np.int64], copies: Ranges, copy_thread: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Which synchronisations directly follow a pageable copy on their thread."""
    found = np.zeros(len(call_thread), bool)
    for thread in np.unique(copy_thread):
        ends = np.sort(copies.end_ns[copy_thread == thread])
        mine = np.flatnonzero(call_thread == thread)
        start = calls.start_ns[mine]
        last = np.searchsorted(ends, start, side="right") - 1
        found[mine] = (last >= 0) & (start - ends[np.maximum(last, 0)] <= _AFTER_COPY_NS)
    return found


def _silent(host_events: pa.Table, here: NDArray[np.bool_]) -> Intervals:
    """Pauses before and between the records of launching threads, which are sorted by start, and inside of operators."""
    rows = here & rows_of(host_events["category"], "runtime", "operator")
    start, end = to_int64(host_events["start_ns"]), to_int64(host_events["end_ns"])
    first = start[here][:1]
    begin = np.maximum.accumulate(np.concatenate((first, end[rows])))[: rows.sum()]
    until = start[rows]
    pauses = until - begin >= SILENT_NS
    return union(begin[pauses], until[pauses]) | _stuck(host_events, rows)


def _stuck(host_events: pa.Table, rows: NDArray[np.bool_]) -> Intervals:
    """Pauses directly inside of an operator, with no record for far longer than that operator usually takes as a whole."""
    start, end, thread = (to_int64(host_events[name]) for name in ("start_ns", "end_ns", "thread"))
    long = np.flatnonzero(rows & (end - start >= _STUCK_NS))
    found: list[tuple[int, int]] = []
    searched = dict.fromkeys(thread[long].tolist(), NULL)
    for outer in long.tolist():
        if end[outer] <= searched[thread[outer]]:
            continue  # inside of the one before
        searched[thread[outer]] = end[outer]
        inside = slice(outer, np.searchsorted(start, end[outer]))
        records = np.flatnonzero(rows[inside] & (thread[inside] == thread[outer])) + outer
        times = np.sort(np.concatenate((start[records], np.minimum(end[records], end[outer]))))
        around = long[(long >= outer) & (thread[long] == thread[outer])]
        for place in np.flatnonzero(np.diff(times) >= _STUCK_NS):
            begin, until = int(times[place]), int(times[place + 1])
            # The last one to begin is the innermost. In a call, the host waits for the driver or the device.
            innermost = around[(start[around] <= begin) & (end[around] >= until)][-1].item()
            if host_events["category"][innermost].as_py() != "operator":
                continue
            alike = rows & rows_of(host_events["name"], host_events["name"][innermost].as_py())
            if alike.sum() >= _ENOUGH_ALIKE and until - begin >= _STUCK * np.median((end - start)[alike]):
                found.append((begin, until))
    times_ns = np.array(found, np.int64).reshape(-1, 2)
    return union(times_ns[:, 0], times_ns[:, 1])


def _matching(host_events: pa.Table, rows: NDArray[np.bool_], expression: str) -> Ranges:
    """The outermost of the ranges whose name matches. Compares each distinct name once."""
    matching = [name for name in names_in(host_events["name"]) if _matches(expression, name)]
    if not matching:
        return NO_RANGES
    return outermost_ranges(host_events, rows & rows_of(host_events["name"], *matching))


@lru_cache(maxsize=1 << 14)
def _matches(expression: str, name: str) -> bool:
    """Whether a name matches. Kept, because the ranks of a run have the same names."""
    return re.search(expression, name, re.IGNORECASE) is not None


def outermost_ranges(host_events: pa.Table, rows: NDArray[np.bool_]) -> Ranges:
    """The chosen events that are inside no other chosen one."""
    found = host_events.filter(pa.array(rows))
    start, end = to_int64(found["start_ns"]), to_int64(found["end_ns"])
    ranges = Ranges(np.array(found["name"].to_pylist(), object), start, end)[start_order(start, end)]
    return ranges[outermost(ranges.end_ns)]


def joined(one: Ranges, other: Ranges) -> Ranges:
    """Both, by start."""
    both = (np.concatenate(pair) for pair in zip(vars(one).values(), vars(other).values(), strict=True))
    ranges = Ranges(*both)
    return ranges[np.argsort(ranges.start_ns, kind="stable")]
