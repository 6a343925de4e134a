"""The tables that every capture is read into. `schemas.toml` declares their columns. Rules for every table:

- A time is int64 nanoseconds on one clock per rank, see `RankInfo.clock`. End is never before start.
- `null` means that the capture does not record the value. Nothing is guessed; `RankInfo.caveats` lists what was inferred.
- Names are dictionary-encoded (`NAME`), so a million events cost a few thousand strings.
- Rows are sorted by start time (`time_ns`, `allocated_ns`); of host events that start together the longest comes first.
"""

from __future__ import annotations

import contextlib
import ctypes
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Integers = NDArray[np.int64]

#: Stands for null in arrays of integers.
NULL = np.iinfo(np.int64).min

NAME = pa.dictionary(pa.int32(), pa.string())


#: By table; `schemas.toml` declares them.
SCHEMAS: dict[str, pa.Schema] = {
    table: pa.schema(
        {"rank": pa.int32()} | {name: NAME if kind == "name" else pa.type_for_alias(kind) for name, kind in columns.items()}
    )
    for table, columns in tomllib.loads(Path(__file__).with_name("schemas.toml").read_text(encoding="utf-8")).items()
}

#: No size is larger, in bytes or elements: sums over two million rows stay below 2^63.
MAX_SIZE = 1 << 42

_SIZES = {"bytes", "requested_bytes", "free_bytes", "total_allocated_bytes", "total_reserved_bytes"}
_SIZES |= {"message_bytes", "in_elements", "out_elements"}


#: Rows that a column has room for at first.
_FIRST_ROWS = 1 << 12


class Columns:
    """Columns of one kind of events. Each is an array that grows in place.

    Joining many small arrays would leave holes in the heap, as large as half of the memory that reading takes.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[Any]] = {}
        self._rows = 0

    def add(self, **columns: NDArray[Any]) -> None:
        """Append one piece of every column."""
        first = self._rows
        for name, values in columns.items():
            self._rows = first + len(values)
            if name not in self._buffers:
                self._buffers[name] = np.empty(max(_FIRST_ROWS, self._rows), values.dtype)
            buffer = self._buffers[name]
            if len(buffer) < self._rows:
                buffer.resize(max(len(buffer) * 5 // 4, self._rows), refcheck=False)
            buffer[first : self._rows] = values

    def take(self, name: str, rows: NDArray[Any] | slice = slice(None)) -> NDArray[Any]:
        """Remove a column and return its rows, in the order given. Columns take most of the memory."""
        buffer = self._buffers.pop(name, None)
        return np.empty(0, np.int64)[rows] if buffer is None else buffer[: self._rows][rows]

    def __len__(self) -> int:
        return self._rows


def build(name: str, rank: int, columns: Mapping[str, pa.Array | NDArray[Any]], base_ns: int = 0) -> pa.Table:
    """A table of a schema, from at least one column. Types are cast; columns that are not given are null.

    Integers are null where they are NULL. `base_ns` is added to the times among them.

    So are numbers that the column's type cannot hold, and sizes beyond `MAX_SIZE`: a file can hold any.

    Raises:
        KeyError: a column is not in the schema.
    """
    schema = SCHEMAS[name]
    unknown = set(columns) - set(schema.names)
    if unknown:
        raise KeyError(f"{name} has no column {', '.join(sorted(unknown))}")
    rows = len(next(iter(columns.values())))
    arrays = []
    for column in schema:
        if column.name == "rank":
            arrays.append(pa.repeat(pa.scalar(rank, column.type), rows))
        elif column.name in columns:
            array = columns[column.name]
            if isinstance(array, np.ndarray) and array.dtype == np.int64:
                array = integer_column(array, base_ns if column.name.endswith("_ns") else 0)
            array = _bounded(array if isinstance(array, pa.Array) else pa.array(array), column)
            arrays.append(array if array.type == column.type else array.cast(column.type))
        else:
            arrays.append(pa.nulls(rows, column.type))
    return pa.table(arrays, schema=schema)


def _bounded(array: pa.Array, column: pa.Field) -> pa.Array:
    """A column of integers with null for those beyond its bounds."""
    bits = 8 * array.type.byte_width if pa.types.is_signed_integer(array.type) else 0
    narrower = bits and pa.types.is_integer(column.type) and column.type.bit_width < bits
    most = MAX_SIZE if bits and column.name in _SIZES else (1 << (column.type.bit_width - 1)) - 1 if narrower else None
    if most is None:
        return array
    low, high = pc.min_max(array).values()
    if not low.is_valid or (low.as_py() >= -most and high.as_py() <= most):
        return array
    within = pc.and_(pc.greater_equal(array, -most), pc.less_equal(array, most))
    return pc.if_else(within, array, pa.scalar(None, array.type))


class BlockTable(ABC):
    """A table that is read or made on each use, in blocks of rows: it need not fit into memory as a whole."""

    @abstractmethod
    def blocks(self, wanted: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """The rows of all columns, or of some."""

    @abstractmethod
    def read(self, wanted: Sequence[str] | None = None) -> pa.Table:
        """The same as one table."""


class MadeTable(BlockTable):
    """A table that a function makes in blocks."""

    def __init__(self, make: Callable[[], Iterator[pa.Table]]) -> None:
        self._make = make
        self._whole: pa.Table | None = None

    def blocks(self, wanted: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """The rows as they are made, or as one table once that was needed."""
        blocks = self._make() if self._whole is None else iter([self._whole])
        return blocks if wanted is None else (block.select(list(wanted)) for block in blocks)

    def read(self, wanted: Sequence[str] | None = None) -> pa.Table:
        """All rows, which are kept."""
        if self._whole is None:
            self._whole = pa.concat_tables(self._make()).unify_dictionaries().combine_chunks()
        return self._whole if wanted is None else self._whole.select(list(wanted))


def give_memory_back() -> None:
    """Give freed memory back to the system, of which the C library would keep 0.4 GB after an nsys export of 1 GB."""
    pa.default_memory_pool().release_unused()
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: not the GNU C library
        ctypes.CDLL(None).malloc_trim(0)


def coded_column(codes: NDArray[Any], values: Sequence[str | None]) -> pa.Array:
    """`values[codes]` as a dictionary-encoded column with only the values in use; null where a code is negative."""
    counts = np.bincount(codes[codes >= 0], minlength=len(values)) if len(codes) else np.zeros(len(values), np.int64)
    known: dict[str, int] = {}
    place = np.full(len(values) + 1, -1, np.int32)  # the last one is for negative codes
    for code in np.flatnonzero(counts).tolist():
        value = values[code]
        if value is not None:
            place[code] = known.setdefault(value, len(known))
    numbers = place[np.where(codes >= 0, codes, len(values))]
    return pa.DictionaryArray.from_arrays(pa.array(numbers, mask=numbers < 0), pa.array(list(known), pa.string()))


def text_column(values: Sequence[str | None]) -> pa.Array:
    """Texts, dictionary-encoded."""
    return pa.array(values, pa.string()).dictionary_encode()


def integer_column(values: Integers, plus: int = 0) -> pa.Array:
    """Integers as a column, null where they are NULL; shares memory with `values` unless something is added to them."""
    missing = values == NULL
    values = values + plus if plus else values
    if not missing.any():
        return pa.array(values)
    valid = pa.py_buffer(np.packbits(~missing, bitorder="little"))
    return pa.Array.from_buffers(pa.int64(), len(values), [valid, pa.py_buffer(np.ascontiguousarray(values, np.int64))])


def to_int64(column: pa.ChunkedArray | pa.Array, null: int = NULL) -> Integers:
    """A column of integers as an array."""
    integers = column if column.type == pa.int64() else column.cast(pa.int64())
    return (integers.fill_null(null) if integers.null_count else integers).to_numpy()


def fields(kind: pa.DataType, *names: str) -> list[tuple[str, pa.DataType]]:
    """Columns of one type, for a schema."""
    return [(name, kind) for name in names]
