"""Reads a PyTorch memory snapshot into the tables: allocations and segments over time, with their call stacks.

A snapshot is a pickle: `plain_pickle` loads it without running the code that such a file can name.
"""

from __future__ import annotations

import contextlib
import gc
import io
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bridge_profiling.common.errors import TraceError
from bridge_profiling.traces.bounds import MAX_DEVICES, SNAPSHOT, UNIX_SINCE_NS, unpack
from bridge_profiling.traces.joins import content_of
from bridge_profiling.traces.memory.plain_pickle import CheckedPickle
from bridge_profiling.traces.memory.replay import ROUNDING_BYTES, Replay, dictionaries, foreign, integer, replay, text, time_of
from bridge_profiling.traces.tables import SCHEMAS, build, coded_column
from bridge_profiling.traces.types import RankInfo, RankSource, RankTables

#: Entries kept by our own hook, and by torch's examples.
_USUAL_CAP = 100_000

#: Codes of caveats about gaps of a device's history.
_LACKS = (
    *("frees_unmatched", "allocated_before_history", "frees_missing", "segments_overlap", "allocations_outside_segments"),
    *("segments_without_place", "blocks_unusable", "entries_without_place"),
)

#: Characters of call stacks per byte of the file. Real snapshots have 1/30: most stacks repeat.
_STACK_TEXT_PER_BYTE = 16


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's cyclic garbage collector, which goes through all objects of a snapshot again and again: 4.5 s of CPU
    for one of 140 MB, and 3.5 s without it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_uncollected()
def read(path: Path, *, rank: int = 0, rank_source: RankSource = "order") -> RankTables:
    """The tables of one snapshot: `allocations`, `segments`, `out_of_memory`, and torch's annotations as `host_events`.

    Args:
        path: a pickle of `torch.cuda.memory._dump_snapshot`, plain or as `.xz`.
        rank: global rank; a snapshot does not contain it.
        rank_source: where that rank comes from.

    Raises:
        TraceError: it is not a snapshot, or more than plain data. The message names the file.
        OSError: the file does not exist.
    """
    unpacked = io.BytesIO()  # pieces and their sum would be twice the file
    unpacked.writelines(unpack(path, SNAPSHOT))
    data = unpacked.getvalue()
    del unpacked
    budget = _Budget(path, len(data))
    try:
        checked = CheckedPickle(data)
        del data
        snapshot, repeated = checked.load()
    except ValueError as error:
        raise TraceError(f"{path} cannot be read as a memory snapshot: {error}") from error
    if type(snapshot) is not dict or not ("segments" in snapshot or "device_traces" in snapshot):
        raise TraceError(f"{path} is not a memory snapshot: it holds no segments and no history of allocations")
    replays = _replays(snapshot, budget)
    if not replays:
        raise TraceError(f"{path} is a memory snapshot without a single segment or allocation")
    budget.spend("entries", len(annotations := dictionaries(snapshot.get("external_annotations"))))
    full = snapshot.get("trace_alloc_overflowed")  # since torch 2.13: for each device, whether entries were dropped
    overflowed = {device for device, dropped in enumerate(full) if dropped is True} if type(full) is list else set[int]()
    histories = snapshot.get("device_traces", [])
    parts = [snapshot.get("segments", []), *(histories if type(histories) is list else [histories])]
    unusable = sum(map(foreign, parts))
    del snapshot, histories, parts  # the tables need only the rows
    stacks = _Stacks(budget, repeated)
    try:
        tables = {
            name: _table(name, rank, [row for found in replays for row in getattr(found, name)], stacks)
            for name in ("allocations", "segments", "out_of_memory")
        }
        if columns := _annotation_columns(annotations):
            tables["host_events"] = build("host_events", rank, columns)
    except (pa.ArrowInvalid, OverflowError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from error
    info = RankInfo(rank=rank, rank_source=rank_source, source="memory", files=[str(path.absolute())])
    # Without times, two ranks of one model can have equal snapshots.
    times = (("allocations", "allocated_ns"), ("allocations", "freed_ns"), ("out_of_memory", "time_ns"))
    info.content = content_of(*(tables[table][column].drop_null().to_numpy() for table, column in times))
    _add_caveats(info, replays, overflowed)
    if unusable:
        info.add_caveat("parts_unusable", of_file=True, count=unusable)
    return RankTables(info, tables)


class _Budget:
    """Limits work by the file's size: a reference takes a few bytes, a real entry tens."""

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._left = path, {"entries": size, "call stacks": 1 << 20 | _STACK_TEXT_PER_BYTE * size}

    def spend_devices(self, count: int) -> None:
        if count > MAX_DEVICES:
            raise TraceError(f"{self._path} is not a memory snapshot of one process: it lists {count} devices")

    def spend(self, what: str, count: int) -> None:
        """Take so many entries, or characters of call stacks."""
        self._left[what] -= count
        if self._left[what] < 0:
            raise TraceError(f"{self._path} needs memory far beyond its size: it repeats its {what} by reference")


def _replays(snapshot: Mapping[str, Any], budget: _Budget) -> list[Replay]:
    histories = snapshot.get("device_traces")
    traces = {}
    budget.spend_devices(len(histories) if type(histories) is list else 0)
    for device, history in enumerate(histories if type(histories) is list else []):
        traces[device] = dictionaries(history)
        budget.spend("entries", len(traces[device]))
    segments: dict[int, list[Mapping[str, Any]]] = {}
    for segment in dictionaries(snapshot.get("segments")):
        budget.spend("entries", 1 + len(dictionaries(segment.get("blocks"))))
        segments.setdefault(integer(segment.get("device")) or 0, []).append(segment)
    devices = sorted(traces | segments)
    budget.spend_devices(len(devices))
    replays = [replay(device, traces.get(device, []), segments.get(device, [])) for device in devices]
    return [each for each in replays if each.entries or each.segments]


class _Stacks:
    """Call stacks as texts, each made once."""

    def __init__(self, budget: _Budget, repeated: Sequence[Any]) -> None:
        self._budget, self._repeated = budget, repeated
        self._frames: dict[int, str] = {}
        self._lists: dict[int, int] = {}
        self._codes: dict[tuple[int, ...], int] = {}
        self.texts: list[str] = []

    def code(self, frames: Any) -> int:
        """The number of a stack's text; -1 when none was recorded."""
        if type(frames) is bytes:
            frames = self._repeated[int.from_bytes(frames, "little")]
        if type(frames) is not list or not frames:
            return -1
        known = self._lists.get(id(frames))
        if known is None:
            # Frames are shared by reference, so equal stacks are lists of the same objects.
            key = tuple(map(id, frames))
            known = self._codes.get(key)
            if known is None:
                known = self._codes[key] = len(self.texts)
                self.texts.append("\n".join([self._frame(frame) for frame in frames]))
            self._lists[id(frames)] = known
        return known

    def _frame(self, frame: Any) -> str:
        known = self._frames.get(id(frame))
        if known is None:
            known = "?"
            if type(frame) is dict:
                name, file, line = text(frame.get("name")), text(frame.get("filename")), integer(frame.get("line"))
                known = (name if file in ("", "?", "??") else f"{name} {file}:{line}").replace("\n", " ")
            self._frames[id(frame)] = known
        self._budget.spend("call stacks", len(known) + 1)
        return known


def _table(name: str, rank: int, rows: list[Any], stacks: _Stacks) -> pa.Table:
    """Rows that have the columns of a table as attributes, by start and address."""
    if name != "out_of_memory":
        rows.sort(key=lambda row: (row.allocated_ns or 0, row.address))
    columns = {}
    for column in SCHEMAS[name]:
        if column.name == "stack":
            codes = np.fromiter((stacks.code(row.frames) for row in rows), np.int64, len(rows))
            columns["stack"] = coded_column(codes, stacks.texts)
        elif column.name != "rank":
            columns[column.name] = pa.array([getattr(row, column.name) for row in rows], column.type)
    return build(name, rank, columns)


def _annotation_columns(entries: Sequence[Mapping[str, Any]]) -> dict[str, pa.Array]:
    """Columns of `host_events` from starts and ends of ranges; one without its counterpart is left out."""
    begun: dict[tuple[Any, str], list[int]] = {}
    found = []
    for entry in entries:
        name, time_ns, stage = text(entry.get("name")), time_of(entry), entry.get("stage")
        starts = begun.setdefault((integer(entry.get("device")), name), [])
        if time_ns is not None and stage == "START":
            starts.append(time_ns)
        elif time_ns is not None and stage == "END" and starts:
            start_ns = starts.pop()
            if start_ns <= time_ns:
                found.append((start_ns, -time_ns, name))
    if not found:
        return {}
    found.sort(key=lambda each: each[:2])
    return {
        "category": pa.repeat("annotation", len(found)).dictionary_encode(),
        "name": pa.array([name for _, _, name in found]).dictionary_encode(),
        "start_ns": pa.array([start_ns for start_ns, _, _ in found]),
        "end_ns": pa.array([-end_ns for _, end_ns, _ in found]),
    }


def _add_caveats(info: RankInfo, replays: list[Replay], overflowed: Container[int]) -> None:
    """Set the clock, and say what the snapshot lacks; `overflowed` are devices whose history lost entries, as torch says."""
    say = info.add_caveat
    starts = (row.allocated_ns for found in replays for rows in (found.allocations, found.segments) for row in rows)
    if min((start for start in starts if start is not None), default=0) > UNIX_SINCE_NS:
        info.clock = "unix"
    elif any(found.entries for found in replays):
        say("clock_unknown.snapshot")
    if any(found.allocations for found in replays):
        say("freed_sizes_rounded", rounding=ROUNDING_BYTES)
    for found in replays:
        if found.entries == _USUAL_CAP or found.device in overflowed:
            say("history_overwritten", device=found.device, entries=found.entries)
        _add_device_caveats(info, found)
    if not any(found.entries for found in replays):
        say("no_memory_history")


def _add_device_caveats(info: RankInfo, found: Replay) -> None:
    say = partial(info.add_caveat, device=found.device)
    for code in _LACKS:
        if count := found.counts[code]:
            say(code, count=count)
    for action, count in found.unknown.most_common(3):
        say("actions_unknown", count=count, action=action)
    for error in found.out_of_memory[:3]:
        say("out_of_memory", requested_bytes=error.requested_bytes, free_bytes=error.free_bytes)
