"""Copies that compute waits for, though they are of pinned memory or within the device."""

from __future__ import annotations

from bridge_profiling.analysis.attribution.idle import Cause
from bridge_profiling.analysis.findings.context import Context, ranks_in_words
from bridge_profiling.analysis.findings.copying import copies_of
from bridge_profiling.analysis.findings.finding import Finding
from bridge_profiling.analysis.findings.losses import by_rank, claimed_cause, ms

_ACTION = (
    "Copy earlier, beside compute: on a stream of its own, a micro-batch ahead (.to(device, non_blocking=True) from "
    "pinned memory). With offloading (model.cpu_offloading, optimizer.optimizer_cpu_offload, optimizer_offload_fraction) move "
    "less, or overlap it (optimizer.overlap_cpu_optimizer_d2h_h2d=true, model.cpu_offloading_double_buffering=true)."
)


def find(context: Context) -> list[Finding]:
    """One finding for all copies that block compute.

    Args:
        context: of one run.
    """
    loss = claimed_cause(context, Cause.blocked_by_copy, at_least=context.thresholds.cause)
    if loss is None:
        return []
    confidence, reason = context.confidence()
    return [
        Finding(
            id="copy_bound",
            title=f"Compute of {ranks_in_words(loss.ranks, context.ranks)} waits {ms(loss.recoverable_us)} of each "
            f"{context.per} for copies ({context.share(loss.recoverable_us):.0%})",
            ranks=loss.ranks,
            evidence={
                "share_of_iteration": round(context.share(loss.recoverable_us), 4),
                "blocked_us": by_rank(loss.lost_us),
                "copies": copies_of(context, loss.ranks, pageable=False),
            },
            recoverable_us_per_iteration=loss.recoverable_us,
            confidence=confidence,
            confidence_reason=reason,
            action=_ACTION,
            events=context.events(Cause.blocked_by_copy, ranks=loss.ranks),
        )
    ]
