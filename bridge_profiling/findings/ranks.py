"""Findings about ranks that make others wait: stragglers among ranks with the same work, and pipeline stages."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace

import numpy as np

from bridge_profiling.facts.idle import Cause
from bridge_profiling.facts.parts import ENOUGH_ITERATIONS
from bridge_profiling.findings.evidence import Evidence
from bridge_profiling.findings.ledger import Found, Ledger, advice_on_short_pauses, cost_in_words, finding, occurrence
from bridge_profiling.findings.peers import (
    KERNELS,
    beyond_peers,
    computes_more,
    contended_ranks,
    differ_in_part,
    differ_in_size,
    excess_compute_us,
    kernels_beyond_peers,
    other_convolutions,
    peers_of,
    take_turns,
    unlike_peers,
)
from bridge_profiling.findings.types import Confidence, Event, Grid, Occurrence, Thresholds, advice, by_rank, ms
from bridge_profiling.layout import name_ranks

#: A finding shows the kernels of this many slow ranks: ranks that are slow together mostly share the cause.
_RANKS = 3

#: Matrix products of cuBLAS (nvjet, xmma, gemm), CUTLASS, cuDNN, Triton and ROCm.
_MATRIX_PRODUCT = re.compile(r"gemm|gemv|nvjet|xmma|cutlass|wgmma|matmul|\bmm_|_mm\b|splitk|Cijk_", re.IGNORECASE)

#: Causes of host delay without a more specific finding.
_LATE = (Cause.host_pause, Cause.host_launch, Cause.small_kernels)

#: Hosts of one job are late by this share of an iteration in turns, for no cause of their own.
_BY_CHANCE = 0.1

#: Turns that only the hosts' own time shows: at least this share of the median one, in more than this share of iterations.
_ALIKE, _ALMOST_ALWAYS = 0.5, 0.75

#: An iteration that is later than so many medians is so for another reason.
_USUAL = 2.0

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

#: Parts of an iteration on CPUs, in words. Data loading and saving have findings of their own.
_SPENT = {"operators_us": "in operators", "other_us": "in Python between operators", "communication_us": "in transfers"}

#: CPUs that other processes use too make a rank late by chance: it must be the latest this often, by this share.
_OFTEN, _LATEST = 0.75, 0.2

_NO_ITERATIONS = "no iterations are marked, so whole captures are compared, which can contain different work"


def straggler_compute(evidence: Evidence, thresholds: Thresholds, ledger: Ledger) -> Found:
    """Ranks that compute longer than ranks with the same work, which wait for them."""
    if len(evidence.ranks) < 2:
        return [], ledger
    peers = peers_of(evidence)
    excess = excess_compute_us(evidence, peers)
    # Found before, by what only these show.
    explained = evidence.ranks if differ_in_size(evidence, peers, thresholds) else contended_ranks(evidence, peers)
    excess = np.where(np.isin(evidence.ranks, explained), np.minimum(excess, 0.0), excess)
    typical, turns = evidence.typical_us(excess), take_turns(evidence, excess, thresholds.cause * evidence.iteration_us)
    compute, same_part = evidence.typical_us(evidence.compute_us), not differ_in_part(evidence, peers)
    slow = [
        rank
        for rank in unlike_peers(evidence, excess, peers)
        if evidence.share(typical[rank]) > thresholds.cause
        and (
            typical[rank] > _CLOCKS * compute[rank]
            or (same_part and computes_more(kernels_beyond_peers(evidence, peers, rank)))
        )
    ]
    struck = None
    if turns:
        typical, slow = evidence.mean_us(np.maximum(excess, 0.0)), sorted(turns)
    elif not slow:
        excess, struck = _sometimes(evidence, excess)
        typical = evidence.mean_us(excess)
        slow = sorted(rank for rank, time_us in typical.items() if time_us > 0) if struck else []
    if not slow:
        return [], ledger
    worst, *others = sorted(slow, key=lambda rank: -typical[rank])[:_RANKS]
    kernels = {rank: kernels_beyond_peers(evidence, peers, rank) for rank in (worst, *others)}
    extra = sum(max(each.extra_us, 0.0) for each in kernels[worst])
    more = sum(max(each.of_count_us, 0.0) for each in kernels[worst])
    products = sum(each.extra_us for each in kernels[worst] if _MATRIX_PRODUCT.search(each.name))
    confidence, reason = (Confidence.low, _NO_ITERATIONS) if evidence.per == "capture" else evidence.confidence()
    not_always = any(np.nanmin(excess[:, evidence.ranks.index(rank)]) <= 0 for rank in slow)
    if not struck and confidence is Confidence.high and not_always:
        confidence, reason = Confidence.medium, "the ranks are not slow in every captured iteration"
    why = "more_work" if more >= extra / 2 else "slower"
    why = "other_kernels" if other_convolutions(evidence, peers, worst) else why
    saving_us, attributed = ledger.attribute(np.where(np.isin(evidence.ranks, slow), excess, 0.0))
    saving_us = min(saving_us, evidence.room_us)
    if struck:
        if evidence.share(saving_us) < thresholds.cause:
            return [], ledger
        attributed = replace(attributed, sporadic_us=attributed.sporadic_us + saving_us)
    named = evidence.named(slow).capitalize()
    computes = "compute up to" if len(slow) > 1 else "computes"
    mostly = ", mostly in matrix products" if extra and products / extra > 0.5 else ""
    title = f"{named} {computes} {ms(typical[worst])} longer per {evidence.per} than ranks with the same work{mostly}"
    if turns:
        title = f"{named} take turns: in each {evidence.per} another one computes longer, by {ms(saving_us)} on average{mostly}"
    elif struck:
        cost = cost_in_words(evidence, saving_us, struck)
        title = f"{named} {computes.removesuffix(' up to')} longer than ranks with the same work, by {cost}{mostly}"
    found = finding(
        evidence,
        "straggler_compute",
        title,
        slow,
        {
            "excess_compute_us": {str(rank): typical[rank] for rank in slow},
            "compute_us": {str(rank): value for rank, value in compute.items()},
            "rotating": bool(turns),
            "slowest_share": by_rank(turns),
            "excess_compute_us_by_iteration": {str(rank): evidence.column(excess, rank) for rank in slow},
            "of_matrix_products_us": products,
            "of_more_kernels_us": more,
            "of_slower_kernels_us": extra - more,
            "kernels": [
                {
                    "name": each.name,
                    "extra_us_per_iteration": each.extra_us,
                    "extra_count_per_iteration": each.extra_count,
                    "matrix_product": bool(_MATRIX_PRODUCT.search(each.name)),
                }
                for each in kernels[worst][:KERNELS]
            ],
        },
        saving_us=saving_us,
        sure=(confidence, reason),
        case=why,
        events=[
            Event(rank, each.name, duration_us=each.extra_us, count=max(round(each.extra_count), 1))
            for rank in kernels
            for each in kernels[rank][: max(KERNELS // len(kernels), 1)]
        ],
        occurrence=struck,
    )
    return [found], attributed


def _sometimes(evidence: Evidence, excess_us: Grid) -> tuple[Grid, Occurrence | None]:
    """The compute of ranks beyond their peers in some iterations, and these iterations; 0 in the others."""
    compute = evidence.typical_us(evidence.compute_us)
    found_us = np.zeros_like(excess_us)
    for place, rank in enumerate(evidence.ranks):
        mine_us = np.maximum(np.nan_to_num(excess_us[:, place]), 0.0)
        found = occurrence(evidence.numbers, mine_us)
        if found and found.each_us > _BY_CHANCE * compute.get(rank, 0.0):
            found_us[:, place] = np.where(np.isin(np.array(evidence.numbers, float), found.iterations), mine_us, 0.0)
    return found_us, occurrence(evidence.numbers, found_us.max(axis=1))


def straggler_host(evidence: Evidence, thresholds: Thresholds, ledger: Ledger) -> Found:
    """Ranks whose hosts launch later than those of ranks with the same work, which wait for them in communication.

    The delay is the launch-starved time beyond the peers', limited by their difference in time without compute and waiting, and
    by that between the hosts: the peers' hosts may barely keep up either, and are what limits the job without this one's delay.
    """
    if len(evidence.ranks) < 2:
        return [], ledger
    peers, known = peers_of(evidence), evidence.waiting_is_known
    own = evidence.duration_us - evidence.compute_us - np.nan_to_num(evidence.waiting_us)
    late = np.minimum(beyond_peers(ledger.left_us(*_LATE), peers), beyond_peers(own, peers))
    of_host = beyond_peers(evidence.grid("profiler_cost", "host_own_us"), peers)
    late = np.where(np.isnan(of_host), late, np.minimum(late, of_host))
    if evidence.per == "capture" and known:
        # Captures that start one after the other have one long wait, in which ranks meet for the first time.
        longest_us = evidence.grid("ranks", "longest_wait_us")
        late = np.minimum(late, np.nanmax(np.maximum(evidence.waiting_us - longest_us, 0.0), axis=1, keepdims=True))
    # Hosts that barely keep up are late in turns by chance, and by what the profiler costs each of them.
    least_us = max(_BY_CHANCE * evidence.iteration_us, *evidence.profiler_of_host_us.values())
    turns = take_turns(evidence, late, least_us) if known else {}
    if known and not turns:
        # A pause of a host whose device waits for another rank delays nothing, until that rank is on time.
        turns = take_turns(evidence, of_host, _BY_CHANCE * evidence.iteration_us, alike=_ALIKE, often=_ALMOST_ALWAYS)
    if not turns:
        # What strikes single iterations is a pause, and no straggler.
        usual = evidence.typical_us(late)
        late = np.minimum(late, _USUAL * np.array([usual.get(rank, 0.0) for rank in evidence.ranks]))
    typical, waiting = evidence.typical_us(late), evidence.typical_us(evidence.waiting_us)
    # In pauses nothing is recorded, so the profiler does not explain them.
    pauses_us = np.minimum(late, beyond_peers(ledger.left_us(Cause.host_pause), peers))
    paused = evidence.typical_us(pauses_us)
    waited_for = evidence.typical_us(evidence.grid("ranks", "waited_for_us")) if known else {}
    slow = [
        rank
        for rank in unlike_peers(evidence, late, peers)
        if evidence.share(typical[rank]) > thresholds.cause
        and (typical[rank] > evidence.profiler_of_host_us[rank] or evidence.share(paused[rank]) > thresholds.cause)
        and (not known or waiting[rank] <= waited_for.get(rank, 0.0))
    ]
    if turns:
        typical, paused, slow = evidence.mean_us(np.maximum(late, 0.0)), evidence.mean_us(pauses_us), sorted(turns)
    if not slow:
        return [], ledger
    worst = max(slow, key=lambda rank: typical[rank])
    calls = evidence.typical_us(evidence.grid("launch_statistics", "launch_call_us"))
    slow_calls = calls.get(worst, 0.0) > _SLOW_CALL * float(np.median(list(calls.values()) or [0.0])) > 0
    confidence, reason = evidence.confidence(of_host=True)
    if not known:
        confidence, reason = Confidence.low, "communication is not matched between ranks, so waiting is not measured"
    if evidence.per == "capture":
        confidence, reason = Confidence.low, _NO_ITERATIONS
    saving_us, attributed = ledger.attribute(np.where(np.isin(evidence.ranks, slow), late, 0.0), _LATE)
    if turns and evidence.share(saving_us) < thresholds.cause:
        return [], ledger
    named = evidence.named(slow)
    launches = "Hosts of {} launch up to" if len(slow) > 1 else "The host of {} launches"
    pauses = paused[worst] > _MOSTLY * typical[worst]
    how = ", mostly in pauses for no recorded reason" if pauses else ""
    hints = [advice("straggler_host", name) for name, holds in (("slow_calls", slow_calls), ("pauses", pauses)) if holds]
    if pauses:
        hints = advice_on_short_pauses(evidence, slow) + hints
    title = f"Hosts of {named} take turns: in each {evidence.per} another one launches late, by {ms(saving_us)} on average{how}"
    if not turns:
        title = f"{launches.format(named)} {ms(typical[worst])} late in each {evidence.per}{how}, and the other ranks wait"
    found = finding(
        evidence,
        "straggler_host",
        title,
        slow,
        {
            "late_us": {str(rank): typical[rank] for rank in slow},
            "rotating": bool(turns),
            "slowest_share": by_rank(turns),
            "late_us_by_iteration": {str(rank): evidence.column(late, rank) for rank in slow},
            "launch_starved_us": {str(rank): value for rank, value in evidence.typical_us(evidence.idle_us(*_LATE)).items()},
            "waiting_us": {str(rank): value for rank, value in waiting.items()},
            "waited_for_us": {str(rank): waited_for.get(rank, 0.0) for rank in slow} if known else None,
            "launch_call_us": {str(rank): value for rank, value in calls.items()},
        },
        saving_us=saving_us,
        sure=(confidence, reason),
        action=" ".join([*hints, advice("straggler_host")]),
        events=evidence.events(*_LATE, ranks=slow, limit=6),
    )
    return [found], attributed


def late_on_cpus(evidence: Evidence, thresholds: Thresholds, ledger: Ledger) -> Found:
    """A rank that takes longer than the others, which wait for it in collectives, beyond its data loading and saving."""
    if len(evidence.ranks) < 2 or evidence.per == "capture":
        return [], ledger
    parts = {column: np.nan_to_num(evidence.grid("host_iterations", column)) for column in _SPENT}
    own = sum(parts.values(), np.zeros_like(evidence.duration_us))
    late = int(own.mean(axis=0).argmax())
    others = np.delete(own, late, axis=1).max(axis=1)
    excess_us = float(np.mean(own[:, late] - others))
    waiting_us = float(np.delete(np.nan_to_num(evidence.waiting_us), late, axis=1).min(axis=1).mean())
    # All of this is measured with the profiler, which makes every part longer.
    unprofiled = min(evidence.iteration_us / evidence.captured_iteration_us, 1.0) if evidence.captured_iteration_us else 1.0
    saving_us = unprofiled * min(excess_us, waiting_us)
    few = len(evidence.numbers) < ENOUGH_ITERATIONS
    if np.mean(own[:, late] > others) < _OFTEN or saving_us < _LATEST * evidence.iteration_us:
        return [], ledger
    rank, rest = evidence.ranks[late], {name: np.delete(grid, late, axis=1).mean() for name, grid in parts.items()}
    longer = {name: float(grid[:, late].mean() - rest[name]) for name, grid in parts.items()}
    most = max(longer, key=lambda name: longer[name])
    title = f"Rank {rank} takes {ms(excess_us)} longer per iteration than the other ranks, mostly {_SPENT[most]}"
    numbers = {
        "own_us": by_rank(dict(zip(evidence.ranks, own.mean(axis=0).tolist(), strict=True))),
        "waiting_us": by_rank(evidence.mean_us(evidence.waiting_us)),
        "beyond_other_ranks_us": {name.removesuffix("_us"): round(time_us, 3) for name, time_us in longer.items()},
    }
    sure = Confidence.low if few else Confidence.medium, "the profiler slows the hosts of ranks differently"
    found = finding(evidence, "straggler_host", title, [rank], numbers, saving_us=saving_us, sure=sure, case="on_host")
    return [found], ledger


def pipeline_bubble(evidence: Evidence, thresholds: Thresholds, ledger: Ledger) -> Found:
    """Pipeline stages wait for each other, because one has more work or because there are too few microbatches.

    With m microbatches and p stages, a pipeline takes (m + p - 1) / m times the longest stage's work; with even stages, the
    mean stage's. A stage's work is the least compute of its ranks, so that a slow rank does not look like a long stage. Only
    whole layers can be moved, which helps where two stages differ by more than one.
    """
    stages = {row["stage"]: row for row in evidence.facts.pipeline.to_pylist()}
    if len(stages) < 2:
        return [], ledger
    first = next(iter(stages.values()))
    count, microbatches, ideal = first["stages"], first["microbatches"], first["ideal_bubble_fraction"]
    typical = evidence.typical_us(evidence.grid("pipeline_by_rank", "compute_us"))
    ranks: dict[int, set[int]] = defaultdict(set)
    for row in evidence.facts.pipeline_by_rank.to_pylist():
        ranks[row["stage"]].add(row["rank"])
    compute = {stage: min((typical[rank] for rank in ranks[stage] if rank in typical), default=0.0) for stage in stages}
    mean = float(np.mean(list(compute.values())))
    longest, shortest = max(compute, key=lambda stage: compute[stage]), min(compute, key=lambda stage: compute[stage])
    # Interleaved schedules fill and drain faster: only the longest stage's own time is certain.
    passes = (microbatches + count - 1) / microbatches if microbatches else 1.0
    uneven_us = (compute[longest] - mean) * passes if len(stages) == count else 0.0
    layers = _layers(evidence, stages[shortest]["ranks"][0], microbatches)
    movable = compute[longest] - compute[shortest] > compute[shortest] / (layers or _FEW_LAYERS)
    uneven = movable and evidence.share(uneven_us) > thresholds.cause
    bubble = float(np.mean([row["bubble_fraction"] or 0.0 for row in stages.values()]))
    few = ideal is not None and ideal > _SCHEDULE_WASTES and bubble > _SCHEDULE_WASTES
    if not uneven and not few:
        return [], ledger
    members = stages[longest]["ranks"]
    of_longest = np.where(np.isin(evidence.ranks, members), uneven_us if uneven else 0.0, 0.0)
    saving_us, ledger = ledger.attribute(evidence.zero + of_longest)
    if few:
        of_bubble, ledger = ledger.attribute(evidence.grid("pipeline_by_rank", "bubble_us"), waited=True)
        saving_us += of_bubble
    confidence, reason = evidence.confidence()
    if microbatches is None:
        confidence, reason = Confidence.medium, "the minimal cost of an interleaved schedule is unknown"
    if len(stages) < count:
        confidence, reason = Confidence.medium, f"only {len(stages)} of {count} stages are captured"
    end = {0: "first", count - 1: "last"}.get(longest, "middle")
    steps = [advice("pipeline_bubble", end, stage=longest)] if uneven else []
    steps += [advice("pipeline_bubble", "few_microbatches")] if few else []
    names = ("stage", "ranks", "pipeline_us", "bubble_us", "warm_up_us", "steady_us", "cool_down_us", "other_idle_us")
    longer = f"{ms(compute[longest] - mean)} longer per {evidence.per} than the mean stage"
    title = f"Pipeline stages wait {bubble:.0%} of the time: {microbatches} microbatches are too few for {len(stages)} stages"
    if uneven:
        title = f"Pipeline stage {longest} ({name_ranks(members)}) computes {longer}, and the other stages wait"
    found = finding(
        evidence,
        "pipeline_bubble",
        title,
        members if uneven else sorted(rank for row in stages.values() for rank in row["ranks"]),
        {
            "stages": [
                {name: row[name] for name in (*names, "bubble_fraction")}
                | {"compute_us": compute[stage], "excess_compute_us": compute[stage] - mean}
                for stage, row in stages.items()
            ],
            "longest_stage": longest if uneven else None,
            "uneven_stages_us": uneven_us,
            "layers_of_shortest_stage": layers,
            "microbatches": microbatches,
            "bubble_fraction": bubble,
            "ideal_bubble_fraction": ideal,
        },
        saving_us=saving_us,
        sure=(confidence, reason),
        action=" ".join(steps),
        events=[
            Event(row["ranks"][0], f"bubble of stage {row['stage']}", duration_us=row["bubble_us"])
            for row in sorted(stages.values(), key=lambda row: -row["bubble_us"])
        ],
    )
    return [found], ledger


def _layers(evidence: Evidence, rank: int, microbatches: int | None) -> int | None:
    """The number of layers on a rank, from its kernels: each layer's kernels run the same number of times per microbatch."""
    if not microbatches:
        return None
    captured = max(evidence.captured_iterations[rank], 1)
    rows = [row for row in evidence.compute_kernels if row["rank"] == rank]
    count = np.array([row["count"] / captured / microbatches for row in rows])
    time = np.array([row["total_us"] for row in rows])
    enough = _OF_LAYERS * time.sum()
    dividing = (each for each in range(_MOST_LAYERS, 0, -1) if time[(count % each == 0) & (count > 0)].sum() >= enough)
    return next(dividing, None)
