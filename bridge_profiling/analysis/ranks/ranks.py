"""Ranks compared: who waits for whom, who is slow, whether it stays the same rank. Says what was seen, not what to do.

A rank's own time of an iteration is the iteration without the time in which it only waited for other ranks. The slowest rank
is the one with the most own time: it waits least, and the others wait for it, also those that do so by way of a third. Time
spent in communication says the opposite, since whoever is fast waits there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from bridge_profiling.analysis.attribution.device import Windows
from bridge_profiling.analysis.attribution.device import windows as device_windows
from bridge_profiling.analysis.caveats import name_ranks
from bridge_profiling.analysis.intervals import EMPTY, Intervals, rows_of, union
from bridge_profiling.analysis.ranks.matching import tell
from bridge_profiling.analysis.ranks.stragglers import stragglers
from bridge_profiling.analysis.ranks.waiting import measure_waiting, rank_by_rank
from bridge_profiling.traces.types import RankInfo

if TYPE_CHECKING:
    import duckdb

_WAITS = """
select iteration, rank, waits_for, sum(wait_ns) / 1e3 as wait_us, count(*) as operations
from waiting where rank <> waits_for group by all having wait_us > 0 order by iteration, rank, waits_for
"""

_WAITED_FOR = """
select iteration, waits_for as rank, sum(wait_ns) / 1e3 as waited_for_us from waiting where rank <> waits_for group by all
"""

# Ranks that communicate, and none of whose operations could be compared with another rank's.
_INCOMPARABLE = """
select distinct rank from operations where coalesce(group_size, 2) > 1 and rank not in (select rank from waiting) order by rank
"""

_SKEW = """
with began as (
    select rank, min(start_ns) as start_ns from device_events group by rank
), lateness as (
    select rank, median(late_ns) / 1e3 as median_late_us, count(*) filter (waits_for = rank) as times_last,
        count(*) as operations
    from waiting group by rank
)
select began.rank, (start_ns + offset_ns - min(start_ns + offset_ns) over ()) / 1e3 as capture_start_us, offset_ns / 1e3 as
    clock_offset_us, median_late_us, coalesce(times_last, 0) as times_last, coalesce(operations, 0) as operations
from began join offsets using (rank) left join lateness using (rank) order by began.rank
"""

#: Stands for no iteration in arrays.
_NONE = -1

_RANKS = pa.schema(
    [
        ("iteration", pa.int32()),
        ("rank", pa.int32()),
        ("boundary", pa.bool_()),
        ("duration_us", pa.float64()),
        ("compute_us", pa.float64()),
        ("waiting_us", pa.float64()),
        ("own_us", pa.float64()),
        ("waited_for_us", pa.float64()),
        ("place", pa.string()),
    ]
)


def waits(connection: duckdb.DuckDBPyConnection, infos: Sequence[RankInfo], *, limitations: list[str]) -> pa.Table:
    """Who waits for whom: the matrix rank by rank, one row for each of its cells that is not empty.

    Args:
        connection: of `session.connect`.
        infos: what is known of the ranks.
        limitations: what the captures cannot tell is appended.

    Returns:
        iteration (null outside of all), rank, waits_for, wait_us, operations. Kernels' time added up: where two of them wait
        at once, both count. The one waited for is the last to begin an operation, directly; it may be late because it
        waited elsewhere, which `ranks` sees through.
    """
    measure_waiting(connection, infos, limitations=limitations)
    return connection.sql(_WAITS).to_arrow_table()


def ranks(connection: duckdb.DuckDBPyConnection, infos: Sequence[RankInfo], *, limitations: list[str]) -> pa.Table:
    """Each rank's iterations, and which rank was the slowest and the fastest of each.

    Args:
        connection: of `session.connect`.
        infos: what is known of the ranks.
        limitations: what the captures cannot tell is appended.

    Returns:
        A row per iteration and rank: iteration (null for a capture without any, taken as a whole), rank, boundary,
        duration_us (of the iteration's window on the device, `iterations.windows`), compute_us (union of kernels that do not
        communicate), waiting_us (waiting for other ranks while nothing was computed), own_us (duration less waiting),
        waited_for_us (what other ranks waited for it, added up), place: `slowest`, `fastest` or null. The four are null for a
        rank none of whose communication could be matched.
    """
    measure_waiting(connection, infos, limitations=limitations)
    windows = _windows(connection)
    waited_for = {(row[0], row[1]): row[2] for row in connection.execute(_WAITED_FOR).fetchall()}
    rows: list[dict[str, Any]] = []
    query = "select rank, kind, start_ns, end_ns, iteration from device_events where kind in ('compute', 'communication')"
    for rank, events in rank_by_rank(connection.cursor(), query):
        rows += _iterations(rank, windows.pop(rank, None), events, _waiting_of(connection, rank))
    incomparable = {row[0] for row in connection.execute(_INCOMPARABLE).fetchall()}
    if incomparable:
        tell(
            limitations,
            f"how long {len(incomparable)} ranks, as rank {min(incomparable)}, waited is unknown, since none of their "
            "communication could be matched: whether they are slow cannot be told",
        )
    if windows:
        tell(limitations, f"no work on a device was recorded of {name_ranks(list(windows))}: not compared")
    rows.sort(key=lambda row: (-1 if row["iteration"] is None else row["iteration"], row["rank"]))
    if any(row["iteration"] is None for row in rows):
        tell(limitations, "captures without marked iterations are compared as wholes")
    for row in rows:
        row["waited_for_us"] = waited_for.get((row["iteration"], row["rank"]), 0.0)
        row["place"] = None
        if row["rank"] in incomparable:
            row["waiting_us"] = row["own_us"] = row["waited_for_us"] = None
    _place(rows)
    return pa.Table.from_pylist(rows, schema=_RANKS)


def straggler(connection: duckdb.DuckDBPyConnection, infos: Sequence[RankInfo], *, limitations: list[str]) -> pa.Table:
    """Which ranks are slow, whether always the same, and how sure that is: `stragglers.stragglers` of `ranks`.

    Args:
        connection: of `session.connect`.
        infos: what is known of the ranks.
        limitations: what the captures cannot tell is appended.
    """
    return stragglers(ranks(connection, infos, limitations=limitations), limitations=limitations)


def start_skew(connection: duckdb.DuckDBPyConnection, infos: Sequence[RankInfo], *, limitations: list[str]) -> pa.Table:
    """When each capture starts, told from how late its rank is: a profiler that started late says nothing about the rank.

    Args:
        connection: of `session.connect`.
        infos: what is known of the ranks.
        limitations: what the captures cannot tell is appended.

    Returns:
        A row per rank: rank, capture_start_us (its first device event after the earliest rank's, on the common clock),
        clock_offset_us (what was added to its times for that), median_late_us (how long after an operation's first
        participant it begins, on the common clock), times_last (operations it was last to begin), operations.
    """
    measure_waiting(connection, infos, limitations=limitations)
    return connection.sql(_SKEW).to_arrow_table()


def _windows(connection: duckdb.DuckDBPyConnection) -> dict[int, pa.Table]:
    """Each rank's iterations."""
    rows = connection.sql(
        """select rank, iteration, start_ns, end_ns, coalesce(boundary, false) as boundary
        from iterations order by rank, start_ns"""
    ).to_arrow_table()
    rank = rows["rank"].to_numpy()
    bounds = np.searchsorted(rank, np.unique(rank)), np.searchsorted(rank, np.unique(rank), side="right")
    return {int(rank[begin]): rows.slice(begin, end - begin) for begin, end in zip(*bounds, strict=True)}


def _waiting_of(connection: duckdb.DuckDBPyConnection, rank: int) -> pa.Table:
    """When a rank waited for another one."""
    return connection.sql(
        f"select iteration, start_ns, start_ns + wait_ns as end_ns from waiting where rank = {rank} and waits_for <> rank"
    ).to_arrow_table()


def _iterations(rank: int, marked: pa.Table | None, events: pa.Table, waiting: pa.Table) -> list[dict[str, Any]]:
    """A rank's rows of `ranks`."""
    computing = rows_of(events["kind"], "compute")
    start, end = events["start_ns"].to_numpy()[computing], events["end_ns"].to_numpy()[computing]
    of_event = events["iteration"].fill_null(_NONE).to_numpy()[computing]
    of_wait = waiting["iteration"].fill_null(_NONE).to_numpy()
    compute = union(start, end)
    windows = device_windows(marked, events) if marked is not None else _whole(events)
    rows = []
    for iteration, boundary, start_ns, end_ns in zip(
        windows.iteration.tolist(), windows.boundary.tolist(), windows.start_ns.tolist(), windows.end_ns.tolist(), strict=True
    ):
        here = of_event == iteration
        waited = _chosen(waiting, of_wait == iteration)
        alone_ns = waited.total_ns - int(compute.within_ns(waited.start_ns, waited.end_ns).sum())
        rows.append(
            {
                "iteration": None if iteration == _NONE else iteration,
                "rank": rank,
                "boundary": boundary,
                "duration_us": (end_ns - start_ns) / 1e3,
                "compute_us": union(start[here], end[here]).total_ns / 1e3,
                "waiting_us": alone_ns / 1e3,
                "own_us": (end_ns - start_ns - alone_ns) / 1e3,
            }
        )
    return rows


def _whole(events: pa.Table) -> Windows:
    """A capture without iterations as one."""
    return Windows(
        np.array([_NONE], np.int32),
        np.array([False]),
        np.array([events["start_ns"].to_numpy().min()]),
        np.array([events["end_ns"].to_numpy().max()]),
    )


def _chosen(ranges: pa.Table, rows: np.ndarray) -> Intervals:
    return union(ranges["start_ns"].to_numpy()[rows], ranges["end_ns"].to_numpy()[rows]) if len(rows) else EMPTY


def _place(rows: list[dict[str, Any]]) -> None:
    """Mark the slowest and the fastest rank of each iteration that more than one rank captured."""
    by_iteration: dict[int | None, list[dict[str, Any]]] = {}
    for row in rows:
        by_iteration.setdefault(row["iteration"], []).append(row)
    for every in by_iteration.values():
        mine = [row for row in every if row["own_us"] is not None]
        if len(mine) > 1:
            min(mine, key=lambda row: row["own_us"])["place"] = "fastest"
            max(mine, key=lambda row: row["own_us"])["place"] = "slowest"
