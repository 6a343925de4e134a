"""Reductions of gradients and gathers of parameters that could run beside compute, and do not.

Data-parallel communication depends on one layer's gradients or parameters at a time, so nearly all of it fits beside the other
layers' passes: gradients beside the last backward pass, parameters beside the first forward pass. What could hide is therefore
what is exposed of it, as far as there is compute that it does not overlap yet.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from bridge_profiling.analysis.attribution.idle import Cause
from bridge_profiling.analysis.findings.context import Context, ranks_in_words
from bridge_profiling.analysis.findings.finding import Confidence, Event, Finding
from bridge_profiling.analysis.findings.transfers import Transfer, by_group, transfers

#: Hidden to this part, overlapping is on and works: what is left is of the first and the last bucket.
_MOSTLY_HIDDEN = 0.5

#: What reduces gradients or gathers parameters; others in these groups are norms and flags.
_OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")

#: Smaller ones are norms, flags and losses: they depend on everything before them.
_SMALLEST_BYTES = 1 << 20

_ACTION = (
    "Set ddp.overlap_grad_reduce=true and, with the distributed optimizer, ddp.overlap_param_gather=true "
    "(ddp.use_distributed_optimizer=true). If they are set: a smaller ddp.bucket_size starts the first bucket earlier, "
    "CUDA_DEVICE_MAX_CONNECTIONS=1 keeps the order of launches under tensor parallelism, and "
    "ddp.align_param_gather=true helps with pipeline stages."
)


def find(context: Context) -> list[Finding]:
    """One finding for all ranks on which more than the threshold of a typical iteration could be hidden and is not.

    Args:
        context: of one run.
    """
    if not context.ranks:
        return []
    chosen = [each for each in transfers(context) if _could_overlap(each)]
    compute = context.typical_us(context.compute_us)
    exposed_us: dict[int, float] = defaultdict(float)
    overlapped_us: dict[int, float] = defaultdict(float)
    for each in chosen:
        exposed_us[each.rank] += each.exposed_us
        overlapped_us[each.rank] += each.overlapped_us
    hideable, hidden = {}, {}
    for rank in context.ranks:
        exposed, overlapped = exposed_us[rank], overlapped_us[rank]
        hideable[rank] = min(exposed, max(compute.get(rank, 0.0) - overlapped, 0.0))
        hidden[rank] = overlapped / (exposed + overlapped) if exposed else 1.0
    ranks = [
        rank
        for rank in context.ranks
        if hidden[rank] < _MOSTLY_HIDDEN and context.share(hideable[rank]) > context.thresholds.cause
    ]
    if not ranks:
        return []
    lost = np.array([hideable[rank] for rank in context.ranks])
    unclaimed = np.minimum(context.unclaimed_us(Cause.blocked_by_communication), lost)
    worst = max(ranks, key=lambda rank: hideable[rank])
    groups = by_group([each for each in chosen if each.rank in ranks])
    confidence, reason = _confidence(context, chosen)
    return [
        Finding(
            id="low_overlap",
            title=(
                f"{ranks_in_words(ranks, context.ranks).capitalize()}: {hideable[worst] / 1e3:.1f} ms of data-parallel "
                f"communication in each {context.per} could run beside compute; {hidden[worst]:.0%} of it does"
            ),
            ranks=ranks,
            evidence={
                "could_hide_us": {str(rank): hideable[rank] for rank in ranks},
                "hidden_share": {str(rank): hidden[rank] for rank in ranks},
                "groups": groups,
            },
            recoverable_us_per_iteration=context.claim(
                unclaimed, of=(Cause.blocked_by_communication,), waited=not context.waiting_is_known
            ),
            confidence=confidence,
            confidence_reason=reason,
            action=_ACTION,
            events=[
                Event(
                    row["rank"],
                    f"{row['operation']} of {row['group']}",
                    duration_us=row["exposed_us"],
                    count=max(round(row["operations"]), 1),
                )
                for row in groups[:5]
            ],
        )
    ]


def _could_overlap(each: Transfer) -> bool:
    return (
        each.dimension == "dp"
        and each.operation in _OPERATIONS
        and each.message_bytes is not None
        and each.message_bytes >= _SMALLEST_BYTES
    )


def _confidence(context: Context, chosen: list[Transfer]) -> tuple[Confidence, str]:
    if not all(each.matched for each in chosen):
        return Confidence.low, "communication could not be matched between ranks: transfers are told from their shortest alone"
    return context.confidence()
