"""Every table of a run's answers, each defined once: from rows of an answer to a `TableView`."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import pyarrow as pa

from bridge_profiling.facts.operators import MEMORY
from bridge_profiling.facts.parts import BY_ACTIVITY
from bridge_profiling.layout import number_ranges
from bridge_profiling.manifest import RankCapture
from bridge_profiling.report import words
from bridge_profiling.report.figures import MOST_GROUPS, PARTS, by_group, visible_parts
from bridge_profiling.report.views import Cell, Row, TableView, Target, ms, of, table
from bridge_profiling.traces.types import RankInfo

Rows = Sequence[Row]

#: Names longer than this lose their middle, as an example of a group.
_GROUP_NAME = 120

NOWHERE: Mapping[str, Target] = {}

_MICROSECONDS = "{:,.1f}".format


def most(rows: Rows, count: int, order: str = "with less time") -> tuple[Rows, str]:
    """The first rows, and a note on the others."""
    left = len(rows) - count
    return rows[:count], f"{left:,} more {order}: bridge-profiling analyze --json lists them." if left > 0 else ""


def device_time(rows: Rows) -> TableView:
    """Rows of `Run.breakdown`."""
    parts = ("span", "busy", "idle", "compute", "communication", "exposed_communication", "memcpy", "memset")
    columns = {
        "rank": of("rank", str),
        **{part.replace("_communication", ""): ms(f"{part}_us") for part in parts},
        "kernels": of("kernel_count"),
        "source": lambda row: row["source"],
    }
    return table("device", "Device time over the whole capture, ms", rows, columns, of_ranks=True)


def typical_iterations(rows: Rows, without_device: Collection[tuple[int, str]]) -> TableView:
    """Rows of `Run.typical_iteration`; ranks without a device have a duration only."""
    parts = ("compute", "exposed_communication", "idle", "launch_starved", "blocked", "dependency_stalled")
    columns: dict[str, Any] = {"rank": of("rank", str), "duration": ms("duration_us")}
    headings = {"launch_starved": "launch-starved", "dependency_stalled": "dependency-stalled"}
    for part in parts:
        columns[headings.get(part, part.replace("_", " "))] = lambda row, part=part: (
            words.UNKNOWN if (row["rank"], row["source"]) in without_device else words.ms(row[f"{part}_us"])
        )
    columns["iterations"] = lambda row: f"median of {row['iterations']}"
    return table("typical", "A typical iteration, ms", rows, columns, of_ranks=True)


def attribution(bars: Rows, view: str = "cause") -> TableView:
    """Bars of the attribution figure in numbers; each has a `label`."""
    columns = {"ms": lambda row: row["label"], "iteration": ms("duration_us")}
    columns |= {PARTS[part][0]: ms(part) for part in visible_parts(bars, view)}
    return table(f"attribution-by-{view}", f"The median iteration by {view}, ms", bars, columns, folded=True)


def spread(rows: Rows) -> TableView:
    """How the ranks of a large job differ, from rows of `Run.attribution`."""

    def at(values: Sequence[float], share: float) -> float:
        return values[min(int(share * len(values)), len(values) - 1)]

    lines = []
    for part in ("duration_us", *visible_parts(rows), *BY_ACTIVITY[1:]):
        values = sorted(row[part] for row in rows)
        amounts = (values[0], at(values, 0.05), median(values), at(values, 0.95), values[-1])
        name = "iteration" if part == "duration_us" else PARTS[part][0]
        lines.append([Cell(name), *(Cell(words.ms(amount), amount) for amount in amounts)])
    headings = ["", "minimum", "5% of ranks below", "median", "5% of ranks above", "maximum"]
    return TableView("spread", "How the ranks differ, ms", headings, lines)


def iterations_by_rank(rows: Rows) -> TableView:
    """Rows of `Run.ranks`."""
    columns = {
        "iteration": lambda row: words.UNKNOWN if row["iteration"] is None else str(row["iteration"]),
        "rank": of("rank", str),
        "duration": ms("duration_us"),
        "own": ms("own_us"),
        "waits for others": ms("waiting_us"),
        "others wait for it": ms("waited_for_us"),
        "place": lambda row: row["place"] or "",
    }
    return table("ranks", "Ranks compared with each other, ms", rows, columns, of_ranks=True)


def stragglers(rows: Rows, note: str = "") -> TableView:
    """Rows of `Run.stragglers`, the slowest first."""
    often = {"stable": "always", "sometimes": "sometimes", "no": "no"}

    def slow(row: Row) -> str:
        confidence = f" ({row['confidence']} confidence)" if row["confidence"] else ""
        return f"{often.get(row['verdict'], row['verdict'])}{confidence}"

    columns = {
        "rank": of("rank", str),
        "own time beyond the mean": ms("excess_own_us"),
        "compute beyond the mean": ms("excess_compute_us"),
        "others waited for it": ms("waited_for_us"),
        "slow iterations": lambda row: f"{row['times_slow']} of {row['iterations']}",
        "slow": slow,
    }
    title = "Slow ranks, the slowest first, ms; a rank that only waits is not slow"
    return table("stragglers", title, rows, columns, of_ranks=True, note=note)


def pipeline(rows: Rows) -> TableView:
    """Rows of `Run.pipeline`."""
    columns = {
        "stage": lambda row: f"{row['stage']} of {row['stages']}",
        **{name: ms(f"{name.replace(' ', '_')}_us") for name in ("pipeline", "compute", "bubble", "other idle")},
        "bubble share": of("bubble_fraction", words.percent),
        "at best": of("ideal_bubble_fraction", words.percent),
        "ranks": lambda row: number_ranges(row["ranks"]),
    }
    return table("pipeline", "Pipeline stages, ms per iteration", rows, columns)


def pipeline_waits(rows: Rows) -> TableView:
    """Rows of `Run.pipeline_waits`."""
    columns = {
        "stage": of("stage", str),
        "waits for stage": of("waits_for_stage", str),
        "waiting": ms("wait_us"),
        "operations": lambda row: Cell(f"{row['count']:,.1f}", row["count"]),
        "ranks": lambda row: number_ranges(row["ranks"]),
    }
    title = "Sends and receives that wait for another stage, ms per iteration of a rank"
    return table("pipeline-waits", title, rows, columns)


def _launch(row: Row) -> Cell:
    """Grid and block without dimensions of 1 at the end; "+" where launches differ."""
    if row["grid"] is None:
        return Cell(words.UNKNOWN)
    grid, block = (re.sub(r"(x1)+$", "", row[name]) for name in ("grid", "block"))
    return Cell(f"{grid} × {block}{'+' * (row['configurations'] > 1)}", math.prod(map(int, row["grid"].split("x"))))


def _resources(row: Row) -> Cell:
    if row["registers_per_thread"] is None:
        return Cell(words.UNKNOWN)
    return Cell(f"{row['registers_per_thread']}, {words.size(row['shared_memory_bytes'])}", row["registers_per_thread"])


#: The most frequent launch of a kernel.
_LAUNCH: Mapping[str, Any] = {"grid × block": _launch, "regs, shared": _resources}


def kernels(rows: Rows, count: int) -> TableView:
    """Rows of `Run.kernels(by_rank=False)`."""
    total_us = sum(row["total_us"] for row in rows) or 1.0
    shown, note = most(rows, count)
    columns = {
        "group": lambda row: row["group"],
        "count": of("count"),
        "total ms": ms("total_us"),
        "share": lambda row: Cell(words.percent(row["total_us"] / total_us), row["total_us"]),
        **{f"{name} µs": of(f"{name}_us", _MICROSECONDS) for name in ("mean", "min", "max")},
        **(_LAUNCH if any(row["configurations"] for row in rows) else {}),
        "name": lambda row: words.short(row["name"]),
    }
    if any(row["configurations"] > 1 for row in shown):
        note = f"{note} A +: launches differ, and the most frequent is shown.".strip()
    kinds = sorted({row["group"] for row in shown})
    title = "Kernels of all ranks, over the whole capture"
    return table("kernels", title, shown, columns, name_last=True, filters=kinds, sorted_by=2, note=note)


def kernel_groups(rows: Rows) -> TableView:
    """Rows of `Run.kernel_groups`, those of all ranks added up."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        sums = found.setdefault(row["group"], {"group": row["group"], "count": 0, "total_us": 0.0, "low": 1.0, "high": 0.0})
        sums |= {"count": sums["count"] + row["count"], "total_us": sums["total_us"] + row["total_us"]}
        sums |= {"low": min(sums["low"], row["share"]), "high": max(sums["high"], row["share"])}
        sums.setdefault("names", row["names"])
    total_us = sum(sums["total_us"] for sums in found.values()) or 1.0
    columns = {
        "group": lambda row: row["group"],
        "count": of("count"),
        "total ms": ms("total_us"),
        "share": lambda row: Cell(words.percent(row["total_us"] / total_us), row["total_us"]),
        "lowest rank": of("low", words.percent),
        "highest rank": of("high", words.percent),
        "kernel with the most time": lambda row: words.short(row["names"][0], _GROUP_NAME),
    }
    ordered = sorted(found.values(), key=lambda sums: -sums["total_us"])
    title = "Kernels and copies of all ranks by what they do, over the whole capture"
    return table("kernel-groups", title, ordered, columns, name_last=True)


def operators(of_ranks: pa.Table, count: int, places: Mapping[str, Target] = NOWHERE) -> TableView:
    """`Run.operators`, the rows of all ranks added up; `places`: where the timeline shows each name."""
    # Without threads, which would add fractions in any order. A hundred rows of each of many ranks are slow as objects.
    summed = of_ranks.group_by("name", use_threads=False)
    added = summed.aggregate([*((name, "sum") for name in _SUMMED), ("max_us", "max"), ("module", "first")])
    columns_of = {**{f"{name}_sum": name for name in _SUMMED}, "max_us_max": "max_us", "module_first": "module"}
    rows = added.rename_columns([columns_of.get(name, name) for name in added.column_names]).to_pylist()
    found = [row | {name: row[name] or 0 for name in _SUMMED} for row in rows]
    shown, note = most(sorted(found, key=lambda row: (-row["self_us"], row["name"])), count)
    of_device = {"own device ms": ms("device_self_us"), "device ms": ms("device_total_us")}
    of_memory = {
        heading: of(f"{where}_memory_self_bytes", words.memory)
        for where, heading in (("cpu", "own host memory"), ("device", "own device memory"))
        if any(row[f"{where}_memory_self_bytes"] for row in found)
    }
    columns = {
        "count": of("count"),
        "own ms": ms("self_us"),
        "total ms": ms("total_us"),
        **(of_device if any(row["device_total_us"] for row in found) else {}),
        "longest µs": of("max_us", _MICROSECONDS),
        **of_memory,
        **({"module": lambda row: row["module"] or ""} if any(row["module"] for row in found) else {}),
        **({"longest": lambda row: Cell("", target=places.get(row["name"]))} if places else {}),
        "name": lambda row: words.short(row["name"]),
    }
    title = f"Host operators of {words.ranks(sorted(set(of_ranks['rank'].to_pylist())))}, over the whole capture"
    return table("operators", title, shown, columns, name_last=True, filters=[], sorted_by=1, note=note)


_SUMMED = ("count", "self_us", "total_us", "device_self_us", "device_total_us", *MEMORY)


def communication(rows: Rows, iterations: int, count: int = MOST_GROUPS) -> TableView:
    """Rows of `Run.communication` per iteration; those of many groups combined."""
    shown, note = most(by_group(rows, iterations), count)
    columns = {
        "operation": lambda row: row["operation"],
        "calls": of("count"),
        "data": of("bytes", words.size),
        "transfer, ms": ms("transfer_us"),
        "waiting, ms": ms("wait_us"),
        "algorithm GB/s": of("algorithm_bandwidth_gbs", words.bandwidth),
        "bus GB/s": of("bus_bandwidth_gbs", words.bandwidth),
        "ranks": lambda row: row["ranks"],
        "group": lambda row: row["group"],
    }
    title = "Communication per iteration by operation and group; waiting is the mean of the ranks"
    return table("communication-table", title, shown, columns, note=note)


def copies(rows: Rows, count: int) -> TableView:
    """Rows of `Run.copies`."""
    shown, note = most(sorted(rows, key=lambda row: -row["total_us"]), count)
    columns = {
        "rank": of("rank", str),
        "count": of("count"),
        "data": of("bytes", words.size),
        "total ms": ms("total_us"),
        "GB/s": of("bandwidth_gbs", words.bandwidth),
        "kind": copy_kind,
    }
    return table("copies", "Copies and memsets over the whole capture", shown, columns, note=note)


def gpu_metrics(rows: Rows, count: int) -> TableView:
    """Rows of `Run.gpu_metrics`."""
    shown, note = most(rows, count)
    columns = {
        "rank": of("rank", str),
        "device": of("device", str),
        "mean": of("mean", _level),
        "95th percentile": of("p95", _level),
        "max": of("max", _level),
        "samples": of("samples"),
        "counter": lambda row: row["metric"],
    }
    return table("gpu-metrics-table", "GPU counters in the marked iterations, sampled by nsys", shown, columns, note=note)


def system_calls(rows: Rows, count: int) -> TableView:
    """Rows of `Run.system_calls`."""
    shown, note = most(sorted(rows, key=lambda row: -row["time_us"]), count)
    marked = any(row["iterations"] for row in rows)
    columns = {
        "rank": of("rank", str),
        "calls": lambda row: Cell(f"{row['calls']:,.1f}", row["calls"]),
        "ms": ms("time_us"),
        **({"of the iteration": of("share", words.percent)} if marked else {}),
        "longest ms": ms("longest_us"),
        "name": lambda row: words.short(row["name"]),
    }
    when = "an iteration" if marked else "the whole capture"
    title = f"System calls of the threads that launch work (all threads where none does), in {when}, recorded by nsys"
    return table("system-calls", title, shown, columns, name_last=True, filters=[], sorted_by=2, note=note)


def cuda_memory(rows: Rows, count: int) -> TableView:
    """Rows of `Run.cuda_memory`."""
    shown, note = most(sorted(rows, key=lambda row: -row["peak_bytes"]), count, "with less memory")
    columns = {
        "device": lambda row: words.UNKNOWN if row["device"] is None else words.device(row["rank"], row["device"]),
        "memory": lambda row: row["memory"],
        "peak": of("peak_bytes", words.memory),
        "at the end": of("end_bytes", words.memory),
        "allocations": of("allocations"),
        "frees": of("frees"),
        "in the iterations": lambda row: Cell(f"{row['in_iterations']:,} in {row['iterations']:,}", row["in_iterations"]),
    }
    title = "Memory that CUDA allocated, recorded by nsys"
    return table("cuda-memory", title, shown, columns, note=note)


def _level(value: float) -> str:
    return f"{value:,.1f}"


def copy_kind(row: Row) -> str:
    """A copy's direction and memory, or "memset"."""
    if row.get("kind") == "memset":
        return "memset"
    return f"{row['direction']} {row['from_memory']} to {row['to_memory']}"


def memory_devices(rows: Rows, count: int, title: str = "Device memory, the highest peaks first") -> TableView:
    """Rows of `Run.memory`."""
    shown, note = most(sorted(rows, key=lambda row: -(row["peak_bytes"] or 0)), count, "devices")
    columns = {
        "device": lambda row: words.device(row["rank"], row["device"]),
        "peak": of("peak_bytes", words.memory),
        "at the end": of("end_bytes", words.memory),
        "peak reserved": of("peak_reserved_bytes", words.memory),
        "growth per iteration": of("growth_bytes_per_iteration", words.memory),
        "fragmentation": of("fragmentation", words.percent),
        "source": lambda row: row["source"],
    }
    return table("memory-devices", title, shown, columns, of_ranks=True, note=note)


def captures(
    infos: Iterable[RankInfo],
    manifests: Mapping[int, RankCapture],
    iterations: Rows,
    offsets: Mapping[int, Row],
    uneventful: int | None,
) -> TableView:
    """How complete each rank's capture is; of the complete ones the first `uneventful`, None for all."""
    boundaries = defaultdict(list)
    for row in iterations:
        boundaries[row["rank"]].append(row["boundary"])
    rows, left = [], 0
    for info in infos:
        manifest, offset, boundary = manifests.get(info.rank), offsets.get(info.rank, {}), boundaries[info.rank]
        status = manifest.manifest.status if manifest else "partial" if info.partial else "no manifest"
        if uneventful is not None and status in ("complete", "no manifest") and not info.error:
            if not uneventful:
                left += 1
                continue
            uneventful -= 1
        edges = f", {sum(boundary)} at the profiler's edges" if any(boundary) else ""
        clock = [offset.get(name) for name in ("offset_ns", "residual_ns")]
        texts = [
            f"rank {info.rank}",
            f"{status}{'' if info.judged else ', not judged'}{', cut short' if info.error and info.judged else ''}",
            f"{len(boundary)}{edges}",
            *(_median_ms(manifest.durations_ns(profiled=each) if manifest else []) for each in (True, False)),
            *(words.UNKNOWN if each is None else f"{each / 1e3:,.1f} µs" for each in clock),
            info.host or words.UNKNOWN,
        ]
        rows.append([Cell(text) for text in texts])
    headings = ["rank", "status", "iterations", "profiled", "not profiled", "clock offset", "residual", "host"]
    title = "Captures; profiled and not profiled: the median iteration of the same run, from the manifests"
    return TableView("captures", title, headings, rows, note=f"{left:,} more ranks without problems." if left else "")


def _median_ms(durations_ns: Sequence[int]) -> str:
    return words.milliseconds(median(durations_ns) / 1e3) if durations_ns else words.UNKNOWN
