"""One rank's kernels and copies: which there are, how long they take, and who launched them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.facts.device import WHOLE_CAPTURE, DeviceWork, Windows
from bridge_profiling.facts.host import Operators
from bridge_profiling.facts.intervals import Lanes, Nanoseconds, coded, judged, plain, rows_of, summed, totals, union
from bridge_profiling.facts.names import COPY, group_of
from bridge_profiling.facts.types import Connection, declared, queried, schema
from bridge_profiling.traces.tables import to_int64

#: Least time that launching a kernel takes the host; 4.5 to 6 µs on a host of H200s.
LAUNCH_NS = 5_000

#: Kernels in a row whose mean duration decides whether a host can keep ahead of them.
_RUN = 32


def launch_statistics(device_events: pa.Table, spans: Windows) -> pa.Table:
    """One row per window: its compute kernels, by their start, and the calls that launched them. Null where there are none.

    `launch_count`: calls that launched one kernel; `launch_call_ns`: their median duration; `graph_kernel_count`: kernels
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
                "mean_kernel_ns": round(took.mean()) if len(took) else None,
                "median_kernel_ns": round(np.median(took)) if len(took) else None,
                "launch_count": len(calls),
                "launch_call_ns": round(np.median(calls)) if len(calls) else None,
                "graph_kernel_count": int(together[together > 1].sum()),
            }
        )
    return pa.Table.from_pylist(rows, schema=_LAUNCH_STATISTICS).add_column(0, "iteration", spans.numbers)


_LAUNCH_STATISTICS = schema(
    "kernel_count", "mean_kernel_ns", "median_kernel_ns", "launch_count", "launch_call_ns", "graph_kernel_count"
)

_PATH = ("direction", "from_memory", "to_memory")


_COPIES = """
select rank, source, kind, direction, from_memory, to_memory,
    case when direction = 'HtoD' and from_memory in ('pinned', 'pageable') then from_memory
        when direction = 'DtoH' and to_memory in ('pinned', 'pageable') then to_memory end as host_memory,
    sum(count)::bigint as count, sum(bytes)::bigint as bytes, sum(total_ns) as total_ns,
    max(max_ns) as max_ns, sum(bytes)::double / nullif(sum(sized_ns)::double, 0) as bandwidth_gbs
from device_sums where kind in ('memcpy', 'memset') group by all
order by rank, source, total_ns desc, kind, direction, from_memory, to_memory
"""


def copies(connection: Connection, device_sums: pa.Table) -> pa.Table:
    """One row per rank, source, direction and pair of memories, and one of memsets, most time first.

    `kind`: `memcpy` or `memset`, which has no direction and no memories. `host_memory`: `pinned` or `pageable` for a copy from
    or to the host, else null. `bandwidth_gbs`: 10⁹ bytes/s during the copies whose size the capture records; null if it records
    none.
    """
    return queried(connection, _COPIES, device_sums=device_sums)


_OF_EVENTS = ("kind", "backend", "name", "configuration", *_PATH)

#: Columns of device events that `device_sums` reads.
SUMMED = (*_OF_EVENTS, "iteration", "start_ns", "end_ns", "launch_start_ns", "bytes")


def device_sums(device_events: pa.Table, *, marked: bool) -> pa.Table:
    """The device's events by iteration, kind, backend, name, launch configuration, direction and memories.

    Args:
        device_events: the table of that name.
        marked: whether the capture has iterations.

    Returns:
        Also `queued`: the events were in the device's queue when the capture began; count; total_ns, min_ns and max_ns of their
        durations; bytes (null if unknown); sized_ns: durations of those with known bytes.
    """
    start = device_events["start_ns"].to_numpy()
    unlaunched = device_events["launch_start_ns"].is_null().to_numpy()
    queued = np.zeros(len(start), bool)
    if marked and 2 * unlaunched.sum() < len(start):
        outside = device_events["iteration"].is_null().to_numpy()
        queued = outside & unlaunched & (start < start[~unlaunched].min())
    size, ns = device_events["bytes"], device_events["end_ns"].to_numpy() - start
    table = pa.table(
        {name: device_events[name] for name in ("iteration", *_OF_EVENTS)}
        | {"queued": queued, "bytes": size, "ns": ns, "sized_ns": ns * size.is_valid().to_numpy()}
    )
    sums = {"count": "count", "total_ns": "sum", "min_ns": "min", "max_ns": "max"}
    columns = {name: ("ns", how) for name, how in sums.items()} | {name: (name, "sum") for name in ("bytes", "sized_ns")}
    return totals(table, ("iteration", "queued", *_OF_EVENTS), **columns)


_KERNELS = """
    with launched as (
        select {of}, kind, backend, name, configuration, sum(count)::bigint as calls, sum(total_ns) as total_ns,
            min(min_ns) as min_ns, max(max_ns) as max_ns
        from device_sums where kind in ('compute', 'communication') and not queued group by all
    )
    select {of}, kind, backend, name, sum(calls)::bigint as count,
        sum(total_ns) as total_ns, round(sum(total_ns) / sum(calls)) as mean_ns, min(min_ns) as min_ns, max(max_ns) as max_ns,
        first(configuration order by calls desc, configuration) filter (where configuration is not null) as configuration,
        count(configuration) as configurations
    from launched
    group by all
    order by {of}, total_ns desc, name
"""


_CONFIGURATION = schema("grid", "block", "registers_per_thread", "shared_memory_bytes", registers_per_thread=pa.int64())


def kernels(connection: Connection, device_sums: pa.Table, *, by_rank: bool = True) -> pa.Table:
    """One row per source, kind, backend and name of kernel (and rank), with its group (`kernel_groups`), most time first.

    `grid`, `block` ("16x8x1"), `registers_per_thread` and `shared_memory_bytes` (of a block, static and dynamic) are those of
    most launches, null where the profiler did not record them; `configurations`: how many different ones there are.

    Kernels that were in the device's queue when the capture began are left out.
    """
    found = queried(connection, _KERNELS.format(of="rank, source" if by_rank else "source"), device_sums=device_sums)
    kinds, names = (found[column].cast(pa.string()).to_pylist() for column in ("kind", "name"))
    groups = [group_of(name or "", kind) for kind, name in zip(kinds, names, strict=True)]
    found = found.append_column("group", pa.array(groups, pa.string()))
    launches = [json.loads(text or "[null, null, null, null]") for text in found["configuration"].to_pylist()]
    for place, (name, kind) in enumerate(zip(_CONFIGURATION.names, _CONFIGURATION.types, strict=True)):
        values = [launch[place] for launch in launches]
        sizes = ["x".join(map(str, each)) or None if isinstance(each, list) else each for each in values]
        found = found.append_column(name, pa.array(sizes, kind))
    return found.drop_columns("configuration")


_KERNEL_GROUPS = pa.schema([*schema("rank", "source"), *declared("KernelGroup").schema()])

_OF_GROUP = ("rank", "source", "group")

#: Names of a group that are listed, those with the most time.
_NAMES_OF_GROUP = 5


def kernel_groups(kernels: pa.Table, copies: pa.Table) -> pa.Table:
    """One row per rank, source and group over the whole capture, most time first.

    `$BRIDGE_PROFILING_KERNEL_GROUPS` names a TOML file with more patterns of names.

    Returns:
        `count` and `total_ns` of its kernels, or copies; `share` of the time of the rank's kernels and copies; `name_count`:
        different names in it, and `names`: those with the most time. Communication has a group for each operation.
    """
    rows = kernels.select([*_OF_GROUP, "name", "count", "total_ns"]).to_pylist()
    rows += [
        {**row, "name": f"{row['direction']} {row['from_memory']} to {row['to_memory']}", "group": COPY}
        for row in copies.to_pylist()
        if row["kind"] == "memcpy"
    ]

    def added(name: str, *keys: str) -> dict[tuple[Any, ...], float]:
        return summed((tuple(row[key] for key in keys), row[name]) for row in rows)

    count, total_ns, of_name = added("count", *_OF_GROUP), added("total_ns", *_OF_GROUP), added("total_ns", *_OF_GROUP, "name")
    whole = summed((key[:2], time_ns) for key, time_ns in total_ns.items())
    names: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for *key, name in sorted(of_name, key=lambda key: -of_name[key]):
        names[tuple(key)].append(name)
    found = [
        dict(zip(_OF_GROUP, key, strict=True))
        | {"count": count[key], "total_ns": time_ns, "share": time_ns / whole[key[:2]] if whole[key[:2]] else 0.0}
        | {"name_count": len(names[key]), "names": names[key][:_NAMES_OF_GROUP]}
        for key, time_ns in sorted(total_ns.items(), key=lambda item: (*item[0][:2], -item[1]))
    ]
    return pa.Table.from_pylist(found, schema=_KERNEL_GROUPS)


def in_small_runs(device_events: pa.Table) -> NDArray[np.bool_]:
    """Which compute kernels are in a run of kernels that take the device less time than launching them takes the host."""
    found = np.zeros(device_events.num_rows, bool)
    rows = np.flatnonzero(rows_of(device_events["kind"], "compute"))
    start, end = (device_events[name].to_numpy()[rows] for name in ("start_ns", "end_ns"))
    if len(rows) < _RUN:
        return found
    order = np.argsort(start, kind="stable")
    sums = np.concatenate(([0], np.cumsum((end - start)[order])))
    small_run = (sums[_RUN:] - sums[:-_RUN]) < _RUN * LAUNCH_NS
    # A kernel is in such a run if any of the runs that contain it is one.
    begins = np.concatenate(([0], np.cumsum(small_run)))
    place = np.arange(len(rows))
    first, last = np.maximum(place - _RUN + 1, 0), np.minimum(place, len(small_run) - 1)
    found[rows[order]] = (begins[last + 1] - begins[first]) > 0
    return found


def kernel_times(device_events: pa.Table) -> pa.Table:
    """One row per iteration that launched a kernel; null for kernels outside of all.

    Columns: iteration; start_ns and end_ns: the first start and the last end of its kernels; the same of its compute kernels,
    null without any; compute_ns: the time in which one of those ran.
    """
    iteration, computes = to_int64(device_events["iteration"], WHOLE_CAPTURE), rows_of(device_events["kind"], "compute")
    kernels = np.flatnonzero(computes | rows_of(device_events["kind"], "communication"))
    kernels = kernels[np.argsort(iteration[kernels], kind="stable")]
    start, end = (device_events[name].to_numpy()[kernels] for name in ("start_ns", "end_ns"))
    iteration, computes = iteration[kernels], computes[kernels]
    times = {"start_ns": start, "end_ns": end}
    times |= {f"compute_{name}": pa.array(time, mask=~computes) for name, time in times.items()}
    bounds = {name: (name, "min" if "start" in name else "max") for name in times}
    found = totals(pa.table({"iteration": iteration, **times}), ["iteration"], **bounds).sort_by("iteration")
    lanes = Lanes(found["start_ns"].to_numpy(), found["end_ns"].to_numpy())
    lane = np.cumsum(np.diff(iteration, prepend=iteration[:1]) != 0)
    compute = lanes.union(lane[computes], start[computes], end[computes])
    found = found.append_column("compute_ns", pa.array(compute.within_ns(lanes.start_ns, lanes.end_ns)))
    number = found["iteration"].to_numpy()
    return found.set_column(0, "iteration", pa.array(number, pa.int32(), mask=number == WHOLE_CAPTURE))


def exposure(device_events: pa.Table, collectives: pa.Table, work: DeviceWork) -> pa.Table:
    """One row per group, operation and message size: how much of the communication nothing else hides.

    Columns: group_name and group_ranks (empty if unknown), operation, message_bytes (null if unknown), exposed_ns (nothing else
    ran), overlapped_ns (compute ran too).
    """
    unknown = {"group_name": "", "group_ranks": "", "operation": "unknown"}
    rows = plain(collectives.select([*unknown, "message_bytes", "collective"]))
    rows = pa.table(
        {name: rows[name].fill_null(unknown[name]) if name in unknown else rows[name] for name in rows.column_names}
    )
    found = totals(rows, rows.column_names[:4], members=("collective", "list"))
    start, end = (device_events[name].to_numpy() for name in ("start_ns", "end_ns"))
    of_event, members = to_int64(device_events["collective"], -1), found["members"].to_pylist()
    # The last one is that of events which do not communicate.
    of_collective = np.full(max(of_event.max(initial=-1), *(max(each) for each in members), 0) + 2, -1)
    for place, mine in enumerate(members):
        of_collective[mine] = place
    kind, other = of_collective[of_event], work.compute | work.memcpy | work.memset
    times = [union(*(each[kind == place] for each in (start, end))) for place in range(len(members))]
    exposed_ns = [time.total_ns - other.within_ns(time.start_ns, time.end_ns).sum() for time in times]
    overlapped_ns = [work.compute.within_ns(time.start_ns, time.end_ns).sum() for time in times]
    found = found.drop_columns("members").append_column("exposed_ns", pa.array(exposed_ns, pa.int64()))
    return found.append_column("overlapped_ns", pa.array(overlapped_ns, pa.int64()))


#: Operators on many tensors at once.
_ON_LISTS = ("aten::_foreach_", "aten::_fused_")


@dataclass(frozen=True)
class Kernels:
    """A rank's compute kernels by start, with indices into the names of kernels and of the operators that launched them."""

    start_ns: Nanoseconds
    end_ns: Nanoseconds
    launch_ns: Nanoseconds
    thread: NDArray[np.int64]
    iteration: pa.ChunkedArray
    name: NDArray[np.int64]
    names: list[str | None]
    operator: NDArray[np.int64]  # -1 where unknown
    operators: list[str | None]

    def named(self, judge: Callable[[str], object]) -> NDArray[np.bool_]:
        """The kernels whose name a function accepts. It is called once for each name."""
        used = np.bincount(self.name, minlength=len(self.names)) > 0
        return np.array([bool(of and name and judge(name)) for of, name in zip(used, self.names, strict=True)])[self.name]

    def launched_by(self, *wanted: str) -> NDArray[np.bool_]:
        """The kernels that one of some operators launched."""
        return judged(self.operator, self.operators, frozenset(wanted).__contains__)

    @property
    def launched_by_one_tensor(self) -> NDArray[np.bool_]:
        """The kernels of torch's operators on one tensor: neither on lists of them, nor fused, nor a program's own."""
        return judged(self.operator, self.operators, lambda name: name.startswith("aten::") and not name.startswith(_ON_LISTS))


def compute_kernels(device_events: pa.Table, kernel_names: pa.Table, operators: Operators) -> Kernels:
    """The compute kernels of device events, whose names are in a table of their own."""
    rows = np.flatnonzero(rows_of(device_events["kind"], "compute"))
    rows = rows[np.argsort(device_events["start_ns"].to_numpy()[rows], kind="stable")]
    start, end, launch, thread, operator = (
        to_int64(device_events[name])[rows] for name in ("start_ns", "end_ns", "launch_start_ns", "launch_thread", "operator")
    )
    name, names = coded(kernel_names["name"])
    iteration, operator = device_events["iteration"].take(rows), operators.codes_of(operator)
    return Kernels(start, end, launch, thread, iteration, name[rows], names, operator, operators.names)


def between(first: NDArray[np.int64], last: NDArray[np.int64], size: int) -> NDArray[np.bool_]:
    """Which places are in one of some spans, ends included."""
    depth = np.zeros(size + 1, np.int64)
    np.add.at(depth, first, 1)
    np.subtract.at(depth, last + 1, 1)
    return np.cumsum(depth[:-1]) > 0


#: Columns that tell kinds of events apart.
KEYS = {
    "kernels": ("kind", "name"),
    "copies": ("kind", "direction", "from_memory", "to_memory"),
    "communication": ("operation", "group", "group_size"),
}

_DEVICE_EVENTS = (
    "select *, total_ns as ns, null as wait_ns, null as kernel_ns from device_sums where kind in {kinds} and source = $source"
)

#: Events of each kind. Only matched operations have transfer and waiting; for others, the kernel's time counts as transfer.
_COUNTED = {
    "kernels": _DEVICE_EVENTS.format(kinds=("compute", "communication")),
    "copies": _DEVICE_EVENTS.format(kinds=("memcpy", "memset")),
    "communication": """
        select operations.operation, coalesce("group", '') as "group", coalesce(group_size, 0) as group_size, rank,
            operations.iteration, operations.message_bytes as bytes, wait_ns, 1 as count,
            operations.end_ns - operations.start_ns as kernel_ns, coalesce(transfer_ns, kernel_ns) as ns
        from operations left join waiting using (rank, collective)
    """,
}

# Nanoseconds are added up as integers: DuckDB adds doubles in an order that changes from run to run.
_CELLS = """
with cells as (
    select {keys}, rank, {step} as step, sum(count) as count, sum(ns) as ns, sum(bytes) as bytes, sum(wait_ns) as wait_ns,
        sum(kernel_ns) as kernel_ns
    from ({events}) where {chosen} group by all
)
select {keys}, step as iteration, sum(count)::double as count, sum(ns)::bigint as ns, min(ns / count) as fastest,
    max(ns / count) as slowest, coalesce(sum(bytes), 0)::double as bytes, coalesce(sum(wait_ns), 0) as wait_ns,
    sum(kernel_ns) as kernel_ns
from cells group by all order by step
"""


def event_cells(
    connection: Connection,
    device_sums: pa.Table,
    *,
    of: str,
    source: str,
    iterations: tuple[int, ...] = (),
    ranks: tuple[int, ...] = (),
) -> pa.Table:
    """Events per kind and iteration. Needs `measure_waiting`.

    Args:
        connection: the run's tables.
        device_sums: the fact of that name.
        of: `kernels`, `copies` or `communication`.
        source: the profiler of the captures.
        iterations: to count; without any, the whole capture counts as one.
        ranks: to count.

    Returns:
        The columns of `KEYS`, iteration, count, ns (sum over ranks), fastest and slowest (mean per call of a rank), bytes; of
        communication also wait_ns and kernel_ns, which are null or 0 otherwise.
    """
    numbers, members = (", ".join(str(int(number)) for number in numbers) for numbers in (iterations, ranks))
    query = _CELLS.format(
        keys=", ".join(f'"{name}"' for name in KEYS[of]),
        events=_COUNTED[of],
        step="iteration" if iterations else "0",
        chosen=f"iteration in ({numbers}) and rank in ({members})" if iterations else "true",
    )
    return queried(connection, query, {} if of == "communication" else {"source": source}, device_sums=device_sums)
