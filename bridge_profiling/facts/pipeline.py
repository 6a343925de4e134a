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
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.facts.activity import POINT_TO_POINT
from bridge_profiling.facts.caveats import caveat
from bridge_profiling.facts.columns import Stage, StageWait
from bridge_profiling.facts.intervals import EMPTY, Intervals, grouped, run_starts, union, window
from bridge_profiling.facts.types import Answer
from bridge_profiling.traces.joins import ranks_of
from bridge_profiling.traces.tables import fields
from bridge_profiling.traces.types import RankInfo

if TYPE_CHECKING:
    import duckdb

_EXCHANGES = f"""
select rank, iteration, collective, operation, peer, "group", group_ranks, start_ns, end_ns from operations
where operation in {POINT_TO_POINT} and group_ranks is not null and iteration is not null
order by rank, iteration, start_ns
"""

# End of each rank's backward passes: a group that communicates only after the last exchange begins.
_OVER = f"""
with exchanged as (
    select rank, iteration, max(end_ns) as last_ns from operations where operation in {POINT_TO_POINT} group by all
), others as (
    select rank, iteration, group_id, min(start_ns) as first_ns from operations
    where operation not in {POINT_TO_POINT} group by all
)
select rank, iteration, min(first_ns) filter (first_ns >= last_ns) as over_ns
from exchanged join others using (rank, iteration) group by all
"""

_STAGE_WAITS = """
select rank, waits_for, iteration, count(*), sum(wait_ns)::bigint from waiting
where point_to_point and rank <> waits_for and wait_ns > 0 group by all
"""

# One query for all ranks, as the next one: one for each would read the tables of all ranks each time.
_WAITS = f"""
select operations.rank, operations.start_ns,
    operations.start_ns + coalesce(wait_ns, operations.end_ns - operations.start_ns) as end_ns, waits_for,
    operations.operation in {POINT_TO_POINT} as exchange
from operations left join waiting using (rank, collective) order by operations.rank
"""

_POINT_TO_POINT = f"select rank, start_ns, end_ns, collective from operations where operation in {POINT_TO_POINT} order by rank"

_TIMES = ("pipeline_us", "compute_us", "bubble_us", "warm_up_us", "steady_us", "cool_down_us", "other_idle_us")


BY_RANK = pa.schema(
    [
        *fields(pa.int32(), "iteration", "rank", "stage"),
        ("pipeline", pa.string()),
        ("boundary", pa.bool_()),
        ("microbatches", pa.int32()),
        *fields(pa.float64(), *_TIMES),
    ]
)


class _Place(NamedTuple):
    """A rank's pipeline (its ranks, as recorded), its stage, and the last stage."""

    pipeline: str
    stage: int
    last: int


@dataclass
class _Exchange:
    """Sends and receives of one rank in one iteration, in order: stages with times at which they ended."""

    received_from: list[tuple[int, int]] = field(default_factory=list)
    sent_to: list[tuple[int, int]] = field(default_factory=list)
    collectives: list[int] = field(default_factory=list)


def pipeline(by_rank: pa.Table) -> Answer:
    """The stages of the run's pipelines, from the answer of `pipeline_by_rank`.

    Returns:
        A row per stage: stage, stages, ranks (captured), iterations, microbatches (null if unknown), pipeline_us, compute_us,
        excess_compute_us (beyond the mean stage: uneven stages), bubble_us and its parts warm_up_us, steady_us and
        cool_down_us, other_idle_us, bubble_fraction (of pipeline_us), ideal_bubble_fraction (null if the microbatches are
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
        mean = {name: float(np.mean([row[name] for row in mine])) for name in _TIMES}
        found.append(
            {
                "stage": stage,
                "stages": count,
                "ranks": sorted({row["rank"] for row in mine}),
                "iterations": len({row["iteration"] for row in mine}),
                "microbatches": number,
                **mean,
                "bubble_fraction": mean["bubble_us"] / mean["pipeline_us"] if mean["pipeline_us"] else None,
                "ideal_bubble_fraction": (count - 1) / (number + count - 1) if number else None,
            }
        )
    even = float(np.mean([row["compute_us"] for row in found])) if found else 0.0
    for row in found:
        row["excess_compute_us"] = row["compute_us"] - even
    missing = ", ".join(str(stage) for stage in range(count) if found and stage not in stages)
    caveats = (caveat("stages_not_captured", missing=missing),) if missing else ()
    return Answer(pa.Table.from_pylist(found, schema=Stage.schema()), caveats)


def pipeline_waits(by_rank: pa.Table, connection: duckdb.DuckDBPyConnection) -> pa.Table:
    """Which stage waits for which in sends and receives, from the answer of `pipeline_by_rank`. Needs `measure_waiting`.

    Returns:
        A row per pair of stages, the longest waiting first: stage, waits_for_stage, ranks (captured, of the stage that waits),
        count (operations that waited) and wait_us, both means of an iteration of a rank, without boundary iterations if others
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
        amounts = {"count": count / times, "wait_us": wait_ns / 1e3 / times}
        found.append({"stage": stage, "waits_for_stage": other, "ranks": ranks, **amounts})
    return pa.Table.from_pylist(found, schema=StageWait.schema())


def pipeline_by_rank(
    connection: duckdb.DuckDBPyConnection,
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
        pipeline_us, compute_us, bubble_us, warm_up_us, steady_us, cool_down_us, other_idle_us.
    """
    places, exchanges, guessed = _exchanges(connection, infos)
    if not places:
        return Answer(BY_RANK.empty_table())
    offsets = dict(zip(clock_offsets["rank"].to_pylist(), clock_offsets["offset_ns"].to_pylist(), strict=True))
    spans, unclear = _spans(connection, kernel_times.to_pylist(), places, offsets)
    counts, interleaved = _microbatches(places, exchanges)
    edge = {(row["rank"], row["iteration"]) for row in marks.to_pylist() if row["boundary"]}
    rows: list[dict[str, Any]] = []
    waiting, messages = _waiting(connection, places), _by_rank(connection.sql(_POINT_TO_POINT).to_arrow_table())
    for rank, work in _by_rank(activity).items():
        if rank not in places:
            continue
        place, shift = places[rank], offsets.get(rank, 0)
        for iteration, (begin_ns, end_ns) in spans.get(place.pipeline, {}).items():
            if (rank, iteration) not in exchanges:
                continue
            lane = _Lane(place, exchanges[rank, iteration], begin_ns - shift, end_ns - shift)
            times_us = _bubbles(lane, work, messages[rank], waiting.get(rank, EMPTY))
            rows.append(
                {
                    "iteration": iteration,
                    "rank": rank,
                    "stage": place.stage,
                    "pipeline": place.pipeline,
                    "boundary": (rank, iteration) in edge,
                    "microbatches": counts.get((place.pipeline, iteration)),
                    **dict(zip(_TIMES, times_us, strict=True)),
                }
            )
    rows.sort(key=lambda row: (row["iteration"], row["pipeline"], row["stage"]))
    doubts = {
        "pipeline_groups_guessed": guessed,
        "pipeline_end_unknown": unclear,
        "pipeline_interleaved": interleaved,
        "microbatches_counted": counts,
    }
    return Answer(pa.Table.from_pylist(rows, schema=BY_RANK), tuple(caveat(code) for code, found in doubts.items() if found))


def _exchanges(
    connection: duckdb.DuckDBPyConnection, infos: Sequence[RankInfo]
) -> tuple[dict[int, _Place], dict[tuple[int, int], _Exchange], bool]:
    """Each rank's place, its exchanges by rank and iteration, and whether the pipelines are guessed."""
    rows = connection.sql(_EXCHANGES).to_arrow_table().to_pylist()
    members_of = {text: ranks_of(text) or () for text in {row["group_ranks"] for row in rows}}
    stage_of = {info.rank: info.coordinates["pp"][0] for info in infos if info.coordinates and "pp" in info.coordinates}
    named = [row for row in rows if "pipeline" in (row["group"] or "").lower()]
    across = [row for row in rows if len({stage_of[rank] for rank in members_of[row["group_ranks"]] if rank in stage_of}) > 1]
    chosen = across or named or rows
    places: dict[int, _Place] = {}
    exchanges: dict[tuple[int, int], _Exchange] = {}
    for row in chosen:
        rank, members = row["rank"], members_of[row["group_ranks"]]
        if rank not in members:
            continue
        places[rank] = _Place(row["group_ranks"], members.index(rank), len(members) - 1)
        exchange = exchanges.setdefault((rank, row["iteration"]), _Exchange())
        exchange.collectives.append(row["collective"])
        peer = row["peer"]
        if peer is None and len(members) == 2:
            peer = members[1 - members.index(rank)]
        if peer not in members:
            continue
        if row["operation"] != "send":
            exchange.received_from.append((members.index(peer), row["end_ns"]))
        if row["operation"] != "recv":
            exchange.sent_to.append((members.index(peer), row["end_ns"]))
    return places, exchanges, bool(chosen) and not across and not named


def _spans(
    connection: duckdb.DuckDBPyConnection,
    kernel_times: list[dict[str, Any]],
    places: dict[int, _Place],
    offsets: dict[int, int],
) -> tuple[dict[str, dict[int, tuple[int, int]]], bool]:
    """Begin and end of each pipeline's iterations on the common clock, and whether the end of some rank is unclear."""
    over = {(rank, iteration): time for rank, iteration, time in connection.execute(_OVER).fetchall() if time is not None}
    found: dict[str, dict[int, tuple[int, int]]] = {}
    unclear = False
    for row in kernel_times:
        rank, iteration, first_ns, last_ns = (row[name] for name in ("rank", "iteration", "compute_start_ns", "compute_end_ns"))
        if rank not in places or iteration is None or first_ns is None:
            continue
        unclear |= (rank, iteration) not in over
        begin, end = first_ns + offsets.get(rank, 0), over.get((rank, iteration), last_ns) + offsets.get(rank, 0)
        mine = found.setdefault(places[rank].pipeline, {})
        earlier = mine.get(iteration, (begin, end))
        mine[iteration] = (min(begin, earlier[0]), max(end, earlier[1]))
    return found, unclear


def _microbatches(
    places: dict[int, _Place], exchanges: dict[tuple[int, int], _Exchange]
) -> tuple[dict[tuple[str, int], int], bool]:
    """Messages from the first stage to the second by pipeline and iteration; or none, if the schedule is interleaved."""
    found: dict[tuple[str, int], int] = {}
    for (rank, iteration), exchange in exchanges.items():
        pipeline, stage, last = places[rank]
        if stage == 0:
            if last > 1 and any(other == last for other, _ in exchange.sent_to + exchange.received_from):
                return {}, True
            sent = sum(1 for target, _ in exchange.sent_to if target == 1)
            if sent:
                found[pipeline, iteration] = sent
    return found, False


def _waiting(connection: duckdb.DuckDBPyConnection, places: dict[int, _Place]) -> dict[int, Intervals]:
    """Each rank's waiting for ranks of other stages. An exchange whose partner is not captured counts as waiting."""

    def across(rank: int, waits_for: int | None, exchange: bool) -> bool:
        if waits_for is None:
            return exchange
        return waits_for != rank and (waits_for not in places or places[waits_for].stage != places[rank].stage)

    rows = connection.sql(_WAITS).to_arrow_table()
    columns = (rows[name].to_pylist() for name in ("rank", "waits_for", "exchange"))
    waits = np.array([rank in places and across(rank, *row) for rank, *row in zip(*columns, strict=True)], bool)
    rank, start, end = (rows[name].to_numpy()[waits] for name in ("rank", "start_ns", "end_ns"))
    begins = run_starts(rank)
    pieces = (np.split(times, begins[1:]) for times in (start, end))
    return {one: union(*times) for one, *times in zip(rank[begins].tolist(), *pieces, strict=True)} if len(rank) else {}


class _Lane(NamedTuple):
    """A rank's part in its pipeline's time of one iteration, on the rank's own clock."""

    place: _Place
    exchange: _Exchange
    begin_ns: int
    end_ns: int


def _by_rank(table: pa.Table) -> dict[int, dict[str, NDArray[Any]]]:
    """The columns of each rank's rows, which are together."""
    columns = {name: table[name].to_numpy() for name in table.column_names if name != "source"}
    bounds = [*run_starts(columns["rank"]).tolist(), len(table)]
    slices = [slice(begin, until) for begin, until in pairwise(bounds)]
    return {
        int(columns["rank"][mine.start]): {name: values[mine] for name, values in columns.items()}
        for mine in slices
        if mine.start < mine.stop
    }


def _bubbles(
    lane: _Lane, work: dict[str, NDArray[Any]], messages: dict[str, NDArray[Any]], waiting: Intervals
) -> tuple[float, ...]:
    """`_TIMES` of a lane, from the rank's activity, its sends and receipts, and its waiting for other stages."""
    begin, end, span = lane.begin_ns, lane.end_ns, window(lane.begin_ns, lane.end_ns)
    computes, other = work["computes"], ~np.isin(messages["collective"], lane.exchange.collectives)
    compute = union(work["start_ns"][computes], work["end_ns"][computes]) & span
    # Sends and receipts of another iteration, or of no pipeline, are work like any other.
    starts, ends = (np.concatenate([work[name][~computes], messages[name][other]]) for name in ("start_ns", "end_ns"))
    busy = (compute | (union(starts, ends) & span)) - waiting | compute
    first, final = (int(busy.start_ns[0]), int(busy.end_ns[-1])) if len(busy) else (end, end)
    bubble = ((waiting & span) | window(begin, first) | window(final, end)) - busy
    filled, drained = _phases(lane.exchange, lane.place, begin, end)
    times = np.array([begin, filled, drained, end])
    parts = bubble.within_ns(times[:-1], times[1:]).tolist()
    rest = end - begin - bubble.total_ns - busy.total_ns
    return tuple(each / 1e3 for each in (end - begin, compute.total_ns, bubble.total_ns, *parts, rest))


def _phases(exchange: _Exchange, place: _Place, begin_ns: int, end_ns: int) -> tuple[int, int]:
    """End of the warm-up and begin of the cool-down."""
    gradients = [time for source, time in exchange.received_from if source > place.stage]
    activations = [time for source, time in exchange.received_from if source < place.stage]
    sent = [time for target, time in exchange.sent_to if target > place.stage]
    filled = min(activations if place.stage == place.last else gradients, default=begin_ns)
    drained = max(sent if place.stage == 0 else activations, default=end_ns)
    filled = min(max(filled, begin_ns), end_ns)
    return filled, min(max(drained, filled), end_ns)
