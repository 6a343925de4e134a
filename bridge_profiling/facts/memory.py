"""Device memory: peak, growth, fragmentation, allocation sites, allocations at the peak, and out-of-memory errors.

There are two sources. A memory snapshot has every allocation and its call stack; a Kineto trace with `profile_memory=True` has
the totals after each allocation. If a rank has both, the snapshot is used.

Allocated memory holds the program's tensors, as the allocator rounds them; reserved memory is what the caching allocator holds
of the device. Fragmentation is the share of reserved but free memory outside its largest free block: memory that cannot serve
a large request.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bridge_profiling.facts import memory_series
from bridge_profiling.facts.intervals import totals
from bridge_profiling.facts.memory_series import Amounts, Integers, Series, live, site
from bridge_profiling.facts.types import Answer, caveat, declared, schema
from bridge_profiling.traces.types import RankTables

#: Name of all sites beyond the `MOST_SITES` largest in `memory_over_time`.
OTHER_SITES = "other sites"
MOST_SITES = 9

#: Points in time of `memory_timeline` per device (more than a screen has columns), and of `memory_over_time`.
_POINTS, _POINTS_OF_SITES = 2_000, 400

#: Columns of the run's tables that the facts of one capture lack: its own.
_OF_CAPTURE = ("rank", "source")

# A stack has kilobytes, and each occurs many times.
_STACK = dict.fromkeys(("site", "stack"), pa.dictionary(pa.int32(), pa.string()))

#: The tables of a run by name, each with a row for something of a rank's device:
#:
#: - `memory`: `Series` in numbers; the free blocks are those when the snapshot was taken.
#: - `memory_timeline`: amounts from each time on, thinned so that no peak is lost. `reserved_bytes` is null if unknown.
#: - `memory_growth`: amounts at the end of each iteration.
#: - `memory_sites`: allocation sites, the largest at the peak first.
#: - `memory_at_peak`: allocations that were live at the device's peak, the largest first; `allocated_ns` is null for one from
#:   before the recording, `freed_ns` for one that was not freed.
#: - `memory_over_time`: bytes of the device's largest sites (the largest at the peak first, `OTHER_SITES` last) over time. At
#:   each time, they add up to the allocated amount.
#: - `out_of_memory`: requests that the allocator could not serve, by time (null if not recorded), with the bytes free on the
#:   device outside what the allocator held.
SCHEMAS: dict[str, pa.Schema] = {
    "memory": declared("DeviceMemory").schema(),
    "memory_growth": declared("IterationEnd").schema(),
    "memory_sites": declared("Site").schema(),
    "memory_timeline": schema("rank", "device", "time_ns", "allocated_bytes", "reserved_bytes"),
    "memory_at_peak": schema("rank", "device", "bytes", "allocated_ns", "freed_ns", "site", "stack", **_STACK),
    "memory_over_time": schema("rank", "device", "site", "time_ns", "bytes"),
    "out_of_memory": schema("rank", "device", "time_ns", "requested_bytes", "free_bytes", "site", "stack"),
}

_OF_RANK = {
    name: pa.schema([column for column in schema if column.name not in _OF_CAPTURE]) for name, schema in SCHEMAS.items()
}


class _Site(NamedTuple):
    """The allocations of one site on one device, and their sum over time."""

    allocations: pa.Table
    held: Amounts


def memory_facts(tables: RankTables, iterations: pa.Table, *, points: int = _POINTS) -> dict[str, Answer]:
    """The tables of `SCHEMAS` of a snapshot or a trace, without the columns rank and source.

    Args:
        tables: of the capture.
        iterations: the rank's marked iterations, which a snapshot lacks: iteration, start_ns, end_ns.
        points: most rows per device in `memory_timeline`.
    """
    free = _free_blocks(tables)
    found: dict[str, list[pa.Table]] = {name: [schema.empty_table()] for name, schema in _OF_RANK.items()}
    caveats = []

    def add(name: str, device: int, rows: list[dict[str, Any]]) -> None:
        found[name].append(pa.Table.from_pylist([{"device": device} | row for row in rows], schema=_OF_RANK[name]))

    for series in memory_series.device_series(tables):
        ends, numbers = memory_series.marked_ends(iterations, series)
        if not numbers:
            ends = memory_series.inferred_ends(series)
            caveats.append(caveat("memory_iterations_inferred" if len(ends) else "memory_growth_unknown"))
        add("memory", series.device, [_summary(series, ends) | free.get(series.device, {})])
        found["memory_timeline"].append(_timeline(series, points))
        add("memory_growth", series.device, _ends(series, ends, numbers))
        if series.allocations is None:
            caveats.append(caveat("memory_without_snapshot"))
            continue
        sites = [*map(site, series.stacks), memory_series.UNRECORDED]
        parts = _by_site(series.allocations, sites)
        add("memory_sites", series.device, _sites(series, parts, ends))
        found["memory_at_peak"].append(_at_peak(series, series.allocations, sites))
        if len(series.allocated.time_ns):
            found["memory_over_time"].append(_over_time(series, parts))
    failed = tables.columns("out_of_memory", ("device", "time_ns", "requested_bytes", "free_bytes", "stack"))
    rows = [
        row | {"site": site(row["stack"])}
        for row in failed.sort_by([("device", "ascending"), ("time_ns", "ascending")]).to_pylist()
    ]
    found["out_of_memory"].append(pa.Table.from_pylist(rows, schema=_OF_RANK["out_of_memory"]))
    return {
        name: Answer(pa.concat_tables(parts), () if name == "out_of_memory" else tuple(caveats))
        for name, parts in found.items()
    }


def of_snapshot(tables: RankTables, marks: pa.Table) -> dict[str, Answer]:
    """`memory_facts` of a snapshot, with the iterations of its rank's trace: rank, iteration, start_ns, end_ns."""
    return memory_facts(tables, marks.filter(pc.equal(marks["rank"], tables.info.rank)))


def of_run(name: str, snapshots: Mapping[str, Answer], traces: Mapping[str, Answer], source: str) -> Answer:
    """A table of `SCHEMAS` from those of each capture. If a rank has a snapshot and a trace, the snapshot is used.

    Args:
        name: of the table.
        snapshots: the tables of all snapshots, with the columns rank and source.
        traces: those of all traces.
        source: of the traces to use.
    """
    captured = set(snapshots["memory"].table["rank"].to_pylist())
    recorded = traces["memory"].table
    recorded = recorded.filter(pc.equal(recorded["source"], source))
    alone = set(recorded["rank"].to_pylist()) - captured
    rows = traces[name].table
    rows = rows.filter(pc.and_(pc.equal(rows["source"], source), pc.is_in(rows["rank"], pa.array(sorted(alone), pa.int32()))))
    table = pa.concat_tables([snapshots[name].table, rows])
    of = pc.if_else(pc.equal(table["source"], "memory"), "snapshot", table["source"])
    table = table.set_column(table.column_names.index("source"), "source", of)
    caveats = [caveat for caveat in traces[name].caveats if caveat.ranks[0] in alone]
    return Answer(table.select(SCHEMAS[name].names), (*snapshots[name].caveats, *caveats))


def difference(before: pa.Table, after: pa.Table) -> pa.Table:
    """Changes between two recordings per site, from two answers of `sites`.

    Returns:
        A row per site, the largest change first: site, before_bytes_at_peak, after_bytes_at_peak, change_bytes_at_peak,
        before_end_bytes, after_end_bytes, change_end_bytes, before_allocations, after_allocations. Amounts are means over the
        recorded ranks and devices.
    """
    measured = ("bytes_at_peak", "end_bytes", "allocations")
    sites = sorted({*before["site"].to_pylist(), *after["site"].to_pylist()})
    rows = [{"site": name} | {f"{side}_{each}": 0.0 for side in ("before", "after") for each in measured} for name in sites]
    for side, table in (("before", before), ("after", after)):
        count = max(len(totals(table, ("rank", "device"))), 1)
        for found in totals(table, ["site"], **{name: (name, "sum") for name in measured}).to_pylist():
            rows[sites.index(found["site"])] |= {f"{side}_{name}": found[name] / count for name in measured}
    for row in rows:
        row |= {f"change_{name}": row[f"after_{name}"] - row[f"before_{name}"] for name in measured}
    rows.sort(key=lambda row: (-abs(row["change_bytes_at_peak"]), -abs(row["change_end_bytes"]), row["site"]))
    return pa.Table.from_pylist(rows, schema=declared("SiteChange").schema())


def _free_blocks(tables: RankTables) -> dict[int, dict[str, Any]]:
    """Free memory of each device when its snapshot was taken."""
    segments = tables.columns("segments", ("device", "bytes", "active_bytes", "largest_free_bytes", "freed_ns"))
    held = segments.filter(pc.and_(segments["freed_ns"].is_null(), segments["active_bytes"].is_valid()))
    free, device = pc.subtract(held["bytes"], held["active_bytes"]), held["device"].fill_null(0)
    split = pc.if_else(pc.greater(held["active_bytes"], 0), free, 0)
    table = pa.table({"device": device, "free": free, "split": split, "largest": held["largest_free_bytes"].fill_null(0)})
    sums = {"free": ("free", "sum"), "inactive_split_bytes": ("split", "sum"), "largest_free_bytes": ("largest", "max")}
    return {
        row["device"]: row | {"fragmentation": 1 - row["largest_free_bytes"] / row["free"] if row["free"] else None}
        for row in totals(table, ["device"], **sums).to_pylist()
    }


def _summary(series: Series, ends: Integers) -> dict[str, Any]:
    peak, peak_ns = series.allocated.peak
    reserved = None if series.reserved is None else series.reserved.bytes
    return {
        "peak_bytes": peak,
        "peak_ns": peak_ns,
        "end_bytes": int(series.allocated.bytes[-1]),
        "peak_reserved_bytes": None if reserved is None else int(reserved.max()),
        "end_reserved_bytes": None if reserved is None else int(reserved[-1]),
        "needlessly_reserved_bytes": series.needlessly_reserved,
        "iterations": len(ends),
        "growth_bytes_per_iteration": _growth(series.allocated.at(ends)),
    }


def _growth(amounts: Integers) -> float | None:
    """Median change: the set-up in the first iterations is not growth."""
    return float(np.median(np.diff(amounts))) if len(amounts) > 1 else None


def _timeline(series: Series, points: int) -> pa.Table:
    kept = _thinned(series.allocated.bytes[1:], points)
    time_ns = series.allocated.time_ns[kept]
    reserved = None if series.reserved is None else series.reserved.at(time_ns)
    return pa.table(
        {
            "device": np.full(len(kept), series.device, np.int32),
            "time_ns": time_ns,
            "allocated_bytes": series.allocated.bytes[1:][kept],
            "reserved_bytes": pa.nulls(len(kept), pa.int64()) if reserved is None else reserved,
        },
        schema=_OF_RANK["memory_timeline"],
    )


def _ends(series: Series, ends: Integers, numbers: Sequence[int]) -> list[dict[str, Any]]:
    amounts = series.allocated.at(ends).tolist()
    reserved = [None] * len(ends) if series.reserved is None else series.reserved.at(ends).tolist()
    return [
        {
            "iteration": numbers[place] if numbers else None,
            "end_ns": end_ns,
            "allocated_bytes": amounts[place],
            "change_bytes": amounts[place] - amounts[place - 1] if place else None,
            "reserved_bytes": reserved[place],
        }
        for place, end_ns in enumerate(ends.tolist())
    ]


def _by_site(allocations: pa.Table, of_code: Sequence[str]) -> dict[str, _Site]:
    names = sorted(set(of_code))
    number = {name: place for place, name in enumerate(names)}
    of_row = np.array([number[name] for name in of_code], np.int64)[allocations["code"].to_numpy()]
    order = np.argsort(of_row, kind="stable")
    bounds = np.searchsorted(of_row[order], np.arange(len(names) + 1))
    found = {}
    for name, (begin, end) in zip(names, itertools.pairwise(bounds.tolist()), strict=True):
        if begin < end:
            mine = allocations.take(pa.array(order[begin:end]))
            found[name] = _Site(mine, memory_series.running(mine))
    return found


def _sites(series: Series, parts: dict[str, _Site], ends: Integers) -> list[dict[str, Any]]:
    _, peak_ns = series.allocated.peak
    rows = []
    for name, (allocations, held) in parts.items():
        size = allocations["bytes"].to_numpy()
        rows.append(
            {
                "site": name,
                "allocations": allocations.num_rows,
                "allocated_bytes": int(size.sum()),
                "peak_bytes": int(held.bytes.max()),
                "bytes_at_peak": int(size[live(allocations, peak_ns)].sum()),
                "end_bytes": int(held.bytes[-1]),
                "growth_bytes_per_iteration": _growth(held.at(ends)),
            }
        )
    rows.sort(key=lambda row: (-row["bytes_at_peak"], -row["peak_bytes"], row["site"]))
    return rows


def _at_peak(series: Series, allocations: pa.Table, sites: Sequence[str]) -> pa.Table:
    mine = allocations.filter(pa.array(live(allocations, series.allocated.peak[1]))).sort_by([("bytes", "descending")])
    code = mine["code"].to_numpy()
    columns = [mine[name] for name in ("device", "bytes", "allocated_ns", "freed_ns")]
    for names in (sites, series.stacks):
        indices = pa.array(code, pa.int32(), mask=code >= len(names))
        columns.append(pa.DictionaryArray.from_arrays(indices, pa.array(names, pa.string())))
    schema = _OF_RANK["memory_at_peak"]
    return pa.table(columns, names=schema.names).cast(schema)


def _over_time(series: Series, parts: dict[str, _Site]) -> pa.Table:
    shown_ns = _shown(series.allocated)
    peak = int(np.argmax(series.allocated.at(shown_ns)))
    held = {name: each.held.at(shown_ns) for name, each in parts.items()}
    largest = sorted(held, key=lambda name: (-int(held[name][peak]), -int(held[name].max()), name))
    kept = {name: held[name] for name in largest[:MOST_SITES]}
    if len(largest) > MOST_SITES:
        kept[OTHER_SITES] = np.sum([held[name] for name in largest[MOST_SITES:]], axis=0)
    count = len(kept) * len(shown_ns)
    return pa.table(
        {
            "device": np.full(count, series.device, np.int32),
            "site": pa.array([name for name in kept for _ in shown_ns], pa.string()),
            "time_ns": np.tile(shown_ns, len(kept)),
            "bytes": np.concatenate(list(kept.values())),
        },
        schema=_OF_RANK["memory_over_time"],
    )


def _shown(amounts: Amounts) -> Integers:
    """Times to show: of equal parts of the recording, the time with the highest amount; and the last."""
    time_ns, size = amounts.time_ns, amounts.bytes[1:]
    bounds = np.searchsorted(time_ns, np.linspace(int(time_ns[0]), int(time_ns[-1]) + 1, _POINTS_OF_SITES + 1))
    return np.unique(time_ns[_highest(size, np.unique(bounds))])


def _thinned(amounts: Integers, points: int) -> Integers:
    """Indices to keep: all, or the highest amount of each of some equal parts, and the last."""
    if len(amounts) <= points:
        return np.arange(len(amounts))
    return _highest(amounts, np.linspace(0, len(amounts), points, dtype=np.int64))


def _highest(amounts: Integers, bounds: Integers) -> Integers:
    """Index of the highest amount between each two bounds, and the last."""
    parts = itertools.pairwise(bounds.tolist())
    return np.array([*(begin + int(amounts[begin:end].argmax()) for begin, end in parts), len(amounts) - 1], np.int64)
