"""Iterations that are longer than others: far longer than usual, outside the capture or in it, or because they are profiled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from bridge_profiling.common.slow_iterations import slow_threshold
from bridge_profiling.facts import words
from bridge_profiling.facts.idle import Cause
from bridge_profiling.findings.grids import Grids
from bridge_profiling.findings.ledger import Ledger
from bridge_profiling.findings.rule import Evidence, occurrence, responsible
from bridge_profiling.findings.types import Confidence, Event, Occurrence, Thresholds, by_rank, text

#: Fewer iterations do not show the usual duration.
_ENOUGH = 10

#: How many times longer than usual the first or last captured iteration must be: the profiler starts or stops in it.
_AT_AN_EDGE = 5.0

#: Causes of idle time that other ranks can have.
_OF_OTHERS = (Cause.blocked_by_communication, Cause.starved_beside_communication)

#: This many slow iterations at one distance occur at a configured interval.
_REGULAR = 3


def slow_iterations(grids: Grids, thresholds: Thresholds, ledger: Ledger) -> Iterator[Evidence]:
    """Iterations that are far longer than usual: unprofiled ones, which need not be in a capture, and captured ones.

    Captured iterations that count in means and lose time are not repeated here: the findings about their causes name them.
    """
    unprofiled = list(_unprofiled(grids, thresholds, ledger))
    yield from unprofiled
    # Unprofiled ones show better what the same pauses cost the whole run.
    shown = any(each.saving_ns is not None for each in unprofiled)
    for captured in (*_left_out(grids, thresholds), *_computing(grids, thresholds)):
        yield replace(captured, saving_ns=None) if shown else captured


def _unprofiled(grids: Grids, thresholds: Thresholds, ledger: Ledger) -> Iterator[Evidence]:
    slow: dict[int, dict[int, float]] = {}
    lost, typical, ranks = [], [], []
    compute = grids.typical_ns(grids.compute_ns)
    for manifest in grids.facts.manifests:
        durations = manifest.durations_by_iteration(profiled=False)
        threshold = slow_threshold(list(durations.values()), factor=thresholds.slow_iteration, at_least=_ENOUGH)
        # A host that launches several iterations ahead catches up in one of them. That iteration is not slow.
        if threshold is None or threshold.median < compute.get(manifest.rank, 0.0):
            continue
        excess = {number: time - threshold.median for number, time in durations.items() if time > threshold.above}
        # What the profiler frees: of 82 healthy trainings, it was slow 13 times as often as an iteration before the window.
        if (window := manifest.manifest.window) and set(excess) == {window.end + 1}:
            continue
        if excess:
            ranks.append(manifest.rank)
        for number, time in excess.items():
            slow.setdefault(number, {})[manifest.rank] = time
        lost.append(sum(excess.values()) / len(durations))
        typical.append(threshold.median)
    # Ranks agree on durations, because a rank that is not slow waits: at once, or in the next iteration.
    if 2 * len(ranks) >= len(lost):
        ranks = [manifest.rank for manifest in grids.facts.manifests]
    saving_ns, usual = (float(np.median(values)) if values else 0.0 for values in (lost, typical))
    if not slow or saving_ns < thresholds.cause * usual:
        return
    # The same pauses in the window are in the savings of other findings.
    saving_ns = max(saving_ns - ledger.sporadic_ns, 0.0)
    numbers = sorted(slow)
    distances = set(np.diff(numbers).tolist())
    every = distances.pop() if len(numbers) >= _REGULAR and len(distances) == 1 and 1 not in distances else None
    longest = {number: max(slow[number].values()) for number in numbers}
    worst = max(numbers, key=lambda number: longest[number])
    confidence, reason = Confidence.high, ""
    if once := numbers[-1] - numbers[0] < len(numbers):
        confidence, reason = Confidence.low, "one_pause"
    elif len(numbers) < _REGULAR:
        confidence, reason = Confidence.medium, "few_pauses"
    events = [
        Event(
            max(slow[number], key=lambda rank: slow[number][rank]),
            text("events", "iteration", number=number),
            number,
            None,
            longest[number],
        )
        for number in sorted(slow, key=lambda number: -longest[number])[:5]
    ]
    yield _evidence(
        sorted(ranks),
        usual,
        longest,
        {"every": every},
        (confidence, reason),
        saving_ns=None if once else saving_ns,
        title=["one" if len(numbers) == 1 else "several", "unprofiled", "often" if every else ""],
        advice=["default", "regular" if every else "irregular"],
        values={
            "ranks": words.named_ranks(sorted(ranks), len(grids.facts.manifests)),
            "number": len(numbers),
            "longest": longest[worst],
            "start": worst,
            "end": worst + 1,
        },
        events=events,
    )


def _evidence(
    ranks: list[int],
    usual_ns: float,
    beyond_ns: Mapping[int, float],
    measures: Mapping[str, Any],
    sure: tuple[Confidence, str],
    **known: Any,
) -> Evidence:
    """The evidence of slow iterations, which are longer than usual by such times."""
    shown = sorted(beyond_ns)[:50]
    beyond = {str(number): round(beyond_ns[number]) for number in shown}
    measures = {"iterations": shown, "usual_ns": round(usual_ns), "beyond_usual_ns": beyond, **measures}
    events = [
        Event(ranks[0], text("events", "iteration", number=number), number, None, beyond_ns[number]) for number in shown[:5]
    ]
    return Evidence(**{"ranks": ranks, "measures": measures, "sure": sure, "events": events, **known})


def _left_out(grids: Grids, thresholds: Thresholds) -> Iterator[Evidence]:
    """Captured iterations in which the profiler also started, stopped or flushed, but that are far longer for other reasons."""
    usual_ns = grids.captured_iteration_ns
    durations_ns = grids.left_out_ns
    captured = {*durations_ns, *(number for number in grids.numbers if number is not None)}
    if not usual_ns or not captured:
        return
    edges = {min(captured), max(captured)}
    beyond_ns = {
        number: duration_ns - usual_ns
        for number, duration_ns in durations_ns.items()
        if duration_ns > (_AT_AN_EDGE if number in edges else thresholds.slow_iteration) * usual_ns
    }
    if not beyond_ns:
        return
    numbers = sorted(beyond_ns)
    worst = max(numbers, key=lambda number: beyond_ns[number])
    ranks, lasting = _longest(grids, worst)
    timed, confidence, reason = len(captured), Confidence.medium, "started_there"
    others = 0
    if grids.chance.issuperset(numbers):
        others = max(len(manifest.durations_by_iteration(profiled=False)) for manifest in grids.facts.manifests)
        timed, confidence, reason = len(captured) + others, Confidence.low, "profiler_or_chance"
    saving_ns = sum(beyond_ns.values())
    yield _evidence(
        ranks,
        usual_ns,
        beyond_ns,
        {"idle_ns": lasting, "iterations_captured": len(captured)},
        (confidence, reason),
        saving_ns=saving_ns / timed,
        title=["left_out", "of_captured" if len(numbers) > 1 else "takes", "times_usual", "by_chance" if others else ""],
        advice=["captured"],
        values={
            "named": _named(numbers),
            "number": len(numbers),
            "longest": durations_ns[worst],
            "times": durations_ns[worst] / usual_ns,
            "usual": usual_ns,
            "others": others,
        },
        occurrence=Occurrence(tuple(numbers), timed, saving_ns / len(numbers)),
    )


def _computing(grids: Grids, thresholds: Thresholds) -> Iterator[Evidence]:
    """Captured iterations that are far longer because every rank computes more: evaluation, a metric, an image to look at."""
    if not grids.has_device or not grids.captured_iteration_ns:
        return
    # The least of all ranks that captured the iteration.
    each_ns = [np.nan_to_num(grid, nan=np.inf).min(axis=1) for grid in (grids.compute_ns, grids.duration_ns)]
    compute_ns, duration_ns = (np.where(np.isfinite(least_ns), least_ns, 0.0) for least_ns in each_ns)
    usual_ns = float(np.median(duration_ns))
    beyond_ns = np.maximum(np.minimum(compute_ns - np.median(compute_ns), duration_ns - usual_ns), 0.0)
    struck = occurrence(grids.numbers, beyond_ns)
    if struck is None or struck.each_ns < (thresholds.slow_iteration - 1) * usual_ns:
        return
    longest_ns = dict(zip(grids.numbers, beyond_ns.tolist(), strict=True))
    saving_ns = struck.each_ns * len(struck.iterations) / struck.of
    yield _evidence(
        grids.ranks,
        usual_ns,
        {number: longest_ns[number] for number in struck.iterations},
        {"iterations_captured": struck.of},
        (Confidence.medium, "needed_or_not"),
        saving_ns=saving_ns,
        title=["left_out", "computes" if len(struck.iterations) == 1 else "compute", "more"],
        advice=["computing"],
        values={"named": _named(list(struck.iterations))},
        occurrence=struck,
    )


def _longest(grids: Grids, number: int) -> tuple[list[int], dict[str, float]]:
    """The ranks that lose most time in an iteration for reasons of their own, and the time that they lose by cause."""
    lost: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in grids.facts.idle_causes.to_pylist():
        if row["iteration"] == number and not row["between"] and row["cause"] != Cause.profiler:
            lost[row["rank"]][row["cause"]] += row["lost_ns"]
    own = {rank: sum(time_ns for cause, time_ns in causes.items() if cause not in _OF_OTHERS) for rank, causes in lost.items()}
    ranks = responsible(own) or grids.ranks
    causes = lost[max(ranks, key=lambda rank: own.get(rank, 0.0))]
    return ranks, {cause: round(causes[cause]) for cause in sorted(causes, key=lambda cause: -causes[cause])[:3]}


def _named(numbers: list[int]) -> str:
    """`Iteration 12`, or `Iterations 12, 15`."""
    return f"Iteration{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:5]))}{', …' if len(numbers) > 5 else ''}"


# The profiler itself.


def profiler_overhead(grids: Grids, thresholds: Thresholds, ledger: Ledger) -> Iterator[Evidence]:
    """Profiled iterations are longer than the others, which do not overlap them. That costs nothing outside the window.

    Manifests time both. Else captured iterations are compared with the same without the estimated cost, alike on all ranks,
    which wait for each other.
    """
    timed = grids.timed_iterations
    profiled_ns = {rank: each.profiled_ns for rank, each in timed.items()}
    unprofiled_ns = {rank: each.unprofiled_ns for rank, each in timed.items()}
    if not timed:
        both = grids.captured_iteration_ns, grids.iteration_ns
        profiled_ns, unprofiled_ns = (dict.fromkeys(grids.ranks, time_ns) for time_ns in both)
    shares = {rank: profiled_ns[rank] / usual - 1.0 for rank, usual in unprofiled_ns.items() if usual > 0}
    unclear = {rank for rank, each in timed.items() if each.overlap}
    costly = {rank: share for rank, share in sorted(shares.items()) if share > thresholds.profiler and rank not in unclear}
    if not costly:
        return
    worst = max(costly, key=lambda rank: costly[rank])
    cost_ns = {rank: profiled_ns[rank] - usual_ns for rank, usual_ns in unprofiled_ns.items()}
    confidence, reason, compared = Confidence.high, "", None
    if not timed:
        confidence, reason = Confidence.medium, "cost_estimated"
    else:
        compared = dict(zip(("profiled", "unprofiled"), min(each.counts for each in timed.values()), strict=True))
    if compared and min(compared.values()) < 3:
        confidence, reason = Confidence.medium, "few_compared"
    by_kind = _by_kind(grids)
    yield Evidence(
        ranks=list(costly),
        measures={
            "profiler_ns": by_rank(cost_ns),
            "unprofiled_iteration_ns": by_rank(unprofiled_ns),
            "share_of_unprofiled_iteration": by_rank(shares, 4),
            "iterations_compared": compared,
            "host_cost_ns": {kind: round(time_ns) for kind, time_ns in by_kind.items()},
        },
        title=[grids.per, "measured" if timed else "estimated"],
        advice=_advice(grids, max(by_kind, key=lambda kind: by_kind[kind]) if by_kind else ""),
        values={
            "compared": compared,
            "longer": cost_ns[worst],
            "share": costly[worst],
            "profiled": profiled_ns[worst],
            "unprofiled": unprofiled_ns[worst],
        },
        sure=(confidence, reason),
        events=[
            Event(rank, text("events", "profiled", rank=rank), duration_ns=cost_ns[rank])
            for rank in responsible({rank: cost_ns[rank] for rank in costly})[:5]
        ],
        severe=costly[worst] > 1.0,
    )


def _advice(grids: Grids, costliest: str) -> list[str]:
    if not grids.has_device:
        return ["on_host"]
    return ["under_nsys"] if grids.facts.infos[0].source == "nsys" else [costliest, "default"]


def _by_kind(grids: Grids) -> dict[str, float]:
    """What recording costs the host per iteration, by kind of event; of the rank whose host pays most."""
    of_host = grids.mean_ns(grids.grid("profiler_cost", "host_cost_ns"))
    if not of_host:
        return {}
    rank = max(of_host, key=lambda rank: of_host[rank])
    kinds = ("operators", "shapes", "cuda_calls", "annotations", "python_frames")
    found = {kind: grids.mean_ns(grids.grid("profiler_cost", f"{kind}_cost_ns"))[rank] for kind in kinds}
    return {kind: time_ns for kind, time_ns in found.items() if time_ns > 0}
