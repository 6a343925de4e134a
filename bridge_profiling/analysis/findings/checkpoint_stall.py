"""Devices that idle while a checkpoint is written, within iterations or between them."""

from __future__ import annotations

import numpy as np

from bridge_profiling.analysis.attribution.idle import Cause
from bridge_profiling.analysis.findings.context import Context, ranks_in_words
from bridge_profiling.analysis.findings.finding import Finding
from bridge_profiling.analysis.findings.losses import by_rank, claimed_ranges, ms

_ACTION = (
    "Write it beside training, which holds the devices only for the copy to host memory (Megatron Bridge: "
    "checkpoint.async_save=true with checkpoint.ckpt_format=torch_dist; Megatron-LM: --async-save; plain PyTorch: "
    "torch.distributed.checkpoint.async_save); share the writing among data-parallel ranks (Megatron Bridge: "
    "checkpoint.fully_parallel_save=true); faster or node-local storage; a longer checkpoint.save_interval."
)


def find(context: Context) -> list[Finding]:
    """One finding for all checkpoints in the window.

    Args:
        context: of one run.
    """
    loss = claimed_ranges(context, Cause.checkpoint_stall, at_least=context.thresholds.cause)
    if loss is None:
        return []
    host = context.host_us(Cause.checkpoint_stall) + context.host_us(Cause.checkpoint_stall, between=True)
    saving = np.nanmax(host, axis=1)
    times = int((saving > 0).sum())
    after = [number for number, time_us in zip(context.numbers, saving.tolist(), strict=True) if time_us > 0]
    confidence, reason = context.host_confidence()
    events = context.events(Cause.checkpoint_stall, ranks=loss.ranks)
    events += context.events(Cause.checkpoint_stall, ranks=loss.ranks, between=True, limit=5 - len(events))
    return [
        Finding(
            id="checkpoint_stall",
            title=f"Writing a checkpoint holds {ranks_in_words(loss.ranks, context.ranks)} for "
            f"{ms(loss.recoverable_us * len(context.numbers) / times)}, {_how_often(times, len(context.numbers))}",
            ranks=loss.ranks,
            evidence={
                "idle_us": by_rank(loss.lost_us),
                "in_checkpoint_us": by_rank(loss.host_us),
                "iterations": after,
                "iterations_captured": len(context.numbers),
                "share_of_iteration": round(context.share(loss.recoverable_us, captured=True), 4),
            },
            recoverable_us_per_iteration=loss.recoverable_us,
            confidence=confidence,
            confidence_reason=" ".join(
                [
                    *([f"{reason};"] if reason else []),
                    "its cost per iteration is that of the captured ones: over the run it is as rare as save_interval says",
                ]
            ),
            action=_ACTION,
            events=events,
        )
    ]


def _how_often(times: int, iterations: int) -> str:
    return "in each captured iteration" if times == iterations else f"in {times} of {iterations} captured iterations"
