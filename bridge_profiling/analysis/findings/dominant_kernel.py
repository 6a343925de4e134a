"""One kernel that takes a large part of a rank's compute: where making compute faster begins. No time is said to be lost."""

from __future__ import annotations

from collections import defaultdict

from bridge_profiling.analysis.findings.context import Context, ranks_in_words
from bridge_profiling.analysis.findings.finding import Confidence, Event, Finding
from bridge_profiling.analysis.findings.losses import ms
from bridge_profiling.analysis.ncu_command import NcuCommand, ncu_command

_ACTION = (
    "Look at this kernel first: is it the right one for its shapes (tensor cores need dimensions in multiples of 16, and bf16 "
    "or fp8: model.fp8), is it fused (attention: model.attention_backend=flash; softmax: model.masked_softmax_fusion=true), "
    "and how near is it to what the device can do (Nsight Compute: the evidence has the command)? A matrix product near its "
    "peak needs no mending."
)


def find(context: Context) -> list[Finding]:
    """A finding for each kernel that is more than the threshold's part of some rank's compute.

    Args:
        context: of one run.
    """
    compute_us: dict[int, float] = defaultdict(float)
    kernels: dict[str, dict[int, dict]] = defaultdict(dict)
    counts: dict[int, dict[str, int]] = defaultdict(dict)
    for row in context.run.kernels().to_pylist():
        if row["source"] != context.source:
            continue
        counts[row["rank"]][row["name"]] = row["count"]
        if row["kind"] == "compute":
            compute_us[row["rank"]] += row["total_us"]
            kernels[row["name"]][row["rank"]] = row
    found = []
    for name, rows in kernels.items():
        shares = {rank: row["total_us"] / compute_us[rank] for rank, row in rows.items() if compute_us[rank]}
        ranks = sorted(rank for rank, share in shares.items() if share > context.thresholds.dominant_kernel)
        if ranks:
            found.append((max(shares.values()), name, ranks, shares, rows))
    found.sort(key=lambda each: (-each[0], each[1]))
    return [_finding(context, counts, *each) for each in found]


def _finding(
    context: Context,
    counts: dict[int, dict[str, int]],
    most: float,
    name: str,
    ranks: list[int],
    shares: dict[int, float],
    rows: dict[int, dict],
) -> Finding:
    worst = max(ranks, key=lambda rank: shares[rank])
    row = rows[worst]
    ncu = _nsight_compute(context, name, worst, counts[worst])
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
            "ncu_command": ncu.command,
            "ncu_notes": ncu.notes,
        },
        recoverable_us_per_iteration=None,
        confidence=confidence if confidence is Confidence.high else Confidence.medium,
        confidence_reason=reason or "",
        action=f"{_ACTION} It runs {row['count']} times in the capture, {ms(row['mean_us'])} each in the mean.",
        events=[Event(rank, name, duration_us=rows[rank]["total_us"], count=rows[rank]["count"]) for rank in ranks[:5]],
    )


def _nsight_compute(context: Context, name: str, rank: int, counts: dict[str, int]) -> NcuCommand:
    """The command that profiles the kernel on a rank."""
    hosts = {info.host for info in context.infos}
    # Of ranks that were not captured, the hosts are not known.
    everyone = all(info.world_size == len(context.infos) for info in context.infos)
    captured = context.iterations["rank"].to_pylist() if context.iterations.num_rows else []
    return ncu_command(
        name,
        next(info for info in context.infos if info.rank == rank),
        counts,
        iterations=captured.count(rank),
        manifest=next((manifest for manifest in context.manifests if manifest.rank == rank), None),
        hosts=len(hosts) if everyone and None not in hosts else None,
    )
