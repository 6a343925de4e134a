"""A rank whose host launches later than its peers' hosts do. The others wait for it in their communication.

What a rank is late by is the time its device starves for launches beyond that of its peers, as far as the time in which it
neither computes nor waits for other ranks is beyond theirs too: a rank that waits a lot is not late.
"""

from __future__ import annotations

import numpy as np

from bridge_profiling.analysis.attribution.idle import Cause
from bridge_profiling.analysis.findings.books import Grid
from bridge_profiling.analysis.findings.context import Context, ranks_in_words
from bridge_profiling.analysis.findings.finding import Confidence, Finding
from bridge_profiling.analysis.findings.peers import beyond_peers, peers

#: What a host that is late for no reason that has a finding of its own loses its device.
_LATE = (Cause.host_launch, Cause.small_kernels)

#: A launching call this much longer than the peers' says that the processor is slow or shared.
_SLOW_CALL = 1.3

#: Host ranges that a finding shows.
_EVENTS = 6

_ACTION = (
    "Give each rank's process cores of its own on the GPU's NUMA node (Slurm: --cpu-bind=cores, --cpus-per-task; numactl; "
    "OMP_NUM_THREADS), let all ranks collect garbage together (train.manual_gc=true, train.manual_gc_interval), and keep "
    "logging, checkpoint writers and data workers off these ranks' cores. CUDA graphs "
    "(model.cuda_graph_impl=local) take the host out of the way."
)
_SLOW_ACTION = "Its launching calls themselves take longer than elsewhere: the processor is slow or shared with other work. "


def find(context: Context) -> list[Finding]:
    """One finding for all ranks whose hosts are late by more than the threshold in a typical iteration.

    Args:
        context: of one run.
    """
    if len(context.ranks) < 2:
        return []
    late = late_us(context)
    typical = context.typical_us(late)
    waiting, waited_for = context.typical_us(context.waiting_us), _waited_for(context)
    slow = [
        rank
        for rank in context.ranks
        if context.share(typical.get(rank, 0.0)) > context.thresholds.cause
        and (waited_for is None or waiting[rank] <= waited_for.get(rank, 0.0))
    ]
    if not slow:
        return []
    chosen = np.array([rank in slow for rank in context.ranks])
    worst = max(slow, key=lambda rank: typical[rank])
    calls = context.typical_us(context.grid(context.pace, "launch_call_us")) if context.pace.num_rows else {}
    slow_call = calls.get(worst, 0.0) > _SLOW_CALL * float(np.median([calls[rank] for rank in calls] or [0.0])) > 0
    confidence, reason = _confidence(context)
    return [
        Finding(
            id="straggler_host",
            title=_title(context, slow, typical[worst]),
            ranks=slow,
            evidence={
                "late_us": {str(rank): typical[rank] for rank in slow},
                "late_us_by_iteration": {str(rank): _column(context, late, rank) for rank in slow},
                "launch_starved_us": {
                    str(rank): value for rank, value in context.typical_us(context.absent_us(*_LATE)).items()
                },
                "waiting_us": {str(rank): value for rank, value in waiting.items()},
                "waited_for_us": None if waited_for is None else {str(rank): waited_for.get(rank, 0.0) for rank in slow},
                "launch_call_us": {str(rank): value for rank, value in calls.items()},
            },
            recoverable_us_per_iteration=context.claim(np.where(chosen, late, 0.0), of=_LATE),
            confidence=confidence,
            confidence_reason=reason,
            action=(_SLOW_ACTION if slow_call else "") + _ACTION,
            events=context.events(*_LATE, ranks=slow, limit=_EVENTS),
        )
    ]


def late_us(context: Context) -> Grid:
    """How much later than their peers' the ranks' hosts launch, negative for those that launch earlier.

    Args:
        context: of one run.
    """
    sets = peers(context)
    starved = beyond_peers(context.unclaimed_us(*_LATE), sets)
    own = beyond_peers(context.duration_us - context.compute_us - np.nan_to_num(context.waiting_us), sets)
    return np.minimum(starved, own)


def _waited_for(context: Context) -> dict[int, float] | None:
    """What others wait for each rank in a typical iteration; None where that is unknown."""
    if not context.waiting_is_known:
        return None
    return context.typical_us(context.grid(context.run.ranks(), "waited_for_us"))


def _confidence(context: Context) -> tuple[Confidence, str]:
    if context.numbers == [None]:
        return Confidence.low, "no iterations are marked: captures are compared as wholes, which can hold different work"
    if not context.waiting_is_known:
        return Confidence.low, (
            "communication could not be matched between ranks: that others waited for these is concluded from their long "
            "communication alone"
        )
    return context.host_confidence()


def _title(context: Context, slow: list[int], late: float) -> str:
    who = ranks_in_words(slow, context.ranks)
    launch = f"The hosts of {who} launch up to" if len(slow) > 1 else f"The host of {who} launches"
    return f"{launch} {late / 1e3:.1f} ms late in each {context.per}; the others wait"


def _column(context: Context, grid: Grid, rank: int) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in grid[:, context.ranks.index(rank)]]
