"""What NCCL itself tells nsys of its operations: ranges around its calls, and in their payloads the message's bytes.

A kernel is described by the call it was launched in. Payloads are recorded by nsys 2024.6 and later and are in an export made
with `--include-blobs=true`; without them only the operation is known. Nothing is guessed.
"""

from __future__ import annotations

import json
import re
import struct
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bridge_profiling.traces.joins import Operation, batch
from bridge_profiling.traces.kinds import torch_operation
from bridge_profiling.traces.nsys_database import Database
from bridge_profiling.traces.nsys_ranges import TABLE, Ranges
from bridge_profiling.traces.tables import Integers

_CALL = re.compile(r"p?nccl(?=[A-Z])")
_GROUPING = ("ncclGroupStart", "ncclGroupEnd")
_NO_OPERATION = re.compile(r"ncclComm|ncclGroup|ncclMem|ncclGet|ncclRedOp")

#: Domain, schema, size and place of the payload; 64-bit little-endian.
_HEADER = struct.Struct("<QQQQ")

#: Fields of NCCL's payloads by their published names (nvtx_payload_schemas.h), and how they are packed.
_FIELDS = {
    "NCCL communicator ID": struct.Struct("<Q"),
    "Message size [bytes]": struct.Struct("<Q"),
    "Peer rank": struct.Struct("<i"),
    "No. of ranks": struct.Struct("<i"),
}

#: Larger values are damage: 4 TB of one rank, a million ranks. Their products fit 64 bits.
_MAX_SHARE_BYTES, _MAX_RANKS = 1 << 42, 1 << 20

#: NCCL gives one rank's share of these; the larger of input and output is that of all ranks.
_SHARED = {"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"}
_WHOLE = {"all_reduce", "broadcast", "reduce", "send", "recv"}

#: Which calls a kernel can carry out, by the operation that its name tells; else those of that operation.
_CALLED = {"send_recv": ("send", "recv", "all_to_all", "gather", "scatter")}


@dataclass(frozen=True)
class Call:
    """One call of NCCL.

    Args:
        operation: in the words of `collectives.operation`.
        communicator: NCCL's hash of the communicator, the same on all of its ranks; None when not recorded.
        ranks: how many ranks it has; None when no payload says.
        share_bytes: the message size that NCCL gives; None when not recorded.
        peer: of send and recv, in the communicator's numbering.
    """

    operation: str
    communicator: int | None = None
    ranks: int | None = None
    share_bytes: int | None = None
    peer: int | None = None

    @property
    def message_bytes(self) -> int | None:
        """As `collectives.message_bytes`; None when that needs the number of ranks and it is unknown."""
        if self.share_bytes is None:
            return None
        if self.operation in _SHARED:
            return self.share_bytes * self.ranks if self.ranks else None
        return self.share_bytes if self.operation in _WHOLE else None


@dataclass(frozen=True)
class Described:
    """What communication kernels carry out: one of each per kernel.

    Args:
        operations: all but the message's bytes.
        message_bytes: None where unknown.
        unknown: how many have no known message.
    """

    operations: list[Operation]
    message_bytes: list[int | None]
    unknown: int


def describe(
    database: Database,
    where: str,
    ranges: Ranges,
    *,
    told: Sequence[str | None],
    thread: Integers,
    launched_ns: Integers,
    world_size: int | None,
) -> Described:
    """What each communication kernel carries out.

    Args:
        database: the report.
        where: SQL condition for the process' ranges.
        ranges: the process' ranges.
        told: the operation that each kernel's name tells.
        thread: `globalTid` of each kernel's launch; NULL when it was not recorded.
        launched_ns: when the launch began.
        world_size: ranks in the job; a communicator of as many numbers its ranks as the job does.
    """
    calls = _calls(database, where, ranges)
    is_call = np.array([_CALL.match(name) is not None for name in ranges.names], bool)[ranges.name]
    row = ranges.innermost(thread, launched_ns, is_call)
    groups = _Groups(ranges, calls)
    operations, sizes = [], []
    for name, own in zip(told, row.tolist(), strict=True):
        found = groups.taken(own) if own >= 0 and ranges.names[ranges.name[own]] == "ncclGroupEnd" else [calls.get(own)]
        operation, size = _joined([call for call in found if call is not None], name, world_size)
        operations.append(operation)
        sizes.append(size)
    return Described(operations, sizes, sum(size is None for size in sizes))


def _joined(calls: list[Call], told: str | None, world_size: int | None) -> tuple[Operation, int | None]:
    """One kernel's operation and bytes, from the calls that it carries out; what its name tells wins where they differ."""
    if told is not None:
        calls = [call for call in calls if call.operation in _CALLED.get(told, (told,))]
    elif len({call.operation for call in calls}) > 1:
        return Operation(), None
    if not calls:
        return Operation(told), None
    operations = [_operation(call, world_size) for call in calls]
    operation = operations[0] if len(calls) == 1 else batch(operations)
    sizes = [call.message_bytes for call in calls]
    if None in sizes:
        return operation, None
    known = [size for size in sizes if size is not None]
    if operation.operation != "send_recv":
        return operation, sum(known)
    sent = sum(size for call, size in zip(calls, known, strict=True) if call.operation == "send")
    return operation, max(sent, sum(known) - sent)


def _operation(call: Call, world_size: int | None) -> Operation:
    name = None if call.communicator is None else f"NCCL {call.communicator:#018x}"
    whole_job = call.ranks is not None and call.ranks == world_size
    return Operation(operation=call.operation, group_name=name, group_size=call.ranks, peer=call.peer if whole_job else None)


class _Groups:
    """The calls between ncclGroupStart and ncclGroupEnd: kernels are launched when the outermost group ends."""

    def __init__(self, ranges: Ranges, calls: dict[int, Call]) -> None:
        self._calls: dict[int, list[Call]] = {}
        pending: dict[int, list[Call]] = defaultdict(list)
        depth: dict[int, int] = defaultdict(int)
        grouping = [name in _GROUPING for name in ranges.names]
        rows = np.flatnonzero(np.array(grouping, bool)[ranges.name] | np.isin(np.arange(len(ranges)), list(calls)))
        for row in rows.tolist():
            thread, name = int(ranges.thread[row]), ranges.names[ranges.name[row]]
            if name == "ncclGroupStart":
                depth[thread] += 1
            elif name == "ncclGroupEnd":
                depth[thread] = max(depth[thread] - 1, 0)
                if depth[thread] == 0:
                    self._calls[row] = pending.pop(thread, [])
            elif depth[thread]:
                pending[thread].append(calls[row])

    def taken(self, row: int) -> list[Call]:
        """The calls that the group ending in this range carries out.

        Its operations of one communicator go into one kernel; of several communicators, into one kernel each, of which
        nothing says which is whose.
        """
        found = self._calls.get(row, [])
        return found if len({call.communicator for call in found}) == 1 else []


def _calls(database: Database, where: str, ranges: Ranges) -> dict[int, Call]:
    """NCCL's calls by the row of their range."""
    payloads = _payloads(database, where)
    sizes = {
        payload["NCCL communicator ID"]: payload["No. of ranks"]
        for payload in payloads.values()
        if "NCCL communicator ID" in payload and 0 < payload.get("No. of ranks", 0) <= _MAX_RANKS
    }
    calling = [_CALL.match(name) is not None and not _NO_OPERATION.match(name) for name in ranges.names]
    found = {}
    for row in np.flatnonzero(np.array(calling, bool)[ranges.name]).tolist() if len(ranges) else []:
        payload = payloads.get((int(ranges.thread[row]), int(ranges.start_ns[row])), {})
        communicator = payload.get("NCCL communicator ID")
        found[row] = Call(
            operation=torch_operation(_CALL.sub("", ranges.names[ranges.name[row]], count=1)),
            communicator=communicator,
            ranks=None if communicator is None else sizes.get(communicator),
            share_bytes=_within(payload.get("Message size [bytes]"), _MAX_SHARE_BYTES),
            peer=_within(payload.get("Peer rank"), _MAX_RANKS),
        )
    return found


def _within(value: int | None, largest: int) -> int | None:
    return value if value is not None and 0 <= value <= largest else None


def _payloads(database: Database, where: str) -> dict[tuple[int, int], dict[str, int]]:
    """The payloads of ranges, by thread and start."""
    found: dict[tuple[int, int], dict[str, int]] = {}
    if database.has(TABLE, "binaryData", "start", "globalTid"):
        fields = _schemas(database)
        query = f"SELECT globalTid, start, CAST(binaryData AS BLOB) FROM {TABLE} WHERE binaryData IS NOT NULL AND ({where})"
        for thread, start, raw in database.rows(query) if fields else ():
            if payload := _unpacked(raw, fields):
                found[thread, start] = payload
    if database.has(TABLE, "jsonText", "start", "globalTid"):
        query = f"SELECT globalTid, start, jsonText FROM {TABLE} WHERE jsonText LIKE '%NCCL communicator ID%' AND ({where})"
        for thread, start, text in database.rows(query):
            if payload := _parsed(text):
                found[thread, start] = payload
    return found


def _schemas(database: Database) -> dict[int, dict[str, int]]:
    """Where each schema of a payload has the fields we know, by its id."""
    found: dict[int, dict[str, int]] = defaultdict(dict)
    if database.has("NVTX_PAYLOAD_SCHEMA_ENTRIES", "schemaId", "name", "offset"):
        for schema, name, offset in database.rows('SELECT schemaId, name, "offset" FROM NVTX_PAYLOAD_SCHEMA_ENTRIES'):
            if name in _FIELDS and isinstance(schema, int) and isinstance(offset, int | None):
                found[schema][name] = offset or 0  # null for the first field
    return found


def _unpacked(raw: Any, schemas: dict[int, dict[str, int]]) -> dict[str, int]:
    if not isinstance(raw, bytes) or len(raw) < _HEADER.size:
        return {}
    _, schema, size, _ = _HEADER.unpack_from(raw)
    payload = raw[_HEADER.size :]
    fields = schemas.get(schema, {})
    return {
        name: _FIELDS[name].unpack_from(payload, offset)[0]
        for name, offset in fields.items()
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
