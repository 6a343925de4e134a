"""Hosts that wait for their device and then launch too late: `.item()`, `.cpu()`, a printed tensor, `torch.cuda.synchronize()`.

What counts is not how long the host waits, as the device works meanwhile, but how long the device idles after it for want of
launches. One synchronisation at the end of an iteration, for its loss or its timer, is common; whether it costs too much is
told by the same measure.
"""

from __future__ import annotations

from bridge_profiling.analysis.attribution.idle import Cause
from bridge_profiling.analysis.findings.context import Context, ranks_in_words
from bridge_profiling.analysis.findings.finding import Finding
from bridge_profiling.analysis.findings.losses import blamed, by_rank, claimed_cause, ms

_ACTION = (
    "Take the synchronisations that the events name out of the iteration: no .item(), .cpu(), .tolist(), nonzero() or print "
    "of a device tensor per micro-batch; add losses up on the device and read them every logger.log_interval iterations, with "
    "copies to pinned memory (non_blocking=True). "
)
#: Share of an iteration.
_SEVERE = 0.25

#: Many synchronisations are a finding at this part of the threshold; a few, as every loop has for its loss, its gradients' norm
#: and its log, at more of it.
_OF_MANY, _OF_FEW = 0.2, 2.0
_FEW = 4

#: What is said of some calls.
_NAMED = (
    ("cudaDeviceSynchronize", "With pipeline stages, model.batch_p2p_sync waits for the device after each exchange: "
     "model.overlap_p2p_comm=true with model.batch_p2p_comm=false does without. "),
    ("cudaFree", "cudaFree waits for the device: the allocator gives memory back because it is nearly full or fragmented "
     "(PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, no torch.cuda.empty_cache() in the loop). "),
    ("aten::nonzero", "aten::nonzero must know its result's size: mask with torch.where in place of indexing with booleans. "),
)  # fmt: skip


def find(context: Context) -> list[Finding]:
    """One finding for all synchronisations that cost time.

    Args:
        context: of one run.
    """
    calls = context.mean_us(context.calls(Cause.host_sync))
    number = max(calls.values(), default=0.0)
    factor = _OF_MANY if number >= context.thresholds.synchronizations else _OF_FEW if number <= _FEW else 1.0
    loss = claimed_cause(context, Cause.host_sync, at_least=context.thresholds.cause * factor)
    if loss is None:
        return []
    # Ranks that wait as often are as much to blame, also those that lose less because they wait for others.
    ranks = blamed(calls) if number > _FEW else loss.ranks
    confidence, reason = context.host_confidence()
    events = context.events(Cause.host_sync, ranks=ranks)
    hints = [hint for name, hint in _NAMED if any(name in event.name for event in events)]
    few = "They are the few at an iteration's end that every loop has: logging less often saves most of it. "
    once = few if number <= _FEW else ""
    return [
        Finding(
            id="host_sync",
            title=f"{ranks_in_words(ranks, context.ranks).capitalize()}: the host waits for the device {number:.0f} times "
            f"in each {context.per} and then launches too late, which costs {ms(loss.recoverable_us)} "
            f"({context.share(loss.recoverable_us):.0%})",
            ranks=ranks,
            evidence={
                "share_of_iteration": round(context.share(loss.recoverable_us), 4),
                "idle_after_us": by_rank(loss.lost_us),
                "host_waits_us": by_rank(context.mean_us(context.host_us(Cause.host_sync))),
                "synchronizations": {str(rank): round(count, 2) for rank, count in calls.items()},
            },
            recoverable_us_per_iteration=loss.recoverable_us,
            confidence=confidence,
            confidence_reason=reason,
            action=once + _ACTION + "".join(hints),
            events=events,
            severe=context.share(loss.recoverable_us) >= _SEVERE,
        )
    ]
