"""Findings about ranks with the same program and different conditions: a shared GPU, data of different sizes."""

from __future__ import annotations

import numpy as np

from bridge_profiling.facts.idle import Cause
from bridge_profiling.findings.evidence import Evidence
from bridge_profiling.findings.ledger import Found, Ledger
from bridge_profiling.findings.peers import (
    beyond_peers,
    contended_ranks,
    differ_in_size,
    excess_compute_us,
    kernels_beyond_peers,
    peers_of,
)
from bridge_profiling.findings.types import Confidence, Event, Finding, Thresholds, advice, by_rank, ms, ranks_in_words

#: A finding shows so many kernels.
_KERNELS = 5


def contended_device(evidence: Evidence, thresholds: Thresholds, ledger: Ledger) -> Found:
    """Another process uses a rank's GPU: the same kernels are sometimes interrupted there, and the other ranks wait."""
    if len(evidence.ranks) < 2:
        return [], ledger
    peers = peers_of(evidence)
    ranks = contended_ranks(evidence, peers)
    # Between kernels, the other process has the device too.
    stalled = ledger.left_us(Cause.dependency_stalled)
    stalled = np.minimum(stalled, np.maximum(np.nan_to_num(beyond_peers(stalled, peers)), 0.0))
    slower = np.maximum(np.nan_to_num(beyond_peers(evidence.compute_us, peers)), 0.0)
    here = np.isin(evidence.ranks, ranks)
    excess = evidence.mean_us(np.where(here, slower + stalled, np.where(np.isnan(evidence.duration_us), np.nan, 0.0)))
    if not ranks or evidence.share(max(excess.values())) < thresholds.cause:
        return [], ledger
    of_stalls, ledger = ledger.attribute(np.where(here, stalled, 0.0), (Cause.dependency_stalled,))
    of_compute, ledger = ledger.attribute(np.where(here, slower, 0.0))
    of_compute = min(of_compute, evidence.room_us)
    worst = max(ranks, key=lambda rank: excess[rank])
    longest = sorted(
        (row for row in evidence.kernels.to_pylist() if row["rank"] == worst and row["kind"] == "compute"),
        key=lambda row: row["mean_us"] - row["max_us"],
    )[:_KERNELS]
    confidence, reason = evidence.confidence()
    finding = Finding(
        id="contended_device",
        title=f"The GPU of {ranks_in_words(ranks, evidence.ranks)} is shared: the same kernels are interrupted there, which "
        f"costs {ms(of_stalls + of_compute)} of each {evidence.per}",
        ranks=ranks,
        evidence={
            "excess_us": by_rank({rank: excess[rank] for rank in ranks}),
            "compute_us": by_rank(evidence.mean_us(evidence.compute_us)),
            "longest_us": {row["name"]: round(row["max_us"], 3) for row in longest},
            "usual_us": {row["name"]: round(row["mean_us"], 3) for row in longest},
        },
        recoverable_us_per_iteration=of_stalls + of_compute,
        confidence=confidence,
        confidence_reason=reason,
        action=advice("contended_device"),
        events=[Event(worst, row["name"], duration_us=row["max_us"]) for row in longest],
    )
    return [finding], ledger


def uneven_work(evidence: Evidence, thresholds: Thresholds, ledger: Ledger) -> Found:
    """Ranks run the same kernels on data of different sizes, in each iteration another one has more, and the others wait."""
    if len(evidence.ranks) < 2:
        return [], ledger
    peers = peers_of(evidence)
    turns = differ_in_size(evidence, peers, thresholds)
    if not turns:
        return [], ledger
    # Evened out, each rank has the mean.
    mean = np.zeros_like(evidence.compute_us)
    for places in peers:
        mean[:, places] = np.nanmean(evidence.compute_us[:, places], axis=1)[:, None]
    excess = np.where(excess_compute_us(evidence, peers) > 0, np.maximum(evidence.compute_us - mean, 0.0), 0.0)
    saving_us, ledger = ledger.attribute(np.where(np.isnan(evidence.duration_us), np.nan, excess))
    saving_us = min(saving_us, evidence.room_us)
    ranks = sorted(turns)
    sizes = {
        str(rank): [
            row["bytes"]
            for row in evidence.communication_by_rank.to_pylist()
            if row["rank"] == rank and row["operation"] == "all_to_all"
        ]
        for rank in ranks
    }
    kernels = {rank: kernels_beyond_peers(evidence, peers, rank)[:_KERNELS] for rank in ranks}
    finding = Finding(
        id="uneven_work",
        title=f"Work is uneven: in each {evidence.per} another one of {ranks_in_words(ranks, evidence.ranks)} computes longer "
        f"with as many kernels, by {ms(saving_us)} on average",
        ranks=ranks,
        evidence={
            "rotating": True,
            "slowest_share": by_rank(turns),
            "excess_compute_us_by_iteration": {str(rank): evidence.column(excess, rank) for rank in ranks},
            "all_to_all_bytes": {rank: size for rank, size in sizes.items() if size},
        },
        recoverable_us_per_iteration=saving_us,
        confidence=Confidence.medium,
        confidence_reason="sizes are inferred from times of kernels, because ranks launch as many of them",
        action=advice("uneven_work"),
        events=[Event(rank, each.name, duration_us=each.extra_us) for rank in ranks for each in kernels[rank][:2]],
    )
    return [finding], ledger
