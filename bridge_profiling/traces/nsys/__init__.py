"""Reads an nsys report into the tables: its SQLite export of any version, or an `.nsys-rep` that is exported first.

A table or a column that the report lacks gives nulls and a caveat.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.common.errors import TraceError
from bridge_profiling.traces import joins
from bridge_profiling.traces.iterations import Iterations, can_mark, find_iterations
from bridge_profiling.traces.kinds import COMMUNICATION, COMPUTE, MEMCPY, MEMSET
from bridge_profiling.traces.nsys import events, report
from bridge_profiling.traces.nsys.database import Database
from bridge_profiling.traces.nsys.ranges import Ranges, operations, read_ranges
from bridge_profiling.traces.periods import find_periods
from bridge_profiling.traces.tables import NULL, Integers, MadeTable, build, coded_column, give_memory_back
from bridge_profiling.traces.types import LostRecords, RankInfo, RankSource, RankTables, texts

_CATEGORIES = ("operator", "annotation", "runtime", "overhead")


def _device_columns(
    work: events.DeviceWork,
    calls: events.Calls,
    launches: joins.Launches,
    operator: Integers,
    iterations: Iterations,
    communication: Integers,
    timed: bool,
    rows: Integers,
) -> dict[str, Any]:
    """The columns of `device_events` of some rows.

    `operator` is that of each call, `communication` the rows of kernels, `timed` whether times of launches mean anything.
    """
    call, name = launches.row[rows], work.name[rows]
    start, launched = work.start_ns[rows], joins.taken(calls.start_ns, call if timed else np.full(len(call), -1))
    collective = np.full(len(rows), NULL)
    place = np.minimum(communication.searchsorted(rows), max(len(communication) - 1, 0))
    if len(communication):
        collective = np.where(communication[place] == rows, place, NULL)
    return {
        **{column: getattr(work, column)[rows] for column in ("device", "stream", "correlation", "graph", "bytes")},
        **{column: coded_column(name, [getattr(each, column) for each in work.names]) for column in ("kind", "backend")},
        "name": coded_column(name, [each.text for each in work.names]),
        "start_ns": start,
        "end_ns": start + work.duration_ns[rows],
        "operator": joins.taken(operator, call),
        "launch_start_ns": launched,
        "launch_end_ns": np.where(launched == NULL, NULL, launched + joins.taken(calls.duration_ns, call)),
        "launch_thread": thread_of(joins.taken(calls.thread, call)),
        "iteration": iterations.containing(launches.issued_ns[rows]),
        "collective": collective,
        **{
            column: coded_column(name, [getattr(each.copy, column, None) for each in work.names])
            for column in ("direction", "from_memory", "to_memory")
        },
        "configuration": coded_column(work.configuration[rows], work.configurations),
    }


def _host_blocks(ranges: Ranges, calls: events.Calls, overhead: events.Calls, block_rows: int) -> list[tuple[slice, ...]]:
    """Rows of ranges, calls and the profiler's own work for each block: events that start together are in one."""
    starts = (ranges.start_ns, calls.start_ns, overhead.start_ns)
    times = np.unique(np.concatenate([start[block_rows::block_rows] for start in starts]))
    bounds = [[0, *start.searchsorted(times).tolist(), len(start)] for start in starts]
    return [tuple(map(slice, first, last)) for first, last in pairwise(zip(*bounds, strict=True))]


def _host_columns(
    ranges: Ranges, calls: events.Calls, overhead: events.Calls, operator: Integers, block: tuple[slice, ...]
) -> dict[str, Any]:
    """The columns of `host_events` of one block, by start; `operator` is that of each call."""
    of_ranges, of_calls, of_overhead = block
    kinds = ((ranges, of_ranges), (calls, of_calls), (overhead, of_overhead))
    start = np.concatenate([each.start_ns[rows] for each, rows in kinds])
    duration = np.concatenate([each.duration_ns[rows] for each, rows in kinds])
    order = joins.start_order(start, duration)
    sizes = [rows.stop - rows.start for rows in block]

    def by_start(*values: NDArray[Any] | int) -> NDArray[Any]:
        whole = [np.broadcast_to(value, size) for value, size in zip(values, sizes, strict=True)]
        return np.concatenate(whole)[order]

    thread = by_start(*(each.thread[rows] for each, rows in kinds))
    range_names, first = ranges.name[of_ranges], len(ranges.names)
    category = np.where(np.array(ranges.operator, bool), 0, 1).astype(np.int8)
    columns = {
        "start_ns": start[order],
        "end_ns": start[order] + duration[order],
        "process": np.where(thread == NULL, NULL, (thread >> report.THREAD_BITS) & report.THREAD_MASK),
        "thread": thread_of(thread),
        "category": coded_column(by_start(category[range_names], 2, 3), _CATEGORIES),
        "name": coded_column(
            by_start(range_names, calls.name[of_calls] + first, overhead.name[of_overhead] + (first + len(calls.names))),
            [*ranges.names, *calls.names, *overhead.names],
        ),
        "correlation": by_start(NULL, calls.correlation[of_calls], NULL),
        # A range's own number, from 1.
        "operator": by_start(np.arange(of_ranges.start, of_ranges.stop) + 1, operator[of_calls], NULL),
    }
    sequence = ranges.sequence[of_ranges]
    if (sequence != NULL).any():
        columns["sequence"] = by_start(sequence, NULL, NULL)
    if any(ranges.shapes):
        columns["shapes"] = coded_column(by_start(range_names, -1, -1), ranges.shapes)
    return columns


def thread_of(global_tid: Integers) -> Integers:
    """The operating system's thread ids in globalTids; NULL stays."""
    return np.where(global_tid == NULL, NULL, global_tid & report.THREAD_MASK)


#: nsys' own work in which the profiler starts, stops or writes: an iteration around it is a boundary one.
_FLUSH = re.compile(r"flush|initialization|cudaProfilerSt", re.IGNORECASE)

#: Up to so many ranges, calls and device events are one block each. More are made in blocks of a quarter: columns of 0.5 MB.
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
    with report.open_report(path) as database:
        found = report.processes(database)
        ranks = report.process_ranks(found)
        chosen = next((place for place, known in enumerate(ranks) if known == rank), 0) if len(found) > 1 else 0
        process = found[chosen]
        info = RankInfo(rank=rank, rank_source=rank_source, source="nsys", files=[str(path.absolute())])
        if process.rank is not None:
            info.rank, info.rank_source = process.rank, "trace"
        elif len(found) > 1:
            info.rank, info.rank_source = ranks[chosen], "order"
        named = f"process {process.pid} on device {', '.join(map(str, process.devices)) or 'none'}"
        if len(found) > 1 and process.rank is None:
            info.add_caveat("processes_unnamed.several", count=len(found), rank=info.rank, named=named)
        elif len(found) > 1:
            info.add_caveat("several_processes", count=len(found), named=named)
        try:
            return _read(database, process, info)
        except (ValueError, OverflowError) as error:  # pa.ArrowInvalid is a ValueError
            raise TraceError(f"{path} cannot be read: {error}") from error


def _read(database: Database, process: report.Process, info: RankInfo) -> RankTables:
    work = events.read_device_work(process)
    calls = events.read_calls(process, report.CALL, "unnamed call")
    # Calls that launch one kernel each.
    launching = calls.named(joins.launches_one)
    launches = joins.launch_of(
        work.correlation,
        work.start_ns,
        kernel=~work.of_kind(MEMCPY, MEMSET),
        calls=calls.correlation,
        call_start_ns=calls.start_ns,
        launches_one=launching,
    )
    waits, wait_caveats = events.read_waits(process, calls)
    give_memory_back()
    spans = [_span(each) for each in (work, calls)]
    ranges = read_ranges(process, max((int(last) for span in spans for last in span[1:]), default=None))
    give_memory_back()
    overhead = events.read_calls(process, "PROFILER_OVERHEAD", "profiler overhead")
    most = max(len(each.start_ns) for each in (work, calls, ranges, overhead))
    system = events.read_calls(process, report.SYSTEM, "unnamed call")
    spans += [_span(each) for each in (ranges, overhead, system)]
    times = np.concatenate((*spans, waits["start_ns"], waits["end_ns"]))
    if (abs(times) > events.MAX_TIME_NS).any():
        raise ValueError("its times are not nanoseconds of one session")
    report.describe_capture(process, info)
    begin_ns = min((int(times.min()) for times in (calls.start_ns, ranges.start_ns) if len(times)), default=0)
    rows = ranges.named(can_mark)
    iterations, iteration_caveats = find_iterations(
        ranges.names,
        ranges.name[rows].astype(np.int32),
        ranges.start_ns[rows],
        ranges.end_ns(rows),
        calls.start_ns[launching],
        begin_ns,
    )
    info.content = joins.content_of(work.start_ns, work.duration_ns, calls.start_ns, ranges.start_ns, system.start_ns)
    host_ns = [*(span[1:] for span in spans[1:3]), calls.start_ns[:1]]
    device_times = joins.DeviceTimes(
        start_ns=work.start_ns,
        duration_ns=work.duration_ns,
        device=work.device,
        stream=work.stream,
        computes=~work.of_kind(COMMUNICATION),
        launches=launches,
        call_start_ns=calls.start_ns,
        call_duration_ns=calls.duration_ns,
        calls_named=calls.named,
        host_ns=host_ns,
    )
    device_times, time_caveats = joins.checked_times(device_times)
    work = replace(work, duration_ns=device_times.duration_ns)
    info.caveats += time_caveats
    if not len(iterations.number) and not iteration_caveats:
        names = [name.text for name in work.names]
        copied = np.array([name.copy is not None and "H" in name.copy.direction for name in work.names], bool)[work.name]
        iterations, iteration_caveats = find_periods(device_times, names, work.name, work.of_kind(COMPUTE), copied, begin_ns)
    iterations, incomplete, unrecorded = iterations.complete(
        *joins.unrecorded_launches(
            work.correlation, calls=calls.correlation, call_start_ns=calls.start_ns, calls_named=calls.named
        )
    )
    iteration_caveats = [*iteration_caveats, *incomplete]
    flushes = np.flatnonzero(overhead.named(lambda name: _FLUSH.search(name) is not None))
    flush_start = overhead.start_ns[flushes]
    boundary = iterations.overlapping(flush_start, flush_start + overhead.duration_ns[flushes])
    if len(iterations.rows):  # they were made from ranges
        boundary |= np.isin(rows[iterations.rows], ranges.open)
    base = info.clock_base_ns
    block_rows = max(most if most <= _BLOCK_ROWS else _BLOCK_ROWS // 4, 1)
    # Operators are numbered by their ranges, from 1.
    innermost = ranges.innermost(calls.thread, calls.start_ns)
    operator = np.where(innermost >= 0, innermost.astype(np.int64) + 1, NULL)
    kernels = np.flatnonzero(work.of_kind(COMMUNICATION))
    device_columns = partial(
        _device_columns, work, calls, launches, operator, iterations, kernels, not joins.clocks_disagree(time_caveats)
    )
    issued_ns = launches.issued_ns[kernels]
    named = [work.names[name].operation for name in work.name[kernels].tolist()]
    described = operations(process, ranges, named, joins.taken(calls.thread, launches.row[kernels]), issued_ns, info.world_size)
    if unknown := sum(operation.message_bytes is None for operation in described):
        info.add_caveat("message_size_unknown", unknown=unknown, kernels=len(kernels))
    communication = build("device_events", info.rank, device_columns(kernels), base)
    collectives = joins.collective_columns(described, communication, np.arange(len(kernels)), issued_ns)
    tables = {
        "iterations": iterations.table(info.rank, boundary, base),
        "collectives": build("collectives", info.rank, collectives),
    }
    sampled = {"gpu_metrics": events.metric_columns(process), "cuda_memory": events.memory_columns(process)}
    system_columns = {
        "thread": thread_of(system.thread),
        "name": coded_column(system.name, system.names),
        "start_ns": system.start_ns,
        "end_ns": system.start_ns + system.duration_ns,
    }
    more = {"synchronizations": waits, "system_calls": system_columns} | sampled
    built = [(name, build(name, info.rank, columns, base)) for name, columns in more.items() if columns]
    tables |= {name: table for name, table in built if table.num_rows}
    if len(system.start_ns):
        callers = len(np.unique(system.thread >> report.THREAD_BITS))
        if process.global_pid is None and callers > 1:
            info.add_caveat("processes_unnamed.callers", count=callers)
    # What nsys records on request and nothing here reads.
    known = texts("bridge_profiling.traces", "caveats.toml")["unread"]
    unread = [what for table, what in known.items() if database.has(table) and database.rows(f"SELECT 1 FROM {table} LIMIT 1")]
    if not most and not unread and not any(len(table) for table in tables.values()):
        nothing = "nsys recorded nothing" if database.has("META_DATA_EXPORT") else "it is not an nsys report"
        raise TraceError(f"{database.name} holds no events: {nothing}")
    info.caveats += [*wait_caveats, *iteration_caveats]
    joins.add_trace_caveats(
        info,
        device_events=len(work.start_ns),
        unlaunched=int((launches.row < 0).sum()),
        iterations=len(iterations.number),
        marks="NVTX iteration_N",
    )
    of_none = calls.unowned + ranges.lost
    if unread:
        info.add_caveat("unread_tables", names=", ".join(dict.fromkeys(unread)))
    _add_caveats(database, info, work, calls, ranges, unusable=work.unowned + of_none)
    lost = work.negative + work.unnamed + launches.ambiguous + work.unowned + unrecorded
    of_device = len(work.start_ns) + work.negative + work.unowned + unrecorded
    joins.add_lost(info, LostRecords(lost + calls.negative + of_none, lost, of_device, unrecorded), launches.ambiguous)
    info.partial = info.error is not None
    if most > _BLOCK_ROWS:
        give_memory_back()
    count = len(work.start_ns)
    blocks = [np.arange(begin, min(begin + block_rows, count)) for begin in range(0, max(count, 1), block_rows)]
    device_events = _made("device_events", info, device_columns, blocks)
    host_columns = partial(_host_columns, ranges, calls, overhead, operator)
    host_events = _made("host_events", info, host_columns, _host_blocks(ranges, calls, overhead, block_rows))
    return RankTables(info, tables | {"device_events": device_events, "host_events": host_events})


def _made(name: str, info: RankInfo, columns: Callable[[Any], dict[str, Any]], blocks: Sequence[Any]) -> pa.Table | MadeTable:
    """A table of one block, or one whose blocks are made on each use.

    The 15 columns of device events take five times the memory of what they are made from, and 1 GB of host events 2 GB.
    """

    def make() -> Iterator[pa.Table]:
        return (build(name, info.rank, columns(block), info.clock_base_ns) for block in blocks)

    return next(make()) if len(blocks) == 1 else MadeTable(make)


def _span(of: events.DeviceWork | events.Calls | Ranges) -> Integers:
    """The lowest and the highest of all starts and ends; none without events."""
    bounds = [
        bound for times in (of.start_ns, of.start_ns + of.duration_ns) if len(times) for bound in (times.min(), times.max())
    ]
    return np.array([min(bounds), max(bounds)] if bounds else [], np.int64)


def _add_caveats(
    database: Database, info: RankInfo, work: events.DeviceWork, calls: events.Calls, ranges: Ranges, *, unusable: int
) -> None:
    if negative := work.negative + calls.negative:
        info.error = f"{database.name} holds {negative} events that end before they start; the others were read"
    if database.pending:
        info.error = f"{database.name} is not complete: {database.pending}" + (f"; {info.error}" if info.error else "")
    if work.unnamed:
        info.add_caveat("kernels_unnamed", of_file=True, count=work.unnamed)
    if work.whole_graphs:
        info.add_caveat("graphs_whole", count=work.whole_graphs)
    if len(ranges.open):
        info.add_caveat("ranges_open", count=len(ranges.open))
    if database.has("DIAGNOSTIC_EVENT", "text", "severity"):
        for (text,) in database.rows("SELECT DISTINCT text FROM DIAGNOSTIC_EVENT WHERE severity = 3 LIMIT 3"):
            info.add_caveat("nsys_error", text=text)
    if unusable:
        info.add_caveat("events_undecodable.nsys", of_file=True, count=unusable)
