"""Rows of tables and figures: answers about ranks, groups or calls that are alike, added up or averaged."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from bridge_profiling.bench.results import BUS_OPERATIONS, bus_factor
from bridge_profiling.facts.intervals import grouped, totals
from bridge_profiling.facts.operators import MEMORY
from bridge_profiling.facts.parts import BY_CAUSE, HOST_PARTS, steady
from bridge_profiling.facts.phases import KINDS
from bridge_profiling.facts.run import RunFacts
from bridge_profiling.facts.sampled import MEASURES
from bridge_profiling.report.views import Row

Rows = list[dict[str, Any]]

#: More groups than this are combined by name, and a matrix has this number of ranks.
MOST_GROUPS, MOST_RANKS = 24, 32

#: Ranges of libraries with this share of an iteration are shown below a verdict.
_LONG = 0.1

_SUMS = ("count", "matched_count", "captured_ranks", "duration_ns", "transfer_ns", "wait_ns", "exposed_ns", "overlapped_ns")
_OF_OPERATORS = ("count", "self_ns", "total_ns", "device_self_ns", "device_total_ns", *MEMORY)
_OF_PHASES = (
    *("calls", "host_ns", "host_share", "device_ns", "device_share", "compute_ns", "kernel_count", "backward_device_ns"),
    *MEASURES,
)
_PRODUCT = ("operator", "shapes", "precision", "flops", "flops_per_byte", "peak_tflops", "memory_tb_s", "roof_tflops")


def of_source(facts: RunFacts, table: pa.Table) -> pa.Table:
    """The rows by the profiler that captured the most ranks."""
    return table.filter(pc.equal(table["source"], facts.source))


@dataclass(frozen=True)
class Part:
    """The part of an iteration in a column, such as those of `BY_CAUSE`."""

    column: str
    time_ns: float  # of an iteration
    share: float  # of the iteration; of a run, the mean over its ranks
    low: float  # the smallest share of a rank
    high: float  # the largest share of a rank


@dataclass(frozen=True)
class Budget:
    """The parts of an iteration; none without iterations."""

    iteration_ns: float | None  # the median over ranks of each rank's median iteration; None without iterations
    waiting_known: bool  # on every rank; else `communication_ns` contains waiting for other ranks
    parts: list[Part]  # their times add up to `iteration_ns`, and their shares to 1


def budget(rows: Rows, columns: Sequence[str] = BY_CAUSE) -> Budget:
    """The budget of some ranks, from their rows of `RunFacts.attribution` or `mean_host_iterations`, and their parts.

    Shares are averaged, not times: the parts then add up to the median iteration, however the ranks differ.
    """
    if not rows:
        return Budget(None, False, [])
    iteration_ns = median(row["duration_ns"] for row in rows)
    timed = [row for row in rows if row["duration_ns"]]
    parts = []
    for column in columns if timed else ():
        shares = [row[column] / row["duration_ns"] for row in timed]
        share = fmean(shares)
        parts.append(Part(column, share * iteration_ns, share, min(shares), max(shares)))
    return Budget(iteration_ns, all(row["waiting_known"] for row in rows), parts)


def mean_host_iterations(rows: Rows) -> Rows:
    """One row per rank from rows of `RunFacts.host_iterations`: the median duration, and means of it and its parts."""
    found = []
    for rank, mine in sorted(grouped(rows, "rank").items()):
        counted = steady(mine)
        parts = {part: fmean(row[part] or 0.0 for row in counted) for part in (*HOST_PARTS, "waiting_ns", "own_ns")}
        durations = [row["duration_ns"] for row in counted]
        known = {"rank": rank, "iterations": len(counted), "waiting_known": mine[0]["waiting_ns"] is not None}
        found.append(known | parts | {"duration_ns": fmean(durations), "median_ns": median(durations)})
    return found


def shares(rows: Rows) -> Rows:
    """The rows with the share of each in all of their time."""
    total_ns = sum(row["total_ns"] for row in rows) or 1.0
    return [{**row, "share": row["total_ns"] / total_ns} for row in rows]


def kernel_groups(rows: Rows) -> Rows:
    """Rows of `RunFacts.kernel_groups` of all ranks, with the lowest and the highest share of a rank."""
    found = []
    for group, mine in grouped(rows, "group").items():
        shares_of_ranks = [row["share"] for row in mine]
        ends = {"low_share": min(shares_of_ranks), "high_share": max(shares_of_ranks)}
        found.append({"group": group, "name": mine[0]["names"][0], **_added(mine, "count", "total_ns"), **ends})
    return shares(found)


def operators(of_ranks: pa.Table) -> Rows:
    """`RunFacts.operators` of all ranks by name."""
    # A hundred rows of each of many ranks are slow as objects.
    sums = {name: (name, "sum") for name in _OF_OPERATORS}
    added = totals(of_ranks, ("name",), **sums, max_ns=("max_ns", "max"), module=("module", "first"))
    return [row | {name: row[name] or 0 for name in _OF_OPERATORS} for row in added.sort_by("name").to_pylist()]


def kernel_counters(rows: Rows) -> Rows:
    """Rows of `RunFacts.kernel_counters` by kernel, most device time first: means weighted by device time."""
    means = (*MEASURES, "memory_tb_s", "dram_tb_s", "samples_per_call")
    return [_with_dram(row) for row in _by_device_time(rows, ("name",), *means)]


def matrix_products(rows: Rows) -> Rows:
    """Rows of `RunFacts.matrix_products` by operator, shapes and precision on a kind of device, most device time first."""
    merged = _by_device_time(rows, _PRODUCT, "tensor_active", "dram_tb_s")
    for row in merged:
        flops = row["flops"] and row["flops"] * row["count"] / 1e3
        row["tflops"] = _ratio(flops, row["device_ns"])
        row |= {f"share_of_{most}": _ratio(row["tflops"], row[f"{most}_tflops"]) for most in ("peak", "roof")}
        row["measured_flops_per_byte"] = _ratio(row["tflops"], row["dram_tb_s"])
    return merged


def _by_device_time(rows: Rows, keys: Sequence[str], *means: str) -> Rows:
    """Rows that are alike in some columns as one each, with means of others that are weighted by device time."""
    merged = [
        mine[0] | _added(mine, "count", "device_ns") | {name: _weighted(mine, name) for name in means}
        for mine in grouped(rows, *keys).values()
    ]
    return sorted(merged, key=lambda row: -row["device_ns"])


def phases(rows: Rows, *, library: bool = True) -> Rows:
    """Rows of `RunFacts.phases` by kind and name: means over the ranks with it, and the lowest and highest iteration of any.

    Without `library`, of the ranges that libraries open those that take the host long are left.
    """
    merged = []
    for (kind, name), mine in grouped(rows, "kind", "name").items():
        known = {"kind": kind, "name": name, "ranks": len(mine), "iterations": max(row["iterations"] for row in mine)}
        means = {column: _of_known(fmean, mine, column) for column in _OF_PHASES}
        ends = {column: _of_known(end, mine, column) for end, column in ((min, "host_low_ns"), (max, "host_high_ns"))}
        merged.append(with_counters(known | means | ends))
    if not library and any(row["kind"] == "phase" for row in merged):
        merged = [row for row in merged if row["kind"] != "library" or (row["host_share"] or 0.0) >= _LONG]
    return sorted(merged, key=lambda row: (KINDS.index(row["kind"]), -(row["host_ns"] or 0.0), row["name"]))


def with_counters(row: dict[str, Any]) -> dict[str, Any]:
    """A row with columns of `MEASURES`, with the traffic of the device's memory, and whether anything was measured."""
    return _with_dram(row) | {"measured": any(row[name] is not None for name in MEASURES)}


def _with_dram(row: dict[str, Any]) -> dict[str, Any]:
    read, write = row["dram_read"], row["dram_write"]
    return row | {"dram": None if read is None or write is None else read + write}


def by_group(rows: Rows, iterations: int) -> Rows:
    """Rows of `RunFacts.communication` per iteration, the most time first; of many groups, those of one name and size combined.

    `wait_ns` is the mean over the ranks; combined groups have mean times and median bandwidths.
    """
    names = ["operation", "dimension", "group", "group_size"]
    if len(rows) <= MOST_GROUPS:
        names += ["group_name", "group_ranks"]
    found = [_combined(members, iterations) for members in grouped(rows, *names).values()]
    return sorted(found, key=lambda row: -((row["transfer_ns"] or 0.0) + (row["wait_ns"] or 0.0)))


def _combined(rows: Rows, iterations: int) -> dict[str, Any]:
    first, count = rows[0], len(rows)
    group, operation = group_label(first), first["operation"] or "?"
    members = f"{count} groups of {first['group_size']}"
    if count == 1:
        ranks = json.loads(first["group_ranks"] or "[]")
        members = ", ".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]} … {ranks[-1]}"
    participants = sum(row["captured_ranks"] or 0 for row in rows)
    by = {"bytes": iterations * count, "transfer_ns": iterations * count, "wait_ns": iterations * max(participants, 1)}
    return {
        "label": f"{operation} · {group} [{members or '?'}]",
        "operation": operation,
        "group": group,
        "ranks": members or "?",
        "count": _added(rows, "count")["count"] / iterations / count,
        **{name: None if (total := _of_known(sum, rows, name)) is None else total / parts for name, parts in by.items()},
        **{name: _of_known(median, rows, name) for name in ("algorithm_bandwidth_gbs", "bus_bandwidth_gbs")},
    }


def by_size(rows: Rows, iterations: int) -> Rows:
    """Rows of `compare.bench.with_alone` by operation, kind of group, its size and that of the message.

    Times are of a rank in an iteration.
    """
    labeled = ({**row, "label": group_label(row)} for row in rows)
    kinds = grouped(labeled, "operation", "label", "group_size", "message_bytes").values()
    return [_of_size(mine, iterations) for mine in kinds]


def _of_size(rows: Rows, iterations: int) -> dict[str, Any]:
    operation, group, size, message_bytes = (rows[0][name] for name in ("operation", "label", "group_size", "message_bytes"))
    sums = _added(rows, *_SUMS)
    # Of each group, the captured ranks have a kernel of each operation.
    by = max(sums["captured_ranks"], 1) * iterations
    speed = _ratio(sums["matched_count"] * (message_bytes or 0), sums["transfer_ns"])
    bus_gbs = speed * bus_factor(operation, size) if speed and size and operation in BUS_OPERATIONS else None

    def share(name: str) -> float | None:
        """Of a bandwidth that all groups have in common."""
        first, *others = {row[name] for row in rows}
        return None if others else _ratio(bus_gbs, first)

    return {
        "operation": operation or "?",
        "group": f"{group} of {size or '?'}" + (f", {len(rows)} groups" if len(rows) > 1 else ""),
        "message_bytes": message_bytes,
        "calls": sums["count"] / len(rows) / iterations,
        **{name: sums[name] / by for name in ("duration_ns", "exposed_ns")},
        "wait_ns": sums["wait_ns"] / by if sums["matched_count"] else None,
        "hidden_share": sums["overlapped_ns"] / sums["duration_ns"] if sums["duration_ns"] else None,
        "algorithm_gbs": speed,
        "bus_gbs": bus_gbs,
        "share_of_alone": share("alone_bus_bandwidth_gbs"),
        "share_of_link": share("link_gbs"),
    }


@dataclass(frozen=True)
class WaitMatrix:
    """Waiting between ranks: `wait_ns[row][column]` is how long a rank waits for another per iteration.

    `shown` is the share of all waiting that is in the matrix, from 0 to 1.
    """

    ranks: list[int]
    wait_ns: list[list[float]]
    shown: float


def wait_matrix(waits: Iterable[Row], iterations: int, everyone: Sequence[int]) -> WaitMatrix:
    """The matrix of the ranks that wait or are waited for most, from rows of `RunFacts.waits`."""
    between: dict[tuple[int, int], float] = defaultdict(float)
    weight: dict[int, float] = defaultdict(float, dict.fromkeys(everyone, 0.0))
    for row in waits:
        between[row["rank"], row["waits_for"]] += row["wait_ns"] / max(iterations, 1)
        for end in (row["rank"], row["waits_for"]):
            weight[end] += row["wait_ns"]
    ranks = sorted(sorted(weight, key=lambda rank: (-weight[rank], rank))[:MOST_RANKS])
    cells = [[between.get((rank, other), 0.0) for other in ranks] for rank in ranks]
    total = sum(between.values())
    return WaitMatrix(ranks, cells, sum(map(sum, cells)) / total if total else 1.0)


def group_name(group: str | None) -> str:
    """Megatron's name of a group without the part that all have in common."""
    return (group or "unknown group").removesuffix("_GROUP").replace("_", " ").lower()


def group_label(row: Row) -> str:
    """A group by its parallel dimension, where that is known, and by the program's name, unless that is a number of torch's."""
    name, dimension = group_name(row["group"]), row["dimension"]
    if dimension is None:
        return name
    spanned = "all ranks" if dimension == "all" else str(dimension)
    unnamed = row["group"] is None or name.isdecimal() or name in ("default pg", dimension)
    return spanned if unnamed else f"{spanned}: {name}"


def _added(rows: Rows, *names: str) -> dict[str, Any]:
    """The sums of some columns; unknown values count as 0."""
    return {name: sum(row[name] or 0 for row in rows) for name in names}


def _ratio(part: float | None, whole: float | None) -> float | None:
    """None if either is unknown or 0."""
    return part / whole if part and whole else None


def _of_known(function: Callable[[list[Any]], Any], rows: Rows, name: str) -> Any:
    """Of the values of a column that are known; None if none is."""
    known = [row[name] for row in rows if row[name] is not None]
    return function(known) if known else None


def _weighted(rows: Rows, name: str) -> float | None:
    """The mean of a column, weighted by device time; None if nothing is known."""
    known = [(row[name], row["device_ns"]) for row in rows if row[name] is not None]
    weight = sum(spent for _, spent in known)
    return sum(value * spent for value, spent in known) / weight if weight else None
