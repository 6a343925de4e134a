"""One kernel that takes a large part of a rank's compute: where making compute faster begins. No time is said to be lost."""

from __future__ import annotations

from collections import defaultdict

from bridge_profiling.analysis.findings.context import Context, ranks_in_words
from bridge_profiling.analysis.findings.finding import Confidence, Event, Finding
from bridge_profiling.analysis.findings.losses import ms

_ACTION = (
    "Look at this kernel first: is it the right one for its shapes (tensor cores need dimensions in multiples of 16, and bf16 "
    "or fp8: model.fp8), is it fused (attention: model.attention_backend=flash; softmax: model.masked_softmax_fusion=true), "
    "and how near is it to what the device can do (Nsight Compute)? A matrix product near its peak needs no mending."
)


def find(context: Context) -> list[Finding]:
    """A finding for each kernel that is more than the threshold's part of some rank's compute.

    Args:
        context: of one run.
    """
    compute_us: dict[int, float] = defaultdict(float)
    kernels: dict[str, dict[int, dict]] = defaultdict(dict)
    for row in context.run.kernels().to_pylist():
        if row["source"] == context.source and row["kind"] == "compute":
            compute_us[row["rank"]] += row["total_us"]
            kernels[row["name"]][row["rank"]] = row
    found = []
    for name, rows in kernels.items():
        shares = {rank: row["total_us"] / compute_us[rank] for rank, row in rows.items() if compute_us[rank]}
        ranks = sorted(rank for rank, share in shares.items() if share > context.thresholds.dominant_kernel)
        if ranks:
            found.append((max(shares.values()), name, ranks, shares, rows))
    found.sort(key=lambda each: (-each[0], each[1]))
    return [_finding(context, *each) for each in found]


def _finding(
    context: Context, most: float, name: str, ranks: list[int], shares: dict[int, float], rows: dict[int, dict]
) -> Finding:
    worst = max(ranks, key=lambda rank: shares[rank])
    row = rows[worst]
    confidence, reason = context.confidence()
    return Finding(
        id="dominant_kernel",
        title=f"{name[:80]} is {most:.0%} of the compute of {ranks_in_words(ranks, context.ranks)}",
        ranks=ranks,
        evidence={
            "kernel": name,
            "share_of_compute": {str(rank): round(shares[rank], 4) for rank in ranks},
            "count": row["count"],
            "mean_us": row["mean_us"],
            "max_us": row["max_us"],
        },
        recoverable_us_per_iteration=None,
        confidence=confidence if confidence is Confidence.high else Confidence.medium,
        confidence_reason=reason or "",
        action=f"{_ACTION} It runs {row['count']} times in the capture, {ms(row['mean_us'])} each in the mean.",
        events=[Event(rank, name, duration_us=rows[rank]["total_us"], count=rows[rank]["count"]) for rank in ranks[:5]],
    )
