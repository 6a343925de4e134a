"""Reads an nsys report into the tables: its SQLite export of any version, or an `.nsys-rep` that is exported first.

A table or a column that the report lacks gives nulls and a caveat.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.errors import TraceError
from bridge_profiling.traces.joins import (
    Iterations,
    add_lost,
    collective_columns,
    iterations_from_names,
    launch_of,
    launches_one,
    shifted,
    start_order,
    trace_caveats,
    wait_columns,
)
from bridge_profiling.traces.kinds import COMMUNICATION, MEMCPY, MEMSET
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
    COPY,
    GRAPH,
    KERNEL,
    THREAD_BITS,
    THREAD_MASK,
    Process,
    describe_capture,
    process_ranks,
    processes,
)
from bridge_profiling.traces.nsys.report import MEMSET as MEMSETS
from bridge_profiling.traces.tables import NULL, Integers, build, coded_column, integer_column
from bridge_profiling.traces.types import LostRecords, RankInfo, RankSource, RankTables

#: nsys' own work in which the profiler starts, stops or writes: an iteration around it is a boundary one.
_FLUSH = re.compile(r"flush|initialization|cudaProfilerSt", re.IGNORECASE)
_CATEGORIES = ("operator", "annotation", "runtime", "overhead")


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
    iterations, iteration_caveats = iterations_from_names(ranges.iteration_numbers(), ranges.start_ns, ranges.end_ns)
    flushes = np.array([_FLUSH.search(name) is not None for name in overhead.names], bool)[overhead.name]
    boundary = iterations.overlapping(overhead.start_ns[flushes], overhead.end_ns[flushes]) | ranges.open[iterations.rows]
    base = info.clock_base_ns
    device_tables, ambiguous = _device_tables(process, info, work, calls, ranges, iterations)
    tables = {
        "iterations": iterations.table(info.rank, boundary, base),
        "host_events": build("host_events", info.rank, _host_columns(ranges, calls, overhead, base)),
        **device_tables,
    }
    if len(waits["start_ns"]):
        tables["synchronizations"] = build("synchronizations", info.rank, wait_columns(waits, WAIT_KINDS, base))
    if metrics := metric_columns(process, base):
        tables["gpu_metrics"] = build("gpu_metrics", info.rank, metrics)
    if len(system.start_ns):
        tables["system_calls"] = build("system_calls", info.rank, _system_columns(system, base))
    if memory := memory_columns(process, base):
        tables["cuda_memory"] = build("cuda_memory", info.rank, memory)
    info.caveats += [*wait_caveats, *iteration_caveats, *trace_caveats(info, tables, "NVTX iteration_N")]
    _add_caveats(database, info, work, calls, ranges)
    work_of_none = sum(database.not_integers(table, "globalPid") for table in (KERNEL, COPY, MEMSETS, GRAPH))
    of_none = database.not_integers(CALL, "globalTid") + ranges.lost
    if unusable := work_of_none + of_none:
        text = f"{unusable:,} rows without a process, a type or a usable time are left out"
        info.add_caveat("events_undecodable", text, of_file=True)
    lost = work.negative + work.unnamed + ambiguous + work_of_none
    of_device = len(work.start_ns) + work.negative + work_of_none
    add_lost(info, LostRecords(lost + calls.negative + of_none, lost, of_device), ambiguous)
    info.partial = info.error is not None
    return RankTables(info, tables)


def _device_tables(
    process: Process, info: RankInfo, work: DeviceWork, calls: Calls, ranges: Ranges, iterations: Iterations
) -> tuple[dict[str, pa.Table], int]:
    """The tables of device work, and the number of events whose launch is ambiguous."""
    launches = launch_of(
        work.correlation,
        work.start_ns,
        calls=calls.correlation,
        call_start_ns=calls.start_ns,
        call_end_ns=calls.end_ns,
        call_thread=calls.thread,
        kernel=np.array([name.kind not in (MEMCPY, MEMSET) for name in work.names], bool)[work.name],
        launches_one=np.array([launches_one(name) for name in calls.names], bool)[calls.name],
    )
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
        "operator": integer_column(_operator_of(ranges, launches.thread, launches.issued_ns)),
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


def _operator_of(ranges: Ranges, thread: Integers, issued_ns: Integers) -> Integers:
    """`host_events.operator` of the innermost range that contains each launch: the range's own number, from 1."""
    row = ranges.innermost(thread, issued_ns)
    return np.where(row >= 0, row + 1, NULL)


def _host_columns(ranges: Ranges, calls: Calls, overhead: Calls, base: int) -> dict[str, pa.Array]:
    """Ranges, calls and the profiler's own work as host events by start."""
    start = np.concatenate((ranges.start_ns, calls.start_ns, overhead.start_ns))
    end = np.concatenate((ranges.end_ns, calls.end_ns, overhead.end_ns))
    order = start_order(start, end).astype(np.int32)
    columns = {"start_ns": pa.array(start[order] + base), "end_ns": pa.array(end[order] + base)}
    del start, end

    def by_start(of_ranges: NDArray[Any], of_calls: NDArray[Any] | int, of_overhead: NDArray[Any] | int) -> NDArray[Any]:
        values = (of_ranges, of_calls, of_overhead)
        sizes = (len(ranges), len(calls.start_ns), len(overhead.start_ns))
        return np.concatenate([np.broadcast_to(value, size) for value, size in zip(values, sizes, strict=True)])[order]

    # A million rows: one column at a time.
    threads = by_start(ranges.thread, calls.thread, overhead.thread)
    columns["process"] = integer_column(np.where(threads == NULL, NULL, (threads >> THREAD_BITS) & THREAD_MASK))
    columns["thread"] = integer_column(_thread(threads))
    del threads
    category = np.where(np.array(ranges.operator, bool)[ranges.name], 0, 1)
    columns["category"] = coded_column(by_start(category, 2, 3), _CATEGORIES)
    first = len(ranges.names)
    columns["name"] = coded_column(
        by_start(ranges.name, calls.name + first, overhead.name + (first + len(calls.names))),
        [*ranges.names, *calls.names, *overhead.names],
    )
    columns["correlation"] = integer_column(by_start(np.full(len(ranges), NULL), calls.correlation, NULL))
    operators = _operator_of(ranges, calls.thread, calls.start_ns)
    columns["operator"] = integer_column(by_start(np.arange(len(ranges)) + 1, operators, NULL))
    if (ranges.sequence != NULL).any():
        columns["sequence"] = integer_column(by_start(ranges.sequence, NULL, NULL))
    if any(ranges.shapes):
        columns["shapes"] = coded_column(by_start(ranges.name, -1, -1), ranges.shapes)
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


def _add_caveats(database: Database, info: RankInfo, work: DeviceWork, calls: Calls, ranges: Ranges) -> None:
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
