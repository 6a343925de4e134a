"""NVTX ranges of one process: their names, torch's operators among them, and the communication described by NCCL's ranges.

NCCL puts a range around each of its calls, with the message's bytes in a payload. A kernel is described by the call that
launched it. Payloads are recorded since nsys 2024.6 and exported with `--include-blobs=true`.
"""

from __future__ import annotations

import json
import re
import struct
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bridge_profiling.traces.joins import Operation, batch, carried_out_by, distinct, places, rows_by_start
from bridge_profiling.traces.kinds import torch_operation
from bridge_profiling.traces.nsys.database import Among, Database, Needed, durations, sql_of
from bridge_profiling.traces.nsys.report import NVTX, Process
from bridge_profiling.traces.tables import NULL, Columns, Integers, to_int64

#: NvtxPushPopRange and NvtxtPushPopRange nest on their thread; NvtxStartEndRange and NvtxtStartEndRange need not.
_NESTED_TYPES, _FREE_TYPES = (59, 70), (60, 71)

#: Ranges that torch opens around operators, and emit_nvtx numbers as if they were some. Kineto calls them annotations.
_ANNOTATION = re.compile(r"Optimizer\.\w+#|enumerate\(DataLoader\)#|DistributedDataParallel\.|FSDP::")

#: Between an operator's name and its inputs' dimensions.
_MARK = "\x1e"

#: Appended by torch's emit_nvtx to an operator's name: autograd's sequence number, its own, its inputs' dimensions.
_NUMBERED = ", op_id = "
_NUMBERS = r"(?s), (?:seq = -?\d+(?:, op_id = \d*)?|op_id = \d*)"
_SHAPES = r"(?:, sizes = (\[.*?\]))?(?:, input_op_ids = .*)?$"
_SEQUENCE = r", seq = (?P<number>-?\d{1,18})"

_CALL = re.compile(r"p?nccl(?=[A-Z])")
_GROUPING = ("ncclGroupStart", "ncclGroupEnd")
_NO_OPERATION = re.compile(r"ncclComm|ncclGroup|ncclMem|ncclGet|ncclRedOp")

#: Domain, schema, size and place of the payload; 64-bit little-endian.
_HEADER = struct.Struct("<QQQQ")

#: Fields of NCCL's payloads by their published names (nvtx_payload_schemas.h), and how they are packed.
_COMMUNICATOR, _SIZE, _PEER, _RANKS = "NCCL communicator ID", "Message size [bytes]", "Peer rank", "No. of ranks"
_FIELDS = {
    _COMMUNICATOR: struct.Struct("<Q"),
    _SIZE: struct.Struct("<Q"),
    _PEER: struct.Struct("<i"),
    _RANKS: struct.Struct("<i"),
}

#: Larger values are damage: 4 TB of one rank, a million ranks. Their products fit 64 bits.
_MAX_SHARE_BYTES, _MAX_RANKS = 1 << 42, 1 << 20

#: NCCL gives one rank's share of these; the larger of input and output is that of all ranks.
_SHARED = {"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"}
_WHOLE = {"all_reduce", "broadcast", "reduce", "send", "recv"}


@dataclass(frozen=True)
class Ranges:
    """Ranges by start, the longer first, on the report's clock."""

    start_ns: Integers
    duration_ns: Integers  # up to the report's end for a range that is still open there
    thread: Integers  # globalTid
    name: NDArray[np.int32]  # index of `names`, `operator` and `shapes`
    sequence: Integers  # autograd's number of an operator; NULL for others, and on threads that made no node of its graph
    nested: NDArray[np.bool_]  # pushed and popped on its thread
    open: Integers  # rows of those that are still open at the report's end
    names: list[str]  # without torch's additions
    operator: list[bool]  # torch called it an operator
    shapes: list[str | None]  # its inputs' dimensions as JSON text; None when not recorded
    lost: int = 0  # left out: without a thread, a type or a start, or they end before it
    described: bool = True  # whether NCCL can have written payloads as JSON

    def __len__(self) -> int:
        return len(self.start_ns)

    def end_ns(self, rows: slice | Integers) -> Integers:
        """When some ranges end."""
        return self.start_ns[rows] + self.duration_ns[rows]

    def named(self, wanted: Callable[[str], bool]) -> Integers:
        """The rows with a wanted name."""
        chosen = np.array(list(map(wanted, self.names)), bool)
        return np.flatnonzero(chosen[self.name]) if chosen.any() else np.empty(0, np.int64)

    def innermost(self, thread: Integers, time_ns: Integers, rows: Integers | None = None) -> NDArray[np.int32]:
        """The innermost nested range that contains a time on its thread, -1 where none does; of `rows` if given."""
        found = np.full(len(time_ns), -1, np.int32)
        usable = self.nested & (self.duration_ns > 0) & (self.thread != NULL)
        rows = (np.flatnonzero(usable) if rows is None else rows[usable[rows]]).astype(np.int32)
        for one in distinct(thread)[0].tolist():
            mine, times = rows[self.thread[rows] == one], np.flatnonzero(thread == one)
            inner = _innermost(self.start_ns[mine], self.end_ns(mine), time_ns[times])
            found[times] = np.append(mine, -1)[inner]
        return found


def _innermost(start_ns: Integers, end_ns: Integers, time_ns: Integers) -> Integers:
    """The innermost of nested ranges, by start, that contains each time; -1 where none does.

    It is the last to start among those as deep as the number of ranges that are open at the time.
    """
    ends = np.sort(end_ns)
    # How many were open when each began.
    depth = np.arange(len(start_ns), dtype=np.int32) - places(ends, start_ns, "right").astype(np.int32)
    opened = places(start_ns, time_ns, "right") - places(ends, time_ns, "right")
    found = np.full(len(time_ns), -1)
    # Clocks that went backwards could give less than 0.
    for level in np.flatnonzero(np.bincount(np.maximum(opened, 0))).tolist():
        times, candidates = np.flatnonzero(opened == level), np.flatnonzero(depth == level - 1)
        if level and len(candidates):
            before = places(start_ns[candidates], time_ns[times], "right") - 1
            place = candidates[np.maximum(before, 0)]
            found[times] = np.where((before >= 0) & (end_ns[place] > time_ns[times]), place, -1)
    return found


def read_ranges(process: Process, end_ns: int | None) -> Ranges:
    """The ranges of one process. Those still open end at `end_ns`; None leaves them out."""
    database, conditions = process.database, process.where(NVTX)
    needed: Needed = {}
    if database.has(NVTX, "eventType"):
        of_ranges = Among("eventType", tuple((kind, kind) for kind in _NESTED_TYPES + _FREE_TYPES))
        conditions = (*conditions, of_ranges)
        needed = {"eventType": (), "globalTid": (of_ranges,)}
    names = ("start", "end", "globalTid", "textId", "eventType")
    present = [name for name in names if database.has(NVTX, name)]
    text = "text" if database.has(NVTX, "text") else None
    codes = {} if text else {"": 0}  # of names, with _MARK between one and torch's additions
    columns, registered = Columns(), {NULL: -1}
    lost, described = 0, False
    for piece in database.pieces(NVTX, present, conditions, text, needed):
        unknown = np.full(len(piece), NULL)
        begin, end, thread, text_id, kind = (piece.integers.get(name, unknown) for name in names)
        code, number = (np.zeros(len(piece), np.int64), unknown) if piece.texts is None else _named(piece.texts, codes)
        columns.add(
            start=begin,
            duration=durations(begin, end),
            thread=thread,
            sequence=number,
            code=_registered(database, text_id, code, codes, registered).astype(np.int32),
            nested=np.isin(kind, _NESTED_TYPES),
        )
        lost += piece.without
        described = described or piece.pages is None or _COMMUNICATOR.encode() in piece.pages.tobytes()
    start, duration = columns.take("start"), columns.take("duration")
    still_open = np.flatnonzero((duration == NULL) & (start != NULL))
    if end_ns is not None:
        duration[still_open] = np.maximum(end_ns - start[still_open], 0)
    usable = duration >= 0
    # Neither with nor without an end do those left out end later.
    lost += int((~usable).sum()) - (len(still_open) if end_ns is None else 0)
    rows = rows_by_start(start, duration, usable)
    parts = [text.partition(_MARK) for text in codes]
    operator = np.array([bool(mark) and _ANNOTATION.match(name) is None for name, mark, _ in parts], bool)
    name, sequence = columns.take("code", rows), columns.take("sequence", rows)
    sequence[~operator[name] | (sequence <= 0)] = NULL
    is_open = np.zeros(len(start), bool)
    is_open[still_open] = True
    return Ranges(
        start_ns=start[rows],
        duration_ns=duration[rows],
        thread=columns.take("thread", rows),
        name=name,
        sequence=sequence,
        nested=columns.take("nested", rows).astype(bool),
        open=np.flatnonzero(is_open[rows]),
        names=[name for name, _, _ in parts],
        operator=operator.tolist(),
        shapes=["".join(shapes.split()) or None for _, _, shapes in parts],
        lost=lost,
        described=described,
    )


def _registered(
    database: Database, text_ids: Integers, code: Integers, codes: dict[str, int], known: dict[int, int]
) -> Integers:
    """Codes of names, with those of texts that are registered once and have a number in the row.

    `known` has the codes of numbers; -1 where there is no such text.
    """
    ids, place = distinct(text_ids)
    fresh = [each for each in ids.tolist() if each not in known]
    texts = database.strings(np.array(fresh, np.int64))
    known |= {each: codes.setdefault(texts[each], len(codes)) if each in texts else -1 for each in fresh}
    of_id = np.array([known[each] for each in ids.tolist()], np.int64)[place]
    return np.where(of_id >= 0, of_id, code)


def _named(texts: pa.Array, codes: dict[str, int]) -> tuple[Integers, Integers]:
    """The code of each text's name with _MARK, known or new, and autograd's number in the text; NULL where there is none."""
    # Most texts differ only in the number at their end, without which a regular expression is needed for few.
    texts = texts.view(pa.string())
    shortened = pc.ascii_rtrim(texts, "0123456789")
    texts = pc.if_else(pc.ends_with(shortened, _NUMBERED), shortened, texts).dictionary_encode()
    written = texts.dictionary.view(pa.binary())  # which need not be UTF-8 in a damaged report
    names = pc.replace_substring_regex(written, f"{_NUMBERS}$", _MARK).dictionary_encode()
    shaped = pc.replace_substring_regex(names.dictionary, _NUMBERS + _SHAPES, rf"{_MARK}\1").to_pylist()
    known = np.array([codes.setdefault(name.decode("utf-8", "replace"), len(codes)) for name in shaped], np.int64)
    number = pc.extract_regex(written, _SEQUENCE).flatten()[0].cast(pa.string()).cast(pa.int64())
    place = texts.indices.to_numpy()
    return known[names.indices.to_numpy()][place], to_int64(number)[place]


def operations(
    process: Process,
    ranges: Ranges,
    kernels: Sequence[str | None],
    thread: Integers,
    issued_ns: Integers,
    world_size: int | None,
) -> list[Operation]:
    """The operation that each communication kernel carries out.

    Args:
        kernels: the operation in each kernel's name.
        thread: `globalTid` of each kernel's launch; NULL when unknown.
        issued_ns: when each kernel was launched.
        world_size: ranks in the job. A communicator of this size numbers its ranks as the job does.
    """
    calls = _calls(process, ranges, world_size)
    groups = _groups(ranges, calls)
    of_calls = ranges.named(lambda name: _CALL.match(name) is not None)
    found = []
    for kernel, row in zip(kernels, ranges.innermost(thread, issued_ns, of_calls).tolist(), strict=True):
        launched = groups[row] if row in groups else [calls[row]] if row in calls else []
        found.append(_operation_of(kernel, launched))
    return found


def _operation_of(kernel: str | None, calls: list[Operation]) -> Operation:
    """The operation of a kernel that carries out some calls; the kernel's name wins where they differ."""
    if kernel is not None:
        calls = [call for call in calls if call.operation in carried_out_by(kernel)]
    elif len({call.operation for call in calls}) > 1:
        return Operation()
    if len(calls) <= 1:
        return calls[0] if calls else Operation(kernel)
    found = batch(calls)
    sizes = [call.size_bytes for call in calls if call.size_bytes is not None]
    if len(sizes) < len(calls):
        return found
    sent = sum(size for call, size in zip(calls, sizes, strict=True) if call.operation == "send")
    total = sum(sizes)
    return replace(found, size_bytes=max(sent, total - sent) if found.operation == "send_recv" else total)


def _groups(ranges: Ranges, calls: dict[int, Operation]) -> dict[int, list[Operation]]:
    """The calls between ncclGroupStart and ncclGroupEnd, by the row of the outermost end, where kernels are launched."""
    groups: dict[int, list[Operation]] = {}
    pending: dict[int, list[Operation]] = defaultdict(list)
    depth: dict[int, int] = defaultdict(int)
    rows = np.union1d(ranges.named(lambda name: name in _GROUPING), np.array(list(calls), np.int64))
    codes = ranges.name[rows].tolist()
    for row, thread, name in zip(
        rows.tolist(), ranges.thread[rows].tolist(), map(ranges.names.__getitem__, codes), strict=True
    ):
        if name == "ncclGroupStart":
            depth[thread] += 1
        elif name == "ncclGroupEnd":
            depth[thread] = max(depth[thread] - 1, 0)
            found = [] if depth[thread] else pending.pop(thread, [])
            # Those of one communicator go into one kernel; of several communicators, into one kernel each in unknown order.
            groups[row] = found if len({call.group_name for call in found}) == 1 else []
        elif depth[thread]:
            pending[thread].append(calls[row])
    return groups


def _calls(process: Process, ranges: Ranges, world_size: int | None) -> dict[int, Operation]:
    """NCCL's calls by the row of their range."""
    payloads = _payloads(process, described=ranges.described)
    sizes = {
        payload[_COMMUNICATOR]: payload[_RANKS]
        for payload in payloads.values()
        if _COMMUNICATOR in payload and 0 < payload.get(_RANKS, 0) <= _MAX_RANKS
    }
    found, made = {}, {}
    rows = ranges.named(lambda name: _CALL.match(name) is not None and not _NO_OPERATION.match(name))
    columns = (rows, ranges.thread[rows], ranges.start_ns[rows], ranges.name[rows])
    for row, thread, start, name in zip(*(column.tolist() for column in columns), strict=True):
        payload = payloads.get((thread, start), {})
        communicator, share, peer = payload.get(_COMMUNICATOR), payload.get(_SIZE, -1), payload.get(_PEER, -1)
        ranks = None if communicator is None else sizes.get(communicator)
        operation = torch_operation(_CALL.sub("", ranges.names[name], count=1))
        size = None
        if 0 <= share <= _MAX_SHARE_BYTES and operation in _WHOLE:
            size = share
        elif 0 <= share <= _MAX_SHARE_BYTES and operation in _SHARED and ranks:
            size = share * ranks
        known_peer = peer if 0 <= peer <= _MAX_RANKS and ranks is not None and ranks == world_size else None
        # Training repeats a few calls a million times.
        key = (operation, communicator, ranks, known_peer, size)
        if key not in made:
            group_name = None if communicator is None else f"NCCL {communicator:#018x}"
            made[key] = Operation(operation, group_name=group_name, group_size=ranks, peer=known_peer, size_bytes=size)
        found[row] = made[key]
    return found


def _payloads(process: Process, *, described: bool) -> dict[tuple[int, int], dict[str, int]]:
    """The payloads of ranges, by thread and start."""
    database, condition = process.database, sql_of(process.where(NVTX))
    found: dict[tuple[int, int], dict[str, int]] = {}
    fields = _schemas(database)
    if fields and database.has(NVTX, "binaryData", "start", "globalTid"):
        query = f"SELECT globalTid, start, CAST(binaryData AS BLOB) FROM {NVTX} WHERE binaryData IS NOT NULL AND {condition}"
        for thread, start, raw in database.rows(query):
            if payload := _unpacked(raw, fields):
                found[thread, start] = payload
    if described and database.has(NVTX, "jsonText", "start", "globalTid"):
        query = f"SELECT globalTid, start, jsonText FROM {NVTX} WHERE jsonText LIKE '%{_COMMUNICATOR}%' AND {condition}"
        for thread, start, text in database.rows(query):
            if payload := _parsed(text):
                found[thread, start] = payload
    return found


def _schemas(database: Database) -> dict[int, dict[str, int]]:
    """Offsets of the known fields by the id of the payload's schema."""
    found: dict[int, dict[str, int]] = defaultdict(dict)
    for schema, name, offset in database.select("NVTX_PAYLOAD_SCHEMA_ENTRIES", "schemaId", "name", "offset"):
        if name in _FIELDS and isinstance(schema, int) and isinstance(offset, int | None):
            found[schema][name] = offset or 0  # null for the first field
    return found


def _unpacked(raw: Any, schemas: dict[int, dict[str, int]]) -> dict[str, int]:
    if not isinstance(raw, bytes) or len(raw) < _HEADER.size:
        return {}
    _, schema, size, _ = _HEADER.unpack_from(raw)
    payload = raw[_HEADER.size :]
    return {
        name: _FIELDS[name].unpack_from(payload, offset)[0]
        for name, offset in schemas.get(schema, {}).items()
        if offset >= 0 and offset + _FIELDS[name].size <= min(len(payload), size)
    }


def _parsed(text: Any) -> dict[str, int]:
    try:
        found = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: value for name, value in found.items() if name in _FIELDS and type(value) is int}
