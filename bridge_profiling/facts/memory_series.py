"""Bytes that each device held over time, from memory snapshots or traces; allocation sites; where iterations end."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bridge_profiling.facts.intervals import coded
from bridge_profiling.traces.tables import to_int64
from bridge_profiling.traces.types import RankTables

Integers = NDArray[np.int64]

#: Site of an allocation without a recorded call stack.
UNRECORDED = "no call stack was recorded"

#: Share of the recurring kinds whose number of occurrences must be a multiple of the iterations. The rest belong to set-up.
_EXPLAINED = 2 / 3

#: Fewer kinds that occur once per iteration are a coincidence.
_MARKERS = 3

#: Null in arrays of times.
_UNKNOWN = np.iinfo(np.int64).min

# A Python frame: "function file:line".
_FRAME = re.compile(r"^(?P<function>.*?)\s+(?P<file>\S+):(?P<line>\d+)$")
_AUTOGRAD = re.compile(r"(\w+Backward\d*)::apply\(")
_OPERATOR = re.compile(r"at::_ops::(\w+)::(?:call|redispatch)")

#: Python files that allocate on behalf of their callers: torch itself, and wrappers of functions.
_INTERNAL = re.compile(r"(?:^|/)(?:torch|torchgen|triton|functorch)/|(?:^|/)(?:contextlib|functools|threading)\.py$|^<")


@dataclass(frozen=True)
class Amounts:
    """Bytes over time."""

    time_ns: Integers  # times of the changes, ascending
    bytes: Integers  # before the first change, then from each change on; one more than there are times

    def at(self, time_ns: Integers) -> Integers:
        """Bytes at some times."""
        return self.bytes[np.searchsorted(self.time_ns, time_ns, side="right")]

    @property
    def peak(self) -> tuple[int, int | None]:
        """The maximum and the first change that reached it; no time if only the amount before all changes was as high."""
        later = self.bytes[1:]
        if not len(later) or later.max() < self.bytes[0]:
            return int(self.bytes[0]), None
        return int(later.max()), int(self.time_ns[later.argmax()])


@dataclass(frozen=True)
class Series:
    """What one device of one rank held over time."""

    device: int  # its number in the process
    allocated: Amounts  # bytes of tensors, as the allocator rounds them
    reserved: Amounts | None  # bytes that the caching allocator holds; None if unknown
    allocations: pa.Table | None = (
        None  # bytes, allocated_ns, freed_ns, code (index of `stacks`, or their number); None without a snapshot
    )
    stacks: Sequence[str | None] = ()  # call stacks of the capture

    @property
    def needlessly_reserved(self) -> int | None:
        """Bytes reserved while at least as many reserved bytes were free, up to the excess of reserved over allocated peak.

        Such a request found no hole that was large enough. If all that was reserved was in use a moment later, holes were not
        the reason; hence the limit. None if the reserved amount is unknown.
        """
        if self.reserved is None:
            return None
        amounts = self.reserved.bytes
        more = np.diff(amounts)
        free = amounts[:-1] - self.allocated.at(self.reserved.time_ns - 1)
        needless = int(more[(more > 0) & (free >= more)].sum())
        return min(needless, max(int(amounts.max()) - self.allocated.peak[0], 0))


def device_series(tables: RankTables) -> Iterator[Series]:
    """Every device with recorded memory, of a snapshot or of a trace."""
    if tables.info.source == "memory":
        recorded = tables.columns("allocations", ("device", "bytes", "allocated_ns", "free_requested_ns", "freed_ns", "stack"))
        codes, stacks = coded(recorded["stack"])
        # A stack has kilobytes, and there are few different ones: rows carry its number, those without one the next.
        codes[codes < 0] = len(stacks)
        # As torch counts: memory is allocated until its tensor is freed, even if another stream still uses the block.
        freed = pc.coalesce(recorded["free_requested_ns"], recorded["freed_ns"])
        columns = [recorded["device"], recorded["bytes"], recorded["allocated_ns"], freed, pa.array(codes)]
        allocations = pa.table(columns, names=["device", "bytes", "allocated_ns", "freed_ns", "code"])
        segments = dict(_by_device(tables.columns("segments", ("device", "bytes", "allocated_ns", "freed_ns"))))
        for device, mine in _by_device(allocations):
            held = segments.get(device)
            yield Series(device, running(mine), None if held is None else running(held), mine, stacks)
        return
    events = tables.columns(
        "memory_events", ("device_type", "device", "time_ns", "total_allocated_bytes", "total_reserved_bytes")
    )
    on_device = pc.not_equal(pc.utf8_lower(events["device_type"].cast(pa.string())), "cpu")
    events = events.filter(pc.and_(on_device, events["total_allocated_bytes"].is_valid()))
    for device, mine in _by_device(events):
        mine = mine.sort_by("time_ns")
        time_ns = mine["time_ns"].to_numpy()
        # The amount before the first event is not recorded, only the total after it.
        allocated, reserved = (
            Amounts(time_ns, np.concatenate((amounts[:1], amounts)))
            for amounts in (to_int64(mine[f"total_{name}_bytes"], 0) for name in ("allocated", "reserved"))
        )
        known = mine["total_reserved_bytes"].null_count < len(mine)
        yield Series(device, allocated, reserved if known else None)


def running(allocations: pa.Table) -> Amounts:
    """Sum of the bytes of allocations over time.

    Args:
        allocations: bytes, allocated_ns (null: before the recording), freed_ns (null: never).
    """
    size = allocations["bytes"].to_numpy()
    begun, gone = _times(allocations["allocated_ns"]), _times(allocations["freed_ns"])
    began, went = begun != _UNKNOWN, gone != _UNKNOWN
    time_ns = np.concatenate((gone[went], begun[began]))
    change = np.concatenate((-size[went], size[began]))
    # At equal times, frees come first: a block that is freed and allocated again counts once.
    order = np.argsort(time_ns, kind="stable")
    base = int(size[~began].sum())
    return Amounts(time_ns[order], np.concatenate(([base], base + np.cumsum(change[order]))))


def live(allocations: pa.Table, time_ns: int | None) -> NDArray[np.bool_]:
    """Which allocations were live at a time; None is before the recording."""
    begun, gone = _times(allocations["allocated_ns"]), _times(allocations["freed_ns"])
    if time_ns is None:
        return begun == _UNKNOWN
    return (begun <= time_ns) & ((gone == _UNKNOWN) | (gone > time_ns))


def marked_ends(iterations: pa.Table, series: Series) -> tuple[Integers, list[int]]:
    """Ends of the marked iterations that overlap a series, and their numbers."""
    times = series.allocated.time_ns
    rows = iterations.select(["end_ns", "start_ns", "iteration"]).to_pylist() if len(times) else []
    marked = sorted(
        {(row["end_ns"], row["iteration"]) for row in rows if row["end_ns"] >= times[0] and row["start_ns"] <= times[-1]}
    )
    return np.array([end for end, _ in marked], np.int64), [number for _, number in marked]


def inferred_ends(series: Series) -> Integers:
    """Ends of iterations inferred from recurring allocations."""
    if series.allocations is None:
        return np.empty(0, np.int64)
    begun = _times(series.allocations["allocated_ns"])
    known = begun != _UNKNOWN
    kinds = series.allocations["code"].to_numpy() * (1 << 40) + series.allocations["bytes"].to_numpy()
    return iteration_ends(kinds[known], begun[known])


def iteration_ends(kind: NDArray[np.int64], time_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Times between iterations, inferred from events of which some occur once per iteration; empty without such order.

    Each kind of event occurs equally often in every iteration, so its occurrences are a multiple of the iterations. The largest
    number that explains most kinds is used: a smaller one, such as a half, explains them too, and a larger one, such as the
    number of microbatches, does not explain the kinds that occur once per iteration.

    Returns:
        For each iteration but the last, a time just before the first event that marks the next one.
    """
    _, of_event, occurrences = np.unique(kind, return_inverse=True, return_counts=True)
    recurring = occurrences[occurrences > 1]
    numbers, kinds = np.unique(recurring, return_counts=True)
    explains = [
        number
        for number, count in zip(numbers, kinds, strict=True)
        if count >= _MARKERS and (recurring % number == 0).mean() >= _EXPLAINED
    ]
    if not explains:
        return np.empty(0, np.int64)
    number = int(max(explains))
    marking = occurrences[of_event] == number
    order = np.lexsort((time_ns[marking], of_event[marking]))
    times = time_ns[marking][order].reshape(-1, number)
    # A kind that occurs as often, but within one iteration, differs from the others in its times.
    typical = np.median(times, axis=0)
    gap = np.diff(typical).min()
    times = times[(np.abs(times - typical) < max(gap, 1)).all(axis=1)]
    if len(times) < _MARKERS or (times[:, 1:].min(axis=0) <= times[:, :-1].max(axis=0)).any():
        return np.empty(0, np.int64)
    return times[:, 1:].min(axis=0) - 1


@lru_cache(maxsize=1 << 16)
def site(stack: str | None) -> str:
    """The innermost Python frame outside torch, as recorded: "forward megatron/core/….py:147".

    A backward pass runs on a thread of autograd without Python frames: its site is the autograd function or the operator,
    "autograd MulBackward0", "operator mm".

    Args:
        stack: frames, innermost first, one per line; None if not recorded.
    """
    if not stack:
        return UNRECORDED
    frames = stack.split("\n")
    internal = None
    for frame in frames:
        found = _FRAME.match(frame)
        if found is None or not found["file"].endswith(".py"):
            continue
        if not _INTERNAL.search(found["file"]):
            return frame
        internal = internal or frame
    for pattern, word in ((_AUTOGRAD, "autograd"), (_OPERATOR, "operator")):
        named = next((match for frame in frames if (match := pattern.search(frame))), None)
        if named is not None:
            return f"{word} {named[1]}"
    return internal or frames[0]


def _times(column: pa.ChunkedArray) -> Integers:
    return column.fill_null(_UNKNOWN).to_numpy()


def _by_device(table: pa.Table) -> Iterator[tuple[int, pa.Table]]:
    devices = to_int64(table["device"], 0)
    for device in np.unique(devices).tolist():
        yield device, table.filter(pa.array(devices == device))
