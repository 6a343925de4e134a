"""Device memory: peak, growth, fragmentation, allocation sites, allocations at the peak, and out-of-memory errors.

There are two sources. A memory snapshot has every allocation and its call stack; a Kineto trace with `profile_memory=True` has
the totals after each allocation. If a rank has both, the snapshot is used.

Allocated memory holds the program's tensors, as the allocator rounds them; reserved memory is what the caching allocator holds
of the device. Fragmentation is the share of reserved but free memory outside its largest free block: memory that cannot serve
a large request.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bridge_profiling.facts.caveats import caveat
from bridge_profiling.facts.columns import DeviceMemory, IterationEnd, Site, SiteChange
from bridge_profiling.facts.memory_series import (
    Amounts,
    Integers,
    Series,
    device_series,
    inferred_ends,
    live,
    marked_ends,
    running,
    site,
)
from bridge_profiling.facts.types import Answer
from bridge_profiling.traces.tables import fields
from bridge_profiling.traces.types import Caveat

if TYPE_CHECKING:
    import duckdb

#: Name of all sites beyond the `MOST_SITES` largest in `MemoryTables.over_time`.
OTHER_SITES = "other sites"
MOST_SITES = 9

#: Points in time of `MemoryTables.timeline` per device (more than a screen has columns), and of `MemoryTables.over_time`.
_POINTS, _POINTS_OF_SITES = 2_000, 400

_DEVICE = fields(pa.int32(), "rank", "device")


_TIMELINE = pa.schema([*_DEVICE, *fields(pa.int64(), "time_ns", "allocated_bytes", "reserved_bytes")])


# A stack has kilobytes, and each occurs many times.
_STACK = [(name, pa.dictionary(pa.int32(), pa.string())) for name in ("site", "stack")]
_AT_PEAK = pa.schema([*_DEVICE, *fields(pa.int64(), "bytes", "allocated_ns", "freed_ns"), *_STACK])

_OVER_TIME = pa.schema([*_DEVICE, ("site", pa.string()), *fields(pa.int64(), "time_ns", "bytes")])

_REQUEST = fields(pa.int64(), "time_ns", "requested_bytes", "free_bytes")
_OUT_OF_MEMORY = pa.schema([*_DEVICE, *_REQUEST, ("site", pa.string()), ("stack", pa.string())])


@dataclass(frozen=True)
class MemoryTables:
    """Everything about memory over time, from one pass over the recordings. Tables are empty if none was recorded."""

    # A row per rank and device: rank, device, source (`snapshot` or `kineto`), peak_bytes and peak_ns (allocated, and when
    # first), end_bytes (allocated at the end of the recording), peak_reserved_bytes, end_reserved_bytes; largest_free_bytes,
    # fragmentation (0 to 1) and inactive_split_bytes (free parts of partly used device blocks) when the snapshot was taken,
    # null without one; needlessly_reserved_bytes (`Series.needlessly_reserved`), iterations, growth_bytes_per_iteration (median
    # change between the ends of iterations, null if fewer than two are known).
    summary: pa.Table
    # Rank, device, time_ns, allocated_bytes, reserved_bytes (null if unknown): amounts from that time on. Thinned so that no
    # peak is lost.
    timeline: pa.Table
    # Amounts at the end of each iteration: rank, device, iteration (null if inferred), end_ns, allocated_bytes, change_bytes
    # (since the iteration before; null for the first), reserved_bytes (null if unknown).
    growth: pa.Table
    # A row per rank, device and allocation site, the largest at the peak first: rank, device, site, allocations,
    # allocated_bytes (sum of all), peak_bytes (most at once), bytes_at_peak (at the device's peak), end_bytes,
    # growth_bytes_per_iteration.
    sites: pa.Table
    # Allocations that were live at a device's peak, the largest first: rank, device, bytes, allocated_ns (null: before the
    # recording), freed_ns (null: never), site, stack.
    at_peak: pa.Table
    # Bytes of each device's largest sites over time: rank, device, site (the largest at the peak first, `OTHER_SITES` last),
    # time_ns, bytes. At each time, the sites of a device add up to the allocated amount.
    over_time: pa.Table
    caveats: tuple[Caveat, ...]  # of all of them


class _Site(NamedTuple):
    """The allocations of one site on one device, and their sum over time."""

    allocations: pa.Table
    held: Amounts


def memory_tables(connection: duckdb.DuckDBPyConnection, *, points: int = _POINTS) -> MemoryTables:
    """All tables about memory over time.

    Args:
        points: most rows per device in `timeline`.
    """
    blocks = _free_blocks(connection)
    summary: list[dict[str, Any]] = []
    growth: list[dict[str, Any]] = []
    sites: list[dict[str, Any]] = []
    timeline, at_peak, over_time = [_TIMELINE.empty_table()], [_AT_PEAK.empty_table()], [_OVER_TIME.empty_table()]
    sites_of_code: list[str] = []
    of_code: tuple[pa.Array, ...] = ()
    caveats = []
    for series in device_series(connection):
        key = {"rank": series.rank, "device": series.device}
        ends, numbers = marked_ends(connection, series)
        if not numbers:
            ends = inferred_ends(series)
            caveats.append(caveat("memory_iterations_inferred" if len(ends) else "memory_growth_unknown", [series.rank]))
        free = blocks.get((series.rank, series.device), {}) if series.source == "snapshot" else {}
        summary.append(key | _summary(series, ends) | free)
        timeline.append(_timeline(series, points))
        growth += [key | row for row in _ends(series, ends, numbers)]
        if series.allocations is None:
            caveats.append(caveat("memory_without_snapshot", [series.rank]))
            continue
        if not sites_of_code:  # once: stacks are those of the whole run
            sites_of_code = [site(stack) for stack in series.stacks]
            of_code = pa.array(sites_of_code, pa.string()), pa.array(series.stacks, pa.string())
        parts = _by_site(series.allocations, sites_of_code)
        sites += [key | row for row in _sites(series, parts, ends)]
        at_peak.append(_at_peak(series.allocations, series.allocated.peak[1], of_code))
        if len(series.allocated.time_ns):
            over_time.append(_over_time(series, parts))
    sites.sort(key=lambda row: (row["rank"], row["device"], -row["bytes_at_peak"], -row["peak_bytes"], row["site"]))
    return MemoryTables(
        pa.Table.from_pylist(summary, schema=DeviceMemory.schema()),
        pa.concat_tables(timeline),
        pa.Table.from_pylist(growth, schema=IterationEnd.schema()),
        pa.Table.from_pylist(sites, schema=Site.schema()),
        pa.concat_tables(at_peak),
        pa.concat_tables(over_time),
        tuple(caveats),
    )


def memory_over_time(recorded: MemoryTables, *, ranks: tuple[int, ...] | None = None) -> Answer:
    """`MemoryTables.over_time` of some ranks; None for all."""
    found = recorded.over_time
    if ranks is not None:
        found = found.filter(pc.is_in(found["rank"], pa.array(ranks, pa.int32())))
    return Answer(found, recorded.caveats)


def out_of_memory(connection: duckdb.DuckDBPyConnection) -> pa.Table:
    """Every request that the allocator could not serve, by rank and time, from memory snapshots.

    Returns:
        rank, device, time_ns (null if not recorded), requested_bytes, free_bytes (of the device, outside what the allocator
        held), site, stack (null if not recorded).
    """
    columns = ", ".join(name for name in _OUT_OF_MEMORY.names if name != "site")
    rows = connection.sql(f"select {columns} from out_of_memory order by rank, device, time_ns").to_arrow_table().to_pylist()
    return pa.Table.from_pylist([row | {"site": site(row["stack"])} for row in rows], schema=_OUT_OF_MEMORY)


def difference(before: pa.Table, after: pa.Table) -> pa.Table:
    """Changes between two recordings per site, from two answers of `sites`.

    Returns:
        A row per site, the largest change first: site, before_bytes_at_peak, after_bytes_at_peak, change_bytes_at_peak,
        before_end_bytes, after_end_bytes, change_end_bytes, before_allocations, after_allocations. Amounts are means over the
        recorded ranks and devices.
    """
    measured = ("bytes_at_peak", "end_bytes", "allocations")
    sides = []
    for table in (before, after):
        count = max(table.select(["rank", "device"]).group_by(["rank", "device"]).aggregate([]).num_rows, 1)
        summed = table.group_by("site").aggregate([(name, "sum") for name in measured]).to_pylist()
        sides.append({row["site"]: {name: row[f"{name}_sum"] / count for name in measured} for row in summed})
    rows = []
    nothing = dict.fromkeys(measured, 0.0)
    for name in sorted(sides[0].keys() | sides[1].keys()):
        first, second = sides[0].get(name, nothing), sides[1].get(name, nothing)
        row: dict[str, Any] = {"site": name}
        for measure in measured:
            row |= {f"before_{measure}": first[measure], f"after_{measure}": second[measure]}
            if measure != "allocations":
                row[f"change_{measure}"] = second[measure] - first[measure]
        rows.append(row)
    rows.sort(key=lambda row: (-abs(row["change_bytes_at_peak"]), -abs(row["change_end_bytes"]), row["site"]))
    return pa.Table.from_pylist(rows, schema=SiteChange.schema())


def _free_blocks(connection: duckdb.DuckDBPyConnection) -> dict[tuple[int, int], dict[str, Any]]:
    """Free memory of each device when its snapshot was taken."""
    rows = connection.execute(
        """select rank, coalesce(device, 0), sum(bytes - active_bytes)::bigint, coalesce(max(largest_free_bytes), 0)::bigint,
            coalesce(sum(bytes - active_bytes) filter (active_bytes > 0), 0)::bigint
        from segments where freed_ns is null and active_bytes is not null group by all"""
    ).fetchall()
    return {
        (rank, device): {
            "largest_free_bytes": largest,
            "fragmentation": 1 - largest / free if free else None,
            "inactive_split_bytes": split,
        }
        for rank, device, free, largest, split in rows
    }


def _summary(series: Series, ends: Integers) -> dict[str, Any]:
    peak, peak_ns = series.allocated.peak
    reserved = None if series.reserved is None else series.reserved.bytes
    return {
        "source": series.source,
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
            "rank": np.full(len(kept), series.rank, np.int32),
            "device": np.full(len(kept), series.device, np.int32),
            "time_ns": time_ns,
            "allocated_bytes": series.allocated.bytes[1:][kept],
            "reserved_bytes": pa.nulls(len(kept), pa.int64()) if reserved is None else reserved,
        },
        schema=_TIMELINE,
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
            found[name] = _Site(mine, running(mine))
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
    return rows


def _at_peak(allocations: pa.Table, peak_ns: int | None, of_code: Sequence[pa.Array]) -> pa.Table:
    mine = allocations.filter(pa.array(live(allocations, peak_ns))).sort_by([("bytes", "descending")])
    code = mine["code"].combine_chunks().cast(pa.int32())
    columns = [mine[name] for name in ("rank", "device", "bytes", "allocated_ns", "freed_ns")]
    columns += [pa.DictionaryArray.from_arrays(code, values) for values in of_code]
    return pa.table(columns, names=_AT_PEAK.names).cast(_AT_PEAK)


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
            "rank": np.full(count, series.rank, np.int32),
            "device": np.full(count, series.device, np.int32),
            "site": pa.array([name for name in kept for _ in shown_ns], pa.string()),
            "time_ns": np.tile(shown_ns, len(kept)),
            "bytes": np.concatenate(list(kept.values())),
        },
        schema=_OVER_TIME,
    )


def _shown(amounts: Amounts) -> Integers:
    """Times to show: of equal parts of the recording, the time with the highest amount; and the last."""
    time_ns, size = amounts.time_ns, amounts.bytes[1:]
    bounds = np.unique(np.searchsorted(time_ns, np.linspace(int(time_ns[0]), int(time_ns[-1]) + 1, _POINTS_OF_SITES + 1)))
    highest = [begin + int(size[begin:end].argmax()) for begin, end in itertools.pairwise(bounds.tolist())]
    return np.unique(time_ns[[*highest, -1]])


def _thinned(amounts: Integers, points: int) -> Integers:
    """Indices to keep: all, or the highest amount of each of some equal parts, and the last."""
    if len(amounts) <= points:
        return np.arange(len(amounts))
    bounds = np.linspace(0, len(amounts), points, dtype=np.int64)
    highest = [begin + int(amounts[begin:end].argmax()) for begin, end in itertools.pairwise(bounds)]
    return np.array([*highest, len(amounts) - 1], np.int64)
