"""Reads a PyTorch memory snapshot into the tables: allocations and segments over time, with their call stacks.

A snapshot is a pickle, and to unpickle runs code that it names. This reader builds plain data and nothing else
(plain_pickle.py), in memory in proportion to the file. What the snapshot has lost is said in the caveats.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bridge_profiling.errors import TraceError
from bridge_profiling.traces import plain_pickle
from bridge_profiling.traces.snapshot_annotations import annotation_tables, read_annotations
from bridge_profiling.traces.snapshot_replay import (
    ROUNDING_BYTES,
    Allocation,
    OutOfMemory,
    Replay,
    Segment,
    dictionaries,
    integer,
    replay,
    text,
)
from bridge_profiling.traces.tables import build, coded_column
from bridge_profiling.traces.types import RankInfo, RankSource, RankTables

#: Refused beyond, packed or not.
_MAX_BYTES = 16 << 30

#: An .xz file that unpacks to more is refused, once so much is unpacked. Real snapshots shrink 45-fold.
_MAX_RATIO, _RATIO_CHECKED_BYTES = 400, 64 << 20

#: Entries of our own hook, and of torch's examples.
_USUAL_CAP = 100_000

_UNIX_SINCE_US = 10**15
_MAX_TIME_US = 9 * 10**15

#: Characters that call stacks may have together for each byte of the file. Real ones have 1/30: most stacks return.
_STACK_TEXT_PER_BYTE = 16


def read(path: Path, *, rank: int = 0, rank_source: RankSource = "order") -> RankTables:
    """The tables of one snapshot.

    Args:
        path: a pickle of `torch.cuda.memory._dump_snapshot`, plain or as `.xz`.
        rank: global rank; a snapshot does not name it.
        rank_source: where that rank comes from.

    Returns:
        `allocations`, `segments` and `out_of_memory`, and `host_events` with the annotations that torch recorded. Times are
        nanoseconds, exact to the microsecond that torch writes.

    Raises:
        TraceError: it is no snapshot, or more than plain data. The message names the file.
        OSError: the file is not there.
    """
    data = _bytes(path)
    try:
        snapshot = plain_pickle.loads(data)
    except plain_pickle.PickleError as error:
        raise TraceError(f"{path} is no memory snapshot that can be read: {error}") from error
    if type(snapshot) is not dict or not ("segments" in snapshot or "device_traces" in snapshot):
        raise TraceError(f"{path} is no memory snapshot: it holds no segments and no history of allocations")
    info = RankInfo(rank=rank, rank_source=rank_source, source="memory", files=[str(path.absolute())])
    budget = _Budget(path, len(data))
    replays = _replays(snapshot, budget)
    if not any(each.entries or each.segments for each in replays):
        raise TraceError(f"{path} is a memory snapshot without a single segment or allocation")
    stacks = _Stacks(path, len(data))
    allocations = sorted(
        (each for found in replays for each in found.allocations), key=lambda each: (each.allocated or 0, each.address)
    )
    segments = sorted(
        (each for found in replays for each in found.segments), key=lambda each: (each.allocated or 0, each.address)
    )
    errors = [each for found in replays for each in found.out_of_memory]
    marks = read_annotations(budget.of(dictionaries(snapshot.get("external_annotations"))))
    try:
        tables = {
            "allocations": build("allocations", rank, _allocation_columns(allocations, stacks)),
            "segments": build("segments", rank, _segment_columns(segments)),
            "out_of_memory": build("out_of_memory", rank, _out_of_memory_columns(errors, stacks)),
            **annotation_tables(marks, rank),
        }
    except (pa.ArrowInvalid, OverflowError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from error
    _describe(info, replays)
    return RankTables(info, tables)


def _bytes(path: Path) -> bytes:
    if path.stat().st_size > _MAX_BYTES:
        raise TraceError(f"{path} is larger than {_MAX_BYTES >> 30} GiB: no snapshot is")
    if path.suffix != ".xz":
        return path.read_bytes()
    packed, pieces, done = path.stat().st_size, [], 0
    try:
        with lzma.open(path) as source:
            while piece := source.read(1 << 22):
                pieces.append(piece)
                done += len(piece)
                if done > _MAX_BYTES or (done > _RATIO_CHECKED_BYTES and done > _MAX_RATIO * packed):
                    raise TraceError(f"{path} unpacks to more than {_MAX_RATIO} times its size: that is no snapshot")
    except (lzma.LZMAError, EOFError) as error:
        raise TraceError(f"{path} cannot be unpacked: {error}") from error
    return b"".join(pieces)


class _Budget:
    """Counts what is walked: a pickle can refer to one list a million times, and costs a few bytes for each.

    Args:
        path: the file that errors name.
        size: its bytes. A real entry costs tens of them.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._left = path, size

    def of(self, found: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The same list, paid for.

        Raises:
            TraceError: more is walked than a file of this size can hold.
        """
        self._left -= len(found)
        if self._left < 0:
            raise TraceError(f"{self._path} asks for memory far beyond its size: it repeats its entries by reference")
        return found


def _replays(snapshot: Mapping[str, Any], budget: _Budget) -> list[Replay]:
    histories = snapshot.get("device_traces")
    traces = [budget.of(dictionaries(history)) for history in histories] if type(histories) is list else []
    by_device: dict[int, list[Mapping[str, Any]]] = {}
    for segment in budget.of(dictionaries(snapshot.get("segments"))):
        budget.of(dictionaries(segment.get("blocks")))
        by_device.setdefault(integer(segment.get("device")) or 0, []).append(segment)
    devices = sorted({*range(len(traces)), *by_device})
    found = [
        replay(device, traces[device] if 0 <= device < len(traces) else [], by_device.get(device, [])) for device in devices
    ]
    return [each for each in found if each.entries or each.segments]


class _Stacks:
    """Call stacks as texts, each made once.

    Args:
        path: the file that errors name.
        size: its bytes, which limit the texts.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._left = 1 << 20 | _STACK_TEXT_PER_BYTE * size
        self._frames: dict[int, str] = {}
        self._lists: dict[int, int] = {}
        self._codes: dict[tuple[int, ...], int] = {}
        self.texts: list[str] = []

    def code(self, frames: Any) -> int:
        """The number of a stack's text; -1 when none was recorded."""
        if type(frames) is not list or not frames:
            return -1
        known = self._lists.get(id(frames))
        if known is None:
            # Frames are shared by reference, so equal stacks are lists of the same objects.
            key = tuple(map(id, frames))
            known = self._codes.get(key)
            if known is None:
                known = self._codes[key] = len(self.texts)
                self.texts.append(self._text(frames))
            self._lists[id(frames)] = known
        return known

    def _text(self, frames: Iterable[Any]) -> str:
        lines = []
        for frame in frames:
            if id(frame) not in self._frames:
                self._frames[id(frame)] = _frame(frame)
            lines.append(self._frames[id(frame)])
            self._left -= len(lines[-1]) + 1
            if self._left < 0:
                raise TraceError(f"{self._path} asks for memory far beyond its size: it repeats its call stacks by reference")
        return "\n".join(lines)


def _frame(frame: Any) -> str:
    if type(frame) is not dict:
        return "?"
    name, file, line = text(frame.get("name")), text(frame.get("filename")), integer(frame.get("line"))
    place = "" if file in ("", "?", "??") else f" {file}:{line}"
    return f"{name}{place}".replace("\n", " ")


def _allocation_columns(rows: list[Allocation], stacks: _Stacks) -> dict[str, pa.Array]:
    codes = np.fromiter((stacks.code(row.frames) for row in rows), np.int64, len(rows))
    return {
        "device": pa.array([row.device for row in rows], pa.int64()),
        "stream": pa.array([row.stream for row in rows], pa.int64()),
        "address": pa.array([row.address for row in rows], pa.uint64()),
        "bytes": pa.array([row.size for row in rows], pa.int64()),
        "requested_bytes": pa.array([row.requested for row in rows], pa.int64()),
        "allocated_ns": _times([row.allocated for row in rows]),
        "free_requested_ns": _times([row.free_requested for row in rows]),
        "freed_ns": _times([row.freed for row in rows]),
        "stack": coded_column(codes, stacks.texts),
    }


def _segment_columns(rows: list[Segment]) -> dict[str, pa.Array]:
    pools = {None: -1, "large": 0, "small": 1}
    return {
        "device": pa.array([row.device for row in rows], pa.int64()),
        "stream": pa.array([row.stream for row in rows], pa.int64()),
        "address": pa.array([row.address for row in rows], pa.uint64()),
        "bytes": pa.array([row.size for row in rows], pa.int64()),
        "allocated_ns": _times([row.allocated for row in rows]),
        "freed_ns": _times([row.freed for row in rows]),
        "pool": coded_column(np.array([pools[row.pool] for row in rows], np.int64), ["large", "small"]),
        "active_bytes": pa.array([row.active for row in rows], pa.int64()),
        "largest_free_bytes": pa.array([row.largest_free for row in rows], pa.int64()),
    }


def _out_of_memory_columns(rows: list[OutOfMemory], stacks: _Stacks) -> dict[str, pa.Array]:
    codes = np.fromiter((stacks.code(row.frames) for row in rows), np.int64, len(rows))
    return {
        "device": pa.array([row.device for row in rows], pa.int64()),
        "time_ns": _times([row.time for row in rows]),
        "requested_bytes": pa.array([row.requested for row in rows], pa.int64()),
        "free_bytes": pa.array([row.free for row in rows], pa.int64()),
        "stack": coded_column(codes, stacks.texts),
    }


def _times(microseconds: list[int | None]) -> pa.Array:
    """Microseconds as nanoseconds; what is no time of a host is null."""
    known = [None if time is None or abs(time) > _MAX_TIME_US else time * 1000 for time in microseconds]
    return pa.array(known, pa.int64())


def _describe(info: RankInfo, replays: list[Replay]) -> None:
    """Say what the snapshot has lost, and which clock it has."""
    say = info.add_caveat
    times = [each.allocated for found in replays for each in found.allocations if each.allocated is not None]
    times += [held.allocated for found in replays for held in found.segments if held.allocated is not None]
    if times and min(times) > _UNIX_SINCE_US:
        info.clock = "unix"
    elif any(found.entries for found in replays):
        say("clock_unknown", "times are not on the host's clock: only differences mean anything")
    if any(found.allocations for found in replays):
        say(
            "freed_sizes_rounded",
            f"allocations that were freed count as asked for, rounded up to {ROUNDING_BYTES} bytes: a history has no blocks",
        )
    for found in replays:
        _describe_device(found, say)
    if not any(found.entries for found in replays):
        say(
            "no_memory_history",
            "no history was recorded (torch.cuda.memory._record_memory_history): there is only what was live at the end",
        )


def _describe_device(found: Replay, say: Any) -> None:
    on = f"on device {found.device}"
    if found.entries == _USUAL_CAP:
        say(
            "history_overwritten",
            f"the history {on} holds {_USUAL_CAP:,} entries, its usual limit: earlier ones were overwritten",
        )
    if found.unmatched_frees:
        say(
            "frees_unmatched",
            f"{found.unmatched_frees} frees {on} are of allocations made before the history begins: their beginning is unknown",
        )
    if found.before:
        say(
            "allocated_before_history",
            f"{found.before} allocations {on} that are live at the end were made before the history begins",
        )
    if found.replaced:
        say(
            "frees_missing",
            f"{found.replaced} allocations {on} have no free, though their address was allocated again: they end there",
        )
    if found.overlapping:
        say("segments_overlap", f"{found.overlapping} segments {on} overlap others and are left out")
    if found.unlisted:
        say("allocations_outside_segments", f"{found.unlisted} allocations {on} are live by the history and in no segment")
    if found.unplaced:
        say(
            "entries_without_place", f"{found.unplaced} entries of the history {on} have no address or no size and are left out"
        )
    for action, count in found.unknown.most_common(3):
        say("actions_unknown", f"{count} entries of the history {on} with the unknown action {action!r} are left out")
    for error in found.out_of_memory[:3]:
        say(
            "out_of_memory",
            f"the history {on} has an out-of-memory error: {error.requested} bytes were asked for, {error.free} were free",
        )
