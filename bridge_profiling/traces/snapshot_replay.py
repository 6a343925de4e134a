"""Replays the allocator's history in a memory snapshot: which allocations and segments there were, from when to when.

Takes plain lists and dictionaries as torch writes them, of any version; never reads a file. Linear in the history.

A history is a ring: at most `max_entries` are kept, and the earliest are overwritten. So a free can be all that is left of an
allocation, and what is live at the end can have no allocation at all; both are kept, with an unknown beginning.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: The allocator rounds up to it; what it leaves unsplit beyond that (0.1 % of a real run's bytes) the history does not tell.
ROUNDING_BYTES = 512

#: Blocks of a segment that belong to the program, or that it has freed while a stream may still use them.
_ACTIVE, _PENDING = "active_allocated", ("active_pending_free", "active_awaiting_free")


@dataclass
class Allocation:
    """One allocation; times in microseconds, None where they are not known or have not come.

    Args:
        size: bytes of its block where the snapshot lists it, else what was asked for, rounded up.
        requested: bytes asked for, which are the sizes in a history; None when unknown.
        frames: the call stack as torch wrote it, innermost first.
    """

    device: int
    stream: int | None
    address: int
    size: int
    requested: int | None = None
    allocated: int | None = None
    free_requested: int | None = None
    freed: int | None = None
    frames: Any = None


@dataclass
class Segment:
    """Memory that the allocator holds of the device, from when to when; microseconds, None as above.

    Args:
        pool: large or small; None when unknown.
        active: bytes of live allocations in it at the end; None when it was given back.
        largest_free: its largest free block at the end.
    """

    device: int
    stream: int | None
    address: int
    size: int
    allocated: int | None = None
    freed: int | None = None
    pool: str | None = None
    active: int | None = None
    largest_free: int | None = None

    @property
    def end(self) -> int:
        """The address after it."""
        return self.address + self.size


@dataclass
class OutOfMemory:
    """A request that the allocator could not serve.

    Args:
        time: microseconds, None when not recorded.
        requested: bytes asked for.
        free: bytes of the device that nobody held.
        frames: the call stack of who asked, as torch wrote it, innermost first.
    """

    device: int
    time: int | None
    requested: int | None
    free: int | None
    frames: Any = None


@dataclass
class Replay:
    """What one device's history and its segments tell together.

    Args:
        entries: how many entries the history has.
        unmatched_frees: frees of what was allocated before the history begins.
        replaced: allocations whose free is missing: their address was allocated again.
        before: allocations that are live at the end and were made before the history begins.
        overlapping: segments left out because another lies where they do.
        unlisted: allocations that the history leaves live and no segment lists.
        unplaced: allocations and frees that name no address or size.
        out_of_memory: each out-of-memory error.
        unknown: actions that this reader does not know, and how often.
    """

    device: int
    entries: int = 0
    allocations: list[Allocation] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    unmatched_frees: int = 0
    replaced: int = 0
    before: int = 0
    overlapping: int = 0
    unlisted: int = 0
    unplaced: int = 0
    out_of_memory: list[OutOfMemory] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)


def replay(device: int, history: Iterable[Mapping[str, Any]], segments: Iterable[Mapping[str, Any]]) -> Replay:
    """Replay one device.

    Args:
        device: its number.
        history: its entries of `device_traces`, in order.
        segments: its entries of `segments`.
    """
    blocks = _Blocks(Replay(device))
    held = _Held(blocks.found)
    for entry in history:
        blocks.found.entries += 1
        action = text(entry.get("action"))
        if action in ("oom", "snapshot"):
            if action == "oom":
                time, size, free = (integer(entry.get(name)) for name in ("time_us", "size", "device_free"))
                blocks.found.out_of_memory.append(OutOfMemory(device, time, size, free, entry.get("frames")))
            continue
        address, size = integer(entry.get("addr")), integer(entry.get("size"))
        if address is None or size is None or address < 0 or size < 0:
            blocks.found.unplaced += 1
        elif action in _BLOCK_ACTIONS:
            _BLOCK_ACTIONS[action](blocks, entry, address, size)
        elif action in _SEGMENT_ACTIONS:
            _SEGMENT_ACTIONS[action](held, entry, address, size)
        else:
            blocks.found.unknown[action[:50]] += 1
    at_end = _apart([_Listed.of(segment) for segment in segments], blocks.found)
    blocks.end(at_end)
    held.end(at_end)
    return blocks.found


def _apart(segments: Iterable[_Listed | None], found: Replay) -> list[_Listed]:
    """The segments by address, without those that lie where another does, as only damage makes them."""
    kept: list[_Listed] = []
    for segment in sorted((each for each in segments if each is not None), key=lambda each: each.address):
        if kept and segment.address < kept[-1].end:
            found.overlapping += 1
        else:
            kept.append(segment)
    return kept


class _Blocks:
    """Allocations that are live as the history goes on, by address."""

    def __init__(self, found: Replay) -> None:
        self.found = found
        self._live: dict[int, Allocation] = {}

    def alloc(self, entry: Mapping[str, Any], address: int, size: int) -> None:
        """`alloc`."""
        time = integer(entry.get("time_us"))
        before = self._live.get(address)
        if before is not None:
            # Its free is missing; it cannot have lived on.
            before.freed = time
            self.found.replaced += 1
        self._live[address] = self._new(entry, address, size, allocated=time)

    def free_requested(self, entry: Mapping[str, Any], address: int, size: int) -> None:
        """`free_requested`: the program let go; a stream may still use it."""
        found = self._live.get(address)
        if found is None:
            found = self._live[address] = self._unmatched(entry, address, size)
        found.free_requested = integer(entry.get("time_us"))

    def free_completed(self, entry: Mapping[str, Any], address: int, size: int) -> None:
        """`free_completed`: the allocator may use it again."""
        found = self._live.pop(address, None)
        if found is None:
            found = self._unmatched(entry, address, size)
        found.freed = integer(entry.get("time_us"))

    def _new(self, entry: Mapping[str, Any], address: int, size: int, *, allocated: int | None) -> Allocation:
        allocation = Allocation(
            self.found.device,
            integer(entry.get("stream")),
            address,
            max(-(-size // ROUNDING_BYTES), 1) * ROUNDING_BYTES,
            requested=size,
            allocated=allocated,
            frames=entry.get("frames"),
        )
        self.found.allocations.append(allocation)
        return allocation

    def _unmatched(self, entry: Mapping[str, Any], address: int, size: int) -> Allocation:
        self.found.unmatched_frees += 1
        allocation = self._new(entry, address, size, allocated=None)
        allocation.frames = None  # those of the free say nothing of who allocated it
        return allocation

    def end(self, segments: list[_Listed]) -> None:
        """Add what is live in the segments and was never allocated in the history."""
        listed = set()
        for segment in segments:
            for block in segment.blocks:
                if block.state != _ACTIVE and block.state not in _PENDING:
                    continue
                listed.add(block.address)
                known = self._live.get(block.address)
                if known is None:
                    known = Allocation(self.found.device, segment.stream, block.address, block.size, frames=block.frames)
                    self.found.allocations.append(known)
                    self.found.before += 1
                known.size = block.size
                known.requested = known.requested if block.requested is None else block.requested
        self.found.unlisted = sum(address not in listed for address in self._live)


class _Held:
    """Memory that the allocator holds as the history goes on: ranges that do not overlap, by address."""

    def __init__(self, found: Replay) -> None:
        self.found = found
        self._starts: list[int] = []
        self._held: dict[int, Segment] = {}

    def alloc(self, entry: Mapping[str, Any], address: int, size: int) -> None:
        """`segment_alloc` and `segment_map`."""
        time = integer(entry.get("time_us"))
        if size == 0:
            return
        self._give_back(address, size, time)  # what is left of one whose free is missing
        self._hold(Segment(self.found.device, integer(entry.get("stream")), address, size, allocated=time))

    def free(self, entry: Mapping[str, Any], address: int, size: int) -> None:
        """`segment_free` and `segment_unmap`, which can take parts of what was mapped."""
        time = integer(entry.get("time_us"))
        for start, end in self._give_back(address, size, time):
            self.found.segments.append(Segment(self.found.device, integer(entry.get("stream")), start, end - start, freed=time))

    def _hold(self, segment: Segment) -> None:
        bisect.insort(self._starts, segment.address)
        self._held[segment.address] = segment
        self.found.segments.append(segment)

    def _overlapping(self, address: int, end: int) -> list[Segment]:
        place = bisect.bisect_right(self._starts, address) - 1
        if place < 0 or self._held[self._starts[place]].end <= address:
            place += 1
        found = []
        while place < len(self._starts) and self._starts[place] < end:
            found.append(self._held[self._starts[place]])
            place += 1
        return found

    def _give_back(self, address: int, size: int, time: int | None) -> list[tuple[int, int]]:
        """End what is held between two addresses; the parts of that range which were not held."""
        end, gaps, reached = address + size, [], address
        overlapping = self._overlapping(address, end)
        if overlapping:
            first = bisect.bisect_left(self._starts, overlapping[0].address)
            del self._starts[first : first + len(overlapping)]
        for segment in overlapping:
            del self._held[segment.address]
            if segment.address > reached:
                gaps.append((reached, segment.address))
            reached = min(segment.end, end)
            for start, stop in ((segment.address, address), (end, segment.end)):
                if start < stop:
                    part = Segment(segment.device, segment.stream, start, stop - start, allocated=segment.allocated)
                    self._hold(part)
            segment.size = reached - max(segment.address, address)
            segment.address = max(segment.address, address)
            segment.freed = time
        if reached < end:
            gaps.append((reached, end))
        return gaps

    def end(self, segments: list[_Listed]) -> None:
        """Add what is held at the end and was never seen to begin, and say how full all of it is."""
        for listed in segments:
            reached = listed.address
            for held in [*self._overlapping(listed.address, listed.end), None]:
                stop = listed.end if held is None else held.address
                if stop > reached:
                    self._hold(Segment(self.found.device, listed.stream, reached, stop - reached))
                if held is not None:
                    reached = held.end
        for listed in segments:
            for held in self._overlapping(listed.address, listed.end):
                held.pool = listed.pool
                if held.stream is None:
                    held.stream = listed.stream
        self._fill(segments)

    def _fill(self, segments: list[_Listed]) -> None:
        blocks = [block for listed in segments for block in listed.blocks]
        blocks.sort(key=lambda block: block.address)
        ends = [self._held[start] for start in self._starts]
        place = 0
        for held in ends:
            held.active, held.largest_free = 0, 0
            while place < len(blocks) and blocks[place].end <= held.address:
                place += 1
            at = place
            while at < len(blocks) and blocks[at].address < held.end:
                inside = min(blocks[at].end, held.end) - max(blocks[at].address, held.address)
                if blocks[at].state == "inactive":
                    held.largest_free = max(held.largest_free, inside)
                else:
                    held.active += inside
                at += 1
            place = max(at - 1, place)


_BLOCK_ACTIONS = {
    "alloc": _Blocks.alloc,
    "free_requested": _Blocks.free_requested,
    "free_completed": _Blocks.free_completed,
    "free": _Blocks.free_completed,  # torch 2.0
}
_SEGMENT_ACTIONS = {
    "segment_alloc": _Held.alloc,
    "segment_map": _Held.alloc,
    "segment_free": _Held.free,
    "segment_unmap": _Held.free,
}


@dataclass(frozen=True)
class _Block:
    address: int
    size: int
    state: str
    requested: int | None
    frames: Any

    @property
    def end(self) -> int:
        return self.address + self.size


@dataclass(frozen=True)
class _Listed:
    """A segment as the snapshot lists it."""

    address: int
    size: int
    stream: int | None
    pool: str | None
    blocks: list[_Block]

    @property
    def end(self) -> int:
        return self.address + self.size

    @classmethod
    def of(cls, segment: Mapping[str, Any]) -> _Listed | None:
        """None when it has no place."""
        address, size = integer(segment.get("address")), integer(segment.get("total_size"))
        if address is None or size is None or address < 0 or size <= 0:
            return None
        blocks, at = [], address
        for block in dictionaries(segment.get("blocks")):
            length = integer(block.get("size"))
            if length is None or length < 0:
                continue
            # torch 2.0 lists blocks without addresses, one after another.
            start = integer(block.get("address"))
            start = at if start is None else start
            frames = block.get("frames", _frames_of(block.get("history")))
            blocks.append(_Block(start, length, text(block.get("state")), integer(block.get("requested_size")), frames))
            at = start + length
        pool = segment.get("segment_type")
        known = pool if pool in ("large", "small") else None
        return cls(address, size, integer(segment.get("stream")), known, blocks)


def _frames_of(history: Any) -> Any:
    """The call stack of a block as torch 2.0 writes it."""
    first = history[0] if type(history) is list and history else None
    return first.get("frames") if type(first) is dict else None


def integer(value: Any) -> int | None:
    """The value when it is a 64-bit integer."""
    return value if type(value) is int and -(1 << 63) <= value < 1 << 64 else None


def text(value: Any) -> str:
    """The value when it is a text, else "?": of a list that holds itself sixty times over, `str` would not end."""
    return value if type(value) is str else "?"


def dictionaries(value: Any) -> list[Mapping[str, Any]]:
    """The dictionaries in a list; none when it is no list."""
    return [each for each in value if type(each) is dict] if type(value) is list else []
