"""Runs of kernels so short that no host can launch them as fast as the device is through with them.

Their time is what the device idles between such kernels, for want of launches or for the start of each.
"""

from __future__ import annotations

from bridge_profiling.analysis.attribution.idle import LAUNCH_NS, Cause
from bridge_profiling.analysis.findings.context import Context, ranks_in_words
from bridge_profiling.analysis.findings.finding import Finding
from bridge_profiling.analysis.findings.launching import pace_of
from bridge_profiling.analysis.findings.losses import by_rank, claimed_cause, ms

_ACTION = (
    "Launch fewer, larger kernels: fused optimizers and norms (optimizer with foreach or fused=True, model.transformer_impl="
    "transformer_engine, model.bias_activation_fusion, model.bias_dropout_fusion, model.masked_softmax_fusion, "
    "model.apply_rope_fusion), torch.compile (model.torch_compile=true) over chains of element-wise operators, a larger "
    "train.micro_batch_size; or launch them together, as a CUDA graph (model.cuda_graph_impl=local)."
)


def find(context: Context) -> list[Finding]:
    """One finding for all ranks that launch runs of small kernels.

    Args:
        context: of one run.
    """
    loss = claimed_cause(context, Cause.small_kernels, at_least=context.thresholds.cause)
    if loss is None:
        return []
    confidence, reason = context.host_confidence()
    return [
        Finding(
            id="small_kernels",
            title=f"{ranks_in_words(loss.ranks, context.ranks).capitalize()}: runs of kernels shorter than their launches "
            f"({LAUNCH_NS / 1e3:.0f} µs) leave the device idle for {ms(loss.recoverable_us)} of each {context.per} "
            f"({context.share(loss.recoverable_us):.0%})",
            ranks=loss.ranks,
            evidence={
                "share_of_iteration": round(context.share(loss.recoverable_us), 4),
                "idle_us": by_rank(loss.lost_us),
                **pace_of(context, loss.ranks),
            },
            recoverable_us_per_iteration=loss.recoverable_us,
            confidence=confidence,
            confidence_reason=reason,
            action=_ACTION,
            events=context.events(Cause.small_kernels, ranks=loss.ranks),
        )
    ]
