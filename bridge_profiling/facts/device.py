"""One rank's device: when it computed, communicated and copied, over the capture and in each iteration, and its counters.

Times are unions over all streams, never sums. An iteration's window on the device is its host range, moved to the work that it
launched: it ends when the host range and the last compute kernel launched in it have ended, and starts where the window before
it ends, or where its own host range starts if that is later. Windows never overlap, so their times can be added up. What was
launched before the first iteration is in none.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bridge_profiling.facts.intervals import Intervals, Nanoseconds, rows_of, union, window
from bridge_profiling.facts.kernel_groups import group_of
from bridge_profiling.facts.types import Answer
from bridge_profiling.traces.tables import NULL, fields, to_int64
from bridge_profiling.traces.types import Caveat

if TYPE_CHECKING:
    import duckdb


#: Number of the window that is the whole capture, where no iteration is marked.
WHOLE_CAPTURE = -1

#: Work that waited starts this soon after what it waited for; 2 to 4 µs are usual on an H200.
PROMPT_NS = 10_000

#: Work that starts so long after its launch was behind other work in the device's queue.
_QUEUED_NS = 100_000


@dataclass(frozen=True)
class DeviceWork:
    """When a rank's device did what. Kernels compute or communicate (NCCL, DeepEP, NVSHMEM, userbuffers and the like)."""

    compute: Intervals
    communication: Intervals
    memcpy: Intervals
    memset: Intervals
    kernel_count: int
    communication_kernel_count: int
    device_count: int

    @cached_property
    def busy(self) -> Intervals:
        """When anything ran."""
        return self.communication | self._other

    @cached_property
    def times(self) -> dict[str, Intervals]:
        """By column of `breakdown` and `iterations`."""
        return {
            "compute_us": self.compute,
            "communication_us": self.communication,
            # Communication and nothing else: an upper bound on the time that hiding it would save.
            "exposed_communication_us": self.communication - self._other,
            "overlapped_communication_us": self.communication & self.compute,
            "memcpy_us": self.memcpy,
            "memset_us": self.memset,
        }

    @cached_property
    def _other(self) -> Intervals:
        return self.compute | self.memcpy | self.memset

    @property
    def span(self) -> Intervals:
        """From the first device event's start to the last one's end; empty without device events."""
        busy = self.busy
        return window(int(busy.start_ns[0]), int(busy.end_ns[-1])) if len(busy) else busy


@dataclass(frozen=True)
class Windows:
    """Iterations of one rank, ascending, with their windows on the device; or its whole capture, as `WHOLE_CAPTURE`."""

    iteration: NDArray[np.int32]
    boundary: NDArray[np.bool_]
    start_ns: Nanoseconds
    end_ns: Nanoseconds

    @property
    def numbers(self) -> pa.Array:
        """The iterations as a column; null for a whole capture."""
        return pa.array(self.iteration, pa.int32(), mask=self.iteration == WHOLE_CAPTURE)

    @classmethod
    def whole(cls, span: Intervals) -> Windows:
        """The whole capture, by its span; no window if that is empty."""
        number, boundary = np.full(len(span), WHOLE_CAPTURE, np.int32), np.zeros(len(span), bool)
        return cls(number, boundary, span.start_ns, span.end_ns)


@dataclass(frozen=True)
class IdleGaps:
    """When a device did not compute, by reason (see `idle`). The three sets are disjoint.

    Args:
        gaps: the union of the three, one interval per gap between compute.
        next_kernel: row in `device_events` of the compute kernel that ends each gap; -1 if none does.
        waits_unrecorded: whether there are several streams and no record of which waits for which.
    """

    gaps: Intervals
    next_kernel: NDArray[np.int64]
    launch_starved: Intervals
    blocked: Intervals
    dependency_stalled: Intervals
    waits_unrecorded: bool

    @property
    def by_reason(self) -> dict[str, Intervals]:
        """The three sets by column of `iterations` and `idle_gaps`."""
        return {
            "launch_starved_us": self.launch_starved,
            "blocked_us": self.blocked,
            "dependency_stalled_us": self.dependency_stalled,
        }


def device_work(device_events: pa.Table) -> DeviceWork:
    """When the device did what."""
    start, end = (device_events[name].to_numpy() for name in ("start_ns", "end_ns"))
    rows = {kind: rows_of(device_events["kind"], kind) for kind in ("compute", "communication", "memcpy", "memset")}
    communicating = int(rows["communication"].sum())
    return DeviceWork(
        **{kind: union(start[chosen], end[chosen]) for kind, chosen in rows.items()},
        kernel_count=int(rows["compute"].sum()) + communicating,
        communication_kernel_count=communicating,
        device_count=pc.count_distinct(device_events["device"]).as_py(),
    )


def windows(iterations: pa.Table, device_events: pa.Table) -> Windows:
    """The device windows of the iterations in `traces.tables.ITERATIONS`."""
    number, boundary, start, end = (iterations[name].to_numpy() for name in ("iteration", "boundary", "start_ns", "end_ns"))
    if not len(number):
        return Windows(number, boundary, start, end)
    # An iteration that launched no compute ends no earlier than the one before it.
    ends = np.maximum.accumulate(np.maximum(end, _last_compute_ns(number, device_events, end)))
    before = np.maximum(_left_before_ns(number[0], device_events), _unrecorded_until_ns(device_events))
    before = np.minimum(np.maximum(start[:1], before), ends[:1])
    return Windows(number, boundary, np.maximum(start, np.concatenate((before, ends[:-1]))), ends)


def spans(windows: Windows, work: DeviceWork) -> Windows:
    """The windows, or the whole capture if there are none."""
    return windows if len(windows.iteration) else Windows.whole(work.span)


def breakdown(work: DeviceWork) -> Answer:
    """One row for the whole capture. Idle is the rest of the span; kernel counts include communication."""
    span_ns, busy_ns = work.span.total_ns, work.busy.total_ns
    table = pa.table(
        {
            "span_us": [span_ns / 1e3],
            "busy_us": [busy_ns / 1e3],
            "idle_us": [(span_ns - busy_ns) / 1e3],
            **{name: [time.total_ns / 1e3] for name, time in work.times.items()},
            "kernel_count": [work.kernel_count],
            "communication_kernel_count": [work.communication_kernel_count],
        }
    )
    if work.device_count < 2:
        return Answer(table)
    text = f"work on {work.device_count} devices is counted as that of one: it is busy while any of them is"
    return Answer(table, (Caveat("several_devices", text),))


def iterations(windows: Windows, work: DeviceWork, gaps: IdleGaps) -> pa.Table:
    """One row per iteration: its window, and the device time in it.

    `duration_us` = `compute_us` + `launch_starved_us` + `blocked_us` + `dependency_stalled_us` = busy + `idle_us`.
    """
    start, end = windows.start_ns, windows.end_ns
    return pa.table(
        {
            "iteration": windows.numbers,
            "boundary": pa.array(windows.boundary, pa.bool_()),
            "start_ns": start,
            "end_ns": end,
            "duration_us": (end - start) / 1e3,
            **{name: intervals.within_ns(start, end) / 1e3 for name, intervals in work.times.items()},
            "idle_us": (end - start - work.busy.within_ns(start, end)) / 1e3,
            **{name: intervals.within_ns(start, end) / 1e3 for name, intervals in gaps.by_reason.items()},
        }
    )


def launch_statistics(device_events: pa.Table, spans: Windows) -> pa.Table:
    """One row per window: its compute kernels, by their start, and the calls that launched them. Null where there are none.

    `launch_count`: calls that launched one kernel; `launch_call_us`: their median duration; `graph_kernel_count`: kernels
    launched together by one call, as in a CUDA graph.
    """
    names = ["start_ns", "end_ns", "correlation", "launch_start_ns", "launch_end_ns"]
    kernels = device_events.select(names).filter(pa.array(rows_of(device_events["kind"], "compute")))
    start, end = (kernels[name].to_numpy() for name in ("start_ns", "end_ns"))
    call, called, returned = (to_int64(kernels[name], -1) for name in ("correlation", "launch_start_ns", "launch_end_ns"))
    duration, call_duration = end - start, returned - called
    rows = []
    for begin, stop in zip(spans.start_ns.tolist(), spans.end_ns.tolist(), strict=True):
        mine = slice(*np.searchsorted(start, (begin, stop)))  # device events are by start
        took, launched = duration[mine], called[mine] >= 0
        _, first, together = np.unique(call[mine][launched], return_index=True, return_counts=True)
        calls = call_duration[mine][launched][first][together == 1]
        rows.append(
            {
                "kernel_count": len(took),
                "mean_kernel_us": float(took.mean()) / 1e3 if len(took) else None,
                "median_kernel_us": float(np.median(took)) / 1e3 if len(took) else None,
                "launch_count": len(calls),
                "launch_call_us": float(np.median(calls)) / 1e3 if len(calls) else None,
                "graph_kernel_count": int(together[together > 1].sum()),
            }
        )
    return pa.Table.from_pylist(rows, schema=_LAUNCH_STATISTICS).add_column(0, "iteration", spans.numbers)


_LAUNCH_STATISTICS = pa.schema(
    [
        ("kernel_count", pa.int64()),
        *fields(pa.float64(), "mean_kernel_us", "median_kernel_us"),
        ("launch_count", pa.int64()),
        ("launch_call_us", pa.float64()),
        ("graph_kernel_count", pa.int64()),
    ]
)

_PATH = ("direction", "from_memory", "to_memory")


def copies(device_events: pa.Table) -> pa.Table:
    """One row per direction and pair of memories, and one of memsets, most time first.

    `kind`: `memcpy` or `memset`, which has no direction and no memories. `host_memory`: `pinned` or `pageable` for a copy from
    or to the host, else null. `bandwidth_gbs`: 10⁹ bytes/s during the copies whose size the capture records; null if it records
    none.
    """
    kinds = device_events["kind"]
    events = device_events.filter(pa.array(rows_of(kinds, "memcpy") | rows_of(kinds, "memset")))
    duration = pc.subtract(events["end_ns"], events["start_ns"])
    table = pa.table(
        {name: events[name].cast(pa.string()) for name in ("kind", *_PATH)}
        | {
            "bytes": events["bytes"],
            "duration_ns": duration,
            "sized_ns": pc.if_else(events["bytes"].is_valid(), duration, 0),
        }
    )
    wanted = [("duration_ns", "count"), ("bytes", "sum"), ("duration_ns", "sum"), ("duration_ns", "max"), ("sized_ns", "sum")]
    found = table.group_by(["kind", *_PATH]).aggregate(wanted).sort_by([("duration_ns_sum", "descending")])
    sized_ns, total_bytes = found["sized_ns_sum"], found["bytes_sum"]
    known = pc.greater(sized_ns, 0)
    divisor = pc.if_else(known, sized_ns, 1).cast(pa.float64())
    sides = [{"HtoD": row["from_memory"], "DtoH": row["to_memory"]}.get(row["direction"]) for row in found.to_pylist()]
    return pa.table(
        {name: found[name] for name in ("kind", *_PATH)}
        | {
            "host_memory": pa.array([side if side in ("pinned", "pageable") else None for side in sides], pa.string()),
            "count": found["duration_ns_count"],
            "bytes": total_bytes,
            "total_us": pc.divide(found["duration_ns_sum"].cast(pa.float64()), 1e3),
            "max_us": pc.divide(found["duration_ns_max"].cast(pa.float64()), 1e3),
            "bandwidth_gbs": pc.if_else(known, pc.divide(total_bytes.cast(pa.float64()), divisor), None),
        }
    )


# The events of all ranks are read once for both answers.
_KERNEL_SUMS = """
create temp table if not exists kernel_sums as
with recorded as (
    select rank, min(start_ns) filter (where launch_start_ns is not null) as first_ns from device_events
    where rank in (select rank from iterations) group by rank having 2 * count(launch_start_ns) > count(*)
)
select rank, kind, backend, name, configuration, count(*) as calls, sum(end_ns - start_ns)::bigint as total_ns,
    min(end_ns - start_ns) as min_ns, max(end_ns - start_ns) as max_ns
from device_events left join recorded using (rank)
where kind in ('compute', 'communication')
    and not (iteration is null and launch_start_ns is null and coalesce(start_ns < first_ns, false))
group by all
"""

_KERNELS = """
    with launched as (
        select {rank} kind, backend, name, configuration::varchar as configuration, sum(calls)::bigint as calls,
            sum(total_ns)::bigint as total_ns, min(min_ns) as min_ns, max(max_ns) as max_ns
        from kernel_sums group by all
    )
    select {rank} kind, backend, name, sum(calls)::bigint as count,
        sum(total_ns)::bigint / 1000 as total_us,
        sum(total_ns)::bigint / sum(calls)::bigint / 1000 as mean_us,
        min(min_ns) / 1000 as min_us,
        max(max_ns) / 1000 as max_us,
        first(configuration order by calls desc, configuration) filter (where configuration is not null) as configuration,
        count(configuration) as configurations
    from launched
    group by all
    order by {rank} total_us desc, name
"""


def kernels(connection: duckdb.DuckDBPyConnection, *, by_rank: bool = True) -> pa.Table:
    """One row per kind, backend and name of kernel (and rank), with its group (`kernel_groups`), most time first.

    `grid`, `block` ("16x8x1"), `registers_per_thread` and `shared_memory_bytes` (of a block, static and dynamic) are those of
    most launches, null where the profiler did not record them; `configurations`: how many different ones there are.

    Where iterations are marked, kernels that were in the device's queue when the capture began are left out.
    """
    connection.execute(_KERNEL_SUMS)
    found = connection.sql(_KERNELS.format(rank="rank," if by_rank else "")).to_arrow_table()
    kinds, names = (found[column].cast(pa.string()).to_pylist() for column in ("kind", "name"))
    groups = [group_of(name or "", kind) for kind, name in zip(kinds, names, strict=True)]
    found = found.append_column("group", pa.array(groups, pa.string()))
    written = found["configuration"].to_pylist()
    launches = [(None, None, None, None) if text is None else json.loads(text) for text in written]
    grids, blocks, registers, shared = zip(*launches, strict=True) if launches else ((),) * 4
    for name, values in (("grid", grids), ("block", blocks)):
        sizes = ["x".join(map(str, value)) if value else None for value in values]
        found = found.append_column(name, pa.array(sizes, pa.string()))
    for name, values in (("registers_per_thread", registers), ("shared_memory_bytes", shared)):
        found = found.append_column(name, pa.array(values, pa.int64()))
    return found.drop_columns("configuration")


def ranks_without_work(breakdown: pa.Table, source: str) -> list[int]:
    """Ranks whose trace, by one profiler, has no work on a device, as in training on CPUs; ascending."""
    return sorted(row["rank"] for row in breakdown.to_pylist() if row["source"] == source and not row["busy_us"])


#: Samples within each rank's marked iterations, or all of a rank that has none. Counters are those of the whole GPU.
_SAMPLES = """
create or replace temp view metric_samples as
with marked as (select rank, min(start_ns) as first_ns, max(end_ns) as last_ns from iterations group by rank),
bounds as (select rank, min(time_ns) as first_ns, max(time_ns) as last_ns from gpu_metrics group by rank)
select sample.rank, sample.device, cast(sample.metric as varchar) as metric, sample.value, sample.time_ns,
  coalesce(marked.first_ns, bounds.first_ns) as first_ns, coalesce(marked.last_ns, bounds.last_ns) as last_ns
from gpu_metrics as sample join bounds using (rank) left join marked using (rank)
where sample.time_ns between coalesce(marked.first_ns, bounds.first_ns) and coalesce(marked.last_ns, bounds.last_ns)
"""


def gpu_metrics(connection: duckdb.DuckDBPyConnection) -> pa.Table:
    """Each hardware counter that nsys sampled (`--gpu-metrics-devices`), within the marked iterations or the whole capture.

    Returns:
        rank, device, metric (nsys' name, which ends with the unit in brackets), samples, mean, p95, max; the highest mean first
        among the counters of a device.
    """
    connection.execute(_SAMPLES)
    return connection.sql(
        """select rank, device, metric, count(*)::bigint as samples, avg(value) as mean, quantile_cont(value, 0.95) as p95,
        max(value) as max from metric_samples group by rank, device, metric order by rank, device, mean desc, metric"""
    ).to_arrow_table()


def gpu_metrics_over_time(connection: duckdb.DuckDBPyConnection, *, intervals: int = 300) -> pa.Table:
    """The mean of each counter in equal intervals of that time.

    Args:
        connection: the run's tables.
        intervals: their number.

    Returns:
        rank, device, metric, time_us (middle of the interval, since the first marked iteration began), value.
    """
    connection.execute(_SAMPLES)
    return connection.sql(
        """with placed as (
          select *, (last_ns - first_ns + 1) / $intervals as width_ns from metric_samples
        ), numbered as (select *, floor((time_ns - first_ns) / width_ns) as place from placed)
        select rank, device, metric, (place + 0.5) * any_value(width_ns) / 1000 as time_us, avg(value) as value
        from numbered group by rank, device, metric, place order by rank, device, metric, place""",
        params={"intervals": intervals},
    ).to_arrow_table()


def _last_compute_ns(number: NDArray[np.int32], device_events: pa.Table, default: Nanoseconds) -> Nanoseconds:
    """When the last compute kernel of each iteration ends; the default for an iteration without one."""
    mine = rows_of(device_events["kind"], "compute") & device_events["iteration"].is_valid().to_numpy()
    events = device_events.select(["iteration", "end_ns"]).filter(pa.array(mine))
    order = np.argsort(number, kind="stable")
    place = order[np.minimum(np.searchsorted(number[order], events["iteration"].to_numpy()), len(number) - 1)]
    last = default.copy()
    np.maximum.at(last, place, events["end_ns"].to_numpy())
    return last


def _left_before_ns(first: int, device_events: pa.Table) -> int:
    """When the device is done with what no iteration launched, before the first kernel of the first iteration; or `NULL`."""
    computes, iteration = rows_of(device_events["kind"], "compute"), to_int64(device_events["iteration"])
    start, end = device_events["start_ns"].to_numpy(), device_events["end_ns"].to_numpy()
    own = start[computes & (iteration == first)]
    return int(end[computes & (iteration == NULL) & (start < own.min())].max(initial=NULL)) if len(own) else NULL


def _unrecorded_until_ns(device_events: pa.Table) -> int:
    """Until when the device ran what the capture does not show, because it was launched before the capture began; or `NULL`.

    The first work of all, and the first on the stream that computes first, start as soon as the device has them, unless
    something ran before.
    """
    if not device_events.num_rows:
        return NULL
    stream, device = to_int64(device_events["stream"]), to_int64(device_events["device"], 0)
    start, end = (device_events[name].to_numpy() for name in ("start_ns", "end_ns"))  # by start
    computes = int(np.argmax(rows_of(device_events["kind"], "compute")))
    until = NULL
    for row in (0, int(np.argmax((stream == stream[computes]) & (device == device[computes])))):
        launched_ns, since = device_events["launch_end_ns"][row].as_py(), start[row] - end[:row]
        queued = launched_ns is not None and start[row] - launched_ns > _QUEUED_NS
        if queued and not ((since >= 0) & (since <= PROMPT_NS)).any():
            until = int(start[row])
    return until
