"""Findings from manifests alone, which time every iteration of a run: slow iterations and the profiler's overhead."""

from __future__ import annotations

import numpy as np

from bridge_profiling.analysis.findings.evidence import Evidence
from bridge_profiling.analysis.findings.idle import responsible
from bridge_profiling.analysis.findings.ledger import Found, Ledger
from bridge_profiling.analysis.findings.types import Confidence, Event, Finding, Thresholds, advice, by_rank, ms, ranks_in_words
from bridge_profiling.slow_iterations import slow_threshold

#: Fewer iterations do not show the usual duration.
_ENOUGH = 10

#: This many slow iterations at one distance occur at a configured interval.
_REGULAR = 3


def slow_iterations(evidence: Evidence, thresholds: Thresholds, ledger: Ledger) -> Found:
    """Unprofiled iterations that are far longer than usual. They need not be in a capture."""
    slow: dict[int, dict[int, float]] = {}
    lost, typical, ranks = [], [], []
    for manifest in evidence.manifests:
        durations = {number: time_ns / 1e3 for number, time_ns in manifest.durations_by_iteration(profiled=False).items()}
        threshold = slow_threshold(list(durations.values()), factor=thresholds.slow_iteration, at_least=_ENOUGH)
        if threshold is None:
            continue
        beyond = {number: time - threshold.median for number, time in durations.items() if time > threshold.above}
        if beyond:
            ranks.append(manifest.rank)
        for number, time in beyond.items():
            slow.setdefault(number, {})[manifest.rank] = time
        lost.append(sum(beyond.values()) / len(durations))
        typical.append(threshold.median)
    # Ranks agree on durations, because a rank that is not slow waits.
    saving_us, usual = (float(np.median(values)) if values else 0.0 for values in (lost, typical))
    if not slow or saving_us < thresholds.cause * usual:
        return [], ledger
    numbers = sorted(slow)
    distances = set(np.diff(numbers).tolist())
    every = distances.pop() if len(numbers) >= _REGULAR and len(distances) == 1 and 1 not in distances else None
    longest = {number: max(slow[number].values()) for number in numbers}
    worst = max(numbers, key=lambda number: longest[number])
    enough = len(numbers) >= _REGULAR
    named = ranks_in_words(sorted(ranks), [manifest.rank for manifest in evidence.manifests])
    counted = "1 iteration is" if len(numbers) == 1 else f"{len(numbers)} iterations are up to"
    action = [
        advice("slow_iterations", ranks=named, start=worst, end=worst + 1),
        advice("slow_iterations", "regular" if every else "irregular", every=every),
    ]
    finding = Finding(
        id="slow_iterations",
        title=f"{counted} {ms(longest[worst])} longer than the usual {ms(usual)}"
        + (f", every {every} iterations" if every else ""),
        ranks=sorted(ranks),
        evidence={
            "iterations": numbers[:50],
            "usual_us": round(usual, 3),
            "beyond_usual_us": {str(number): round(longest[number], 3) for number in numbers[:50]},
            "every": every,
        },
        recoverable_us_per_iteration=saving_us,
        confidence=Confidence.high if enough else Confidence.medium,
        confidence_reason="" if enough else f"only {len(numbers)} such iterations, which can be chance",
        action=" ".join(action),
        events=[
            Event(max(slow[number], key=lambda rank: slow[number][rank]), f"iteration {number}", number, None, longest[number])
            for number in sorted(slow, key=lambda number: -longest[number])[:5]
        ],
    )
    return [finding], ledger


def profiler_overhead(evidence: Evidence, thresholds: Thresholds, ledger: Ledger) -> Found:
    """Profiled iterations are longer than the others. That costs nothing outside the window."""
    shares, unprofiled, counts = {}, {}, []
    for manifest in evidence.manifests:
        if manifest.rank in evidence.profiler_us:
            others = manifest.durations_ns(profiled=False)
            usual = unprofiled[manifest.rank] = float(np.median(others)) / 1e3
            shares[manifest.rank] = evidence.profiler_us[manifest.rank] / usual if usual else 0.0
            counts.append((len(manifest.durations_ns(profiled=True)), len(others)))
    costly = {rank: evidence.profiler_us[rank] for rank, share in sorted(shares.items()) if share > thresholds.profiler}
    if not costly:
        return [], ledger
    worst = max(costly, key=lambda rank: shares[rank])
    compared = dict(zip(("profiled", "unprofiled"), min(counts), strict=True))
    few = min(compared.values()) < 3
    reason = f"only {compared['profiled']} profiled and {compared['unprofiled']} other iterations are compared"
    finding = Finding(
        id="profiler_overhead",
        title=f"Profiling makes an iteration {ms(costly[worst])} ({shares[worst]:.0%}) longer",
        ranks=list(costly),
        evidence={
            "profiler_us": by_rank(evidence.profiler_us),
            "unprofiled_iteration_us": by_rank(unprofiled),
            "share_of_unprofiled_iteration": by_rank(shares, 4),
            "iterations_compared": compared,
        },
        confidence=Confidence.medium if few else Confidence.high,
        confidence_reason=reason if few else "",
        action=advice("profiler_overhead"),
        events=[
            Event(rank, f"profiled iterations of rank {rank}", duration_us=costly[rank]) for rank in responsible(costly)[:5]
        ],
        severe=shares[worst] > 1.0,
    )
    return [finding], ledger
