"""Reads an nsys report into the tables: its SQLite export of any version, or an `.nsys-rep` that is exported first.

A table or a column that the report lacks gives nulls and a caveat.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.errors import TraceError
from bridge_profiling.traces.iterations import Iterations, find_iterations
from bridge_profiling.traces.joins import (
    Launches,
    add_lost,
    collective_columns,
    launch_of,
    launches_one,
    shifted,
    start_order,
    taken,
    trace_caveats,
    wait_columns,
    waits_for_device,
)
from bridge_profiling.traces.kinds import COMMUNICATION, COMPUTE, MEMCPY, MEMSET
from bridge_profiling.traces.nsys.database import Database, open_report
from bridge_profiling.traces.nsys.events import (
    MAX_TIME_NS,
    WAIT_KINDS,
    Calls,
    DeviceWork,
    memory_columns,
    metric_columns,
    read_calls,
    read_device_work,
    read_waits,
)
from bridge_profiling.traces.nsys.ranges import Ranges, operations, read_ranges
from bridge_profiling.traces.nsys.report import (
    CALL,
    THREAD_BITS,
    THREAD_MASK,
    Process,
    describe_capture,
    process_ranks,
    processes,
)
from bridge_profiling.traces.periods import find_periods
from bridge_profiling.traces.tables import NULL, BlockTables, Integers, build, coded_column, give_memory_back, integer_column
from bridge_profiling.traces.types import Caveat, LostRecords, RankInfo, RankSource, RankTables

#: nsys' own work in which the profiler starts, stops or writes: an iteration around it is a boundary one.
_FLUSH = re.compile(r"flush|initialization|cudaProfilerSt", re.IGNORECASE)
_CATEGORIES = ("operator", "annotation", "runtime", "overhead")

#: Ranges, and calls, of a block of host events: columns of 2 MB.
_BLOCK_ROWS = 1 << 18


def read(path: Path, *, rank: int = 0, rank_source: RankSource = "order") -> RankTables:
    """The tables of one rank. When `info.error` is set, parts of the report are damaged, and the tables hold the rest.

    Args:
        path: `.sqlite` or `.nsys-rep`, plain or as `.xz`.
        rank: the rank to assign when the report has none; in a report of several processes, the one to read.
        rank_source: where that rank comes from.

    Raises:
        TraceError: nothing could be read. The message names the file.
        OSError: the file does not exist.
    """
    with open_report(path) as database:
        found = processes(database)
        ranks = process_ranks(found)
        chosen = next((place for place, known in enumerate(ranks) if known == rank), 0) if len(found) > 1 else 0
        process = found[chosen]
        info = RankInfo(rank=rank, rank_source=rank_source, source="nsys", files=[str(path.absolute())])
        if process.rank is not None:
            info.rank, info.rank_source = process.rank, "trace"
        elif len(found) > 1:
            info.rank, info.rank_source = ranks[chosen], "order"
        named = f"process {process.pid} on device {', '.join(map(str, process.devices)) or 'none'}"
        if len(found) > 1 and process.rank is None:
            numbered = f"they are numbered by their devices, and rank {info.rank} is {named}"
            text = f"the report holds {len(found)} processes without ranks: {numbered}; run one nsys per rank to be sure"
            info.add_caveat("processes_unnamed", text)
        elif len(found) > 1:
            info.add_caveat("several_processes", f"the report holds {len(found)} processes: this is {named}")
        try:
            return _read(database, process, info)
        except (ValueError, OverflowError) as error:  # pa.ArrowInvalid is a ValueError
            raise TraceError(f"{path} cannot be read: {error}") from error


def _read(database: Database, process: Process, info: RankInfo) -> RankTables:
    work = read_device_work(process)
    calls = read_calls(process, CALL, "unnamed call")
    last = max((int(ends.max()) for ends in (work.end_ns, calls.end_ns) if len(ends)), default=None)
    ranges = read_ranges(process, last)
    if len(ranges) > _BLOCK_ROWS:
        give_memory_back()
    if not len(work.start_ns) and not len(calls.start_ns) and not len(ranges):
        raise TraceError(f"{database.name} holds no events: nsys recorded nothing, or this is another kind of SQLite file")
    overhead = read_calls(process, "PROFILER_OVERHEAD", "profiler overhead")
    system = read_calls(process, "OSRT_API", "unnamed call")
    waits, wait_caveats = read_waits(process, calls)
    starts_and_ends = [times for each in (work, calls, ranges, overhead, system) for times in (each.start_ns, each.end_ns)]
    for times in (*starts_and_ends, waits["start_ns"], waits["end_ns"]):
        if len(times) and (times.max() > MAX_TIME_NS or times.min() < -MAX_TIME_NS):
            raise ValueError("its times are not nanoseconds of one session")
    describe_capture(process, info)
    launches_one_kernel = np.array([launches_one(name) for name in calls.names], bool)[calls.name]
    launched_ns = np.sort(calls.start_ns[launches_one_kernel])
    begin_ns = min((int(times.min()) for times in (calls.start_ns, ranges.start_ns) if len(times)), default=0)
    iterations, iteration_caveats = find_iterations(
        ranges.names, ranges.name, ranges.start_ns, ranges.end_ns, launched_ns, begin_ns
    )
    launches = _launches(work, calls)
    if not len(iterations.number):
        iterations, iteration_caveats = _periods(work, calls, launches, begin_ns)
    flushes = np.array([_FLUSH.search(name) is not None for name in overhead.names], bool)[overhead.name]
    boundary = iterations.overlapping(overhead.start_ns[flushes], overhead.end_ns[flushes])
    if len(iterations.rows):
        boundary |= ranges.open[iterations.rows]
    base = info.clock_base_ns
    innermost = ranges.innermost(calls.thread, calls.start_ns)
    operator = np.where(innermost >= 0, innermost + 1, NULL)
    device_tables, ambiguous = _device_tables(process, info, work, launches, operator, ranges, iterations)
    tables = {"iterations": iterations.table(info.rank, boundary, base), **device_tables}
    if len(waits["start_ns"]):
        tables["synchronizations"] = build("synchronizations", info.rank, wait_columns(waits, WAIT_KINDS, base))
    if metrics := metric_columns(process, base):
        tables["gpu_metrics"] = build("gpu_metrics", info.rank, metrics)
    if len(system.start_ns):
        tables["system_calls"] = build("system_calls", info.rank, _system_columns(system, base))
    if memory := memory_columns(process, base):
        tables["cuda_memory"] = build("cuda_memory", info.rank, memory)
    info.caveats += [*wait_caveats, *iteration_caveats, *trace_caveats(info, tables, "NVTX iteration_N")]
    of_none = calls.unowned + ranges.lost
    _add_caveats(database, info, work, calls, ranges, unusable=work.unowned + of_none)
    lost = work.negative + work.unnamed + ambiguous + work.unowned
    of_device = len(work.start_ns) + work.negative + work.unowned
    add_lost(info, LostRecords(lost + calls.negative + of_none, lost, of_device), ambiguous)
    info.partial = info.error is not None
    host_events = _HostEvents(ranges, calls, overhead, operator, base, info.rank)
    if len(host_events) == 1:
        return RankTables(info, tables | {"host_events": next(host_events())})
    return RankTables(info, BlockTables(tables, {"host_events": host_events}))


def _launches(work: DeviceWork, calls: Calls) -> Launches:
    return launch_of(
        work.correlation,
        work.start_ns,
        calls=calls.correlation,
        call_start_ns=calls.start_ns,
        call_end_ns=calls.end_ns,
        call_thread=calls.thread,
        kernel=np.array([name.kind not in (MEMCPY, MEMSET) for name in work.names], bool)[work.name],
        launches_one=np.array([launches_one(name) for name in calls.names], bool)[calls.name],
    )


def _periods(work: DeviceWork, calls: Calls, launches: Launches, begin_ns: int) -> tuple[Iterations, list[Caveat]]:
    """Iterations in which the kernels repeat."""
    compute = np.array([name.kind == COMPUTE for name in work.names], bool)[work.name]
    copies = np.array([name.copy is not None and "H" in name.copy.direction for name in work.names], bool)[work.name]
    waits = np.array([waits_for_device(name) for name in calls.names], bool)[calls.name]
    meetings_ns = np.concatenate((launches.start_ns[copies], calls.start_ns[waits]))
    names = [name.text for name in work.names]
    streams = (work.device, work.stream)
    return find_periods(names, work.name, streams, compute, work.end_ns, launches, meetings_ns, begin_ns)


def _device_tables(
    process: Process,
    info: RankInfo,
    work: DeviceWork,
    launches: Launches,
    operator: Integers,
    ranges: Ranges,
    iterations: Iterations,
) -> tuple[dict[str, pa.Table], int]:
    """The tables of device work, and the number of events whose launch is ambiguous. `operator` is that of each call."""
    is_communication = np.array([name.kind == COMMUNICATION for name in work.names], bool)[work.name]
    communication = np.flatnonzero(is_communication)
    collective = np.full(len(work.start_ns), NULL)
    collective[communication] = np.arange(len(communication))
    base = info.clock_base_ns
    device = {
        "kind": coded_column(work.name, [name.kind for name in work.names]),
        "backend": coded_column(work.name, [name.backend for name in work.names]),
        "name": coded_column(work.name, [name.text for name in work.names]),
        "device": integer_column(work.device),
        "stream": integer_column(work.stream),
        "start_ns": pa.array(work.start_ns + base),
        "end_ns": pa.array(work.end_ns + base),
        "correlation": integer_column(work.correlation),
        "operator": integer_column(taken(operator, launches.row)),
        "launch_start_ns": integer_column(shifted(launches.start_ns, base)),
        "launch_end_ns": integer_column(shifted(launches.end_ns, base)),
        "launch_thread": integer_column(_thread(launches.thread)),
        "iteration": integer_column(iterations.containing(launches.issued_ns)),
        "collective": integer_column(collective),
        "graph": integer_column(work.graph),
        "bytes": integer_column(work.bytes),
        **{
            column: coded_column(work.name, [getattr(name.copy, column, None) for name in work.names])
            for column in ("direction", "from_memory", "to_memory")
        },
    }
    issued_ns = launches.issued_ns[communication]
    found = operations(
        process,
        ranges,
        kernels=[work.names[name].operation for name in work.name[communication].tolist()],
        thread=launches.thread[communication],
        issued_ns=issued_ns,
        world_size=info.world_size,
    )
    if unknown := sum(operation.message_bytes is None for operation in found):
        known_since = "NCCL's payloads are in reports since nsys 2024.6, exported with --include-blobs=true"
        text = f"the message size of {unknown} of {len(communication)} communication kernels is unknown: {known_since}"
        info.add_caveat("message_size_unknown", text)
    tables = {
        "device_events": build("device_events", info.rank, device),
        "collectives": build("collectives", info.rank, collective_columns(found, device, communication, issued_ns)),
    }
    return tables, launches.ambiguous


class _HostEvents:
    """Ranges, calls and the profiler's own work as host events by start, made in blocks: 1 GB of them would take 2 GB."""

    def __init__(self, ranges: Ranges, calls: Calls, overhead: Calls, operator: Integers, base: int, rank: int) -> None:
        """`operator` is that of each call, `base` is added to all times."""
        self._ranges, self._calls, self._overhead = ranges, calls, overhead
        self._operator, self._base, self._rank = operator, base, rank
        self._category = np.where(np.array(ranges.operator, bool), 0, 1).astype(np.int8)
        # Events that start together are in one block.
        starts = (ranges.start_ns, calls.start_ns, overhead.start_ns)
        times = np.unique(np.concatenate([start[_BLOCK_ROWS::_BLOCK_ROWS] for start in starts]))
        bounds = [[0, *start.searchsorted(times).tolist(), len(start)] for start in starts]
        self._blocks = [tuple(map(slice, first, last)) for first, last in pairwise(zip(*bounds, strict=True))]

    def __len__(self) -> int:
        return len(self._blocks)

    def __call__(self) -> Iterator[pa.Table]:
        """The blocks."""
        return (build("host_events", self._rank, self._columns(*block)) for block in self._blocks)

    def _columns(self, *block: slice) -> dict[str, pa.Array]:
        ranges, calls, overhead = self._ranges, self._calls, self._overhead
        of_ranges, of_calls, of_overhead = block
        start = np.concatenate((ranges.start_ns[of_ranges], calls.start_ns[of_calls], overhead.start_ns[of_overhead]))
        end = np.concatenate((ranges.end_ns[of_ranges], calls.end_ns[of_calls], overhead.end_ns[of_overhead]))
        order = start_order(start, end)
        sizes = [rows.stop - rows.start for rows in block]

        def by_start(*values: NDArray[Any] | int) -> NDArray[Any]:
            whole = [np.broadcast_to(value, size) for value, size in zip(values, sizes, strict=True)]
            return np.concatenate(whole)[order]

        thread = by_start(ranges.thread[of_ranges], calls.thread[of_calls], overhead.thread[of_overhead])
        range_names, first = ranges.name[of_ranges], len(ranges.names)
        columns = {
            "start_ns": pa.array(start[order] + self._base),
            "end_ns": pa.array(end[order] + self._base),
            "process": integer_column(np.where(thread == NULL, NULL, (thread >> THREAD_BITS) & THREAD_MASK)),
            "thread": integer_column(_thread(thread)),
            "category": coded_column(by_start(self._category[range_names], 2, 3), _CATEGORIES),
            "name": coded_column(
                by_start(range_names, calls.name[of_calls] + first, overhead.name[of_overhead] + (first + len(calls.names))),
                [*ranges.names, *calls.names, *overhead.names],
            ),
            "correlation": integer_column(by_start(NULL, calls.correlation[of_calls], NULL)),
            # A range's own number, from 1.
            "operator": integer_column(
                by_start(np.arange(of_ranges.start, of_ranges.stop) + 1, self._operator[of_calls], NULL)
            ),
        }
        sequence = ranges.sequence[of_ranges]
        if (sequence != NULL).any():
            columns["sequence"] = integer_column(by_start(sequence, NULL, NULL))
        if any(ranges.shapes):
            columns["shapes"] = coded_column(by_start(range_names, -1, -1), ranges.shapes)
        return columns


def _system_columns(system: Calls, base: int) -> dict[str, pa.Array]:
    return {
        "thread": integer_column(_thread(system.thread)),
        "name": coded_column(system.name, system.names),
        "start_ns": pa.array(system.start_ns + base),
        "end_ns": pa.array(system.end_ns + base),
    }


def _thread(global_tid: Integers) -> Integers:
    return np.where(global_tid == NULL, NULL, global_tid & THREAD_MASK)


#: Data that nsys records on request and nothing here reads, by table.
_UNREAD = {
    "CUDNN_EVENTS": "cuDNN calls",
    "CUBLAS_EVENTS": "cuBLAS calls",
    "CUSPARSE_EVENTS": "cuSPARSE calls",
    "CUSOLVER_EVENTS": "cuSOLVER calls",
    "MPI_P2P_EVENTS": "MPI messages",
    "MPI_COLLECTIVES_EVENTS": "MPI collectives",
    "UCX_P2P_EVENTS": "UCX messages",
    "OPENMP_EVENT_KIND_TASK": "OpenMP tasks",
    "COMPOSITE_EVENTS": "CPU samples",
    "SCHED_EVENTS": "context switches",
    "SYSCALL": "system calls",
    "OPENACC_LAUNCH_EVENTS": "OpenACC launches",
    "NET_NIC_METRIC": "network counters",
    "NET_IB_DEVICE_INFO": "InfiniBand counters",
}


def _add_caveats(database: Database, info: RankInfo, work: DeviceWork, calls: Calls, ranges: Ranges, *, unusable: int) -> None:
    unread = [
        what for table, what in _UNREAD.items() if database.has(table) and database.rows(f"SELECT 1 FROM {table} LIMIT 1")
    ]
    if unread:
        names = ", ".join(dict.fromkeys(unread))
        info.add_caveat("unread_tables", f"the report also holds {names}, which only Nsight Systems and nsys stats show")
    if negative := work.negative + calls.negative:
        info.error = f"{database.name} holds {negative} events that end before they start; the others were read"
    if database.pending:
        info.error = f"{database.name} is not complete: {database.pending}" + (f"; {info.error}" if info.error else "")
    if work.unnamed:
        text = f"{work.unnamed} kernels have no readable name in StringIds: whether they communicate is unknown"
        info.add_caveat("kernels_unnamed", text, of_file=True)
    if work.whole_graphs:
        text = f"{work.whole_graphs} executions of CUDA graphs were recorded as a whole and count as compute"
        info.add_caveat("graphs_whole", f"{text}, communication included; --cuda-graph-trace=node records their kernels")
    if still_open := int(ranges.open.sum()):
        info.add_caveat("ranges_open", f"{still_open} NVTX ranges were still open when the capture ended; they end there")
    if database.has("DIAGNOSTIC_EVENT", "text", "severity"):
        for (text,) in database.rows("SELECT DISTINCT text FROM DIAGNOSTIC_EVENT WHERE severity = 3 LIMIT 3"):
            info.add_caveat("nsys_error", f"nsys reports an error: {text}")
    if unusable:
        text = f"{unusable:,} rows without a process, a type or a usable time are left out"
        info.add_caveat("events_undecodable", text, of_file=True)
