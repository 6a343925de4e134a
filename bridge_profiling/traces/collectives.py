"""What one communication operation is: its group, its message, its place in its group's order. Reads no files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from bridge_profiling.traces.joins import NULL, Integers, sequence_in_group
from bridge_profiling.traces.types import ProcessGroup

#: Bytes of an element, by torch's name of its type.
_ELEMENT_BYTES = {
    "Double": 8,
    "Long": 8,
    "Float": 4,
    "Int": 4,
    "Half": 2,
    "BFloat16": 2,
    "Short": 2,
    "UInt16": 2,
    "UInt32": 4,
    "UInt64": 8,
    "ComplexFloat": 8,
    "ComplexDouble": 16,
    "Byte": 1,
    "Char": 1,
    "Bool": 1,
    "Float8_e4m3fn": 1,
    "Float8_e4m3fnuz": 1,
    "Float8_e5m2": 1,
    "Float8_e5m2fnuz": 1,
    "Float8_e8m0fnu": 1,
}


@dataclass(frozen=True)
class Operation:
    """One operation as a row of `collectives`, without its times. None: the capture does not say."""

    operation: str | None = None
    group_name: str | None = None
    group: str | None = None
    group_ranks: tuple[int, ...] | None = None
    group_size: int | None = None
    in_elements: int | None = None
    out_elements: int | None = None
    dtype: str | None = None
    peer: int | None = None

    @property
    def message_bytes(self) -> int | None:
        """As in nccl-tests: the larger of input and output."""
        size = _ELEMENT_BYTES.get(self.dtype or "")
        elements = [count for count in (self.in_elements, self.out_elements) if count is not None]
        return size * max(elements) if size and elements else None

    def in_known_group(self, groups: dict[str, ProcessGroup]) -> Operation:
        """Completed by what the trace lists of its group: the profiler shortens long lists of ranks."""
        known = groups.get(self.group_name or "")
        if known is None:
            return self
        return replace(
            self,
            group=self.group or known.description or None,
            group_ranks=self.group_ranks or known.ranks or None,
            group_size=self.group_size or len(known.ranks) or None,
        )


def batch(operations: Sequence[Operation]) -> Operation:
    """Point-to-point operations that one kernel carries out: what they have in common, and their elements added up.

    Args:
        operations: at least one.
    """
    first = operations[0]
    kinds = {operation.operation for operation in operations}
    peers = {operation.peer for operation in operations}
    same_group = len({operation.group_name for operation in operations}) == 1
    return Operation(
        operation=kinds.pop() if len(kinds) == 1 else "send_recv",
        group_name=first.group_name if same_group else None,
        group=first.group if same_group else None,
        group_ranks=first.group_ranks if same_group else None,
        group_size=first.group_size if same_group else None,
        in_elements=_elements(operations, "send"),
        out_elements=_elements(operations, "recv"),
        dtype=first.dtype if len({operation.dtype for operation in operations}) == 1 else None,
        peer=peers.pop() if len(peers) == 1 else None,
    )


def _elements(operations: Sequence[Operation], kind: str) -> int | None:
    counts = [
        operation.in_elements if operation.operation != "recv" else operation.out_elements
        for operation in operations
        if operation.operation == kind or operation.operation not in ("send", "recv")
    ]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def ranks_of(text: str | None) -> tuple[int, ...] | None:
    """Ranks from their JSON text; None when there is none, or when the profiler shortened it ("[0, 1, ..., 7]")."""
    try:
        found = json.loads(text or "")
    except ValueError:
        return None
    return tuple(found) if isinstance(found, list) and found and all(isinstance(rank, int) for rank in found) else None


def operation_columns(operations: Sequence[Operation], issued_ns: Integers) -> dict[str, pa.Array]:
    """The columns of `collectives` that say what each operation is, and its sequence in its group.

    Args:
        operations: in the rows' order.
        issued_ns: when each was launched, or began where that is unknown.
    """
    ranks = [None if each.group_ranks is None else json.dumps(each.group_ranks, separators=(",", ":")) for each in operations]
    codes: dict[tuple[str | None, str | None], int] = {}
    groups = [codes.setdefault((each.group_name, text), len(codes)) for each, text in zip(operations, ranks, strict=True)]
    return {
        "collective": pa.array(np.arange(len(operations), dtype=np.int32)),
        "operation": text_column([each.operation for each in operations]),
        "group_name": text_column([each.group_name for each in operations]),
        "group": text_column([each.group or each.group_name for each in operations]),
        "group_ranks": text_column(ranks),
        "group_size": pa.array([each.group_size for each in operations], pa.int32()),
        "sequence": pa.array(sequence_in_group(np.array(groups, np.int64), issued_ns), pa.int32()),
        "message_bytes": pa.array([each.message_bytes for each in operations], pa.int64()),
        "in_elements": pa.array([each.in_elements for each in operations], pa.int64()),
        "out_elements": pa.array([each.out_elements for each in operations], pa.int64()),
        "dtype": text_column([each.dtype for each in operations]),
        "peer": pa.array([each.peer for each in operations], pa.int32()),
    }


def text_column(values: Sequence[str | None]) -> pa.Array:
    """Texts, dictionary-encoded as the tables' names are."""
    return pa.array(values, pa.string()).dictionary_encode()


def integer_column(values: Integers) -> pa.Array:
    """Integers with NULL for null; shares memory with `values`."""
    missing = values == NULL
    if not missing.any():
        return pa.array(values)
    valid = pa.py_buffer(np.packbits(~missing, bitorder="little"))
    return pa.Array.from_buffers(pa.int64(), len(values), [valid, pa.py_buffer(np.ascontiguousarray(values, np.int64))])
