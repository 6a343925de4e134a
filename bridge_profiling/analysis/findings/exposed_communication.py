"""Data that moves while nothing can be computed. What ranks wait for each other is not meant: that is the late rank's finding.

Counted is time in which the next kernel was launched and had to wait until communication was over, less the waiting for other
ranks. Time in which the host was late as well is the host's. Where communication cannot be matched between ranks, as of a rank
captured alone, transfers are estimated, and nothing is said where not even that can be done.

A link that is slow for large messages is a cause that can be mended: it is told as soon as that would save what any cause must
cost, and then what it would save is all that is claimed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge_profiling.analysis.attribution.idle import Cause
from bridge_profiling.analysis.findings.books import Grid
from bridge_profiling.analysis.findings.context import Context, ranks_in_words
from bridge_profiling.analysis.findings.finding import Confidence, Event, Finding
from bridge_profiling.analysis.findings.transfers import Transfer, by_group, transfers

_ACTIONS = {
    "tp": (
        "Tensor parallelism: overlap it with the matrix products (model.tp_comm_overlap=true, needs "
        "model.sequence_parallel=true and Transformer Engine), keep model.tensor_model_parallel_size within one NVLink "
        "domain, or make it smaller."
    ),
    "dp": (
        "Data parallelism: ddp.overlap_grad_reduce=true, ddp.overlap_param_gather=true (with ddp.use_distributed_optimizer), "
        "ddp.bucket_size, ddp.grad_reduce_in_fp32=false, and more microbatches for each reduction."
    ),
    "pp": "Pipeline: model.overlap_p2p_comm=true with model.virtual_pipeline_model_parallel_size, and larger microbatches.",
    "ep": (
        "Experts: model.moe_token_dispatcher_type=flex (DeepEP), model.overlap_moe_expert_parallel_comm, "
        "model.moe_shared_expert_overlap, and model.expert_model_parallel_size within one NVLink domain."
    ),
    "cp": (
        "Context parallelism: model.cp_comm_type=a2a or p2p, which overlaps with attention, and a smaller "
        "model.context_parallel_size."
    ),
}
_ANY = "Overlap it with compute, send less of it, or over a faster link: find which group it is, and what waits for it."
_LATENCY = "Its messages are small: their number costs more than their size. Send fewer, larger ones (ddp.bucket_size)."
#: From this share on of what a link gives alone, nothing beside it can be to blame.
_AS_FAST_AS_ALONE = 0.85

_LINK = (
    "Its messages are large and move slowly: look at the link. NCCL_DEBUG=INFO says over what they go (P2P, SHM, NET); then "
    "nvidia-smi topo -m, NCCL_P2P_DISABLE and NCCL_SHM_DISABLE unset, NCCL_IB_HCA and NCCL_SOCKET_IFNAME, and nccl-tests."
)


def find(context: Context) -> list[Finding]:
    """One finding for all ranks that move data for more than the threshold of a typical iteration while nothing runs.

    Args:
        context: of one run.
    """
    if not context.ranks:
        return []
    every = transfers(context)
    exposed = _exposed(context, every)
    if exposed is None:
        return []
    typical = context.typical_us(exposed)
    ranks = [rank for rank in context.ranks if context.share(typical.get(rank, 0.0)) > context.thresholds.communication]
    claimed = exposed
    if not ranks:
        claimed = np.minimum(exposed, _by_rank(context, [(each.rank, each.slow_link_us) for each in every]))
        saved = context.typical_us(claimed)
        ranks = [rank for rank in context.ranks if context.share(saved.get(rank, 0.0)) > context.thresholds.cause]
    if not ranks:
        return []
    groups = by_group([each for each in every if each.rank in ranks])
    worst = max(ranks, key=lambda rank: typical[rank])
    share = context.share(typical[worst])
    known = context.waiting_is_known
    confidence, reason = _confidence(context)
    return [
        Finding(
            id="exposed_communication",
            title=_title(context, ranks, typical[worst], groups),
            ranks=ranks,
            evidence={
                "exposed_transfer_us": {str(rank): typical[rank] for rank in ranks},
                "share_of_iteration": share,
                "estimated": not known,
                "groups": groups,
            },
            recoverable_us_per_iteration=context.claim(claimed, of=(Cause.blocked_by_communication,), waited=not known),
            confidence=confidence,
            confidence_reason=reason,
            action=_action(groups),
            events=[
                Event(
                    row["rank"],
                    f"{row['operation']} of {row['group'] or 'an unnamed group'}",
                    duration_us=row["exposed_us"],
                    count=max(round(row["operations"]), 1),
                )
                for row in groups[:5]
            ],
            severe=share > 2 * context.thresholds.communication,
        )
    ]


def _title(context: Context, ranks: list[int], exposed_us: float, groups: list[dict[str, Any]]) -> str:
    who = ranks_in_words(ranks, context.ranks).capitalize()
    slow = [row["bus_bandwidth_gbs"] for row in groups if row["limited_by"] == "link"]
    link = f", over a slow link ({min(slow):.0f} GB/s)" if slow else ""
    return (
        f"{who}: nothing runs beside communication for {exposed_us / 1e3:.1f} ms of each {context.per} "
        f"({context.share(exposed_us):.0%}), waiting for other ranks not counted{link}"
    )


def _exposed(context: Context, every: list[Transfer]) -> Grid | None:
    """Transfers that nothing hides, of each rank's iterations; None when not even an estimate is possible."""
    blocked = context.unclaimed_us(Cause.blocked_by_communication)
    if context.waiting_is_known:
        return np.maximum(blocked - context.waiting_us, 0.0)
    if not every:
        return None
    return np.minimum(blocked, _by_rank(context, [(each.rank, each.exposed_us) for each in every]))


def _by_rank(context: Context, times_us: list[tuple[int, float]]) -> NDArray[np.float64]:
    """Times added up by rank, as a row of a grid."""
    found = dict.fromkeys(context.ranks, 0.0)
    for rank, time_us in times_us:
        found[rank] += time_us
    return np.array([found[rank] for rank in context.ranks])


def _confidence(context: Context) -> tuple[Confidence, str]:
    if context.waiting_is_known:
        return context.confidence()
    return Confidence.low, (
        "communication could not be matched between ranks: each operation is taken to move data as long as the shortest of its "
        "size, which is too long if all of them waited; capture all ranks of a group"
    )


def _action(groups: list[dict[str, Any]]) -> str:
    """What helps where most of the time goes."""
    first = groups[0] if groups else {}
    limits = {"link": _LINK, "latency": _LATENCY}
    # A slow link may carry less of the time than something else, and is still worth a look.
    limited = [name for name in limits if name == first.get("limited_by") or (name == "link" and _any_slow(groups))]
    found = [limits[name] for name in limited]
    if limited and limited[0] == "link":
        found.append(_beside_alone(groups))
    return " ".join([*filter(None, found), _ACTIONS.get(first.get("dimension") or "", _ANY)])


def _any_slow(groups: list[dict[str, Any]]) -> bool:
    return any(row["limited_by"] == "link" for row in groups)


def _beside_alone(groups: list[dict[str, Any]]) -> str:
    """What a benchmark says of the slow link that carries the most: slow by itself, or only here; "" without one."""
    slow = next((row for row in groups if row["limited_by"] == "link" and "reached_share_of_alone" in row), None)
    if slow is None:
        return ""
    share = slow["reached_share_of_alone"]
    if share >= _AS_FAST_AS_ALONE:
        return f"Alone it gives no more ({share:.0%} reached): the link itself is slow."
    return f"It reached {share:.0%} of what this link gave alone: look at what differs from the benchmark, not at the link."
