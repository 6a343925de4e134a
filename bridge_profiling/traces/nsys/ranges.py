"""NVTX ranges of one process: their names, torch's operators among them, and the communication described by NCCL's ranges.

NCCL puts a range around each of its calls, with the message's bytes in a payload. A kernel is described by the call that
launched it. Payloads are recorded since nsys 2024.6 and exported with `--include-blobs=true`.
"""

from __future__ import annotations

import json
import re
import struct
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge_profiling.traces.joins import Operation, batch, carried_out_by, distinct, places, rows_by_start
from bridge_profiling.traces.kinds import torch_operation
from bridge_profiling.traces.nsys.database import Among, Database, Needed, Piece, sql_of
from bridge_profiling.traces.nsys.operator_names import MARK, OperatorNames
from bridge_profiling.traces.nsys.report import NVTX, Process
from bridge_profiling.traces.tables import NULL, Integers

#: NvtxPushPopRange and NvtxtPushPopRange nest on their thread; NvtxStartEndRange and NvtxtStartEndRange need not.
_NESTED_TYPES, _FREE_TYPES = (59, 70), (60, 71)

#: Key of autograd's sequence numbers among the columns.
_NUMBER = "sequence"

#: Ranges that torch opens around operators, and emit_nvtx numbers as if they were some. Kineto calls them annotations.
_ANNOTATION = re.compile(r"Optimizer\.\w+#|enumerate\(DataLoader\)#|DistributedDataParallel\.|FSDP::")

#: Iterations as profilers and Megatron name them; where there are none, as other loops do.
_ITERATIONS = (
    re.compile(r"(?:ProfilerStep\s*#|iteration[_ #-]?)\s?(\d{1,9})$", re.IGNORECASE),
    re.compile(r"(?:train(?:ing)?[_ -])?(?:iter|step)[_ #:-]?\s?(\d{1,9})$", re.IGNORECASE),
)

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
    end_ns: Integers  # the report's end for a range that is still open there
    thread: Integers  # globalTid
    name: NDArray[np.int32]  # index of `names`, `operator` and `shapes`
    sequence: Integers  # autograd's number of an operator; NULL for others, and on threads that made no node of its graph
    nested: NDArray[np.bool_]  # pushed and popped on its thread
    open: NDArray[np.bool_]
    names: list[str]  # without torch's additions
    operator: list[bool]  # torch called it an operator
    shapes: list[str | None]  # its inputs' dimensions as JSON text; None when not recorded
    lost: int = 0  # left out: without a thread, a type or a start, or they end before it
    described: bool = True  # whether NCCL can have written payloads as JSON

    def __len__(self) -> int:
        return len(self.start_ns)

    def innermost(self, thread: Integers, time_ns: Integers, among: NDArray[np.bool_] | None = None) -> Integers:
        """The innermost nested range that contains a time on its thread, `among` some of them; -1 where there is none."""
        found = np.full(len(time_ns), -1)
        usable = self.nested & (self.end_ns > self.start_ns)
        usable = usable if among is None else usable & among
        for one in np.unique(thread[thread != NULL]).tolist():
            rows = np.flatnonzero(usable & (self.thread == one))
            times = np.flatnonzero(thread == one)
            if len(rows):
                found[times] = self._innermost(rows, time_ns[times])
        return found

    def _innermost(self, rows: Integers, time_ns: Integers) -> Integers:
        """Of nested ranges, it is the last to start among those as deep as the number of ranges open at the time."""
        start, end = self.start_ns[rows], np.sort(self.end_ns[rows])
        depth = np.arange(len(rows)) - places(end, start, "right")
        opened = places(start, time_ns, "right") - places(end, time_ns, "right")
        found = np.full(len(time_ns), -1)
        for level in np.unique(opened[opened > 0]).tolist():
            times = np.flatnonzero(opened == level)
            candidates = rows[depth == level - 1]
            before = places(self.start_ns[candidates], time_ns[times], "right") - 1
            place = candidates[np.maximum(before, 0)] if len(candidates) else np.full(len(times), -1)
            found[times] = np.where((before >= 0) & (self.end_ns[place] > time_ns[times]), place, -1)
        return found

    def iteration_numbers(self) -> Integers:
        """The iteration that each range's name gives; NULL for other ranges."""
        for pattern in _ITERATIONS:
            matches = [pattern.match(name) for name in self.names]
            numbers = np.array([NULL if match is None else int(match[1]) for match in matches], np.int64)[self.name]
            if (numbers != NULL).any():
                return numbers
        return np.full(len(self), NULL)


def read_ranges(process: Process, end_ns: int | None) -> Ranges:
    """The ranges of one process. Those still open end at `end_ns`; None leaves them out."""
    database, where = process.database, process.where(NVTX)
    needed: Needed = {}
    if database.has(NVTX, "eventType"):
        of_ranges = Among("eventType", tuple((kind, kind) for kind in _NESTED_TYPES + _FREE_TYPES))
        where = (*where, of_ranges)
        needed = {"eventType": (), "globalTid": (of_ranges,)}
    written = _read(database, where, needed)
    columns, codes = written.columns, written.code
    start, end = columns.pop("start"), columns.pop("end")
    still_open = end == NULL
    if end_ns is not None and still_open.any():
        end = np.where(still_open, np.maximum(start, end_ns), end)
    text_ids = columns.pop("textId", None)  # nsys writes most names into the row
    registered = {} if text_ids is None else database.strings(text_ids)
    known = {text: code for code, text in enumerate(written.names)}
    if text_ids is not None and registered:
        ids, place = distinct(text_ids)
        of_id = [known.setdefault(registered[number], len(known)) if number in registered else -1 for number in ids.tolist()]
        by_id = np.array(of_id, np.int32)[place]
        codes = np.where(by_id >= 0, by_id, codes)
        del place, by_id
    del text_ids
    lost = written.lost + int(((start == NULL) | (~still_open & (end < start))).sum())
    # Millions of rows: what is done with is freed.
    rows = rows_by_start(start, end, (start != NULL) & (end != NULL) & (end >= start))
    start, end, codes = start[rows], end[rows], codes[rows]
    parts = [text.partition(MARK) for text in known]
    operator = [bool(mark) and _ANNOTATION.match(name) is None for name, mark, _ in parts]
    numbers = columns.pop(_NUMBER)[rows]
    numbers[~np.array(operator, bool)[codes] | (numbers <= 0)] = NULL
    return Ranges(
        start_ns=start,
        end_ns=end,
        thread=columns.pop("globalTid")[rows],
        name=codes,
        sequence=numbers,
        nested=written.nested[rows],
        open=still_open[rows],
        names=[name for name, _, _ in parts],
        operator=operator,
        shapes=["".join(shapes.split()) or None for _, _, shapes in parts],
        lost=lost,
        described=written.described,
    )


@dataclass(frozen=True)
class _Written:
    """Rows of ranges as they are written.

    `columns` has autograd's number in each row's text, `names` have MARK between a name and torch's additions.
    """

    columns: dict[str, Integers]
    nested: NDArray[np.bool_]
    code: NDArray[np.int32]  # index of `names`
    names: list[str]
    lost: int  # rows without a thread or a type
    described: bool


#: Columns of integers that are read.
_COLUMNS = ("start", "end", "globalTid", "textId")


def _read(database: Database, where: Sequence[Among], needed: Needed) -> _Written:
    present = [name for name in (*_COLUMNS, "eventType") if database.has(NVTX, name)]
    text = "text" if database.has(NVTX, "text") else None
    names = OperatorNames()
    pieces: dict[str, list[Integers]] = {name: [np.empty(0, np.int64)] for name in (*_COLUMNS, _NUMBER)}
    nested, codes = [np.empty(0, bool)], [np.empty(0, np.int32)]
    lost, described, registered = 0, False, False
    for piece in map(partial(_written, names=names), database.pieces(NVTX, present, where, text, needed)):
        codes.append(piece.code)
        if not registered and (piece.columns["textId"] != NULL).any():
            registered = True
            pieces["textId"] = [np.full(sum(map(len, nested)), NULL)]
        for name, kept in pieces.items():
            if registered or name != "textId":
                kept.append(piece.columns[name])
        nested.append(piece.nested)
        lost, described = lost + piece.lost, described or piece.described
    if not registered:
        del pieces["textId"]
    columns = {name: np.concatenate(pieces.pop(name)) for name in tuple(pieces)}
    return _Written(columns, np.concatenate(nested), np.concatenate(codes), names.names or [""], lost, described)


def _written(piece: Piece, *, names: OperatorNames) -> _Written:
    unknown = np.full(piece.rows, NULL)
    code, sequence = np.zeros(piece.rows, np.int32), unknown
    if len(piece.texts):
        code, sequence = names.add(piece.texts, piece.rows)
    columns = {name: piece.integers.get(name, unknown) for name in _COLUMNS} | {_NUMBER: sequence}
    nested = np.isin(piece.integers.get("eventType", unknown), _NESTED_TYPES)
    described = piece.pages is None or _COMMUNICATOR.encode() in piece.pages.tobytes()
    return _Written(columns, nested, code, [], piece.without, described)


def operations(
    process: Process,
    ranges: Ranges,
    *,
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
    is_call = np.array([_CALL.match(name) is not None for name in ranges.names], bool)[ranges.name]
    found = []
    for kernel, row in zip(kernels, ranges.innermost(thread, issued_ns, is_call).tolist(), strict=True):
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
    grouping = np.array([name in _GROUPING for name in ranges.names], bool)[ranges.name]
    grouping[list(calls)] = True
    for row in np.flatnonzero(grouping).tolist():
        thread, name = int(ranges.thread[row]), ranges.names[ranges.name[row]]
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
    calling = [_CALL.match(name) is not None and not _NO_OPERATION.match(name) for name in ranges.names]
    operation_of = [
        torch_operation(_CALL.sub("", name, count=1)) if calls else None
        for name, calls in zip(ranges.names, calling, strict=True)
    ]
    found = {}
    for row in np.flatnonzero(np.array(calling, bool)[ranges.name]).tolist():
        payload = payloads.get((int(ranges.thread[row]), int(ranges.start_ns[row])), {})
        communicator, share, peer = payload.get(_COMMUNICATOR), payload.get(_SIZE, -1), payload.get(_PEER, -1)
        ranks = None if communicator is None else sizes.get(communicator)
        operation = operation_of[ranges.name[row]]
        size = None
        if 0 <= share <= _MAX_SHARE_BYTES and operation in _WHOLE:
            size = share
        elif 0 <= share <= _MAX_SHARE_BYTES and operation in _SHARED and ranks:
            size = share * ranks
        found[row] = Operation(
            operation,
            group_name=None if communicator is None else f"NCCL {communicator:#018x}",
            group_size=ranks,
            peer=peer if 0 <= peer <= _MAX_RANKS and ranks is not None and ranks == world_size else None,
            size_bytes=size,
        )
    return found


def _payloads(process: Process, *, described: bool) -> dict[tuple[int, int], dict[str, int]]:
    """The payloads of ranges, by thread and start."""
    database, where = process.database, sql_of(process.where(NVTX))
    found: dict[tuple[int, int], dict[str, int]] = {}
    fields = _schemas(database)
    if fields and database.has(NVTX, "binaryData", "start", "globalTid"):
        query = f"SELECT globalTid, start, CAST(binaryData AS BLOB) FROM {NVTX} WHERE binaryData IS NOT NULL AND {where}"
        for thread, start, raw in database.rows(query):
            if payload := _unpacked(raw, fields):
                found[thread, start] = payload
    if described and database.has(NVTX, "jsonText", "start", "globalTid"):
        query = f"SELECT globalTid, start, jsonText FROM {NVTX} WHERE jsonText LIKE '%{_COMMUNICATOR}%' AND {where}"
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
