"""Ranks compared with each other: which ones wait, which are slow, and whether it is always the same rank.

A rank's own time in an iteration is the iteration without the time in which the rank only waited for others. The slowest rank
has the most own time: it waits least, and the others wait for it, some of them indirectly. Time in communication shows the
opposite, since fast ranks wait there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bridge_profiling.facts.device import WHOLE_CAPTURE
from bridge_profiling.facts.intervals import Lanes, grid, run_starts, totals
from bridge_profiling.facts.parts import ENOUGH_ITERATIONS, steady_iterations
from bridge_profiling.facts.types import Answer, Connection, caveat, queried, schema
from bridge_profiling.traces.tables import to_int64
from bridge_profiling.traces.types import RankInfo

#: A rank is slow in an iteration if its own time exceeds the median rank's by more than this share of the iteration.
SLOW = 0.02

#: Probabilities that some rank is slow as often by chance, below which confidence is high, and above which it is low.
_UNLIKELY, _DOUBTFUL = 0.01, 0.1

_WAITS = """
select iteration, rank, waits_for, sum(wait_ns) as wait_ns, count(*) as operations
from waiting where rank <> waits_for group by all having sum(wait_ns) > 0 order by iteration, rank, waits_for
"""

_WAITS_OF_RANKS = """
select rank, iteration, start_ns, start_ns + wait_ns as end_ns
from waiting where waits_for <> rank order by rank, iteration
"""

_TIMES = """
with spans as (
    select rank, iteration, coalesce(boundary, false) as boundary, start_ns, end_ns from iterations
    where rank in (select rank from kernel_times)
    union all
    select rank, null, false, min(start_ns), max(end_ns) from kernel_times where rank not in (select rank from iterations)
    group by rank
), waited_for as (
    select iteration, waits_for as rank, sum(wait_ns) as waited_for_ns from waiting where rank <> waits_for group by all
), timed as (
    select spans.*, spans.end_ns - spans.start_ns as duration_ns, coalesce(compute_ns, 0) as compute_ns,
        if(unknown.rank is null, coalesce(alone_ns, 0), null) as waiting_ns,
        if(unknown.rank is null, coalesce(waited_for_ns, 0), null) as waited_for_ns,
        if(unknown.rank is null, coalesce(longest_ns, 0), null) as longest_wait_ns, duration_ns - waiting_ns as own_ns
    from spans left join unknown using (rank)
    left join kernel_times on kernel_times.rank = spans.rank and kernel_times.iteration is not distinct from spans.iteration
    left join waited on waited.rank = spans.rank and waited.iteration is not distinct from spans.iteration
    left join waited_for on waited_for.rank = spans.rank and waited_for.iteration is not distinct from spans.iteration
)
select iteration, rank, boundary, duration_ns, compute_ns, waiting_ns, own_ns, waited_for_ns, longest_wait_ns,
    case when count(own_ns) over (partition by iteration) < 2 then null
        when row_number() over (partition by iteration order by own_ns desc nulls last, rank) = 1 then 'slowest'
        when row_number() over (partition by iteration order by own_ns nulls last, rank) = 1 then 'fastest' end as place
from timed order by iteration nulls first, rank
"""

# Ranks that communicate, but without an operation that could be compared with another rank's.
_INCOMPARABLE = """
select distinct rank from operations where coalesce(group_size, 2) > 1 and rank not in (select rank from waiting) order by rank
"""

_SKEW = """
with lateness as (
    select rank, round(median(late_ns)) as median_late_ns, count(*) filter (waits_for = rank) as times_last,
        count(*) as operations
    from waiting group by rank
)
select began.rank, start_ns + offset_ns - min(start_ns + offset_ns) over () as capture_start_ns,
    offset_ns as clock_offset_ns, median_late_ns, coalesce(times_last, 0) as times_last, coalesce(operations, 0) as operations
from began join offsets using (rank) left join lateness using (rank) order by began.rank
"""

#: Columns of `waits`.
WAITS = schema("iteration", "rank", "waits_for", "wait_ns", "operations")

_STRAGGLERS = schema(
    *("rank", "verdict", "confidence", "chance", "iterations", "times_slow", "times_slowest", "times_fastest"),
    *("excess_own_ns", "excess_compute_ns", "waited_for_ns"),
    **dict.fromkeys(("iterations", "times_slow", "times_slowest", "times_fastest"), pa.int32()),
)


def waits(connection: Connection) -> pa.Table:
    """Waiting between pairs of ranks: which rank waits for which, and how long, in each iteration.

    Returns:
        A row per pair that waited: iteration (null outside of all), rank, waits_for, wait_ns (sum over kernels, also over
        simultaneous ones), operations. A rank waits directly for the last one to begin an operation; that rank may have waited
        elsewhere before, which `ranks` takes into account.
    """
    return queried(connection, _WAITS)


def ranks(
    connection: Connection,
    infos: Sequence[RankInfo],
    iterations: pa.Table,
    kernel_times: pa.Table,
    activity: pa.Table,
) -> Answer:
    """Each rank's iterations, with the slowest and the fastest rank of each. Needs `measure_waiting`.

    Args:
        connection: the run's tables.
        infos: of the ranks.
        iterations: the fact of that name, of these ranks, as are the next ones.
        kernel_times: the fact of that name.
        activity: the fact of that name.

    Returns:
        A row per iteration and rank: iteration (null for a capture without any, which counts as one), rank, boundary,
        duration_ns (of the iteration's window on the device), compute_ns (union of kernels that do not communicate),
        waiting_ns (waiting for other ranks without compute), own_ns (duration without waiting), waited_for_ns (sum of what
        other ranks waited for it), longest_wait_ns (its longest wait in one operation, also during compute), place: `slowest`,
        `fastest` or null. The last five are null for a rank whose communication could not be matched, or whose capture lost too
        much to be judged.
    """
    incomparable = {row[0] for row in connection.execute(_INCOMPARABLE).fetchall()}
    unknown = pa.array(sorted(incomparable.union(info.rank for info in infos if not info.judged)), pa.int32())
    tables = {"iterations": iterations, "kernel_times": kernel_times, "unknown": pa.table({"rank": unknown})}
    found = queried(connection, _TIMES, waited=_waited(connection, activity), **tables)
    caveats = []
    if incomparable:
        caveats.append(caveat("waiting_of_rank_unknown", incomparable))
    if idle := set(iterations["rank"].to_pylist()).difference(kernel_times["rank"].to_pylist()):
        caveats.append(caveat("ranks_without_work", idle))
    if found["iteration"].null_count:
        caveats.append(caveat("iterations_not_marked"))
    return Answer(found, tuple(caveats))


def start_skew(connection: Connection, clock_offsets: pa.Table, began: pa.Table) -> pa.Table:
    """When each capture starts, separate from how late its rank is. Needs `measure_waiting`.

    Returns:
        A row per rank: rank, capture_start_ns (its first device event, relative to the earliest rank's), clock_offset_ns (added
        to its times for that), median_late_ns (time from an operation's first participant to this one), times_last (operations
        that it was last to begin), operations.
    """
    return queried(
        connection, _SKEW, offsets=clock_offsets.select(["rank", "offset_ns"]), began=began.select(["rank", "start_ns"])
    )


def stragglers(ranks: pa.Table, infos: Sequence[RankInfo]) -> Answer:
    """Slow ranks, and whether they are always slow, from the answer of `ranks`. Confidence is lower if some rank is not judged.

    Returns:
        A row per rank, the slowest first: rank; verdict: `stable` (slow in more than half of the iterations), `sometimes` or
        `no`; confidence `high`, `medium` or `low`, null for `no`; chance (probability that some rank is slow as often if
        slowness were random in each iteration); iterations; times_slow, times_slowest, times_fastest; excess_own_ns and
        excess_compute_ns (mean excess over the median rank's own time and compute); waited_for_ns. Means are per iteration.
        Empty for a single rank.
    """
    known = ranks.filter(ranks["own_ns"].is_valid())
    iteration = known["iteration"].fill_null(WHOLE_CAPTURE)
    known = known.set_column(known.column_names.index("iteration"), "iteration", iteration)
    every = totals(known, ["iteration"], boundary=("boundary", "any"), ranks=("rank", "count")).to_pylist()
    boundary = {row["iteration"]: row["boundary"] for row in every if row["ranks"] > 1}
    numbers = steady_iterations(boundary)
    chosen = known.filter(pc.is_in(iteration, pa.array(numbers, pa.int32())))
    names = sorted(set(chosen["rank"].to_pylist()))
    places = Counter(zip(chosen["rank"].to_pylist(), chosen["place"].to_pylist(), strict=True))
    all_judged = all(info.judged and not info.doubts for info in infos)
    caveats = [caveat("boundary_iterations_count", captured=len(boundary))] if any(map(boundary.get, numbers)) else []
    if len(names) < 2 or not numbers:
        return Answer(_STRAGGLERS.empty_table(), (*caveats, caveat("ranks_not_comparable")))
    if len(numbers) < ENOUGH_ITERATIONS:
        caveats.append(caveat("few_iterations_of_ranks", iterations=len(numbers)))
    columns = ("own_ns", "compute_ns", "waited_for_ns", "duration_ns")
    own, compute, waited_for, duration = (grid(chosen, column, numbers, names) for column in columns)
    own, compute = (times - np.nanmedian(times, axis=1, keepdims=True) for times in (own, compute))
    slow = own > SLOW * np.nanmedian(duration, axis=1, keepdims=True)
    seen = (~np.isnan(own)).sum(axis=0)
    times_slow = slow.sum(axis=0)
    share = float(slow.sum() / max(seen.sum(), 1))
    rows = []
    for place, rank in enumerate(names):
        captured, times = int(seen[place]), int(times_slow[place])
        verdict = "stable" if 2 * times > captured else "sometimes" if times else "no"
        chance = _chance(times, captured, share, len(names)) if times else 1.0
        rows.append(
            {
                "rank": rank,
                "verdict": verdict,
                "confidence": None if verdict == "no" else _confidence(chance, captured, all_judged=all_judged),
                "chance": chance,
                "iterations": captured,
                "times_slow": times,
                "times_slowest": places[rank, "slowest"],
                "times_fastest": places[rank, "fastest"],
                "excess_own_ns": round(np.nanmean(own[:, place])),
                "excess_compute_ns": round(np.nanmean(compute[:, place])),
                "waited_for_ns": round(np.nanmean(waited_for[:, place])),
            }
        )
    rows.sort(key=lambda row: (-row["excess_own_ns"], row["rank"]))
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


def _waited(connection: Connection, activity: pa.Table) -> pa.Table:
    """How long each rank waited for other ones without computing, and its longest wait, by rank and iteration."""
    waits = connection.sql(_WAITS_OF_RANKS).to_arrow_table()
    rank, iteration, start, end = (to_int64(column, WHOLE_CAPTURE) for column in waits.columns)
    first = run_starts((rank << 32) + iteration)
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
    rows = waits.select(["rank", "iteration"]).take(pa.array(first))
    return rows.append_column("alone_ns", pa.array(summed)).append_column("longest_ns", pa.array(longest))


def _chance(times: int, iterations: int, share: float, ranks: int) -> float:
    """Probability that any rank is slow that often, if each is slow in a share of iterations at random."""
    if share >= 1.0:
        return 1.0

    def probability(slow: int) -> float:
        # Logarithms, because the number of ways is beyond any float from about a thousand iterations on.
        ways = math.lgamma(iterations + 1) - math.lgamma(slow + 1) - math.lgamma(iterations - slow + 1)
        return math.exp(ways + slow * math.log(share) + (iterations - slow) * math.log1p(-share))

    tail = sum(map(probability, range(times, iterations + 1)))
    return 1.0 - (1.0 - min(tail, 1.0)) ** ranks


def _confidence(chance: float, iterations: int, *, all_judged: bool) -> str:
    if iterations < ENOUGH_ITERATIONS or chance > _DOUBTFUL:
        return "low"
    likely = chance <= _UNLIKELY
    return ("medium" if likely else "low") if not all_judged else "high" if likely else "medium"
