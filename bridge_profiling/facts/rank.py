"""Facts about one capture: its events are read in one pass, and what is collected is freed after its last use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.common.errors import TraceError, shortage
from bridge_profiling.common.regular_files import size_bytes
from bridge_profiling.facts import (
    device,
    flame_graph,
    host,
    idle,
    kernels,
    matching,
    memory,
    operators,
    parts,
    phases,
    products,
    profiler_cost,
    roles,
    sampled,
)
from bridge_profiling.facts.store import FactOptions, fact_files, find_facts, keep_facts, packed
from bridge_profiling.facts.types import Answer, Chosen, Collector
from bridge_profiling.traces import cache
from bridge_profiling.traces.cache import is_whole
from bridge_profiling.traces.discover import Capture
from bridge_profiling.traces.tables import give_memory_back
from bridge_profiling.traces.types import RankInfo, RankTables

#: Begins the names of facts about memory in a trace: a rank's snapshot has its own.
OF_TRACE = "trace_"

#: Of Parquet of so many bytes, facts take some 100 MB.
_LARGE_BYTES = 50_000_000

_DEVICE_EVENTS = (
    *("kind", "device", "stream", "start_ns", "end_ns", "iteration"),
    *("correlation", "operator", "launch_start_ns", "launch_end_ns", "launch_thread"),
    *("bytes", "direction", "from_memory", "to_memory", "collective"),
)
_SAMPLES = ("device", "metric", "time_ns", "value")
_OPERATORS = ("category", "thread", "name", "start_ns", "end_ns", "operator")


#: Computes facts by name from a capture's tables.
Compute = Callable[[RankTables], Mapping[str, Answer]]


@dataclass(frozen=True)
class RankTask:
    """A capture, or the folder of its Parquet, and what to compute from it."""

    source: Capture | Path  # what to read
    compute: Compute
    keep: bool = False  # whether `compute` computes all facts with the default options, which a file keeps
    cache_directory: Path | None = None  # where to keep Parquet and facts; None for the default places
    scratch: Path | None = None  # where to write its Parquet if the cache cannot be written
    cached: bool = True  # False reads the capture itself, and writes to `scratch` alone

    @property
    def path(self) -> Path:
        """The file or folder."""
        return self.source if isinstance(self.source, Path) else self.source.path

    @property
    def packed_bytes(self) -> int:
        """The size of the file, or of the folder's files."""
        return sum(map(size_bytes, self.path.iterdir() if self.path.is_dir() else [self.path]))


@dataclass(frozen=True)
class RankResult:
    """What is known about one capture."""

    info: RankInfo
    entry: Path | None  # the folder of its Parquet; None if it was not needed, or could not be written
    facts: bytes = b""  # as `store.packed` makes them; a worker is another process
    unkept: str | None = None  # why its Parquet could not be written where it was to be kept
    source: Capture | Path | None = None  # of the task


def read_rank(task: RankTask) -> RankResult | str:
    """Read a capture and compute facts, in a worker. Returns an error that names the file if it cannot be read.

    If its tables in the cache disappear meanwhile, the capture is read again.
    """
    try:
        tables, entry = _load(task)
    except TraceError as error:
        return str(error)
    except OSError as error:
        return f"{task.path} cannot be read: {shortage(error) or error.strerror or error}"
    except Exception as error:  # a bug of a reader must name the file too
        return f"{task.path} cannot be read: {shortage(error) or f'{type(error).__name__}: {error}'}"
    try:
        facts = task.compute(tables)
    except Exception:
        if not _has_gone(task, entry):
            raise
    else:
        if not _has_gone(task, entry):
            return RankResult(tables.info, entry, _packed(task, tables, facts), tables.unkept)
    return read_rank(replace(task, cached=False))


def kept_facts(task: RankTask) -> RankResult | None:
    """The facts about a capture that a file keeps, if they are what the task computes: nothing is read."""
    if not task.keep or not task.cached or isinstance(task.source, Path):
        return None
    with suppress(OSError, TraceError):
        kept = find_facts(task.source, fact_files(task.source, cache.places(task.source, task.cache_directory)))
        if kept is not None and kept.header.info is not None:
            tables = cache.find(task.source, directory=task.cache_directory)
            return RankResult(kept.header.info, None if tables is None else tables.entry, kept.content, source=task.source)
    return None


def _packed(task: RankTask, tables: RankTables, facts: Mapping[str, Answer]) -> bytes:
    """Facts as bytes, which a file keeps next to their tables."""
    if task.keep and task.cached and tables.entry is not None and not isinstance(task.source, Path):
        with suppress(OSError, UnicodeEncodeError):  # the text of a manifest need not be UTF-8
            return keep_facts(task.source, tables.info, facts, fact_files(task.source, [tables.entry])[-1])
    return packed(facts)


def _has_gone(task: RankTask, entry: Path | None) -> bool:
    """Whether another process has removed files of an entry of the cache."""
    return task.cached and isinstance(task.source, Capture) and entry is not None and not is_whole(entry)


def _load(task: RankTask) -> tuple[RankTables, Path | None]:
    if isinstance(task.source, Path):
        kept = cache.open_directory(task.source)
        if kept is None:
            raise TraceError(f"{task.source} holds no tables that this version can read")
        return kept, kept.entry
    writer = "" if task.scratch is None else task.scratch.name
    tables = cache.load(task.source, directory=task.cache_directory, cached=task.cached, writer=writer)
    if tables.entry is not None or task.scratch is None:
        return tables, tables.entry
    # Timelines and merged traces need Parquet even if nothing can be cached.
    entry = task.scratch / f"{tables.info.source}{tables.info.rank}-scratch"
    try:
        cache.write(tables, entry)
    except OSError:
        return tables, None
    return replace(cache.reopened(tables, entry), unkept=tables.unkept), entry


def rank_facts(tables: RankTables, options: FactOptions) -> dict[str, Answer]:
    """All facts about a capture, by name."""
    events = tables.columns("device_events", _DEVICE_EVENTS)
    iterations = tables.columns("iterations", ("iteration", "start_ns", "end_ns", "boundary"))
    is_large = tables.entry is not None and sum(map(size_bytes, tables.entry.iterdir())) >= _LARGE_BYTES
    free = give_memory_back if is_large else lambda: None
    # First: it takes the most memory.
    found: dict[str, Answer | pa.Table] = {
        "operators": operators.operators(_operator_events(tables), events, _memory_events(tables))
    }
    free()
    hosts = _collected(tables, _collectors(events, options))
    free()
    host_events = partial(tables.blocks, "host_events", host.COLUMNS)
    waits = tables.columns("synchronizations", ("kind", "stream", "correlation", "producer_stream", "producer_correlation"))
    work, windows = device.device_work(events), device.windows(iterations, events)
    spans = device.spans(windows, work)
    gaps = device.gaps(events, hosts.pop("waits"), waits, work, windows)
    cost = profiler_cost.replay(hosts.pop("recorded"), events, gaps, work, tables.info.source)
    names = hosts["operator_names"]
    doing = host.host_activity(hosts.pop("activity"), names, events, gaps.launch_starved, spans, **vars(options))
    found["idle_causes"] = idle.idle_causes(gaps, events, doing, names, spans, cost)
    del doing
    found["longest_calls"] = operators.longest_calls(hosts.pop("longest_calls"))
    free()
    found["device_roles"] = roles.device_roles(
        events, _kernel_names(tables), hosts.pop("roles"), hosts.pop("operator_names"), gaps
    )
    del names
    found["profiler_cost"] = profiler_cost.recorded(cost, spans, iterations)
    found["idle_gaps"] = device.idle_gaps(gaps, spans)
    found["iterations"] = device.iterations(windows, work, gaps)
    del gaps, cost, windows
    free()
    samples = tables.columns("gpu_metrics", _SAMPLES)
    found["gpu_metrics"] = sampled.gpu_metrics(samples, iterations)
    counted = sampled.counted(samples, events)
    del samples
    found["phases"] = phases.phases(hosts.pop("timed"), events, iterations, counted)
    found["products"] = products.products(hosts.pop("shaped"), events, _kernel_names(tables), counted)
    found["counters_by_kernel"] = sampled.by_kernel(counted, events, _kernel_names(tables))
    del counted
    free()
    found["host_steps"] = parts.host_steps(host_events, events, iterations)
    found["units"] = operators.units(hosts.pop("annotations"), events)
    found["loop_counts"] = parts.loop_counts(hosts.pop("ranges"), iterations)
    collectives = tables.columns("collectives", matching.COLUMNS)
    found["operations"] = operations = matching.operations(collectives)
    found["activity"] = matching.activity(events, operations, work)
    found["first_event"] = events.select(["start_ns"]).slice(0, 1)
    found["marks"] = iterations
    found["exposure"] = kernels.exposure(events, collectives, work)
    found["kernel_times"] = kernels.kernel_times(events)
    found["launch_statistics"] = kernels.launch_statistics(events, spans)
    found["device_sums"] = kernels.device_sums(tables.columns("device_events", kernels.SUMMED), marked=len(iterations) > 0)
    found["breakdown"] = device.breakdown(work)
    calls = tables.columns("system_calls", ("thread", "name", "start_ns", "end_ns"))
    found["system_calls"] = sampled.system_calls(calls, events, iterations)
    allocated = tables.columns("cuda_memory", ("time_ns", "device", "memory", "bytes"))
    found["cuda_memory"] = sampled.cuda_memory(allocated, iterations)
    found |= {f"{OF_TRACE}{name}": fact for name, fact in memory.memory_facts(tables, iterations).items()}
    free()
    return {name: each if isinstance(each, Answer) else Answer(each) for name, each in found.items()}


def operators_by(tables: RankTables, **by: Any) -> dict[str, Answer]:
    """Host operators by shapes, stack or module, or other host ranges: the options of `operators.operators`."""
    names = {"shapes": "shapes", "stacks": "stack"}
    more = [column for option, column in names.items() if by.get(option)]
    events = tables.columns("device_events", _DEVICE_EVENTS)
    return {"operators": Answer(operators.operators(_operator_events(tables, *more), events, _memory_events(tables), **by))}


def counters_over_time(tables: RankTables, intervals: int) -> dict[str, Answer]:
    """Hardware counters over time: see `sampled.gpu_metrics_over_time`."""
    samples, iterations = tables.columns("gpu_metrics", _SAMPLES), tables.columns("iterations", ("start_ns", "end_ns"))
    return {"gpu_metrics_over_time": Answer(sampled.gpu_metrics_over_time(samples, iterations, intervals))}


def stacks_of(tables: RankTables, least_share: float = 0.0) -> dict[str, Answer]:
    """Stacks of each thread: see `flame_graph.flame_graph`."""
    iterations = tables.columns("iterations", ("iteration", "start_ns", "end_ns", "boundary"))
    events, frames = tables.columns("device_events", _DEVICE_EVENTS), tables.columns("host_events", host.COLUMNS)
    return {"flame_graph": flame_graph.flame_graph(frames, events, iterations, least_share=least_share)}


def _kernel_names(tables: RankTables) -> pa.Table:
    return tables.columns("device_events", ("name",))


def _memory_events(tables: RankTables) -> pa.Table:
    return tables.columns("memory_events", ("time_ns", "thread", "device_type", "bytes"))


def _operator_events(tables: RankTables, *more: str) -> Callable[[], Iterable[pa.Table]]:
    return partial(tables.blocks, "host_events", (*_OPERATORS, *more))


#: A collector of host events, and the columns that it reads.
_Collected = tuple[Collector, tuple[str, ...]]


def _collectors(events: pa.Table, options: FactOptions) -> dict[str, _Collected]:
    def chosen(rows: Callable[[pa.Table], NDArray[np.bool_]], *columns: str) -> _Collected:
        return Chosen(rows), columns

    range_columns = ("category", "thread", "name", "start_ns", "end_ns")
    return {
        "waits": chosen(device.host_rows, "name", "start_ns", "correlation"),
        "activity": (host.ActivityCollector(events, **vars(options)), host.COLUMNS),
        "operator_names": (host.Operators(), host.Operators.COLUMNS),
        "recorded": (profiler_cost.Recorded(events), profiler_cost.COLUMNS),
        "roles": chosen(roles.host_rows, *range_columns),
        "ranges": chosen(parts.host_rows, "category", "name", "start_ns", "end_ns"),
        "timed": chosen(phases.HostRows(), *range_columns, "sequence"),
        "shaped": chosen(products.host_rows, *range_columns, "shapes"),
        "annotations": chosen(operators.unit_rows, *range_columns),
        "longest_calls": chosen(operators.longest_rows, "category", "name", "start_ns", "end_ns"),
    }


def _collected(tables: RankTables, collectors: dict[str, _Collected]) -> dict[str, Any]:
    """What the collectors come to, in one pass over the host events."""
    columns = list(dict.fromkeys(column for _, read in collectors.values() for column in read))
    for block in tables.blocks("host_events", columns):
        for collector, _ in collectors.values():
            collector.add(block)
    return {name: collectors.pop(name)[0].result() for name in list(collectors)}
