"""One kernel that takes a large share of a rank's compute: the place to start making compute faster. No time is lost."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from bridge_profiling.analysis.findings.evidence import Evidence
from bridge_profiling.analysis.findings.ledger import Found, Ledger
from bridge_profiling.analysis.findings.ncu import ncu_command
from bridge_profiling.analysis.findings.types import Confidence, Event, Finding, Thresholds
from bridge_profiling.analysis.findings.words import advice, ms, ranks_in_words


def dominant_kernel(evidence: Evidence, thresholds: Thresholds, ledger: Ledger) -> Found:
    """A finding for each kernel that exceeds the threshold's share of any rank's compute."""
    compute_us: dict[int, float] = defaultdict(float)
    kernels: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    counts: dict[int, dict[str, int]] = defaultdict(dict)
    for row in evidence.kernels.to_pylist():
        counts[row["rank"]][row["name"]] = row["count"]
        if row["kind"] == "compute":
            compute_us[row["rank"]] += row["total_us"]
            kernels[row["name"]][row["rank"]] = row
    found = []
    for name, rows in kernels.items():
        shares = {rank: row["total_us"] / compute_us[rank] for rank, row in rows.items() if compute_us[rank]}
        if max(shares.values(), default=0.0) > thresholds.dominant_kernel:
            found.append((shares, name, rows))
    found.sort(key=lambda each: (-max(each[0].values()), each[1]))
    return [_finding(evidence, thresholds, counts, *each) for each in found], ledger


def _finding(
    evidence: Evidence,
    thresholds: Thresholds,
    counts: dict[int, dict[str, int]],
    shares: dict[int, float],
    name: str,
    rows: dict[int, dict[str, Any]],
) -> Finding:
    ranks = sorted(rank for rank, share in shares.items() if share > thresholds.dominant_kernel)
    worst = max(ranks, key=lambda rank: shares[rank])
    row = rows[worst]
    infos, hosts = evidence.infos, {info.host for info in evidence.infos}
    # The hosts of ranks without a capture are unknown.
    complete = None not in hosts and all(info.world_size == len(infos) for info in infos)
    ncu = ncu_command(
        name,
        next(info for info in infos if info.rank == worst),
        counts[worst],
        iterations=evidence.captured_iterations[worst],
        manifest=next((manifest for manifest in evidence.manifests if manifest.rank == worst), None),
        hosts=len(hosts) if complete else None,
    )
    confidence, reason = evidence.confidence()
    return Finding(
        id="dominant_kernel",
        title=f"{name[:80]} takes {max(shares.values()):.0%} of the compute of {ranks_in_words(ranks, evidence.ranks)}",
        ranks=ranks,
        evidence={
            "kernel": name,
            "share_of_compute": {str(rank): round(shares[rank], 4) for rank in ranks},
            "count": row["count"],
            "mean_us": row["mean_us"],
            "max_us": row["max_us"],
            "ncu_command": ncu.command,
            "ncu_notes": ncu.notes,
        },
        recoverable_us_per_iteration=None,
        confidence=confidence if confidence is Confidence.high else Confidence.medium,
        confidence_reason=reason,
        action=f"{advice('dominant_kernel')} It runs {row['count']} times in the capture, for {ms(row['mean_us'])} on average.",
        events=[Event(rank, name, duration_us=rows[rank]["total_us"], count=rows[rank]["count"]) for rank in ranks[:5]],
    )
