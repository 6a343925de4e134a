"""How long pipeline stages wait for one another, against what the schedule costs at best. Needs sends and receives only.

The pipeline of an iteration lasts from the first compute on any of its stages until the last stage to finish its backward
passes begins what follows them: gradient synchronization, recognised as the first group that communicates after the last
activation or gradient was exchanged and never before. A stage's bubble is the part of it in which the stage has no work and
waits for another stage: for an activation or a gradient, in a collective across stages, or at the beginning and the end. Idle
time for other reasons, such as a host that launches late, is kept apart.

- warm-up: until the first gradient comes from the next stage; on the last stage, until its first activation comes.
- cool-down: after the last activation came; on the first stage, after it sent its last one.
- steady: between them. A schedule without interleaving has no bubble there.

At best the bubble is (p - 1) / (m + p - 1) of the pipeline, for p even stages and m microbatches (Narayanan et al., 2021,
https://arxiv.org/abs/2104.04473).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from bridge_profiling.analysis.intervals import Intervals, rows_of, union, window
from bridge_profiling.analysis.ranks.matching import POINT_TO_POINT, tell
from bridge_profiling.analysis.ranks.waiting import measure_waiting, rank_by_rank
from bridge_profiling.traces.joins import ranks_of
from bridge_profiling.traces.types import RankInfo

if TYPE_CHECKING:
    import duckdb

_EXCHANGES = f"""
select rank, iteration, collective, operation, peer, "group", group_ranks, start_ns, end_ns from operations
where operation in {POINT_TO_POINT} and group_ranks is not null and iteration is not null
order by rank, iteration, start_ns
"""

# When each rank's backward passes are over: a group that communicates only after the last exchange begins.
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

_COMPUTED = """
select rank, iteration, min(start_ns) as first_ns, max(end_ns) as last_ns from device_events
where kind = 'compute' and iteration is not null group by all
"""

_TIMES = ("pipeline_us", "compute_us", "bubble_us", "warm_up_us", "steady_us", "cool_down_us", "other_idle_us")

_STAGES = pa.schema(
    [
        ("stage", pa.int32()),
        ("stages", pa.int32()),
        ("ranks", pa.list_(pa.int32())),
        ("iterations", pa.int32()),
        ("microbatches", pa.int32()),
        ("pipeline_us", pa.float64()),
        ("compute_us", pa.float64()),
        ("excess_compute_us", pa.float64()),
        ("bubble_us", pa.float64()),
        ("warm_up_us", pa.float64()),
        ("steady_us", pa.float64()),
        ("cool_down_us", pa.float64()),
        ("other_idle_us", pa.float64()),
        ("bubble_fraction", pa.float64()),
        ("ideal_bubble_fraction", pa.float64()),
    ]
)

_RANKS = pa.schema(
    [
        ("iteration", pa.int32()),
        ("rank", pa.int32()),
        ("stage", pa.int32()),
        ("pipeline", pa.string()),
        ("boundary", pa.bool_()),
        ("microbatches", pa.int32()),
        *(
            (name, pa.float64())
            for name in ("pipeline_us", "compute_us", "bubble_us", "warm_up_us", "steady_us", "cool_down_us")
        ),
        ("other_idle_us", pa.float64()),
    ]
)


@dataclass
class _Exchange:
    """Sends and receives of one rank in one iteration, in order."""

    received_from: list[tuple[int, int]] = field(default_factory=list)  # stage, end_ns
    sent_to: list[tuple[int, int]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)


def pipeline(
    connection: duckdb.DuckDBPyConnection,
    infos: Sequence[RankInfo],
    *,
    limitations: list[str],
    microbatches: int | None = None,
) -> pa.Table:
    """The stages of the run's pipelines.

    Args:
        connection: of `session.connect`.
        infos: what is known of the ranks.
        limitations: what the captures cannot tell is appended.
        microbatches: of an iteration; None counts what the first stage sends.

    Returns:
        A row per stage: stage, stages, ranks (captured), iterations, microbatches (null when unknown), pipeline_us, compute_us,
        excess_compute_us (beyond the mean stage: uneven stages), bubble_us, of it warm_up_us, steady_us and cool_down_us,
        other_idle_us, bubble_fraction (of pipeline_us), ideal_bubble_fraction (null when the microbatches are unknown). Times
        are means of an iteration of a rank; boundary iterations are left out where others exist. Empty without a pipeline.
    """
    rows = pipeline_by_rank(connection, infos, limitations=limitations, microbatches=microbatches).to_pylist()
    steady = [row for row in rows if not row["boundary"]] or rows
    stages = sorted({row["stage"] for row in steady})
    count = 1 + max((len(ranks_of(row["pipeline"]) or ()) - 1 for row in steady), default=0)
    found = []
    for stage in stages:
        mine = [row for row in steady if row["stage"] == stage]
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
    missing = sorted(set(range(count)) - set(stages)) if found else []
    if missing:
        tell(
            limitations,
            f"pipeline stages {', '.join(map(str, missing))} are not captured: of them only others' waiting is seen",
        )
    return pa.Table.from_pylist(found, schema=_STAGES)


def pipeline_by_rank(
    connection: duckdb.DuckDBPyConnection,
    infos: Sequence[RankInfo],
    *,
    limitations: list[str],
    microbatches: int | None = None,
) -> pa.Table:
    """Each rank's part in its pipeline, iteration by iteration.

    Args:
        connection: of `session.connect`.
        infos: what is known of the ranks.
        limitations: what the captures cannot tell is appended.
        microbatches: of an iteration; None counts what the first stage sends.

    Returns:
        A row per iteration and rank of a pipeline: iteration, rank, stage, pipeline (its ranks), boundary, microbatches,
        pipeline_us, compute_us, bubble_us, warm_up_us, steady_us, cool_down_us, other_idle_us.
    """
    measure_waiting(connection, infos, limitations=limitations)
    stages, pipelines, exchanges = _stages(connection, infos, limitations)
    if not stages:
        return _RANKS.empty_table()
    offsets = dict(connection.execute("select rank, offset_ns from offsets").fetchall())
    spans = _spans(connection, pipelines, offsets, limitations)
    counts = _microbatches(exchanges, stages, pipelines, microbatches, limitations)
    edge = {
        (rank, number)
        for rank, number in connection.execute("select rank, iteration from iterations where boundary").fetchall()
    }
    rows: list[dict[str, Any]] = []
    query = "select rank, kind, start_ns, end_ns, iteration, collective from device_events"
    for rank, events in rank_by_rank(connection.cursor(), query):
        if rank not in stages:
            continue
        waiting = _waiting(connection, rank, stages)
        name, shift = pipelines[rank], offsets.get(rank, 0)
        last = len(ranks_of(name) or ()) - 1
        for iteration, (begin_ns, end_ns) in spans.get(name, {}).items():
            exchange = exchanges.get((rank, iteration))
            if exchange is None:
                continue
            whole = window(begin_ns - shift, end_ns - shift)
            rows.append(
                {
                    "iteration": iteration,
                    "rank": rank,
                    "stage": stages[rank],
                    "pipeline": name,
                    "boundary": (rank, iteration) in edge,
                    "microbatches": counts.get((name, iteration)),
                    **_bubble(events, waiting, exchange, whole, stage=stages[rank], last=last),
                }
            )
    rows.sort(key=lambda row: (row["iteration"], row["pipeline"], row["stage"]))
    return pa.Table.from_pylist(rows, schema=_RANKS)


def _stages(
    connection: duckdb.DuckDBPyConnection, infos: Sequence[RankInfo], limitations: list[str]
) -> tuple[dict[int, int], dict[int, str], dict[tuple[int, int], _Exchange]]:
    """Each rank's stage and pipeline, and what it exchanged in each iteration."""
    rows = connection.sql(_EXCHANGES).to_arrow_table().to_pylist()
    place = {info.rank: (info.coordinates or {}).get("pp") for info in infos}
    named = [row for row in rows if "pipeline" in (row["group"] or "").lower()]
    across = [row for row in rows if _differ(ranks_of(row["group_ranks"]) or (), place)]
    chosen = across or named or rows
    if chosen and not across and not named:
        tell(
            limitations,
            "no group is called a pipeline's and no manifest gives coordinates: groups that send and receive are taken for it",
        )
    stages: dict[int, int] = {}
    pipelines: dict[int, str] = {}
    exchanges: dict[tuple[int, int], _Exchange] = {}
    for row in chosen:
        members = ranks_of(row["group_ranks"])
        if not members or row["rank"] not in members:
            continue
        rank = row["rank"]
        pipelines[rank] = row["group_ranks"]
        stages[rank] = members.index(rank)
        peer = row["peer"] if row["peer"] is not None else next((each for each in members if each != rank), None)
        row["peer_stage"] = members.index(peer) if peer in members and (len(members) == 2 or row["peer"] is not None) else None
        exchanges.setdefault((rank, row["iteration"]), _Exchange()).rows.append(row)
    for exchange in exchanges.values():
        for row in exchange.rows:
            if row["peer_stage"] is not None and row["operation"] != "send":
                exchange.received_from.append((row["peer_stage"], row["end_ns"]))
            if row["peer_stage"] is not None and row["operation"] != "recv":
                exchange.sent_to.append((row["peer_stage"], row["end_ns"]))
    return stages, pipelines, exchanges


def _differ(members: Sequence[int], place: dict[int, tuple[int, int] | None]) -> bool:
    """Whether a group's ranks are of different stages, by their coordinates."""
    known = {found[0] for rank in members if (found := place.get(rank)) is not None}
    return len(known) > 1


def _spans(
    connection: duckdb.DuckDBPyConnection, pipelines: dict[int, str], offsets: dict[int, int], limitations: list[str]
) -> dict[str, dict[int, tuple[int, int]]]:
    """When each pipeline's iteration begins and ends, on the common clock."""
    over = {(rank, iteration): time for rank, iteration, time in connection.execute(_OVER).fetchall() if time is not None}
    found: dict[str, dict[int, tuple[int, int]]] = {}
    unclear = 0
    for rank, iteration, first_ns, last_ns in connection.execute(_COMPUTED).fetchall():
        if rank not in pipelines:
            continue
        end_ns = over.get((rank, iteration))
        unclear += end_ns is None
        begin, end = first_ns + offsets.get(rank, 0), (last_ns if end_ns is None else end_ns) + offsets.get(rank, 0)
        mine = found.setdefault(pipelines[rank], {})
        earlier = mine.get(iteration, (begin, end))
        mine[iteration] = (min(begin, earlier[0]), max(end, earlier[1]))
    if unclear:
        tell(
            limitations,
            "where backward passes end cannot be told from what follows them: no group communicates only after the last "
            "exchange between stages; the pipeline is taken to last until the iteration's last kernel",
        )
    return found


def _microbatches(
    exchanges: dict[tuple[int, int], _Exchange],
    stages: dict[int, int],
    pipelines: dict[int, str],
    given: int | None,
    limitations: list[str],
) -> dict[tuple[str, int], int]:
    """Microbatches of each pipeline's iteration: as given, else what the first stage sends to the second."""
    found: dict[tuple[str, int], int] = {}
    wraps = False
    for (rank, iteration), exchange in exchanges.items():
        last = len(ranks_of(pipelines[rank]) or ()) - 1
        sent = sum(1 for stage, _ in exchange.sent_to if stage == 1)
        if stages[rank] == 0:
            wraps |= last > 1 and any(stage == last for stage, _ in exchange.sent_to + exchange.received_from)
            if given or sent:
                found[pipelines[rank], iteration] = given or sent
    if wraps and not given:
        tell(
            limitations,
            "the pipeline's schedule is interleaved: microbatches cannot be counted from what is sent, "
            "and warm-up, steady phase and cool-down are not told apart exactly",
        )
        return {}
    if found and not given:
        tell(
            limitations,
            "microbatches are counted as what the first stage sends to the second, true of schedules without interleaving",
        )
    return found


def _waiting(connection: duckdb.DuckDBPyConnection, rank: int, stages: dict[int, int]) -> Intervals:
    """When a rank waited for a rank of another stage. An exchange whose partner is not captured counts as waiting."""
    rows = connection.sql(
        f"""select operations.start_ns,
            operations.start_ns + coalesce(wait_ns, operations.end_ns - operations.start_ns) as end_ns, waits_for,
            operations.operation in {POINT_TO_POINT} as exchange
        from (select * from operations where rank = {rank}) operations
        left join (select * from waiting where rank = {rank}) waiting using (rank, collective)"""
    ).to_arrow_table()
    across = np.array(
        [
            exchange if waits_for is None else waits_for != rank and stages.get(waits_for) != stages[rank]
            for waits_for, exchange in zip(rows["waits_for"].to_pylist(), rows["exchange"].to_pylist(), strict=True)
        ],
        bool,
    )
    return union(rows["start_ns"].to_numpy()[across], rows["end_ns"].to_numpy()[across])


def _bubble(
    events: pa.Table, waiting: Intervals, exchange: _Exchange, whole: Intervals, *, stage: int, last: int
) -> dict[str, float]:
    """A rank's bubble within the pipeline's time of one iteration."""
    begin_ns, end_ns = int(whole.start_ns[0]), int(whole.end_ns[0])
    near = (events["end_ns"].to_numpy() > begin_ns) & (events["start_ns"].to_numpy() < end_ns)
    events = events.filter(pa.array(near))
    start, end = events["start_ns"].to_numpy(), events["end_ns"].to_numpy()
    computing = rows_of(events["kind"], "compute")
    exchanging = np.isin(events["collective"].fill_null(-1).to_numpy(), [row["collective"] for row in exchange.rows])
    compute = union(start[computing], end[computing]) & whole
    work = ((union(start[~exchanging], end[~exchanging]) - waiting) & whole) | compute
    first = int(work.start_ns[0]) if len(work) else end_ns
    final = int(work.end_ns[-1]) if len(work) else end_ns
    bubble = ((waiting & whole) | window(begin_ns, first) | window(final, end_ns)) - work
    filled, drained = _phases(exchange, stage, last, begin_ns, end_ns)
    parts = [bubble & window(*part) for part in ((begin_ns, filled), (filled, drained), (drained, end_ns))]
    return {
        "pipeline_us": whole.total_ns / 1e3,
        "compute_us": compute.total_ns / 1e3,
        "bubble_us": bubble.total_ns / 1e3,
        "warm_up_us": parts[0].total_ns / 1e3,
        "steady_us": parts[1].total_ns / 1e3,
        "cool_down_us": parts[2].total_ns / 1e3,
        "other_idle_us": (whole.total_ns - bubble.total_ns - work.total_ns) / 1e3,
    }


def _phases(exchange: _Exchange, stage: int, last: int, begin_ns: int, end_ns: int) -> tuple[int, int]:
    """When the warm-up ends and the cool-down begins."""
    gradients = [time for source, time in exchange.received_from if source > stage]
    activations = [time for source, time in exchange.received_from if source < stage]
    sent = [time for target, time in exchange.sent_to if target > stage]
    filled = min(activations if stage == last else gradients, default=begin_ns)
    drained = max(sent if stage == 0 else activations, default=end_ns)
    filled = min(max(filled, begin_ns), end_ns)
    return filled, min(max(drained, filled), end_ns)
