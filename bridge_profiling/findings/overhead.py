"""The finding about the profiler itself: how much longer it makes an iteration, and what costs most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bridge_profiling.findings.evidence import Evidence
from bridge_profiling.findings.ledger import Found, Ledger
from bridge_profiling.findings.losses import responsible
from bridge_profiling.findings.types import Confidence, Event, Finding, Thresholds, advice, by_rank, ms


@dataclass(frozen=True)
class _Overhead:
    """By rank: iterations with and without the profiler. Measured, or estimated from the recorded events."""

    profiled_us: Mapping[int, float]
    unprofiled_us: Mapping[int, float]
    compared: Mapping[str, int] | None  # iterations behind the medians; None for an estimate
    unclear: frozenset[int] = frozenset()  # ranks with unprofiled iterations as long as the profiled ones

    @property
    def shares(self) -> dict[int, float]:
        return {rank: self.profiled_us[rank] / usual - 1.0 for rank, usual in self.unprofiled_us.items() if usual > 0}


def profiler_overhead(evidence: Evidence, thresholds: Thresholds, ledger: Ledger) -> Found:
    """Profiled iterations are longer than the others, which do not overlap them. That costs nothing outside the window."""
    overhead = _measured(evidence) or _estimated(evidence)
    clear = ((rank, share) for rank, share in sorted(overhead.shares.items()) if rank not in overhead.unclear)
    costly = {rank: share for rank, share in clear if share > thresholds.profiler}
    if not costly:
        return [], ledger
    worst = max(costly, key=lambda rank: costly[rank])
    cost_us = {rank: overhead.profiled_us[rank] - overhead.unprofiled_us[rank] for rank in overhead.unprofiled_us}
    about, confidence, reason = "", Confidence.high, ""
    unit = "an iteration" if evidence.per == "iteration" else "the capture"
    if overhead.compared is None:
        about, confidence, reason = "about ", Confidence.medium, "the cost is estimated from the number of recorded events"
    elif min(overhead.compared.values()) < 3:
        confidence = Confidence.medium
        reason = "only {profiled} profiled and {unprofiled} other iterations are compared".format_map(overhead.compared)
    by_kind = _by_kind(evidence)
    profiled_us, unprofiled_us = overhead.profiled_us[worst], overhead.unprofiled_us[worst]
    finding = Finding(
        id="profiler_overhead",
        title=f"Profiling makes {unit} {about}{ms(cost_us[worst])} ({costly[worst]:.0%}) longer: "
        f"{ms(profiled_us)} profiled, {about}{ms(unprofiled_us)} without the profiler",
        ranks=list(costly),
        evidence={
            "profiler_us": by_rank(cost_us),
            "unprofiled_iteration_us": by_rank(overhead.unprofiled_us),
            "share_of_unprofiled_iteration": by_rank(overhead.shares, 4),
            "iterations_compared": overhead.compared,
            "host_cost_us": {kind: round(time_us, 3) for kind, time_us in by_kind.items()},
        },
        confidence=confidence,
        confidence_reason=reason,
        action=_action(evidence, max(by_kind, key=lambda kind: by_kind[kind]) if by_kind else None),
        events=[
            Event(rank, f"profiled iterations of rank {rank}", duration_us=cost_us[rank])
            for rank in responsible({rank: cost_us[rank] for rank in costly})[:5]
        ],
        severe=costly[worst] > 1.0,
    )
    return [finding], ledger


def _action(evidence: Evidence, costliest: str | None) -> str:
    if not evidence.has_device:
        return advice("profiler_overhead", "on_host")
    if evidence.infos[0].source == "nsys":
        return advice("profiler_overhead", "under_nsys")
    return " ".join([*([advice("profiler_overhead", costliest)] if costliest else []), advice("profiler_overhead")])


def _measured(evidence: Evidence) -> _Overhead | None:
    """Iterations in the window and outside, as manifests time them."""
    timed = evidence.timed_iterations
    if not timed:
        return None
    profiled = {rank: each.profiled_us for rank, each in timed.items()}
    unprofiled = {rank: each.unprofiled_us for rank, each in timed.items()}
    fewest = min(each.counts for each in timed.values())
    unclear = frozenset(rank for rank, each in timed.items() if each.overlap)
    return _Overhead(profiled, unprofiled, dict(zip(("profiled", "unprofiled"), fewest, strict=True)), unclear)


def _estimated(evidence: Evidence) -> _Overhead:
    """Captured iterations, and the same without the estimated cost; ranks have the same, because they wait for each other."""
    profiled = dict.fromkeys(evidence.ranks, evidence.captured_iteration_us)
    return _Overhead(profiled, dict.fromkeys(evidence.ranks, evidence.iteration_us), None)


def _by_kind(evidence: Evidence) -> dict[str, float]:
    """What recording costs the host per iteration, by kind of event; of the rank whose host pays most."""
    of_host = evidence.mean_us(evidence.grid(evidence.profiler_cost, "host_cost_us"))
    if not of_host:
        return {}
    rank = max(of_host, key=lambda rank: of_host[rank])
    found = {
        kind: evidence.mean_us(evidence.grid(evidence.profiler_cost, f"{kind}_cost_us"))[rank]
        for kind in ("operators", "shapes", "cuda_calls", "annotations", "python_frames")
    }
    return {kind: time_us for kind, time_us in found.items() if time_us > 0}
