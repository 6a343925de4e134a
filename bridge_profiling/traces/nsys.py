"""Reads an nsys report into the tables: its SQLite export of any version, or an `.nsys-rep` that is exported first.

Looks which tables and columns a report has before it reads them. What it lacks is null and said in the caveats; nothing
is guessed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.errors import TraceError
from bridge_profiling.traces.joins import Iterations, collective_columns, rows_by_key, taken
from bridge_profiling.traces.nsys_capture import describe_capture
from bridge_profiling.traces.nsys_database import Database, opened
from bridge_profiling.traces.nsys_device import KINDS, DeviceWork, read_device_work
from bridge_profiling.traces.nsys_metrics import metric_columns
from bridge_profiling.traces.nsys_nccl import describe
from bridge_profiling.traces.nsys_processes import THREAD_BITS, THREAD_MASK, Process, processes
from bridge_profiling.traces.nsys_ranges import TABLE as NVTX
from bridge_profiling.traces.nsys_ranges import Ranges, iterations, read_ranges
from bridge_profiling.traces.nsys_synchronizations import KINDS as SYNCHRONIZATION_KINDS
from bridge_profiling.traces.nsys_synchronizations import read_synchronizations
from bridge_profiling.traces.tables import NULL, Integers, build, coded_column, integer_column
from bridge_profiling.traces.types import RankInfo, RankSource, RankTables

_RUNTIME, _OVERHEAD = "CUPTI_ACTIVITY_KIND_RUNTIME", "PROFILER_OVERHEAD"
_COMMUNICATION = KINDS.index("communication")

#: "cudaLaunchKernel_v7000", "cuMemcpyAsync_ptsz": the version and the default stream's kind are no part of the name.
_VERSION = re.compile(r"(?:_v\d{4,})?(?:_ptsz|_ptds)?$")

#: What makes an iteration a boundary one: the profiler starts, stops or writes in it.
_FLUSH = re.compile(r"flush|initialization|cudaProfilerSt", re.IGNORECASE)
_CATEGORIES = ("operator", "annotation", "runtime", "overhead")

#: Times beyond are no nanoseconds of a session, and would overflow 64 bits together with the session's start.
_MAX_TIME_NS = 1 << 60


def read(path: Path, *, rank: int = 0, rank_source: RankSource = "order") -> RankTables:
    """The tables of one rank.

    Args:
        path: `.sqlite` or `.nsys-rep`, plain or as `.xz`.
        rank: the rank to give it when the report names none; in a report of several processes, the one to read.
        rank_source: where that rank comes from.

    Returns:
        Its tables. When `info.error` is set, parts of the report are damaged, and they hold the rest.

    Raises:
        TraceError: nothing could be read. The message names the file.
        OSError: the file is not there.
    """
    with opened(path) as database:
        found = processes(database)
        ranks = _ranks(found)
        chosen = next((place for place, known in enumerate(ranks) if known == rank), 0) if len(found) > 1 else 0
        process = found[chosen]
        info = RankInfo(rank=rank, rank_source=rank_source, source="nsys", files=[str(path.absolute())])
        if process.rank is not None:
            info.rank, info.rank_source = process.rank, "trace"
        elif len(found) > 1:
            info.rank, info.rank_source = ranks[chosen], "order"
        _say_which_process(info, found, process)
        try:
            return _read(database, process, info)
        except (pa.ArrowInvalid, OverflowError) as error:
            raise TraceError(f"{path} cannot be read: {error}") from error


def ranks_in(path: Path) -> list[int]:
    """The ranks that `read` can read from a report, one per process; exports an `.nsys-rep`.

    Raises:
        TraceError: it cannot be read.
    """
    with opened(path) as database:
        return _ranks(processes(database))


def _ranks(found: list[Process]) -> list[int]:
    """Each process' rank: as the report says, else its place by device, which is torchrun's order on one host."""
    known = [process.rank for process in found if process.rank is not None]
    if len(known) == len(found) == len(set(known)):
        return known
    return list(range(len(found)))


def _say_which_process(info: RankInfo, found: list[Process], process: Process) -> None:
    if len(found) == 1:
        return
    named = f"process {process.pid} on device {', '.join(map(str, process.devices)) or 'none'}"
    if process.rank is None:
        info.add_caveat(
            "processes_unnamed",
            f"the report holds {len(found)} processes and names the rank of none: they are numbered by their devices, and rank"
            f" {info.rank} is {named}; run one nsys per rank to be sure",
        )
    else:
        info.add_caveat("several_processes", f"the report holds {len(found)} processes: this is {named}")


def _read(database: Database, process: Process, info: RankInfo) -> RankTables:
    work = read_device_work(database, process)
    calls = _Calls(database, process)
    last = max((int(ends.max()) for ends in (work.end_ns, calls.end_ns) if len(ends)), default=None)
    ranges = read_ranges(database, process.where(database, NVTX), last)
    if not len(work.start_ns) and not len(calls.start_ns) and not len(ranges):
        raise TraceError(f"{database.name} holds no event of a process: nsys recorded nothing, or this is another SQLite file")
    overhead = _overhead(database, process)
    waits = read_synchronizations(database, process, calls.querying(), info.caveats)
    for each in (work, calls, ranges, overhead):
        _check_times(database, each.start_ns, each.end_ns)
    _check_times(database, waits["start_ns"], waits["end_ns"])
    describe_capture(database, process, info)
    found, rows = iterations(ranges, info.caveats, database.name)
    boundary = ranges.open[rows] | _during(found, overhead)
    tables = {
        "iterations": build("iterations", info.rank, _iteration_columns(found, boundary, info.clock_base_ns)),
        "host_events": build("host_events", info.rank, _host_columns(ranges, calls, overhead, info.clock_base_ns)),
        **_device_tables(database, process, info, work, calls, ranges, found),
    }
    if len(waits["start_ns"]):
        tables["synchronizations"] = build("synchronizations", info.rank, _wait_columns(waits, info.clock_base_ns))
    metrics = metric_columns(database, info.clock_base_ns)
    if metrics is not None:
        tables["gpu_metrics"] = build("gpu_metrics", info.rank, metrics)
    _say_what_is_missing(database, info, work, calls, ranges, found)
    return RankTables(info, tables)


class _Calls:
    """CUDA runtime and driver calls of one process, by start."""

    def __init__(self, database: Database, process: Process) -> None:
        names = ("start", "end", "globalTid", "correlationId", "nameId")
        columns = database.columns(_RUNTIME, names, process.where(database, _RUNTIME))
        usable = (columns["start"] != NULL) & (columns["end"] >= columns["start"])
        self.negative = int((~usable).sum())
        rows = np.flatnonzero(usable)
        rows = rows[np.lexsort((-columns["end"][rows], columns["start"][rows]))]
        self.start_ns, self.end_ns = columns["start"][rows], columns["end"][rows]
        self.thread, self.correlation = columns["globalTid"][rows], columns["correlationId"][rows]
        ids, place = np.unique(columns["nameId"][rows], return_inverse=True)
        self.name = place.astype(np.int32)
        texts = database.strings(ids)
        self.names = [_VERSION.sub("", texts.get(number, "unnamed call")) for number in ids.tolist()]

    def querying(self) -> Integers:
        """Correlations of calls that ask for an event or a stream and do not wait for it."""
        asking = [place for place, name in enumerate(self.names) if "Query" in name]
        return self.correlation[np.isin(self.name, asking)]


def _check_times(database: Database, *times: Integers) -> None:
    for each in times:
        if len(each) and (each.max() > _MAX_TIME_NS or each.min() < -_MAX_TIME_NS):
            raise TraceError(f"{database.name} cannot be read: its times are no nanoseconds of one session")


def _device_tables(
    database: Database,
    process: Process,
    info: RankInfo,
    work: DeviceWork,
    calls: _Calls,
    ranges: Ranges,
    found: Iterations,
) -> dict[str, pa.Table]:
    launch = rows_by_key(calls.correlation, work.correlation)
    launch_start, launch_end = taken(calls.start_ns, launch), taken(calls.end_ns, launch)
    thread = taken(calls.thread, launch)
    issued = np.where(launch >= 0, launch_start, work.start_ns)
    iteration = found.containing(issued)
    communication = np.flatnonzero(work.kind == _COMMUNICATION)
    collective = np.full(len(work.start_ns), NULL)
    collective[communication] = np.arange(len(communication))
    base = info.clock_base_ns
    backends = coded_column(np.where(work.kind == _COMMUNICATION, work.name, -1), [kernel.backend for kernel in work.kernels])
    shared = {
        "device": integer_column(work.device),
        "stream": integer_column(work.stream),
        "start_ns": pa.array(work.start_ns + base),
        "end_ns": pa.array(work.end_ns + base),
        "launch_start_ns": integer_column(_shifted(launch_start, base)),
        "iteration": integer_column(iteration),
        "backend": backends,
    }
    device = shared | {
        "kind": coded_column(work.kind, KINDS),
        "name": coded_column(work.name, work.names),
        "correlation": integer_column(work.correlation),
        "operator": integer_column(_operator_of(ranges, thread, issued)),
        "launch_end_ns": integer_column(_shifted(launch_end, base)),
        "launch_thread": integer_column(_thread(thread)),
        "collective": integer_column(collective),
        "graph": integer_column(work.graph),
        "bytes": integer_column(work.bytes),
        **{
            name: coded_column(work.name, [None if copy is None else getattr(copy, name) for copy in work.copies])
            for name in ("direction", "from_memory", "to_memory")
        },
    }
    described = describe(
        database,
        process.where(database, NVTX),
        ranges,
        told=[work.kernels[name].operation for name in work.name[communication].tolist()],
        thread=thread[communication],
        launched_ns=issued[communication],
        world_size=info.world_size,
    )
    if described.unknown:
        info.add_caveat(
            "message_size_unknown",
            f"the message size of {described.unknown} of {len(communication)} communication kernels is unknown: NCCL's payloads"
            " are in reports since nsys 2024.6, exported with --include-blobs=true",
        )
    columns = collective_columns(described.operations, device, communication, issued[communication])
    columns["message_bytes"] = pa.array(described.message_bytes, pa.int64())
    return {
        "device_events": build("device_events", info.rank, device),
        "collectives": build("collectives", info.rank, columns),
    }


def _operator_of(ranges: Ranges, thread: Integers, issued_ns: Integers) -> Integers:
    """`host_events.operator` of the innermost range that each launch lies in: the range's own number, from 1."""
    row = ranges.innermost(thread, issued_ns)
    return np.where(row >= 0, row + 1, NULL)


def _host_columns(ranges: Ranges, calls: _Calls, overhead: _Overhead, base: int) -> dict[str, pa.Array]:
    """Ranges, calls and the profiler's own work as host events by start."""
    start = np.concatenate((ranges.start_ns, calls.start_ns, overhead.start_ns))
    end = np.concatenate((ranges.end_ns, calls.end_ns, overhead.end_ns))
    order = np.lexsort((-end, start)).astype(np.int32)
    columns = {"start_ns": pa.array(start[order] + base), "end_ns": pa.array(end[order] + base)}
    del start, end

    def by_start(of_ranges: NDArray[Any], of_calls: NDArray[Any], of_overhead: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate((of_ranges, of_calls, of_overhead))[order]

    # A million rows: each column is made and done with before the next.
    first = len(ranges.names)
    operator = np.array(ranges.operator, bool)[ranges.name] if len(ranges) else np.empty(0, bool)
    threads = by_start(ranges.thread, calls.thread, overhead.thread)
    columns["process"] = integer_column(np.where(threads == NULL, NULL, (threads >> THREAD_BITS) & THREAD_MASK))
    columns["thread"] = integer_column(_thread(threads))
    del threads
    columns["category"] = coded_column(
        by_start(np.where(operator, 0, 1).astype(np.int8), _same(calls, 2), _same(overhead, 3)), _CATEGORIES
    )
    columns["name"] = coded_column(
        by_start(ranges.name, calls.name + first, overhead.name + (first + len(calls.names))),
        [*ranges.names, *calls.names, *overhead.names],
    )
    none = np.full(len(overhead.start_ns), NULL)
    columns["correlation"] = integer_column(by_start(np.full(len(ranges), NULL), calls.correlation, none))
    operators = _operator_of(ranges, calls.thread, calls.start_ns)
    columns["operator"] = integer_column(by_start(np.arange(len(ranges)) + 1, operators, none))
    if any(ranges.shapes):
        columns["shapes"] = coded_column(by_start(ranges.name, _same(calls, -1), _same(overhead, -1)), ranges.shapes)
    return columns


def _same(events: _Calls | _Overhead, code: int) -> NDArray[np.int8]:
    return np.full(len(events.start_ns), code, np.int8)


def _thread(global_tid: Integers) -> Integers:
    return np.where(global_tid == NULL, NULL, global_tid & THREAD_MASK)


def _shifted(times: Integers, base: int) -> Integers:
    return np.where(times == NULL, NULL, times + base)


class _Overhead:
    """nsys' own work in one process."""

    def __init__(self, columns: dict[str, Integers], names: dict[int, str]) -> None:
        rows = np.flatnonzero((columns["start"] != NULL) & (columns["end"] >= columns["start"]))
        self.start_ns, self.end_ns, self.thread = (columns[name][rows] for name in ("start", "end", "globalTid"))
        ids, place = np.unique(columns["nameId"][rows], return_inverse=True)
        self.name = place.astype(np.int32)
        self.names = [names.get(number, "profiler overhead") for number in ids.tolist()]


def _overhead(database: Database, process: Process) -> _Overhead:
    columns = database.columns(_OVERHEAD, ("start", "end", "globalTid", "nameId"), process.where(database, _OVERHEAD))
    return _Overhead(columns, database.strings(columns["nameId"]))


def _during(found: Iterations, overhead: _Overhead) -> NDArray[np.bool_]:
    """Which iterations the profiler started, stopped or flushed in."""
    marking = np.array([_FLUSH.search(name) is not None for name in overhead.names], bool)
    boundary = np.zeros(len(found.number), bool)
    for row in np.flatnonzero(marking[overhead.name]).tolist() if len(overhead.names) else []:
        boundary |= (found.start_ns < overhead.end_ns[row]) & (overhead.start_ns[row] < found.end_ns)
    return boundary


def _iteration_columns(found: Iterations, boundary: NDArray[np.bool_], base: int) -> dict[str, pa.Array]:
    return {
        "iteration": pa.array(found.number),
        "start_ns": pa.array(found.start_ns + base),
        "end_ns": pa.array(found.end_ns + base),
        "boundary": pa.array(boundary),
    }


def _wait_columns(waits: dict[str, Integers], base: int) -> dict[str, pa.Array]:
    return {
        "kind": coded_column(waits["kind"], SYNCHRONIZATION_KINDS),
        "start_ns": pa.array(waits["start_ns"] + base),
        "end_ns": pa.array(waits["end_ns"] + base),
        **{
            name: integer_column(waits[name])
            for name in ("device", "stream", "correlation", "producer_stream", "producer_correlation")
        },
    }


def _say_what_is_missing(
    database: Database, info: RankInfo, work: DeviceWork, calls: _Calls, ranges: Ranges, found: Iterations
) -> None:
    say = info.add_caveat
    if work.negative + calls.negative:
        info.error = (
            f"{database.name} holds {work.negative + calls.negative} events that end before they start; the others were read"
        )
        info.partial = True
    if info.clock == "unknown":
        say(
            "clock_unknown",
            "times are not on the host's clock: this rank can be compared with others by matched collectives only",
        )
    if not len(work.start_ns):
        say("no_device_work", "no work on a device was recorded")
    if work.whole_graphs:
        say(
            "graphs_whole",
            f"{work.whole_graphs} executions of CUDA graphs were recorded as a whole and count as compute, whatever is in them;"
            " --cuda-graph-trace=node records their kernels",
        )
    if not len(found.number):
        say("no_iterations", "no iterations are marked (NVTX iteration_N): figures are of the whole capture")
    if ranges.open.any():
        say("ranges_open", f"{int(ranges.open.sum())} NVTX ranges were still open when the capture ended; they end there")
    unlaunched = int((rows_by_key(calls.correlation, work.correlation) < 0).sum())
    if unlaunched:
        say(
            "launches_missing",
            f"{unlaunched} of {len(work.start_ns)} device events have no recorded launch; their start decides their iteration",
        )
    if database.has("DIAGNOSTIC_EVENT", "text", "severity"):
        rows = database.rows("SELECT DISTINCT text FROM DIAGNOSTIC_EVENT WHERE severity = 3 LIMIT 3")
        for (text,) in rows:
            say("nsys_error", f"nsys reports an error: {text}")
