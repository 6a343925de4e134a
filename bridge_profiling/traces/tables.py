"""The tables that every capture is read into: their columns, units and meaning. Rules for every table:

- A time is int64 nanoseconds on one clock per rank, see `RankInfo.clock`. End is never before start.
- `null` means that the capture does not record the value. Nothing is guessed; `RankInfo.caveats` lists what was inferred.
- Names are dictionary-encoded (`NAME`), so a million events cost a few thousand strings.
- Rows are sorted by start time (`time_ns`, `allocated_ns`); of host events that start together the longest comes first.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bridge_profiling.traces.types import BlockTable

Integers = NDArray[np.int64]

#: Stands for null in arrays of integers.
NULL = np.iinfo(np.int64).min

NAME = pa.dictionary(pa.int32(), pa.string())


def _schema(*columns: tuple[str, pa.DataType]) -> pa.Schema:
    """Columns after `rank`: the global rank, the same in every row, so that files of many ranks can be queried as one."""
    return pa.schema([("rank", pa.int32()), *columns])


SCHEMAS: dict[str, pa.Schema] = {
    "device_events": _schema(
        ("kind", NAME),  # compute | communication | memcpy | memset. Synchronization records are not device work
        ("backend", NAME),  # of communication: nccl | rccl | deepep | hybridep | nvshmem | userbuffers | other; null otherwise
        ("name", NAME),  # demangled kernel name; for a copy the profiler's words, "Memcpy HtoD (Pinned -> Device)"
        ("device", pa.int32()),  # the device's number in the process
        ("stream", pa.int64()),
        ("start_ns", pa.int64()),
        ("end_ns", pa.int64()),
        ("correlation", pa.int64()),  # joins host_events.correlation of the launching call; null when the launch has none
        # Joins host_events.operator: the innermost operator or annotation that launched it; null where the profiler does not
        # say, and then it is the innermost one on launch_thread at launch_start_ns.
        ("operator", pa.int64()),
        ("launch_start_ns", pa.int64()),  # start of the launching runtime or driver call; null when it was not recorded
        ("launch_end_ns", pa.int64()),
        ("launch_thread", pa.int64()),  # host_events.thread of that call
        ("iteration", pa.int32()),  # by the launch, else by the start (design.md); null outside every iteration
        ("collective", pa.int32()),  # collectives.collective; null when this is not communication
        ("graph", pa.int64()),  # the CUDA graph that launched it; null outside graphs
        ("bytes", pa.int64()),  # of a copy or a memset. Bandwidth is bytes / (end_ns - start_ns)
        ("direction", NAME),  # of a copy: HtoD | DtoH | DtoD | PtoP | HtoH | other; null otherwise
        ("from_memory", NAME),  # of a copy: pageable | pinned | device | managed | array | unknown; null otherwise
        ("to_memory", NAME),
        # Of a kernel: JSON text of its grid, its blocks, registers of a thread and bytes of shared memory of a block,
        # "[[256,1,1],[128,1,1],32,1024]"; null where the profiler records no grid.
        ("configuration", NAME),
    ),
    "host_events": _schema(
        ("process", pa.int64()),  # operating system's process id as the profiler gives it
        ("thread", pa.int64()),
        # operator (framework op) | runtime (CUDA/HIP runtime and driver call) | annotation (record_function, ProfilerStep,
        # NVTX) | python (a Python frame) | overhead (the profiler's own work)
        ("category", NAME),
        ("name", NAME),
        ("start_ns", pa.int64()),
        ("end_ns", pa.int64()),
        ("correlation", pa.int64()),  # of a runtime call: joins device_events.correlation
        ("operator", pa.int64()),  # of an operator or annotation: its id. Of a runtime call: the operator it ran in
        # Autograd's sequence number: the same of a forward operator and of the backward operator that belongs to it. Operators
        # inside either may have it too. Null when not recorded.
        ("sequence", pa.int64()),
        ("shapes", NAME),  # of an operator: JSON text of its inputs' dimensions, "[[2048,1,2048],[]]"; null when not recorded
        ("stack", NAME),  # Python call stack as the profiler wrote it, innermost frame first, ";" or newline between frames
    ),
    "collectives": _schema(
        ("collective", pa.int32()),  # id within this rank: the row's number
        ("operation", NAME),  # all_reduce | all_gather | reduce_scatter | broadcast | all_to_all | reduce | send | recv | …
        ("backend", NAME),  # as in device_events
        ("group_name", NAME),  # torch's process group name ("15"); null when unknown
        ("group", NAME),  # what the program calls it ("TENSOR_MODEL_PARALLEL_GROUP"), else group_name; null when unknown
        ("group_ranks", NAME),  # JSON text of its global ranks, ascending in the group's order, "[0,2]"; null when unknown
        ("group_size", pa.int32()),
        # Position among this rank's rows of the same (group_name, group_ranks), in launch order, from 0. Operations of the
        # same position match across ranks only when operation and message_bytes match too: a capture can begin anywhere.
        ("sequence", pa.int32()),
        ("message_bytes", pa.int64()),  # as in nccl-tests: the larger of input and output, of one rank; null when unknown
        ("in_elements", pa.int64()),
        ("out_elements", pa.int64()),
        ("dtype", NAME),  # torch's scalar type name, "BFloat16"
        ("peer", pa.int32()),  # of send and recv: the other side's global rank; null when unknown
        ("device", pa.int32()),
        ("stream", pa.int64()),
        ("start_ns", pa.int64()),  # of the device kernel
        ("end_ns", pa.int64()),
        ("launch_start_ns", pa.int64()),  # as in device_events
        ("iteration", pa.int32()),
    ),
    "iterations": _schema(
        ("iteration", pa.int32()),  # ProfilerStep#N, NVTX iteration_N; as the training counts where that is known; else from 0
        ("start_ns", pa.int64()),  # on the host
        ("end_ns", pa.int64()),
        ("boundary", pa.bool_()),  # overlaps the profiler's start, stop or flush: no steady state
    ),
    # How streams wait for one another and the host for streams: what resolves who produced what a stalled kernel waited for.
    "synchronizations": _schema(
        ("kind", NAME),  # stream_wait_event | event | stream | context (device)
        ("device", pa.int32()),
        ("stream", pa.int64()),  # the stream that waits, or is waited for by the host; null for all of them
        ("start_ns", pa.int64()),
        ("end_ns", pa.int64()),
        ("correlation", pa.int64()),  # of the call that synchronizes
        ("producer_stream", pa.int64()),  # stream the event was recorded on; null when unresolved
        ("producer_correlation", pa.int64()),  # correlation of the call that recorded the event; null when unresolved
    ),
    "allocations": _schema(
        ("device", pa.int32()),
        ("stream", pa.int64()),
        ("address", pa.uint64()),
        ("bytes", pa.int64()),  # as the allocator rounded it
        ("requested_bytes", pa.int64()),  # as the program asked; null when not recorded
        ("allocated_ns", pa.int64()),  # null when it was there before the recording began
        ("free_requested_ns", pa.int64()),
        ("freed_ns", pa.int64()),  # null while live
        ("stack", NAME),  # innermost frame first, "function file:line", newline between frames
    ),
    # What the caching allocator holds of the device, block by block: for reserved memory and fragmentation.
    "segments": _schema(
        ("device", pa.int32()),
        ("stream", pa.int64()),
        ("address", pa.uint64()),
        ("bytes", pa.int64()),
        ("allocated_ns", pa.int64()),  # null when it was there before the recording began
        ("freed_ns", pa.int64()),  # null while held
        ("pool", NAME),  # large | small; null when unknown
        ("active_bytes", pa.int64()),  # of live allocations in it when the snapshot was taken; null when freed before
        ("largest_free_bytes", pa.int64()),  # its largest free block then
    ),
    # What the allocator could not serve. The training has usually ended with it.
    "out_of_memory": _schema(
        ("device", pa.int32()),
        ("time_ns", pa.int64()),  # null when not recorded
        ("requested_bytes", pa.int64()),
        ("free_bytes", pa.int64()),  # of the device then, outside what the allocator held
        ("stack", NAME),  # who asked: as of an allocation; null when not recorded
    ),
    "memory_events": _schema(
        ("time_ns", pa.int64()),
        ("thread", pa.int64()),  # host_events.thread of the operator that allocated or freed; null when not recorded
        ("device_type", NAME),  # cpu | cuda | …, torch's words
        ("device", pa.int32()),  # -1 for the host
        ("address", pa.uint64()),
        ("bytes", pa.int64()),  # negative for a free
        ("total_allocated_bytes", pa.int64()),  # on that device after it
        ("total_reserved_bytes", pa.int64()),
    ),
    # nsys --gpu-metrics-devices: sampled hardware counters.
    "gpu_metrics": _schema(
        ("time_ns", pa.int64()),
        ("device", pa.int32()),
        ("metric", NAME),  # nsys's words, "SMs Active [Throughput %]"
        ("value", pa.float64()),
    ),
    # nsys --trace=osrt: calls of the operating system's library that took longer than nsys' threshold.
    "system_calls": _schema(
        ("thread", pa.int64()),  # as in host_events
        ("name", NAME),  # poll, pthread_cond_wait, …
        ("start_ns", pa.int64()),
        ("end_ns", pa.int64()),
    ),
    # nsys --cuda-memory-usage=true: what CUDA allocated and freed, and the caching allocator got its segments from.
    "cuda_memory": _schema(
        ("time_ns", pa.int64()),
        ("device", pa.int32()),
        ("memory", NAME),  # device | pinned | managed | pageable | array | device static | managed static | unknown
        ("bytes", pa.int64()),  # negative for a free
    ),
}

#: No size is larger, in bytes or elements: sums over two million rows stay below 2^63.
MAX_SIZE = 1 << 42

_SIZES = {"bytes", "requested_bytes", "free_bytes", "total_allocated_bytes", "total_reserved_bytes"}
_SIZES |= {"message_bytes", "in_elements", "out_elements"}


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


def to_int64(column: pa.ChunkedArray, null: int = NULL) -> Integers:
    """A column of integers as an array."""
    integers = column if column.type == pa.int64() else column.cast(pa.int64())
    return (integers.fill_null(null) if integers.null_count else integers).to_numpy()


def fields(kind: pa.DataType, *names: str) -> list[tuple[str, pa.DataType]]:
    """Columns of one type, for a schema."""
    return [(name, kind) for name in names]
