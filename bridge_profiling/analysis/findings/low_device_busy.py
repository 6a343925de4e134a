"""Devices that are idle for a good part of an iteration. What for is told by the findings on causes; this one has the rest."""

from __future__ import annotations

import numpy as np

from bridge_profiling.analysis.attribution.idle import Cause
from bridge_profiling.analysis.findings.context import Context, ranks_in_words
from bridge_profiling.analysis.findings.finding import Event, Finding
from bridge_profiling.analysis.findings.losses import blamed, by_rank, claimed, ms

#: Causes by which a device idles, in words.
_WORDS = {
    Cause.data_loading: "data loading",
    Cause.host_sync: "synchronisations of the host",
    Cause.pageable_copy: "copies of pageable memory",
    Cause.checkpoint_stall: "saving a checkpoint",
    Cause.profiler: "the profiler's own work",
    Cause.small_kernels: "launches of small kernels",
    Cause.host_launch: "launches",
    Cause.dependency_stalled: "what is not known, between kernels that were launched in time",
}


_FOLLOW = "Follow the findings that name the cause."
_ALONE = "No single cause is beyond its threshold: the evidence has what each costs."


def find(context: Context) -> list[Finding]:
    """One finding for all ranks that are busy for less than the threshold's part of an iteration.

    Busy is when a kernel, a copy or a memset runs: also one that only waits for another rank. Idle time that the profiler costs
    is not counted.

    Args:
        context: of one run.
    """
    if not context.has_device:
        return []
    busy = _busy(context)
    low = sorted(rank for rank, share in busy.items() if share < context.thresholds.device_busy)
    if not low:
        return []
    idle = {cause: context.mean_us(context.absent_us(cause, profiler=True)) for cause in _WORDS}
    least = min(low, key=lambda rank: busy[rank])
    causes = sorted(_WORDS, key=lambda cause: -idle[cause].get(least, 0.0))
    main = causes[0]
    causes_left = tuple(cause for cause in _WORDS if cause is not Cause.profiler)
    # Beside findings on causes, what is left are many small things, which nobody gets back at once.
    alone = not np.nansum(context.books.claimed_us) > 0
    loss = claimed(context, context.unclaimed_us(*causes_left), of=causes_left, at_least=0.0) if alone else None
    known = main is Cause.dependency_stalled
    confidence, reason = context.confidence() if known else context.host_confidence()
    return [
        Finding(
            id="low_device_busy",
            title=f"{ranks_in_words(low, context.ranks).capitalize()}: the device is busy for only {busy[least]:.0%} "
            f"of each {context.per}; it mostly waits for {_WORDS[main]}",
            ranks=low,
            evidence={
                "busy_share": {str(rank): round(share, 4) for rank, share in busy.items()},
                "idle_us": {str(cause): by_rank({rank: idle[cause][rank] for rank in low}) for cause in causes[:4]},
            },
            recoverable_us_per_iteration=loss.recoverable_us if loss else None,
            confidence=confidence,
            confidence_reason=reason,
            action=f"{_ALONE if alone else _FOLLOW} {ms(idle[main].get(least, 0.0))} of each {context.per} of "
            f"{ranks_in_words([least], context.ranks)} are owed to {_WORDS[main]}.",
            events=_events(context, main, blamed({rank: idle[main].get(rank, 0.0) for rank in low})),
            severe=busy[least] < context.thresholds.device_busy_severe,
        )
    ]


def _busy(context: Context) -> dict[int, float]:
    """Share of an iteration in which each device did anything; of the iteration less what the profiler made it longer."""
    if context.iterations.num_rows:
        busy = context.duration_us - context.grid(context.iterations, "idle_us")
        return context.typical_us(busy / np.maximum(np.maximum(context.duration_us - context.profiler_cost_us, busy), 1e-9))
    rows = [row for row in context.run.breakdown().to_pylist() if row["source"] == context.source and row["span_us"]]
    return {row["rank"]: row["busy_us"] / row["span_us"] for row in rows}


def _events(context: Context, cause: Cause, ranks: list[int]) -> list[Event]:
    return context.events(cause, ranks=ranks)
