"""Pipeline bubbles: how long stages wait for each other, and the schedule's ideal. Needs only sends and receives.

The pipeline of an iteration lasts from the first compute on any of its stages until the last stage to finish its backward
passes begins what follows: gradient synchronization, recognized as the first group that communicates after the last exchange
of an activation or gradient and never before. A stage's bubble is the part of it in which the stage has no work and waits for
another stage: for an activation or a gradient, in a collective across stages, or at the beginning and the end. Idle time for
other reasons, such as a host that launches late, is separate.

- warm-up: until the first gradient arrives from the next stage; on the last stage, until its first activation arrives.
- cool-down: after the last activation arrived; on the first stage, after it sent its last one.
- steady: between them. A schedule without interleaving has no bubble there.

Ideally the bubble is (p - 1) / (m + p - 1) of the pipeline, for p equal stages and m microbatches (Narayanan et al., 2021,
https://arxiv.org/abs/2104.04473).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.facts.intervals import EMPTY, Intervals, grouped, runs, union, window
from bridge_profiling.facts.matching import POINT_TO_POINT
from bridge_profiling.facts.types import Answer, Connection, caveat, declared, queried, schema
from bridge_profiling.traces.joins import ranks_of
from bridge_profiling.traces.types import RankInfo

_GROUPS = f"""
select distinct "group", group_ranks from operations
where operation in {POINT_TO_POINT} and group_ranks is not null and iteration is not null
"""

#: `partner`: the other rank of a group of two.
_PIPELINES = schema("group_name", "group_ranks", "rank", "stage", "last", "partner")

#: Sends and receipts within a pipeline, of ranks with a place in it.
_EXCHANGES = f"""
create or replace temp table exchanges as
select operations.rank, iteration, collective, operation, start_ns, end_ns, operations.group_ranks as pipeline, mine.stage,
    mine.last, other.stage as peer_stage
from operations join pipelines as mine on operations.rank = mine.rank and operations.group_ranks = mine.group_ranks
    and "group" is not distinct from mine.group_name
left join pipelines as other on other.group_ranks = mine.group_ranks and other.group_name is not distinct from mine.group_name
    and other.rank = coalesce(peer, mine.partner)
where operation in {POINT_TO_POINT} and iteration is not null
"""

# Of several pipelines, a rank's is the one in which it communicates last.
_PLACES = """
create or replace temp table places as
select distinct on (rank) rank, pipeline, stage, last from exchanges order by rank, iteration desc, start_ns desc
"""

# Each rank's part in an iteration. The number of microbatches is that of messages from the first stage to the second.
_PARTS = """
create or replace temp table parts as
select exchanges.rank, exchanges.iteration, any_value(places.pipeline) as pipeline, any_value(places.stage) as stage,
    min(end_ns) filter (operation <> 'send' and if(places.stage = places.last, peer_stage < places.stage,
        peer_stage > places.stage)) as filled_ns,
    max(end_ns) filter (if(places.stage = 0, operation <> 'recv' and peer_stage > 0,
        operation <> 'send' and peer_stage < places.stage)) as drained_ns,
    count(*) filter (places.stage = 0 and operation <> 'recv' and peer_stage = 1) as sent,
    bool_or(places.stage = 0 and places.last > 1 and peer_stage = places.last) as interleaved
from exchanges join places using (rank) group by all
"""

# A pipeline's time is on the common clock, each rank's part of it on the rank's own. The backward passes of a rank end where
# a group begins that communicates only after the last exchange.
_LANES = f"""
with exchanged as (
    select rank, iteration, max(end_ns) as last_ns from operations where operation in {POINT_TO_POINT} group by all
), others as (
    select rank, iteration, group_id, min(start_ns) as first_ns from operations
    where operation not in {POINT_TO_POINT} group by all
), backward as (
    select rank, iteration, min(first_ns) filter (first_ns >= last_ns) as over_ns
    from exchanged join others using (rank, iteration) group by all
), spans as (
    select pipeline, iteration, min(compute_start_ns + coalesce(offset_ns, 0)) as begin_ns,
        max(coalesce(over_ns, compute_end_ns) + coalesce(offset_ns, 0)) as end_ns, bool_or(over_ns is null) as unclear
    from kernel_times join places using (rank) left join backward using (rank, iteration) left join offsets using (rank)
    where compute_start_ns is not null and kernel_times.iteration is not null group by all
), counted as (
    select * replace (bool_or(interleaved) over () as interleaved),
        nullif(max(sent) over (partition by pipeline, iteration), 0) as microbatches
    from parts
)
select rank, iteration, stage, pipeline, (rank, iteration) in (select (rank, iteration) from marks where boundary) as boundary,
    if(interleaved, null, microbatches) as microbatches, interleaved, (select bool_or(unclear) from spans) as unclear,
    begin_ns - coalesce(offset_ns, 0) as begin_ns, end_ns - coalesce(offset_ns, 0) as end_ns, filled_ns, drained_ns
from counted left join spans using (pipeline, iteration) left join offsets using (rank)
order by iteration, pipeline, stage
"""

_STAGE_WAITS = """
select rank, waits_for, iteration, count(*), sum(wait_ns)::bigint from waiting
where point_to_point and rank <> waits_for and wait_ns > 0 group by all
"""

# Waiting for ranks of other stages. An exchange whose partner is not captured counts as waiting. One query for all ranks, as
# the next one: one for each would read the tables of all ranks each time.
_WAITS = f"""
select operations.rank, operations.start_ns,
    operations.start_ns + coalesce(wait_ns, operations.end_ns - operations.start_ns) as end_ns
from operations join places as mine using (rank) left join waiting using (rank, collective)
left join places as other on other.rank = waits_for
where if(waits_for is null, operations.operation in {POINT_TO_POINT},
    waits_for <> operations.rank and other.stage is distinct from mine.stage)
order by operations.rank
"""

# `part_of`: the iteration of the pipeline that the message belongs to.
_MESSAGES = f"""
select operations.rank, operations.start_ns, operations.end_ns, coalesce(exchanges.iteration, -1) as part_of
from operations left join exchanges using (rank, collective)
where operations.operation in {POINT_TO_POINT} order by operations.rank
"""

_TIMES = ("pipeline_ns", "compute_ns", "bubble_ns", "warm_up_ns", "steady_ns", "cool_down_ns", "other_idle_ns")


_RANKS = schema("iteration", "rank", "stage", "pipeline", "boundary", "microbatches", *_TIMES)


def pipeline(by_rank: pa.Table) -> Answer:
    """The stages of the run's pipelines, from the answer of `pipeline_by_rank`.

    Returns:
        A row per stage: stage, stages, ranks (captured), iterations, microbatches (null if unknown), pipeline_ns, compute_ns,
        excess_compute_ns (beyond the mean stage: uneven stages), bubble_ns and its parts warm_up_ns, steady_ns and
        cool_down_ns, other_idle_ns, bubble_fraction (of pipeline_ns), ideal_bubble_fraction (null if the microbatches are
        unknown). Times are means of an iteration of a rank, without boundary iterations if others exist. Empty without a
        pipeline.
    """
    rows = by_rank.to_pylist()
    steady = [row for row in rows if not row["boundary"]] or rows
    stages = grouped(steady, "stage")
    count = 1 + max((len(ranks_of(row["pipeline"]) or ()) - 1 for row in steady), default=0)
    found = []
    for stage, mine in sorted(stages.items()):
        known = {row["microbatches"] for row in mine}
        number = known.pop() if len(known) == 1 else None
        mean = {name: round(fmean(row[name] for row in mine)) for name in _TIMES}
        found.append(
            {
                "stage": stage,
                "stages": count,
                "ranks": sorted({row["rank"] for row in mine}),
                "iterations": len({row["iteration"] for row in mine}),
                "microbatches": number,
                **mean,
                "bubble_fraction": mean["bubble_ns"] / mean["pipeline_ns"] if mean["pipeline_ns"] else None,
                "ideal_bubble_fraction": (count - 1) / (number + count - 1) if number else None,
            }
        )
    even = round(fmean(row["compute_ns"] for row in found)) if found else 0
    for row in found:
        row["excess_compute_ns"] = row["compute_ns"] - even
    missing = ", ".join(str(stage) for stage in range(count) if found and stage not in stages)
    caveats = (caveat("stages_not_captured", missing=missing),) if missing else ()
    return Answer(pa.Table.from_pylist(found, schema=declared("Stage").schema()), caveats)


def pipeline_waits(by_rank: pa.Table, connection: Connection) -> pa.Table:
    """Which stage waits for which in sends and receives, and how long.

    Returns:
        A row per pair of stages, the longest waiting first: stage, waits_for_stage, ranks (captured, of the stage that waits),
        count (operations that waited) and wait_ns, both means of an iteration of a rank, without boundary iterations if others
        exist. A receipt waits for the stage that computes what it receives; a send waits until the other stage receives.
    """
    rows = by_rank.to_pylist()
    steady = {(row["rank"], row["iteration"]): row["stage"] for row in rows if not row["boundary"]}
    steady = steady or {(row["rank"], row["iteration"]): row["stage"] for row in rows}
    stage_of = {row["rank"]: row["stage"] for row in rows}
    waits = connection.execute(_STAGE_WAITS).fetchall() if rows else []
    sums: dict[tuple[int, int], list[int]] = {}
    for rank, waits_for, iteration, count, wait_ns in waits:
        if (rank, iteration) in steady and stage_of.get(waits_for, stage_of[rank]) != stage_of[rank]:
            known = sums.setdefault((stage_of[rank], stage_of[waits_for]), [0, 0])
            known[0], known[1] = known[0] + count, known[1] + wait_ns
    found = []
    for (stage, other), (count, wait_ns) in sorted(sums.items(), key=lambda item: (-item[1][1], item[0])):
        ranks = sorted({rank for (rank, _), each in steady.items() if each == stage})
        times = sum(each == stage for each in steady.values())
        amounts = {"count": count / times, "wait_ns": round(wait_ns / times)}
        found.append({"stage": stage, "waits_for_stage": other, "ranks": ranks, **amounts})
    return pa.Table.from_pylist(found, schema=declared("StageWait").schema())


def pipeline_by_rank(
    connection: Connection,
    infos: Sequence[RankInfo],
    clock_offsets: pa.Table,
    kernel_times: pa.Table,
    activity: pa.Table,
    marks: pa.Table,
) -> Answer:
    """Each rank's part in its pipeline, per iteration. Needs `measure_waiting`.

    Args:
        connection: the run's tables.
        infos: of the ranks.
        clock_offsets: the answer of that name.
        kernel_times: the fact of that name, of these ranks, as are the next ones.
        activity: the fact of that name.
        marks: the fact of that name.

    Returns:
        A row per iteration and rank of a pipeline: iteration, rank, stage, pipeline (its ranks), boundary, microbatches,
        pipeline_ns, compute_ns, bubble_ns, warm_up_ns, steady_ns, cool_down_ns, other_idle_ns.
    """
    pipelines, guessed = _pipelines(connection, infos)
    if not pipelines.num_rows:
        return Answer(_RANKS.empty_table())
    connection.register("pipelines", pipelines)
    for query in (_EXCHANGES, _PLACES, _PARTS):
        connection.execute(query)
    connection.unregister("pipelines")
    lanes = queried(connection, _LANES, offsets=clock_offsets, kernel_times=kernel_times, marks=marks).to_pylist()
    work, messages, waits = (_by_rank(each) for each in (activity, queried(connection, _MESSAGES), queried(connection, _WAITS)))
    waiting = {rank: union(times["start_ns"], times["end_ns"]) for rank, times in waits.items()}
    rows = [
        lane | dict(zip(_TIMES, _bubbles(lane, work[rank], messages[rank], waiting.get(rank, EMPTY)), strict=True))
        for lane in lanes
        if (rank := lane["rank"]) in work and lane["begin_ns"] is not None
    ]
    doubts = {
        "pipeline_groups_guessed": guessed and bool(lanes),
        "pipeline_end_unknown": any(lane["unclear"] for lane in lanes),
        "pipeline_interleaved": any(lane["interleaved"] for lane in lanes),
        "microbatches_counted": any(lane["microbatches"] for lane in lanes),
    }
    return Answer(pa.Table.from_pylist(rows, schema=_RANKS), tuple(caveat(code) for code, found in doubts.items() if found))


def _pipelines(connection: Connection, infos: Sequence[RankInfo]) -> tuple[pa.Table, bool]:
    """The ranks of each group that is a pipeline, with their stages, and whether these groups are guessed."""
    groups = connection.execute(_GROUPS).fetchall()
    members_of = {group: ranks_of(group[1]) or () for group in groups}
    stage_of = {info.rank: info.coordinates["pp"][0] for info in infos if info.coordinates and "pp" in info.coordinates}
    across = [each for each in groups if len({stage_of[rank] for rank in members_of[each] if rank in stage_of}) > 1]
    sure = across or [(name, ranks) for name, ranks in groups if "pipeline" in (name or "").lower()]
    rows = [
        (*group, rank, stage, len(members_of[group]) - 1, members_of[group][1 - stage] if len(members_of[group]) == 2 else None)
        for group in sure or groups
        for stage, rank in enumerate(members_of[group])
    ]
    found = [dict(zip(_PIPELINES.names, row, strict=True)) for row in rows]
    return pa.Table.from_pylist(found, schema=_PIPELINES), not sure


def _by_rank(table: pa.Table) -> dict[int, dict[str, NDArray[Any]]]:
    """The columns of each rank's rows, which are together."""
    columns = {name: table[name].to_numpy() for name in table.column_names if name != "source"}
    slices = runs(columns["rank"])
    return {int(columns["rank"][mine.start]): {name: values[mine] for name, values in columns.items()} for mine in slices}


def _bubbles(
    lane: dict[str, Any], work: dict[str, NDArray[Any]], messages: dict[str, NDArray[Any]], waiting: Intervals
) -> tuple[int, ...]:
    """`_TIMES` of a row of `_LANES`, from the rank's activity, its sends and receipts, and its waiting for other stages."""
    begin, end, span = lane["begin_ns"], lane["end_ns"], window(lane["begin_ns"], lane["end_ns"])
    computes, other = work["computes"], messages["part_of"] != lane["iteration"]
    compute = union(work["start_ns"][computes], work["end_ns"][computes]) & span
    # Sends and receipts of another iteration, or of no pipeline, are work like any other.
    starts, ends = (np.concatenate([work[name][~computes], messages[name][other]]) for name in ("start_ns", "end_ns"))
    busy = (compute | (union(starts, ends) & span)) - waiting | compute
    first, final = (int(busy.start_ns[0]), int(busy.end_ns[-1])) if len(busy) else (end, end)
    bubble = ((waiting & span) | window(begin, first) | window(final, end)) - busy
    # End of the warm-up and begin of the cool-down.
    filled = min(max(begin if lane["filled_ns"] is None else lane["filled_ns"], begin), end)
    drained = min(max(end if lane["drained_ns"] is None else lane["drained_ns"], filled), end)
    times = np.array([begin, filled, drained, end])
    parts = bubble.within_ns(times[:-1], times[1:]).tolist()
    rest = end - begin - bubble.total_ns - busy.total_ns
    return end - begin, compute.total_ns, bubble.total_ns, *parts, rest
