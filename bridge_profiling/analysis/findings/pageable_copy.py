"""Copies of pageable host memory: they hold the host until they are staged, and run at a fraction of the link's speed."""

from __future__ import annotations

from bridge_profiling.analysis.attribution.idle import Cause
from bridge_profiling.analysis.findings.context import Context, ranks_in_words
from bridge_profiling.analysis.findings.copying import copies_of
from bridge_profiling.analysis.findings.finding import Finding
from bridge_profiling.analysis.findings.losses import by_rank, claimed_cause, ms

_ACTION = (
    "Copy from pinned memory, and do not wait for it: dataset.pin_memory=true (plain PyTorch: DataLoader(pin_memory=True), "
    "or tensor.pin_memory() once for a buffer that is used again) with .to(device, non_blocking=True). Copies to the host the "
    "same way, into a pinned buffer, with an event to wait for."
)


def find(context: Context) -> list[Finding]:
    """One finding for all pageable copies that keep devices from computing.

    Args:
        context: of one run.
    """
    loss = claimed_cause(context, Cause.pageable_copy, at_least=context.thresholds.cause)
    if loss is None:
        return []
    confidence, reason = context.host_confidence()
    return [
        Finding(
            id="pageable_copy",
            title=f"Copies of pageable memory hold {ranks_in_words(loss.ranks, context.ranks)} for {ms(loss.recoverable_us)} "
            f"of each {context.per} ({context.share(loss.recoverable_us):.0%})",
            ranks=loss.ranks,
            evidence={
                "share_of_iteration": round(context.share(loss.recoverable_us), 4),
                "lost_us": by_rank(loss.lost_us),
                "host_held_us": by_rank(context.mean_us(context.host_us(Cause.pageable_copy))),
                "copies": copies_of(context, loss.ranks, pageable=True),
            },
            recoverable_us_per_iteration=loss.recoverable_us,
            confidence=confidence,
            confidence_reason=reason,
            action=_ACTION,
            events=context.events(Cause.pageable_copy, ranks=loss.ranks),
        )
    ]
