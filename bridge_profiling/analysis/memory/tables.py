"""Device memory over time: the peak and what was live at it, growth, allocation sites, fragmentation, two runs compared.

Two sources: a memory snapshot knows every allocation and where it was made; a Kineto trace with `profile_memory=True` knows the
totals after each, without sites. Where a rank has both, the snapshot is taken. Nothing here reads a snapshot's file.

Allocated is what the program's tensors hold, as the allocator rounds it; reserved is what the caching allocator holds of the
device. Fragmentation is the part of the reserved but free memory that its largest free block is not: memory that is there and
cannot serve a large request. Needlessly reserved is what the allocator took of the device while at least as much of what it
held already was free: holes that were too small for the request.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from bridge_profiling.analysis.memory.series import (
    Integers,
    device_series,
    ends_of_iterations,
    live,
    running,
    stacks,
)
from bridge_profiling.analysis.memory.sites import site
from bridge_profiling.traces.types import RankInfo

if TYPE_CHECKING:
    import duckdb

#: Points of a timeline: more than a screen is wide.
_POINTS = 2_000

_DEVICE = (("rank", pa.int32()), ("device", pa.int32()))

_SUMMARY = pa.schema(
    [
        *_DEVICE,
        ("source", pa.string()),
        ("peak_bytes", pa.int64()),
        ("peak_ns", pa.int64()),
        ("end_bytes", pa.int64()),
        ("peak_reserved_bytes", pa.int64()),
        ("end_reserved_bytes", pa.int64()),
        ("largest_free_bytes", pa.int64()),
        ("fragmentation", pa.float64()),
        ("inactive_split_bytes", pa.int64()),
        ("needlessly_reserved_bytes", pa.int64()),
        ("iterations", pa.int32()),
        ("growth_bytes_per_iteration", pa.float64()),
    ]
)


def memory(connection: duckdb.DuckDBPyConnection, infos: Sequence[RankInfo], *, limitations: list[str]) -> pa.Table:
    """Peak, growth and fragmentation.

    Args:
        connection: of `session.connect`.
        infos: what is known of the ranks.
        limitations: what the captures cannot tell is appended.

    Returns:
        A row per rank and device: rank, device, source (`snapshot` or `kineto`), peak_bytes and peak_ns (of what was
        allocated, and when first), end_bytes (allocated when the recording ended), peak_reserved_bytes, end_reserved_bytes,
        largest_free_bytes, fragmentation (0 to 1) and inactive_split_bytes (free, in blocks of the device of which other parts
        are in use), all three when the snapshot was taken and null without one, needlessly_reserved_bytes (while recorded, at
        most what the highest reserved amount is above the highest allocated one; null when unknown), iterations, and
        growth_bytes_per_iteration: the median change from the end of one iteration to the end of the next, null when fewer
        than two are known. Empty when no memory was recorded.
    """
    held = _free_blocks(connection)
    rows = []
    for series in device_series(connection, limitations):
        ends, _ = ends_of_iterations(connection, series, limitations)
        peak, peak_ns = series.peak
        reserved = series.reserved_base
        unknown = (None, None, None)
        largest, fragmentation, split = (
            held.get((series.rank, series.device), unknown) if series.source == "snapshot" else unknown
        )
        rows.append(
            {
                "rank": series.rank,
                "device": series.device,
                "source": series.source,
                "peak_bytes": peak,
                "peak_ns": peak_ns,
                "end_bytes": series.end,
                "peak_reserved_bytes": None if reserved is None else max(reserved, int(series.reserved.max(initial=0))),
                "end_reserved_bytes": None if reserved is None else int([reserved, *series.reserved[-1:]][-1]),
                "largest_free_bytes": largest,
                "fragmentation": fragmentation,
                "inactive_split_bytes": split,
                "needlessly_reserved_bytes": series.needlessly_reserved,
                "iterations": len(ends),
                "growth_bytes_per_iteration": _growth(series.at(ends)),
            }
        )
    return pa.Table.from_pylist(rows, schema=_SUMMARY)


def timeline(
    connection: duckdb.DuckDBPyConnection, infos: Sequence[RankInfo], *, limitations: list[str], points: int = _POINTS
) -> pa.Table:
    """Memory over time, thinned out so that no peak is lost.

    Args:
        connection: of `session.connect`.
        infos: what is known of the ranks.
        limitations: what the captures cannot tell is appended.
        points: rows of a device at most; of neighbours that become one, the highest stays.

    Returns:
        rank, device, time_ns, allocated_bytes, reserved_bytes (null when unknown): the amounts from that time on.
    """
    found = []
    for series in device_series(connection, limitations):
        kept = _thinned(series.allocated, points)
        time_ns = series.time_ns[kept]
        reserved = series.reserved_at(time_ns)
        found.append(
            pa.table(
                {
                    "rank": pa.repeat(pa.scalar(series.rank, pa.int32()), len(kept)),
                    "device": pa.repeat(pa.scalar(series.device, pa.int32()), len(kept)),
                    "time_ns": pa.array(time_ns, pa.int64()),
                    "allocated_bytes": pa.array(series.allocated[kept], pa.int64()),
                    "reserved_bytes": pa.nulls(len(kept), pa.int64()) if reserved is None else pa.array(reserved, pa.int64()),
                }
            )
        )
    schema = pa.schema([*_DEVICE, *((name, pa.int64()) for name in ("time_ns", "allocated_bytes", "reserved_bytes"))])
    return pa.concat_tables([schema.empty_table(), *found])


def growth(connection: duckdb.DuckDBPyConnection, infos: Sequence[RankInfo], *, limitations: list[str]) -> pa.Table:
    """What was allocated, and what reserved, at the end of each iteration.

    Args:
        connection: of `session.connect`.
        infos: what is known of the ranks.
        limitations: what the captures cannot tell is appended.

    Returns:
        rank, device, iteration (null where iterations are inferred from what repeats), end_ns, allocated_bytes,
        change_bytes (since the end of the iteration before; null for the first), reserved_bytes (null when unknown).
    """
    rows: list[dict[str, Any]] = []
    for series in device_series(connection, limitations):
        ends, numbers = ends_of_iterations(connection, series, limitations)
        amounts, reserved = series.at(ends).tolist(), series.reserved_at(ends)
        for place, (end_ns, amount) in enumerate(zip(ends.tolist(), amounts, strict=True)):
            rows.append(
                {
                    "rank": series.rank,
                    "device": series.device,
                    "iteration": numbers[place] if numbers else None,
                    "end_ns": end_ns,
                    "allocated_bytes": amount,
                    "change_bytes": amount - amounts[place - 1] if place else None,
                    "reserved_bytes": None if reserved is None else int(reserved[place]),
                }
            )
    schema = pa.schema(
        [
            *_DEVICE,
            ("iteration", pa.int32()),
            *((name, pa.int64()) for name in ("end_ns", "allocated_bytes", "change_bytes", "reserved_bytes")),
        ]
    )
    return pa.Table.from_pylist(rows, schema=schema)


def sites(connection: duckdb.DuckDBPyConnection, infos: Sequence[RankInfo], *, limitations: list[str]) -> pa.Table:
    """Memory by the line of the program that allocated it.

    Args:
        connection: of `session.connect`.
        infos: what is known of the ranks.
        limitations: what the captures cannot tell is appended.

    Returns:
        A row per rank, device and site, the largest at the peak first: rank, device, site (`allocation_sites.site`),
        allocations, allocated_bytes (all of them added up), peak_bytes (the most the site held at once), bytes_at_peak (live
        when the device's peak was reached), end_bytes, growth_bytes_per_iteration (as in `memory`).
    """
    rows: list[dict[str, Any]] = []
    for series in device_series(connection, limitations):
        if series.allocations is None:
            continue
        ends, _ = ends_of_iterations(connection, series, limitations)
        _, peak_ns = series.peak
        names = [site(stack) for stack in stacks(connection)]
        number = {name: place for place, name in enumerate(dict.fromkeys(names))}
        of_row = np.array([number[name] for name in names], np.int64)[series.allocations["code"].to_numpy()]
        at_peak = live(series.allocations, peak_ns)
        for name, place in number.items():
            chosen = of_row == place
            if not chosen.any():
                continue
            mine = series.allocations.filter(pa.array(chosen))
            base, time_ns, amounts = running(mine)
            amounts = np.concatenate(([base], amounts))
            size = mine["bytes"].to_numpy()
            rows.append(
                {
                    "rank": series.rank,
                    "device": series.device,
                    "site": name,
                    "allocations": mine.num_rows,
                    "allocated_bytes": int(size.sum()),
                    "peak_bytes": int(amounts.max()),
                    "bytes_at_peak": int(size[at_peak[chosen]].sum()),
                    "end_bytes": int(amounts[-1]),
                    "growth_bytes_per_iteration": _growth(amounts[np.searchsorted(time_ns, ends, side="right")]),
                }
            )
    rows.sort(key=lambda row: (row["rank"], row["device"], -row["bytes_at_peak"], -row["peak_bytes"], row["site"]))
    amounts_of = ("allocations", "allocated_bytes", "peak_bytes", "bytes_at_peak", "end_bytes")
    schema = [*_DEVICE, ("site", pa.string()), *((name, pa.int64()) for name in amounts_of)]
    return pa.Table.from_pylist(rows, schema=pa.schema([*schema, ("growth_bytes_per_iteration", pa.float64())]))


def live_at_peak(connection: duckdb.DuckDBPyConnection, infos: Sequence[RankInfo], *, limitations: list[str]) -> pa.Table:
    """Every allocation that was live when a device's peak was reached, the largest first.

    Args:
        connection: of `session.connect`.
        infos: what is known of the ranks.
        limitations: what the captures cannot tell is appended.

    Returns:
        rank, device, bytes, allocated_ns (null: before the recording began), freed_ns (null: not freed), site, stack.
    """
    found = []
    for series in device_series(connection, limitations):
        if series.allocations is None:
            continue
        mine = series.allocations.filter(pa.array(live(series.allocations, series.peak[1]))).sort_by([("bytes", "descending")])
        every = stacks(connection)
        stack = [every[code] for code in mine["code"].to_pylist()]
        found.append(
            mine.select(["rank", "device", "bytes", "allocated_ns", "freed_ns"])
            .append_column("site", pa.array([site(each) for each in stack], pa.string()))
            .append_column("stack", pa.array(stack, pa.string()))
        )
    times = ((name, pa.int64()) for name in ("bytes", "allocated_ns", "freed_ns"))
    schema = pa.schema([*_DEVICE, *times, ("site", pa.string()), ("stack", pa.string())])
    return pa.concat_tables([schema.empty_table(), *(table.cast(schema) for table in found)])


def difference(before: pa.Table, after: pa.Table) -> pa.Table:
    """What changed between two recordings, site by site.

    Args:
        before: what `sites` gave for one.
        after: what `sites` gave for the other.

    Returns:
        A row per site, the largest change first: site, before_bytes_at_peak, after_bytes_at_peak, change_bytes_at_peak,
        before_end_bytes, after_end_bytes, change_end_bytes, before_allocations, after_allocations. Amounts are means of the
        ranks and devices recorded.
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
    names = ["before_bytes_at_peak", "after_bytes_at_peak", "change_bytes_at_peak", "before_end_bytes", "after_end_bytes"]
    names += ["change_end_bytes", "before_allocations", "after_allocations"]
    return pa.Table.from_pylist(rows, schema=pa.schema([("site", pa.string()), *((name, pa.float64()) for name in names)]))


def _free_blocks(connection: duckdb.DuckDBPyConnection) -> dict[tuple[int, int], tuple[int, float | None, int]]:
    """Largest free block, fragmentation and inactive split bytes of each rank's devices when the snapshot was taken."""
    rows = connection.execute(
        """select rank, coalesce(device, 0), sum(bytes - active_bytes)::bigint, max(largest_free_bytes)::bigint,
            coalesce(sum(bytes - active_bytes) filter (active_bytes > 0), 0)::bigint
        from segments where freed_ns is null and active_bytes is not null group by all"""
    ).fetchall()
    return {
        (rank, device): (largest or 0, 1 - (largest or 0) / free if free else None, split)
        for rank, device, free, largest, split in rows
    }


def _growth(amounts: Integers) -> float | None:
    """The median change from one amount to the next: set-up in the first iterations is no growth."""
    return float(np.median(np.diff(amounts))) if len(amounts) > 1 else None


def _thinned(amounts: Integers, points: int) -> Integers:
    """Places to keep: all, or the highest of each of some equal parts, and the last."""
    if len(amounts) <= points:
        return np.arange(len(amounts))
    bounds = np.linspace(0, len(amounts), points, dtype=np.int64)
    highest = [begin + int(amounts[begin:end].argmax()) for begin, end in itertools.pairwise(bounds)]
    return np.array([*highest, len(amounts) - 1], np.int64)
