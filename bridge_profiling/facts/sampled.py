"""What only nsys records of a rank: hardware counters, system calls of the threads that launch work, and CUDA's allocations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bridge_profiling.common.peaks import memory_gbs
from bridge_profiling.facts.intervals import Intervals, coded, outermost, ranged, rows_of, run_starts, totals, union
from bridge_profiling.facts.names import group_of
from bridge_profiling.facts.parts import counted_iterations
from bridge_profiling.facts.types import declared, schema
from bridge_profiling.traces.tables import NULL, to_int64
from bridge_profiling.traces.types import RankInfo

#: Each share of a peak, and the counters in percent that add up to it; nsys' names differ between devices.
MEASURES: dict[str, re.Pattern[str]] = {
    "sm_active": re.compile(r"SMs? Active \[.*%"),
    "tensor_active": re.compile(r"Tensor (?:Pipe )?Active \[.*%"),
    "dram_read": re.compile(r"DRAM Read .*\[.*%"),
    "dram_write": re.compile(r"DRAM Write .*\[.*%"),
}

#: A longer time between samples, in multiples of the usual one, was not sampled.
_GAP = 4

_METRICS = schema("device", "metric", "samples", "mean", "p95", "max")

_OVER_TIME = schema("device", "metric", "time_ns", "value")

_BY_KERNEL = declared("KernelCounters").schema("name", "group", "count", "device_ns", "samples_per_call", *MEASURES)


@dataclass(frozen=True)
class Counted:
    """Counters while each device event ran."""

    # A row per event: nanoseconds times the share of each of MEASURES; the time of which each of them is known. No columns, and
    # so no work, without samples.
    amounts: NDArray[np.int64]
    interval_ns: float  # usual time between samples; 0 without any

    def means_of_calls(self, found: pa.Table, amounts: Sequence[str]) -> dict[str, pa.Array]:
        """Columns of MEASURES from columns of added amounts, of the time in `device_ns` and of the `count` of calls.

        A shorter call's samples also measure what ran before and after it.
        """
        long = found["device_ns"].to_numpy() >= self.interval_ns * found["count"].to_numpy()
        spent = np.array([found[name].to_numpy() * long for name in amounts], np.int64)
        return means(spent.reshape(len(amounts), len(found)).T)


def means(sums: NDArray[np.int64]) -> dict[str, pa.Array]:
    """Columns of MEASURES from sums of `Counted.amounts`, a row each; null where nothing is known."""
    if not sums.shape[1]:
        return {name: pa.nulls(len(sums), pa.float64()) for name in MEASURES}
    spent, known = sums[:, : len(MEASURES)], sums[:, len(MEASURES) :]
    shares = spent / np.maximum(known, 1)
    return {name: pa.array(shares[:, place], mask=known[:, place] == 0) for place, name in enumerate(MEASURES)}


def counted(gpu_metrics: pa.Table, device_events: pa.Table) -> Counted:
    """The counters of the device that each event ran on, or of the only one that was sampled where all ran on one device."""
    if not gpu_metrics.num_rows:
        return Counted(np.zeros((device_events.num_rows, 0), np.int64), 0.0)
    amounts = np.zeros((device_events.num_rows, 2 * len(MEASURES)), np.int64)
    device, time = (to_int64(gpu_metrics[name]) for name in ("device", "time_ns"))
    code, names = coded(gpu_metrics["metric"])
    value, sampled, intervals = gpu_metrics["value"].to_numpy(), np.unique(device), [0.0]
    ran_on = to_int64(device_events["device"])
    start, end = (to_int64(device_events[name]) for name in ("start_ns", "end_ns"))
    # A report that does not say which GPUs a process used numbers them as the machine does, and its events as the process does.
    alone = len(sampled) == 1 and len(np.unique(ran_on)) == 1
    for place, pattern in enumerate(MEASURES.values()):
        metric = next((number for number, name in enumerate(names) if pattern.match(name or "")), NULL)
        for one in sampled.tolist():
            rows = np.flatnonzero((code == metric) & (device == one))
            events = np.flatnonzero((ran_on == one) | alone)
            if len(rows) > 1:
                (spent, known), interval = _during(time[rows], value[rows] / 100, start[events], end[events])
                amounts[events, place], amounts[events, len(MEASURES) + place] = spent, known
                intervals.append(interval)
    return Counted(amounts, max(intervals))


def _during(
    time_ns: NDArray[np.int64], share: NDArray[np.float64], start_ns: NDArray[np.int64], end_ns: NDArray[np.int64]
) -> tuple[list[NDArray[np.int64]], float]:
    """Of each event, its time multiplied by the share, and its time that was sampled; and the usual time between samples.

    Each sample is the mean since the one before.
    """
    passed = np.diff(time_ns, prepend=time_ns[0]).astype(np.float64)
    interval = float(np.median(passed[1:]))
    sampled = np.where(passed <= _GAP * interval, passed, 0.0)
    at, start, end = ((times - time_ns[0]).astype(np.float64) for times in (time_ns, start_ns, end_ns))
    courses = (np.cumsum(sampled * share), np.cumsum(sampled))
    return [np.rint(np.interp(end, at, each) - np.interp(start, at, each)).astype(np.int64) for each in courses], interval


def by_kernel(counted: Counted, device_events: pa.Table, kernel_names: pa.Table) -> pa.Table:
    """One row per name of a kernel with samples, most device time first.

    Returns:
        `group` of the kernel, `count` and `device_ns` over the whole capture, `samples_per_call`: a kernel's mean duration in
        times between samples. The columns of MEASURES: means while the kernel ran, from 0 to 1; null where a call lasts less
        than the time between two samples, since these also measure what ran before and after it.
    """
    kernels = rows_of(device_events["kind"], "compute", "communication") & (counted.amounts[:, len(MEASURES) :].any(axis=1))
    events, amounts = device_events.filter(pa.array(kernels)), counted.amounts[kernels]
    sums = {f"amount_{place}": column for place, column in enumerate(amounts.T)}
    sums["device_ns"] = to_int64(events["end_ns"]) - to_int64(events["start_ns"])
    table = pa.table({"name": kernel_names["name"].filter(pa.array(kernels)), "kind": events["kind"].cast(pa.string()), **sums})
    added = {name: (name, "sum") for name in sums}
    found = totals(table, ["name"], count=("device_ns", "count"), kind=("kind", "first"), **added)
    names = [name or "" for name in found["name"].to_pylist()]
    columns = {
        "name": names,
        "group": [group_of(name, kind) for name, kind in zip(names, found["kind"].to_pylist(), strict=True)],
        "count": found["count"],
        "device_ns": found["device_ns"],
        "samples_per_call": found["device_ns"].to_numpy() / found["count"].to_numpy() / max(counted.interval_ns, 1.0),
        **counted.means_of_calls(found, [*sums][:-1]),
    }
    return pa.table(columns, schema=_BY_KERNEL).sort_by([("device_ns", "descending"), ("name", "ascending")])


def kernel_counters(by_kernel: pa.Table, infos: list[RankInfo]) -> pa.Table:
    """The rows of `by_kernel`, with `memory_tb_s`, the device's peak, and `dram_tb_s`, read and written; null if unknown."""
    peak = memory_tb_s(by_kernel["rank"], infos)
    return by_kernel.append_column("memory_tb_s", peak).append_column("dram_tb_s", traffic(by_kernel, peak))


def memory_tb_s(rank: pa.ChunkedArray, infos: list[RankInfo]) -> pa.Array:
    """Bandwidth of the memory of each rank's device in 10¹² bytes per second; null if unknown."""
    known = {info.rank: memory_gbs(next(iter(info.devices.values()), "")) for info in infos}
    return pa.array([each and each / 1e3 for each in map(known.get, rank.to_pylist())], pa.float64())


def traffic(rows: pa.Table, peak: pa.Array) -> pa.ChunkedArray:
    """Bytes read from the device's memory and written to it, in 10¹² per second, from the columns of MEASURES."""
    return pc.multiply(pc.add(rows["dram_read"], rows["dram_write"]), peak)


def system_calls(calls: pa.Table, device_events: pa.Table, iterations: pa.Table) -> pa.Table:
    """System calls (`--trace=osrt`) by name, of the threads that launch work on a device, else of all, most time first.

    Returns:
        `calls` and `time_ns`: means of an iteration, `share` of its duration; without marked iterations, sums over the whole
        capture, `iterations` 0 and `share` null. Of calls inside each other the outermost counts. `longest_…`: the longest
        call. Empty unless recorded.
    """
    if not calls.num_rows:
        return declared("SystemCall").schema().empty_table()
    launching = np.setdiff1d(to_int64(device_events["launch_thread"]), [NULL])
    thread, start, end = ranged(calls)
    mine = np.isin(thread, launching) if len(launching) else np.ones(len(thread), bool)
    code, names = coded(calls["name"])
    marked, count = _counted(iterations)
    rows = np.flatnonzero(mine)
    chosen = rows[outermost(start[rows], end[rows], thread[rows])]
    if count:
        within = marked.within_ns(start[chosen], end[chosen])
        chosen, within = chosen[within > 0], within[within > 0]
    else:
        within = (end - start)[chosen]
    used, place, calls_of = np.unique(code[chosen], return_inverse=True, return_counts=True)
    order = np.lexsort((-within, place))
    longest = chosen[order[run_starts(place[order])]]
    spent_ns = np.bincount(place, within, len(used))
    columns = {
        "name": [names[each] for each in used.tolist()],
        "iterations": np.full(len(used), count),
        "calls": calls_of / max(count, 1),
        "time_ns": np.rint(spent_ns / max(count, 1)),
        "share": spent_ns / marked.total_ns if count else pa.nulls(len(used), pa.float64()),
        "longest_ns": (end - start)[longest],
        "longest_start_ns": start[longest],
    }
    return pa.table(columns, schema=declared("SystemCall").schema()).sort_by([("time_ns", "descending"), ("name", "ascending")])


def cuda_memory(events: pa.Table, iterations: pa.Table) -> pa.Table:
    """Allocations by CUDA (`--cuda-memory-usage=true`) by device and kind of memory, the highest peak first.

    Returns:
        `memory`: device, pinned, managed, pageable, array or unknown; device static or managed static for variables in the
        modules of kernels. `allocations`, `frees`: number in the report; nsys also reports those of before a window, with the
        window's start as their time. `in_iterations`: allocations and frees in the `iterations` that count. `peak_bytes` and
        `end_bytes`: allocated less freed, as far as reported. Empty unless recorded.
    """
    if not events.num_rows:
        return declared("CudaMemory").schema().empty_table()
    marked, count = _counted(iterations)
    time, device, amount = (to_int64(events[name]) for name in ("time_ns", "device", "bytes"))
    code, names = coded(events["memory"])
    inside = marked.before_ns(time + 1) > marked.before_ns(time)
    found = []
    for one, kind in sorted(set(zip(device.tolist(), code.tolist(), strict=True))):
        here = (device == one) & (code == kind)
        level = np.cumsum(amount[here])
        found.append(
            {
                "device": one if one != NULL else None,
                "memory": names[kind],
                "allocations": int((amount[here] > 0).sum()),
                "frees": int((amount[here] < 0).sum()),
                "in_iterations": int(inside[here].sum()),
                "iterations": count,
                "allocated_bytes": int(np.maximum(amount[here], 0).sum()),
                "peak_bytes": max(int(level.max()), 0),
                "end_bytes": int(level[-1]),
            }
        )
    found.sort(key=lambda row: -row["peak_bytes"])
    return pa.Table.from_pylist(found, schema=declared("CudaMemory").schema())


def _counted(iterations: pa.Table) -> tuple[Intervals, int]:
    """The iterations that count, and their number: without those at the profiler's start and stop if enough others exist."""
    counted = counted_iterations(iterations)
    start, end = (to_int64(iterations[name])[counted] for name in ("start_ns", "end_ns"))
    return union(start, end), int(counted.sum())


def gpu_metrics(samples: pa.Table, iterations: pa.Table) -> pa.Table:
    """Each hardware counter that nsys sampled (`--gpu-metrics-devices`), within the marked iterations or the whole capture.

    Returns:
        device, metric (nsys' name, which ends with the unit in brackets), samples, mean, p95, max; the highest mean first among
        the counters of a device.
    """
    found = [
        (device, metric, len(value), float(value.mean()), float(np.quantile(value, 0.95)), float(value.max()))
        for device, metric, _, value in _series(samples, *_sampled(samples, iterations))
    ]
    found.sort(key=lambda row: (row[0], -row[3], row[1]))
    return pa.Table.from_pylist([dict(zip(_METRICS.names, row, strict=True)) for row in found], schema=_METRICS)


def gpu_metrics_over_time(samples: pa.Table, iterations: pa.Table, intervals: int) -> pa.Table:
    """The mean of each counter in equal intervals of that time.

    Args:
        samples: the table `gpu_metrics`.
        iterations: the table of that name.
        intervals: their number.

    Returns:
        device, metric, time_ns (middle of the interval, since the first marked iteration began), value.
    """
    first_ns, last_ns = _sampled(samples, iterations)
    width_ns = (last_ns - first_ns + 1) / intervals
    found = [_OVER_TIME.empty_table()]
    for device, metric, time_ns, value in sorted(_series(samples, first_ns, last_ns), key=lambda each: each[:2]):
        interval, place, count = np.unique((time_ns - first_ns) // width_ns, return_inverse=True, return_counts=True)
        columns = {"device": [device] * len(count), "metric": [metric] * len(count)}
        amounts = {"time_ns": np.rint((interval + 0.5) * width_ns), "value": np.bincount(place, value) / count}
        found.append(pa.table(columns | amounts, schema=_OVER_TIME))
    return pa.concat_tables(found)


def _sampled(samples: pa.Table, iterations: pa.Table) -> tuple[int, int]:
    """Begin and end of the marked iterations, or of the samples."""
    marked = iterations.num_rows > 0
    first, last = (iterations["start_ns"], iterations["end_ns"]) if marked else (samples["time_ns"], samples["time_ns"])
    return pc.min(first).as_py() or 0, pc.max(last).as_py() or 0


def _series(
    samples: pa.Table, first_ns: int, last_ns: int
) -> Iterator[tuple[int, str, NDArray[np.int64], NDArray[np.float64]]]:
    """Device, name, times and values of each counter of that time. Counters are those of the whole GPU."""
    time, device = (to_int64(samples[name]) for name in ("time_ns", "device"))
    code, names = coded(samples["metric"])
    value, inside = samples["value"].to_numpy(), (time >= first_ns) & (time <= last_ns)
    for one, number in sorted(set(zip(device[inside].tolist(), code[inside].tolist(), strict=True))):
        rows = inside & (device == one) & (code == number)
        yield one, names[number] or "", time[rows], value[rows]
