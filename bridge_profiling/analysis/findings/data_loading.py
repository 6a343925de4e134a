"""Devices that idle while the program waits for its next batch.

Evidence are ranges on the thread that launches: the training loop's own, Megatron's, or torch's of its DataLoader. Loading that
happens beside the device's work costs nothing, and is none.
"""

from __future__ import annotations

from bridge_profiling.analysis.attribution.idle import Cause
from bridge_profiling.analysis.findings.context import Context, ranks_in_words
from bridge_profiling.analysis.findings.finding import Finding
from bridge_profiling.analysis.findings.losses import by_rank, claimed_ranges, ms

_ACTION = (
    "Have batches ready before they are needed: dataset.num_workers=2 or more with dataset.prefetch_factor=2 or more "
    "(Megatron-LM: --num-workers; plain PyTorch: DataLoader(num_workers=, prefetch_factor=, pin_memory=True, "
    "persistent_workers=True)). If workers are there already, they are too slow: look at what a sample costs (tokenizing, "
    "decoding, storage), give the job more CPU cores, or prepare the data beforehand."
)


def find(context: Context) -> list[Finding]:
    """One finding for all ranks that load slowly.

    Args:
        context: of one run.
    """
    loss = claimed_ranges(context, Cause.data_loading, at_least=context.thresholds.data_loading)
    if loss is None:
        return []
    confidence, reason = context.host_confidence()
    share = context.share(loss.recoverable_us, captured=True)
    events = context.events(Cause.data_loading, ranks=loss.ranks)
    events += context.events(Cause.data_loading, ranks=loss.ranks, between=True, limit=5 - len(events))
    return [
        Finding(
            id="data_loading",
            title=f"Data loading holds {ranks_in_words(loss.ranks, context.ranks)} for {ms(loss.recoverable_us)} of each "
            f"{context.per} ({share:.0%})",
            ranks=loss.ranks,
            evidence={
                "share_of_iteration": round(share, 4),
                "idle_us": by_rank(loss.lost_us),
                "in_data_loading_us": by_rank(loss.host_us),
            },
            recoverable_us_per_iteration=loss.recoverable_us,
            confidence=confidence,
            confidence_reason=reason,
            action=_ACTION,
            events=events,
            severe=share >= 3 * context.thresholds.data_loading,
        )
    ]
