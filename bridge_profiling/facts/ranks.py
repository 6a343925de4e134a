"""Ranks compared with each other: which ones wait, which are slow, and whether it is always the same rank.

A rank's own time in an iteration is the iteration without the time in which the rank only waited for others. The slowest rank
has the most own time: it waits least, and the others wait for it, some of them indirectly. Time in communication shows the
opposite, since fast ranks wait there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from bridge_profiling.facts.caveats import caveat
from bridge_profiling.facts.device import WHOLE_CAPTURE
from bridge_profiling.facts.intervals import Lanes, grouped, run_starts
from bridge_profiling.facts.parts import ENOUGH_ITERATIONS, steady_iterations
from bridge_profiling.facts.types import Answer
from bridge_profiling.traces.tables import fields

if TYPE_CHECKING:
    import duckdb
    from numpy.typing import NDArray

    from bridge_profiling.traces.types import RankInfo

#: A rank is slow in an iteration if its own time exceeds the median rank's by more than this share of the iteration.
SLOW = 0.02

#: Probabilities that some rank is slow as often by chance, below which confidence is high, and above which it is low.
_UNLIKELY, _DOUBTFUL = 0.01, 0.1

_WAITS = """
select iteration, rank, waits_for, sum(wait_ns) / 1e3 as wait_us, count(*) as operations
from waiting where rank <> waits_for group by all having wait_us > 0 order by iteration, rank, waits_for
"""

_WAITS_OF_RANKS = f"""
select rank, coalesce(iteration, {WHOLE_CAPTURE}) as iteration, start_ns, start_ns + wait_ns as end_ns
from waiting where waits_for <> rank order by rank, iteration
"""

_WAITED_FOR = """
select iteration, waits_for as rank, sum(wait_ns) / 1e3 as waited_for_us from waiting where rank <> waits_for group by all
"""

# Ranks that communicate, but without an operation that could be compared with another rank's.
_INCOMPARABLE = """
select distinct rank from operations where coalesce(group_size, 2) > 1 and rank not in (select rank from waiting) order by rank
"""

_SKEW = """
with lateness as (
    select rank, median(late_ns) / 1e3 as median_late_us, count(*) filter (waits_for = rank) as times_last,
        count(*) as operations
    from waiting group by rank
)
select began.rank, (start_ns + offset_ns - min(start_ns + offset_ns) over ()) / 1e3 as capture_start_us, offset_ns / 1e3 as
    clock_offset_us, median_late_us, coalesce(times_last, 0) as times_last, coalesce(operations, 0) as operations
from began join offsets using (rank) left join lateness using (rank) order by began.rank
"""

#: Columns of `waits`.
WAITS = pa.schema(
    [*fields(pa.int32(), "iteration", "rank", "waits_for"), ("wait_us", pa.float64()), ("operations", pa.int64())]
)

_RANKS = pa.schema(
    [
        *fields(pa.int32(), "iteration", "rank"),
        ("boundary", pa.bool_()),
        *fields(pa.float64(), "duration_us", "compute_us", "waiting_us", "own_us", "waited_for_us", "longest_wait_us"),
        ("place", pa.string()),
    ]
)

_STRAGGLERS = pa.schema(
    [
        ("rank", pa.int32()),
        *fields(pa.string(), "verdict", "confidence"),
        ("chance", pa.float64()),
        *fields(pa.int32(), "iterations", "times_slow", "times_slowest", "times_fastest"),
        *fields(pa.float64(), "excess_own_us", "excess_compute_us", "waited_for_us"),
    ]
)


def waits(connection: duckdb.DuckDBPyConnection) -> pa.Table:
    """Waiting between pairs of ranks. Needs `measure_waiting`.

    Returns:
        A row per pair that waited: iteration (null outside of all), rank, waits_for, wait_us (sum over kernels, also over
        simultaneous ones), operations. A rank waits directly for the last one to begin an operation; that rank may have waited
        elsewhere before, which `ranks` takes into account.
    """
    return connection.sql(_WAITS).to_arrow_table()


def ranks(
    connection: duckdb.DuckDBPyConnection | None,
    infos: Sequence[RankInfo],
    iterations: pa.Table,
    kernel_times: pa.Table,
    activity: pa.Table,
) -> Answer:
    """Each rank's iterations, with the slowest and the fastest rank of each. Needs `measure_waiting`.

    Args:
        connection: the run's tables; None without any operations.
        infos: of the ranks.
        iterations: the fact of that name, of these ranks, as are the next ones.
        kernel_times: the fact of that name.
        activity: the fact of that name.

    Returns:
        A row per iteration and rank: iteration (null for a capture without any, which counts as one), rank, boundary,
        duration_us (of the iteration's window on the device), compute_us (union of kernels that do not communicate),
        waiting_us (waiting for other ranks without compute), own_us (duration without waiting), waited_for_us (sum of what
        other ranks waited for it), longest_wait_us (its longest wait in one operation, also during compute), place: `slowest`,
        `fastest` or null. The last five are null for a rank whose communication could not be matched, or whose capture lost too
        much to be judged.
    """
    windows, kernels = (grouped(table.to_pylist(), "rank") for table in (iterations, kernel_times))
    waited_for = {row[:2]: row[2] for row in connection.execute(_WAITED_FOR).fetchall()} if connection else {}
    rows: list[dict[str, Any]] = []
    waited_ns = _waited_ns(connection, activity) if connection else {}
    for rank, mine in kernels.items():
        rows += _iterations(rank, windows.pop(rank, []), mine, waited_ns)
    unjudged = {info.rank for info in infos if not info.judged}
    incomparable = {row[0] for row in connection.execute(_INCOMPARABLE).fetchall()} if connection else set()
    rows.sort(key=lambda row: (-1 if row["iteration"] is None else row["iteration"], row["rank"]))
    for row in rows:
        row["waited_for_us"] = waited_for.get((row["iteration"], row["rank"]), 0.0)
        row["place"] = None
        if row["rank"] in incomparable or row["rank"] in unjudged:
            row["waiting_us"] = row["own_us"] = row["waited_for_us"] = row["longest_wait_us"] = None
    _place(rows)
    caveats = []
    if incomparable:
        caveats.append(caveat("waiting_of_rank_unknown", incomparable))
    if windows:
        caveats.append(caveat("ranks_without_work", windows))
    if any(row["iteration"] is None for row in rows):
        caveats.append(caveat("iterations_not_marked"))
    return Answer(pa.Table.from_pylist(rows, schema=_RANKS), tuple(caveats))


def start_skew(connection: duckdb.DuckDBPyConnection, clock_offsets: pa.Table, began: pa.Table) -> pa.Table:
    """When each capture starts, separate from how late its rank is. Needs `measure_waiting`.

    Returns:
        A row per rank: rank, capture_start_us (its first device event, relative to the earliest rank's), clock_offset_us (added
        to its times for that), median_late_us (time from an operation's first participant to this one), times_last (operations
        that it was last to begin), operations.
    """
    connection.register("offsets", clock_offsets.select(["rank", "offset_ns"]))
    connection.register("began", began.select(["rank", "start_ns"]))
    found = connection.sql(_SKEW).to_arrow_table()
    connection.unregister("offsets")
    connection.unregister("began")
    return found


def stragglers(ranks: pa.Table, infos: Sequence[RankInfo]) -> Answer:
    """Slow ranks, and whether they are always slow, from the answer of `ranks`. Confidence is lower if some rank is not judged.

    Returns:
        A row per rank, the slowest first: rank; verdict: `stable` (slow in more than half of the iterations), `sometimes` or
        `no`; confidence `high`, `medium` or `low`, null for `no`; chance (probability that some rank is slow as often if
        slowness were random in each iteration); iterations; times_slow, times_slowest, times_fastest; excess_own_us and
        excess_compute_us (mean excess over the median rank's own time and compute); waited_for_us. Means are per iteration.
        Empty for a single rank.
    """
    grid = _Grid(ranks)
    all_judged = all(info.judged and not info.doubts for info in infos)
    caveats = [caveat("boundary_iterations_count", captured=grid.captured)] if grid.with_boundary else []
    if len(grid.ranks) < 2 or not len(grid.numbers):
        return Answer(_STRAGGLERS.empty_table(), (*caveats, caveat("ranks_not_comparable")))
    if len(grid.numbers) < ENOUGH_ITERATIONS:
        caveats.append(caveat("few_iterations_of_ranks", iterations=len(grid.numbers)))
    own = _excess(grid.own_us)
    compute, waited_for = _excess(grid.compute_us), grid.waited_for_us
    slow = own > SLOW * np.nanmedian(grid.duration_us, axis=1, keepdims=True)
    seen = (~np.isnan(own)).sum(axis=0)
    times_slow = slow.sum(axis=0)
    share = float(slow.sum() / max(seen.sum(), 1))
    rows = []
    for place, rank in enumerate(grid.ranks):
        captured, times = int(seen[place]), int(times_slow[place])
        verdict = "stable" if 2 * times > captured else "sometimes" if times else "no"
        chance = _chance(times, captured, share, len(grid.ranks)) if times else 1.0
        rows.append(
            {
                "rank": rank,
                "verdict": verdict,
                "confidence": None if verdict == "no" else _confidence(chance, captured, all_judged=all_judged),
                "chance": chance,
                "iterations": captured,
                "times_slow": times,
                "times_slowest": grid.times[rank, "slowest"],
                "times_fastest": grid.times[rank, "fastest"],
                "excess_own_us": float(np.nanmean(own[:, place])),
                "excess_compute_us": float(np.nanmean(compute[:, place])),
                "waited_for_us": float(np.nanmean(waited_for[:, place])),
            }
        )
    rows.sort(key=lambda row: (-row["excess_own_us"], row["rank"]))
    return Answer(pa.Table.from_pylist(rows, schema=_STRAGGLERS), tuple(caveats))


def verdict(stragglers: pa.Table) -> str:
    """One word for a run.

    `stable`: a rank is slow in most iterations; `rotating`: several are, each in few; `occasional`: one is, in few; `none`;
    `unknown`.
    """
    words = stragglers["verdict"].to_pylist()
    if not words:
        return "unknown"
    if "stable" in words:
        return "stable"
    return {0: "none", 1: "occasional"}.get(words.count("sometimes"), "rotating")


def _waited_ns(connection: duckdb.DuckDBPyConnection, activity: pa.Table) -> dict[tuple[int, int], tuple[int, int]]:
    """How long each rank waited for other ones without computing, and its longest wait, by rank and iteration."""
    waits = connection.sql(_WAITS_OF_RANKS).to_arrow_table()
    if not waits.num_rows:
        return {}
    rank, iteration, start, end = (column.to_numpy() for column in waits.columns)
    change = (rank[1:] != rank[:-1]) | (iteration[1:] != iteration[:-1])
    first = np.flatnonzero(np.append(True, change))
    longest = np.maximum.reduceat(end - start, first)
    lane = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(rank))))
    lanes = Lanes(np.minimum.reduceat(start, first), np.maximum.reduceat(end, first))
    waited = lanes.union(lane, start, end)
    lane = lanes.lane_of(waited.start_ns)
    # On the rank's own clock again, where its compute is.
    to_clock = np.minimum.reduceat(start, first) - lanes.start_ns
    begin, until, of_rank = waited.start_ns + to_clock[lane], waited.end_ns + to_clock[lane], rank[first][lane]
    alone = until - begin
    of_event, start, end = (activity.filter(activity["computes"])[name].to_numpy() for name in ("rank", "start_ns", "end_ns"))
    begins = run_starts(of_event)
    if len(begins):
        ranks, place = of_event[begins], np.repeat(np.arange(len(begins)), np.diff(np.append(begins, len(of_event))))
        axis = Lanes(np.minimum.reduceat(start, begins), np.maximum.reduceat(end, begins))
        compute = axis.union(place, start, end)
        mine = np.flatnonzero(np.isin(of_rank, ranks))
        by_rank = np.argsort(ranks)
        where = by_rank[np.searchsorted(ranks[by_rank], of_rank[mine])]
        alone[mine] -= compute.within_ns(axis.place(where, begin[mine]), axis.place(where, until[mine]))
    summed = np.zeros(len(first), np.int64)
    np.add.at(summed, lane, alone)
    keys = zip(rank[first].tolist(), iteration[first].tolist(), strict=True)
    return dict(zip(keys, zip(summed.tolist(), longest.tolist(), strict=True), strict=True))


def _iterations(
    rank: int,
    windows: list[dict[str, Any]],
    kernels: list[dict[str, Any]],
    waited_ns: Mapping[tuple[int, int], tuple[int, int]],
) -> Iterator[dict[str, Any]]:
    if not windows:
        start_ns, end_ns = min(row["start_ns"] for row in kernels), max(row["end_ns"] for row in kernels)
        windows = [{"iteration": None, "boundary": False, "start_ns": start_ns, "end_ns": end_ns}]
    compute_us = {row["iteration"]: row["compute_us"] for row in kernels}
    for row in windows:
        number, duration_ns = row["iteration"], row["end_ns"] - row["start_ns"]
        alone_ns, longest_ns = waited_ns.get((rank, WHOLE_CAPTURE if number is None else number), (0, 0))
        yield {
            "iteration": number,
            "rank": rank,
            "boundary": row["boundary"] or False,
            "duration_us": duration_ns / 1e3,
            "compute_us": compute_us.get(number, 0.0),
            "waiting_us": alone_ns / 1e3,
            "own_us": (duration_ns - alone_ns) / 1e3,
            "longest_wait_us": longest_ns / 1e3,
        }


def _place(rows: list[dict[str, Any]]) -> None:
    """Mark the slowest and the fastest rank of each iteration with several ranks."""
    for every in grouped(rows, "iteration").values():
        mine = [row for row in every if row["own_us"] is not None]
        if len(mine) > 1:
            min(mine, key=lambda row: row["own_us"])["place"] = "fastest"
            max(mine, key=lambda row: row["own_us"])["place"] = "slowest"


class _Grid:
    """Columns of `ranks` as arrays of iterations by ranks; NaN where a rank did not capture an iteration."""

    def __init__(self, ranks: pa.Table) -> None:
        rows = [row | {"iteration": -1 if row["iteration"] is None else row["iteration"]} for row in ranks.to_pylist()]
        rows = [row for row in rows if row["own_us"] is not None]
        every = grouped(rows, "iteration").items()
        boundary = {number: any(row["boundary"] for row in each) for number, each in every if len(each) > 1}
        self.captured = len(boundary)
        self.numbers = steady_iterations(boundary)
        self.with_boundary = any(boundary[number] for number in self.numbers)
        line_of = {number: line for line, number in enumerate(self.numbers)}
        chosen = [row for row in rows if row["iteration"] in line_of]
        self.ranks = sorted({row["rank"] for row in chosen})
        place_of = {rank: place for place, rank in enumerate(self.ranks)}
        cells = [line_of[row["iteration"]] for row in chosen], [place_of[row["rank"]] for row in chosen]

        def filled(name: str) -> NDArray[np.float64]:
            grid = np.full((len(self.numbers), len(self.ranks)), np.nan)
            grid[cells] = [row[name] for row in chosen]
            return grid

        self.own_us, self.compute_us = filled("own_us"), filled("compute_us")
        self.waited_for_us, self.duration_us = filled("waited_for_us"), filled("duration_us")
        self.times = Counter((row["rank"], row["place"]) for row in chosen)


def _excess(grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """Excess over the median rank of the iteration."""
    return grid - np.nanmedian(grid, axis=1, keepdims=True)


def _chance(times: int, iterations: int, share: float, ranks: int) -> float:
    """Probability that any rank is slow that often, if each is slow in a share of iterations at random."""
    if share >= 1.0:
        return 1.0
    # Logarithms, because the number of ways is beyond any float from about a thousand iterations on.
    ways = math.lgamma(iterations + 1)
    tail = sum(
        math.exp(
            ways
            - math.lgamma(k + 1)
            - math.lgamma(iterations - k + 1)
            + k * math.log(share)
            + (iterations - k) * math.log1p(-share)
        )
        for k in range(times, iterations + 1)
    )
    return 1.0 - (1.0 - min(tail, 1.0)) ** ranks


def _confidence(chance: float, iterations: int, *, all_judged: bool) -> str:
    if iterations < ENOUGH_ITERATIONS or chance > _DOUBTFUL:
        return "low"
    likely = chance <= _UNLIKELY
    return ("medium" if likely else "low") if not all_judged else "high" if likely else "medium"
