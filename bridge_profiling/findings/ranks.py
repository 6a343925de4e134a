"""Findings about ranks that make others wait: stragglers among ranks with the same work, and pipeline stages."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from bridge_profiling.facts.idle import Cause
from bridge_profiling.facts.parts import ENOUGH_ITERATIONS
from bridge_profiling.findings import peers
from bridge_profiling.findings.grids import Grids
from bridge_profiling.findings.ledger import Ledger
from bridge_profiling.findings.rule import Evidence, pauses_are_short
from bridge_profiling.findings.types import Confidence, Event, Thresholds, by_rank, text
from bridge_profiling.layout import name_ranks

#: A finding shows the kernels of this many slow ranks: ranks that are slow together mostly share the cause.
_RANKS = 3

#: Matrix products of cuBLAS (nvjet, xmma, gemm), CUTLASS, cuDNN, Triton and ROCm.
_MATRIX_PRODUCT = re.compile(r"gemm|gemv|nvjet|xmma|cutlass|wgmma|matmul|\bmm_|_mm\b|splitk|Cijk_", re.IGNORECASE)

#: Causes of host delay without a more specific finding.
_LATE = (Cause.host_pause, Cause.host_launch, Cause.small_kernels)

#: Hosts of one job are late by this share of an iteration in turns, for no cause of their own.
_BY_CHANCE = 0.1

#: Turns that only the hosts' own time shows: one in more than this share of iterations.
_ALMOST_ALWAYS = 0.75

#: A host is late because it pauses if pauses have more than this share of the delay.
_MOSTLY = 0.5

#: A launch call that takes this many times the median rank's shows a slow or shared processor.
_SLOW_CALL = 1.3

#: Clocks of equal devices differ by up to this share: on its own, such a difference in equal kernels is ignored.
_CLOCKS = 0.05

#: A stage's layers account for at least this share of its compute.
_OF_LAYERS = 0.7

#: The most layers that a stage can have, and the number assumed when it is unknown.
_MOST_LAYERS, _FEW_LAYERS = 256, 4

#: A schedule whose ideal bubble is larger has too few microbatches: fewer than three for each stage but one.
_SCHEDULE_WASTES = 0.25

#: Parts of an iteration on CPUs. Data loading and saving have findings of their own.
_SPENT = ("operators_ns", "other_ns", "communication_ns")

#: CPUs that other processes use too make a rank late by chance: it must be the latest this often, by this share.
_OFTEN, _LATEST = 0.75, 0.2


def straggler_compute(grids: Grids, thresholds: Thresholds, ledger: Ledger) -> Iterator[Evidence]:
    """Ranks that compute longer than ranks with the same work, which wait for them.

    Captures without iterations are not judged: they can cover different parts of the training.
    """
    if len(grids.ranks) < 2 or grids.per == "capture":
        return
    excess = peers.excess_compute_ns(grids)
    # Found before, by what only these show.
    explained = grids.ranks if peers.differ_in_size(grids, thresholds) else peers.contended_ranks(grids)
    excess = np.where(np.isin(grids.ranks, explained), np.minimum(excess, 0.0), excess)
    typical, turns = grids.typical_ns(excess), peers.take_turns(grids, excess, thresholds.cause * grids.iteration_ns)
    compute = grids.typical_ns(grids.compute_ns)
    slow = [
        rank
        for rank in peers.unlike_peers(grids, excess)
        if grids.share(typical[rank]) > thresholds.cause and typical[rank] > _CLOCKS * compute[rank]
    ]
    if turns:
        typical, slow = grids.mean_ns(np.maximum(excess, 0.0)), sorted(turns)
    if not slow:
        return
    worst, *others = sorted(slow, key=lambda rank: -typical[rank])[:_RANKS]
    kernels = {rank: peers.kernels_beyond_peers(grids, rank) for rank in (worst, *others)}
    extra = sum(max(each.extra_ns, 0.0) for each in kernels[worst])
    more = sum(max(each.of_count_ns, 0.0) for each in kernels[worst])
    products = sum(each.extra_ns for each in kernels[worst] if _MATRIX_PRODUCT.search(each.name))
    confidence, reason = grids.confidence()
    not_always = any(np.nanmin(excess[:, grids.ranks.index(rank)]) <= 0 for rank in slow)
    if confidence is Confidence.high and not_always:
        confidence, reason = Confidence.medium, "not_always"
    saving_ns = min(ledger.attribute(np.where(np.isin(grids.ranks, slow), excess, 0.0)), grids.room_ns)
    title = "turns" if turns else "several_late" if len(slow) > 1 else "late"
    yield Evidence(
        ranks=slow,
        measures={
            "excess_compute_ns": {str(rank): typical[rank] for rank in slow},
            "compute_ns": {str(rank): value for rank, value in compute.items()},
            "rotating": bool(turns),
            "slowest_share": by_rank(turns, 3),
            "excess_compute_ns_by_iteration": {str(rank): grids.column(excess, rank) for rank in slow},
            "of_matrix_products_ns": products,
            "of_more_kernels_ns": more,
            "of_slower_kernels_ns": extra - more,
            "kernels": [
                {
                    "name": each.name,
                    "extra_ns_per_iteration": each.extra_ns,
                    "extra_count_per_iteration": each.extra_count,
                    "matrix_product": bool(_MATRIX_PRODUCT.search(each.name)),
                }
                for each in kernels[worst][: peers.KERNELS]
            ],
        },
        saving_ns=saving_ns,
        title=[title, "products" if extra and products / extra > 0.5 else ""],
        advice=["more_work" if more >= extra / 2 else "slower"],
        sure=(confidence, reason),
        events=[
            Event(rank, each.name, duration_ns=each.extra_ns, count=max(round(each.extra_count), 1))
            for rank in kernels
            for each in kernels[rank][: max(peers.KERNELS // len(kernels), 1)]
        ],
    )


def straggler_host(grids: Grids, thresholds: Thresholds, ledger: Ledger) -> Iterator[Evidence]:
    """Ranks whose hosts launch later than those of ranks with the same work, which wait for them in communication.

    The delay is the launch-starved time beyond the peers', limited by their difference in time without compute and waiting, and
    by that between the hosts: the peers' hosts may barely keep up either, and are what limits the job without this one's delay.
    """
    if len(grids.ranks) < 2:
        return
    known = grids.waiting_is_known
    own = grids.duration_ns - grids.compute_ns - np.nan_to_num(grids.waiting_ns)
    late = np.minimum(grids.beyond_peers(ledger.left_ns(*_LATE)), grids.beyond_peers(own))
    of_host = grids.beyond_peers(grids.grid("profiler_cost", "host_own_ns"))
    late = np.where(np.isnan(of_host), late, np.minimum(late, of_host))
    if grids.per == "capture" and known:
        # Captures that start one after the other have one long wait, in which ranks meet for the first time.
        longest_ns = grids.grid("ranks", "longest_wait_ns")
        late = np.minimum(late, np.nanmax(np.maximum(grids.waiting_ns - longest_ns, 0.0), axis=1, keepdims=True))
    # Hosts that barely keep up are late in turns by chance, and by what the profiler costs each of them.
    least_ns = max(_BY_CHANCE * grids.iteration_ns, *grids.profiler_of_host_ns.values())
    turns = peers.take_turns(grids, late, least_ns) if known else {}
    if known and not turns:
        # A pause of a host whose device waits for another rank delays nothing, until that rank is on time.
        turns = peers.take_turns(grids, of_host, _BY_CHANCE * grids.iteration_ns, often=_ALMOST_ALWAYS)
    typical, waiting = grids.typical_ns(late), grids.typical_ns(grids.waiting_ns)
    # In pauses nothing is recorded, so the profiler does not explain them.
    pauses_ns = np.minimum(late, grids.beyond_peers(ledger.left_ns(Cause.host_pause)))
    paused = grids.typical_ns(pauses_ns)
    waited_for = grids.typical_ns(grids.grid("ranks", "waited_for_ns")) if known else {}
    slow = [
        rank
        for rank in peers.unlike_peers(grids, late)
        if grids.share(typical[rank]) > thresholds.cause
        and (typical[rank] > grids.profiler_of_host_ns[rank] or grids.share(paused[rank]) > thresholds.cause)
        and (not known or waiting[rank] <= waited_for.get(rank, 0.0))
    ]
    if turns:
        typical, paused, slow = grids.mean_ns(np.maximum(late, 0.0)), grids.mean_ns(pauses_ns), sorted(turns)
    if not slow:
        return
    worst = max(slow, key=lambda rank: typical[rank])
    calls = grids.typical_ns(grids.grid("launch_statistics", "launch_call_ns"))
    slow_calls = calls.get(worst, 0.0) > _SLOW_CALL * float(np.median(list(calls.values()) or [0.0])) > 0
    confidence, reason = grids.confidence(of_host=True)
    if not known:
        confidence, reason = Confidence.low, "waiting_unmeasured"
    if grids.per == "capture":
        confidence, reason = Confidence.low, "whole_captures"
    saving_ns = ledger.attribute(np.where(np.isin(grids.ranks, slow), late, 0.0), _LATE)
    if turns and grids.share(saving_ns) < thresholds.cause:
        return
    pauses = paused[worst] > _MOSTLY * typical[worst]
    yield Evidence(
        ranks=slow,
        measures={
            "late_ns": {str(rank): typical[rank] for rank in slow},
            "rotating": bool(turns),
            "slowest_share": by_rank(turns, 3),
            "late_ns_by_iteration": {str(rank): grids.column(late, rank) for rank in slow},
            "launch_starved_ns": {str(rank): value for rank, value in grids.typical_ns(grids.idle_ns(*_LATE)).items()},
            "waiting_ns": {str(rank): value for rank, value in waiting.items()},
            "waited_for_ns": {str(rank): waited_for.get(rank, 0.0) for rank in slow} if known else None,
            "launch_call_ns": {str(rank): value for rank, value in calls.items()},
        },
        saving_ns=saving_ns,
        title=[
            "turns" if turns else "several" if len(slow) > 1 else "title",
            "in_pauses" if pauses else "",
            "" if turns else "others_wait",
        ],
        advice=[
            "host_pause.many" if pauses and pauses_are_short(grids, slow) else "",
            "slow_calls" if slow_calls else "",
            "pauses" if pauses else "",
            "default",
        ],
        sure=(confidence, reason),
        events=grids.events(*_LATE, ranks=slow, limit=6),
    )


def late_on_cpus(grids: Grids, thresholds: Thresholds, ledger: Ledger) -> Iterator[Evidence]:
    """A rank that takes longer than the others, which wait for it in collectives, beyond its data loading and saving."""
    if len(grids.ranks) < 2 or grids.per == "capture":
        return
    parts = {column: np.nan_to_num(grids.grid("host_iterations", column)) for column in _SPENT}
    own = sum(parts.values(), np.zeros_like(grids.duration_ns))
    late = int(own.mean(axis=0).argmax())
    others = np.delete(own, late, axis=1).max(axis=1)
    excess_ns = float(np.mean(own[:, late] - others))
    waiting_ns = float(np.delete(np.nan_to_num(grids.waiting_ns), late, axis=1).min(axis=1).mean())
    # All of this is measured with the profiler, which makes every part longer.
    unprofiled = min(grids.iteration_ns / grids.captured_iteration_ns, 1.0) if grids.captured_iteration_ns else 1.0
    saving_ns = unprofiled * min(excess_ns, waiting_ns)
    if np.mean(own[:, late] > others) < _OFTEN or saving_ns < _LATEST * grids.iteration_ns:
        return
    rank, rest = grids.ranks[late], {name: np.delete(grid, late, axis=1).mean() for name, grid in parts.items()}
    longer = {name: float(grid[:, late].mean() - rest[name]) for name, grid in parts.items()}
    most = max(longer, key=lambda name: longer[name])
    few = len(grids.numbers) < ENOUGH_ITERATIONS
    yield Evidence(
        ranks=[rank],
        measures={
            "own_ns": by_rank(dict(zip(grids.ranks, own.mean(axis=0).tolist(), strict=True))),
            "waiting_ns": by_rank(grids.mean_ns(grids.waiting_ns)),
            "beyond_other_ranks_ns": {name.removesuffix("_ns"): round(time_ns) for name, time_ns in longer.items()},
        },
        saving_ns=saving_ns,
        title=["on_cpus", most],
        advice=["on_host"],
        values={"longer": excess_ns},
        sure=(Confidence.low if few else Confidence.medium, "hosts_differ"),
    )


def pipeline_bubble(grids: Grids, thresholds: Thresholds, ledger: Ledger) -> Iterator[Evidence]:
    """Pipeline stages wait for each other, because one has more work or because there are too few microbatches.

    With m microbatches and p stages, a pipeline takes (m + p - 1) / m times the longest stage's work; with even stages, the
    mean stage's. A stage's work is the least compute of its ranks, so that a slow rank does not look like a long stage. Only
    whole layers can be moved, which helps where two stages differ by more than one.
    """
    stages = {row["stage"]: row for row in grids.facts.pipeline.to_pylist()}
    if len(stages) < 2:
        return
    first = next(iter(stages.values()))
    count, microbatches, ideal = first["stages"], first["microbatches"], first["ideal_bubble_fraction"]
    typical = grids.typical_ns(grids.grid("pipeline_by_rank", "compute_ns"))
    ranks: dict[int, set[int]] = defaultdict(set)
    for row in grids.facts.pipeline_by_rank.to_pylist():
        ranks[row["stage"]].add(row["rank"])
    compute = {stage: min((typical[rank] for rank in ranks[stage] if rank in typical), default=0.0) for stage in stages}
    mean = float(np.mean(list(compute.values())))
    longest, shortest = max(compute, key=lambda stage: compute[stage]), min(compute, key=lambda stage: compute[stage])
    # Interleaved schedules fill and drain faster: only the longest stage's own time is certain.
    passes = (microbatches + count - 1) / microbatches if microbatches else 1.0
    uneven_ns = (compute[longest] - mean) * passes if len(stages) == count else 0.0
    layers = _layers(grids, stages[shortest]["ranks"][0], microbatches)
    movable = compute[longest] - compute[shortest] > compute[shortest] / (layers or _FEW_LAYERS)
    uneven = movable and grids.share(uneven_ns) > thresholds.cause
    bubble = float(np.mean([row["bubble_fraction"] or 0.0 for row in stages.values()]))
    few = ideal is not None and ideal > _SCHEDULE_WASTES and bubble > _SCHEDULE_WASTES
    if not uneven and not few:
        return
    members = stages[longest]["ranks"]
    of_longest = np.where(np.isin(grids.ranks, members), uneven_ns if uneven else 0.0, 0.0)
    saving_ns = ledger.attribute(grids.zero + of_longest)
    if few:
        saving_ns += ledger.attribute(grids.grid("pipeline_by_rank", "bubble_ns"), waited=True)
    confidence, reason = grids.confidence()
    if microbatches is None:
        confidence, reason = Confidence.medium, "interleaved"
    if len(stages) < count:
        confidence, reason = Confidence.medium, "few_stages"
    end = {0: "first", count - 1: "last"}.get(longest, "middle")
    names = ("stage", "ranks", "pipeline_ns", "bubble_ns", "warm_up_ns", "steady_ns", "cool_down_ns", "other_idle_ns")
    yield Evidence(
        ranks=members if uneven else sorted(rank for row in stages.values() for rank in row["ranks"]),
        measures={
            "stages": [
                {name: row[name] for name in (*names, "bubble_fraction")}
                | {"compute_ns": compute[stage], "excess_compute_ns": compute[stage] - mean}
                for stage, row in stages.items()
            ],
            "longest_stage": longest if uneven else None,
            "uneven_stages_ns": uneven_ns,
            "layers_of_shortest_stage": layers,
            "microbatches": microbatches,
            "bubble_fraction": bubble,
            "ideal_bubble_fraction": ideal,
        },
        saving_ns=saving_ns,
        title=["uneven" if uneven else "title"],
        advice=[end if uneven else "", "few_microbatches" if few else ""],
        values={
            "stage": longest,
            "members": name_ranks(members),
            "longer": compute[longest] - mean,
            "captured": len(stages),
            "all": count,
        },
        sure=(confidence, reason),
        events=[
            Event(row["ranks"][0], text("events", "bubble", stage=row["stage"]), duration_ns=row["bubble_ns"])
            for row in sorted(stages.values(), key=lambda row: -row["bubble_ns"])
        ],
    )


def _layers(grids: Grids, rank: int, microbatches: int | None) -> int | None:
    """The number of layers on a rank, from its kernels: each layer's kernels run the same number of times per microbatch."""
    if not microbatches:
        return None
    captured = max(grids.captured_iterations[rank], 1)
    rows = [row for row in grids.compute_kernels if row["rank"] == rank]
    count = np.array([row["count"] / captured / microbatches for row in rows])
    time = np.array([row["total_ns"] for row in rows])
    enough = _OF_LAYERS * time.sum()
    dividing = (each for each in range(_MOST_LAYERS, 0, -1) if time[(count % each == 0) & (count > 0)].sum() >= enough)
    return next(dividing, None)
