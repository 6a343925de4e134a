"""Hardware counters that nsys sampled, while each kernel ran: activity of SMs and tensor cores, traffic of its memory."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bridge_profiling.facts.intervals import coded, rows_of
from bridge_profiling.facts.kernel_groups import group_of
from bridge_profiling.peaks import memory_gbs
from bridge_profiling.traces.tables import NULL, fields, to_int64
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

_SCHEMA = pa.schema(
    [
        *fields(pa.string(), "name", "group"),
        *fields(pa.int64(), "count"),
        *fields(pa.float64(), "device_us", "samples_per_call", *MEASURES),
    ]
)


@dataclass(frozen=True)
class Counted:
    """Counters while each device event ran."""

    # A row per event: nanoseconds times the share of each of MEASURES; the time of which each of them is known. No columns, and
    # so no work, without samples.
    amounts: NDArray[np.int64]
    interval_ns: float  # usual time between samples; 0 without any


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
                course = _Course.of(time[rows], value[rows] / 100)
                amounts[events, place], amounts[events, len(MEASURES) + place] = course.within(start[events], end[events])
                intervals.append(course.interval_ns)
    return Counted(amounts, max(intervals))


@dataclass(frozen=True)
class _Course:
    """A counter over time. Each sample is the mean since the one before."""

    time_ns: NDArray[np.float64]  # since the first sample
    first_ns: int
    spent_ns: NDArray[np.float64]  # until each sample: time multiplied by the share
    known_ns: NDArray[np.float64]  # until each sample: time that was sampled
    interval_ns: float

    @classmethod
    def of(cls, time_ns: NDArray[np.int64], share: NDArray[np.float64]) -> _Course:
        passed = np.diff(time_ns, prepend=time_ns[0]).astype(np.float64)
        interval = float(np.median(passed[1:]))
        passed_known = np.where(passed <= _GAP * interval, passed, 0.0)
        first = int(time_ns[0])
        return cls(
            (time_ns - first).astype(np.float64), first, np.cumsum(passed_known * share), np.cumsum(passed_known), interval
        )

    def within(self, start_ns: NDArray[np.int64], end_ns: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of each event: its time multiplied by the share, and its time that was sampled."""
        start, end = (times - self.first_ns for times in (start_ns, end_ns))
        spent, known = (
            np.interp(end, self.time_ns, course) - np.interp(start, self.time_ns, course)
            for course in (self.spent_ns, self.known_ns)
        )
        return np.rint(spent).astype(np.int64), np.rint(known).astype(np.int64)


def by_kernel(counted: Counted, device_events: pa.Table, kernel_names: pa.Table) -> pa.Table:
    """One row per name of a kernel with samples, most device time first.

    Returns:
        `group` of the kernel, `count` and `device_us` over the whole capture, `samples_per_call`: a kernel's mean duration in
        times between samples. The columns of MEASURES: means while the kernel ran, from 0 to 1; null where a call lasts less
        than the time between two samples, since these also measure what ran before and after it.
    """
    kernels = rows_of(device_events["kind"], "compute", "communication") & (counted.amounts[:, len(MEASURES) :].any(axis=1))
    events, amounts = device_events.filter(pa.array(kernels)), counted.amounts[kernels]
    code, names = coded(kernel_names["name"].filter(pa.array(kernels)))
    duration = to_int64(events["end_ns"]) - to_int64(events["start_ns"])
    used, first, place = np.unique(code, return_index=True, return_inverse=True)
    sums = np.column_stack([np.bincount(place, column, len(used)) for column in (duration, *amounts.T)]).astype(np.int64)
    count = np.bincount(place, minlength=len(used))
    kinds = events["kind"].cast(pa.string()).take(pa.array(first)).to_pylist()
    known = [names[number] or "" for number in used.tolist()]
    per_call = sums[:, 0] / np.maximum(count, 1) / max(counted.interval_ns, 1.0)
    amounts = np.where((per_call >= 1)[:, None], sums[:, 1:], 0)
    columns = {
        "name": known,
        "group": [group_of(name, kind) for name, kind in zip(known, kinds, strict=True)],
        "count": count,
        "device_us": sums[:, 0] / 1e3,
        "samples_per_call": per_call,
        **means(amounts),
    }
    return pa.table(columns, schema=_SCHEMA).sort_by([("device_us", "descending"), ("name", "ascending")])


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
