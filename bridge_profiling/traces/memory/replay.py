"""Replays the allocator's history in a memory snapshot: allocations and segments, from when to when.

Linear in the history, for any torch version. The earliest entries of a history are overwritten, so an allocation can be known
by its free, or by its block at the end, alone; its start is then unknown.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from bridge_profiling.traces.tables import SCHEMAS

#: The allocator rounds sizes up to it. Blocks that it leaves unsplit (0.1% of a real run's bytes) are not in the history.
ROUNDING_BYTES = 512

_MAX_TIME_US = 9 * 10**15

#: States of blocks in use: the program holds them, or freed them while a stream may still use them.
_IN_USE = ("active_allocated", "active_pending_free", "active_awaiting_free")


def _row(table: str) -> Any:
    """A type for rows of a table, with its columns in the order of schemas.toml; `frames` is the stack as torch wrote it."""
    columns = [name for name in SCHEMAS[table].names if name not in ("rank", "stack")]
    return msgspec.defstruct(table, [(name, Any, None) for name in (*columns, "frames")], gc=False)


_Allocation, _Segment, _OutOfMemory = map(_row, ("allocations", "segments", "out_of_memory"))


@dataclass
class Replay:
    """The history and the segments of one device, combined: rows of three tables."""

    device: int
    entries: int = 0  # of the history
    allocations: list[Any] = field(default_factory=list)
    segments: list[Any] = field(default_factory=list)
    out_of_memory: list[Any] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)  # what it lacks, by the code of its caveat
    unknown: Counter[str] = field(default_factory=Counter)  # entries by unknown action


class _Entry(NamedTuple):
    address: int
    size: int
    stream: int | None
    time_ns: int | None
    frames: Any


class _Block(NamedTuple):
    address: int
    size: int
    state: str
    requested_bytes: int | None
    frames: Any

    @property
    def end(self) -> int:
        return self.address + self.size


@dataclass(frozen=True)
class _Listed:
    """A segment as the snapshot lists it."""

    address: int
    end: int
    stream: int | None
    pool: str | None
    blocks: list[_Block]


def replay(device: int, history: Iterable[Mapping[str, Any]], segments: Iterable[Mapping[str, Any]]) -> Replay:
    """Replay one device from its entries of `device_traces` and of `segments`."""
    found = Replay(device)
    blocks, held = _Blocks(found), _Held(found)
    for raw in history:
        found.entries += 1
        action, time_ns, frames = text(raw.get("action")), time_of(raw), raw.get("frames")
        address, size = integer(raw.get("addr")), integer(raw.get("size"))
        if action == "oom":
            found.out_of_memory.append(_OutOfMemory(device, time_ns, size, integer(raw.get("device_free")), frames))
            continue
        if action == "snapshot":
            continue
        if address is None or size is None or address < 0 or size < 0:
            found.counts["entries_without_place"] += 1
            continue
        entry = _Entry(address, size, integer(raw.get("stream")), time_ns, frames)
        match action:
            case "alloc":
                blocks.allocate(entry)
            case "free_requested":
                blocks.request_free(entry)
            case "free_completed" | "free":  # "free" is torch 2.0's
                blocks.free(entry)
            case "segment_alloc" | "segment_map":
                held.allocate(entry)
            case "segment_free" | "segment_unmap":
                held.free(entry)
            case _:
                found.unknown[action[:50]] += 1
    at_end = _without_overlaps([_listed(segment, found) for segment in segments], found)
    blocks.end(at_end)
    held.end(at_end)
    return found


def _without_overlaps(listed: Sequence[_Listed | None], found: Replay) -> list[_Listed]:
    """The segments by address. Only damage makes two overlap."""
    kept: list[_Listed] = []
    placed = [each for each in listed if each is not None]
    found.counts["segments_without_place"] = len(listed) - len(placed)
    for segment in sorted(placed, key=lambda each: each.address):
        if kept and segment.address < kept[-1].end:
            found.counts["segments_overlap"] += 1
        else:
            kept.append(segment)
    return kept


class _Blocks:
    """The live allocations while the history goes on, by address."""

    def __init__(self, found: Replay) -> None:
        self._found = found
        self._live: dict[int, Any] = {}

    def allocate(self, entry: _Entry) -> None:
        before = self._live.get(entry.address)
        if before is not None:  # its free is missing
            before.freed_ns = entry.time_ns
            self._found.counts["frees_missing"] += 1
        self._live[entry.address] = allocation = self._add(entry)
        allocation.allocated_ns, allocation.frames = entry.time_ns, entry.frames

    def request_free(self, entry: _Entry) -> None:
        """The program released it; a stream may still use it."""
        found = self._live.get(entry.address)
        if found is None:
            found = self._live[entry.address] = self._unmatched(entry)
        found.free_requested_ns = entry.time_ns

    def free(self, entry: _Entry) -> None:
        """The allocator may use it again."""
        found = self._live.pop(entry.address, None) or self._unmatched(entry)
        found.freed_ns = entry.time_ns

    def _add(self, entry: _Entry) -> Any:
        rounded = max(-(-entry.size // ROUNDING_BYTES), 1) * ROUNDING_BYTES
        self._found.allocations.append(
            _Allocation(self._found.device, entry.stream, entry.address, rounded, requested_bytes=entry.size)
        )
        return self._found.allocations[-1]

    def _unmatched(self, entry: _Entry) -> Any:
        """Without call stack: that of a free does not show the allocating code."""
        self._found.counts["frees_unmatched"] += 1
        return self._add(entry)

    def end(self, segments: list[_Listed]) -> None:
        """Take sizes from the blocks in use at the end, and add those that were never allocated in the history."""
        listed = set()
        for segment in segments:
            for block in segment.blocks:
                if block.state not in _IN_USE:
                    continue
                listed.add(block.address)
                known = self._live.get(block.address)
                if known is None:
                    known = _Allocation(self._found.device, segment.stream, block.address, block.size, frames=block.frames)
                    self._found.allocations.append(known)
                    self._found.counts["allocated_before_history"] += 1
                known.bytes = block.size
                if block.requested_bytes is not None:
                    known.requested_bytes = block.requested_bytes
        self._found.counts["allocations_outside_segments"] = sum(address not in listed for address in self._live)


class _Held:
    """Device memory that the allocator holds while the history goes on: ranges that do not overlap, by address."""

    def __init__(self, found: Replay) -> None:
        self._found = found
        self._starts: list[int] = []
        self._held: dict[int, Any] = {}

    def allocate(self, entry: _Entry) -> None:
        if entry.size:
            self._give_back(entry)  # the rest of one whose free is missing
            self._hold(_Segment(self._found.device, entry.stream, entry.address, entry.size, allocated_ns=entry.time_ns))

    def free(self, entry: _Entry) -> None:
        """`segment_unmap` can take parts of a mapped range."""
        for start, end in self._give_back(entry):
            self._found.segments.append(_Segment(self._found.device, entry.stream, start, end - start, freed_ns=entry.time_ns))

    def _hold(self, segment: Any) -> None:
        bisect.insort(self._starts, segment.address)
        self._held[segment.address] = segment
        self._found.segments.append(segment)

    def _overlapping(self, address: int, end: int) -> list[Any]:
        first = bisect.bisect_right(self._starts, address) - 1
        if first < 0 or _end(self._held[self._starts[first]]) <= address:
            first += 1
        last = max(first, bisect.bisect_left(self._starts, end))
        return [self._held[start] for start in self._starts[first:last]]

    def _give_back(self, entry: _Entry) -> list[tuple[int, int]]:
        """End everything held in the entry's range. Returns the parts of the range that were not held."""
        address, end = entry.address, entry.address + entry.size
        gaps, reached = [], address
        overlapping = self._overlapping(address, end)
        if overlapping:
            first = bisect.bisect_left(self._starts, overlapping[0].address)
            del self._starts[first : first + len(overlapping)]
        for segment in overlapping:
            del self._held[segment.address]
            if segment.address > reached:
                gaps.append((reached, segment.address))
            reached = min(_end(segment), end)
            for start, stop in ((segment.address, address), (end, _end(segment))):
                if start < stop:
                    self._hold(_Segment(segment.device, segment.stream, start, stop - start, segment.allocated_ns))
            segment.bytes = reached - max(segment.address, address)
            segment.address = max(segment.address, address)
            segment.freed_ns = entry.time_ns
        if reached < end:
            gaps.append((reached, end))
        return gaps

    def end(self, segments: list[_Listed]) -> None:
        """Add ranges that are held at the end without a known start, and fill in pools and bytes in use."""
        for listed in segments:
            reached = listed.address
            for held in [*self._overlapping(listed.address, listed.end), None]:
                stop = listed.end if held is None else held.address
                if stop > reached:
                    self._hold(_Segment(self._found.device, listed.stream, reached, stop - reached))
                if held is not None:
                    reached = _end(held)
        for listed in segments:
            for held in self._overlapping(listed.address, listed.end):
                held.pool = listed.pool
                if held.stream is None:
                    held.stream = listed.stream
        blocks = sorted((block for listed in segments for block in listed.blocks), key=lambda block: block.address)
        self._fill(blocks)

    def _fill(self, blocks: list[_Block]) -> None:
        starts = [block.address for block in blocks]
        for held in [self._held[start] for start in self._starts]:
            held.active_bytes, held.largest_free_bytes = 0, 0
            first = max(bisect.bisect_left(starts, held.address) - 1, 0)
            for block in blocks[first : bisect.bisect_left(starts, _end(held))]:
                inside = max(min(block.end, _end(held)) - max(block.address, held.address), 0)
                if block.state == "inactive":
                    held.largest_free_bytes = max(held.largest_free_bytes, inside)
                else:
                    held.active_bytes += inside


def _end(segment: Any) -> int:
    """The address after it."""
    return int(segment.address + segment.bytes)


def _listed(segment: Mapping[str, Any], found: Replay) -> _Listed | None:
    """None for a segment without a place."""
    address, size = integer(segment.get("address")), integer(segment.get("total_size"))
    if address is None or size is None or address < 0 or size <= 0:
        return None
    blocks, end = [], address
    found.counts["blocks_unusable"] += foreign(segment.get("blocks", {}))
    for block in dictionaries(segment.get("blocks")):
        length, start = integer(block.get("size")), integer(block.get("address"))
        if length is None or length < 0:
            found.counts["blocks_unusable"] += 1
            continue
        # torch 2.0 lists blocks one after another without addresses, and their call stacks in a history.
        start = end if start is None else start
        end = start + length
        past = dictionaries(block.get("history"))
        frames = block.get("frames", past[0].get("frames") if past else None)
        blocks.append(_Block(start, length, text(block.get("state")), integer(block.get("requested_size")), frames))
    pool = segment.get("segment_type")
    return _Listed(
        address, address + size, integer(segment.get("stream")), pool if pool in ("large", "small") else None, blocks
    )


def time_of(entry: Mapping[str, Any]) -> int | None:
    """An entry's time in nanoseconds; None when it is missing or absurd."""
    time_us = integer(entry.get("time_us"))
    return None if time_us is None or abs(time_us) > _MAX_TIME_US else time_us * 1000


def integer(value: Any) -> int | None:
    """The value if it is a 64-bit integer."""
    return value if type(value) is int and -(1 << 63) <= value < 1 << 63 else None


def text(value: Any) -> str:
    """The value if it is a text, else "?". `str` of a list that contains itself sixty times over would not end."""
    return value if type(value) is str else "?"


def dictionaries(value: Any) -> list[Mapping[str, Any]]:
    """The dictionaries in a list; empty when it is not a list."""
    return [each for each in value if type(each) is dict] if type(value) is list else []


def foreign(value: Any) -> int:
    """How much of what should be a list of dictionaries is something else; 1 when it is not a list."""
    return sum(type(each) is not dict for each in value) if type(value) is list else 1
