"""Devices that wait for launches, for no reason with a finding of its own: Python, the framework, garbage collection, the CPU.

A rank that waits for others in its communication is not meant, whatever its host does meanwhile: only time in which the device
had nothing at all to do, and less what the profiler itself cost.
"""

from __future__ import annotations

from bridge_profiling.analysis.attribution.idle import Cause
from bridge_profiling.analysis.findings.context import Context, ranks_in_words
from bridge_profiling.analysis.findings.finding import Finding
from bridge_profiling.analysis.findings.launching import pace_of
from bridge_profiling.analysis.findings.losses import blamed, by_rank, claimed, ms

_ACTION = (
    "Make the host launch less or faster: CUDA graphs (model.cuda_graph_impl=local), a larger train.micro_batch_size, fused "
    "layers (model.transformer_impl=transformer_engine), torch.compile (model.torch_compile=true; plain PyTorch: "
    'torch.compile(mode="reduce-overhead")); train.manual_gc=true with train.manual_gc_interval, so that Python does not '
    "collect garbage in the middle of an iteration; CPU cores of its own for each rank."
)

#: Share of an iteration.
_SEVERE = 0.30


def find(context: Context) -> list[Finding]:
    """One finding for all ranks whose hosts launch too slowly, beyond what makes single ranks late.

    Args:
        context: of one run.
    """
    if not context.has_device:
        return []
    lost = context.unclaimed_us(Cause.host_launch)
    loss = claimed(context, lost, of=(Cause.host_launch,), at_least=context.thresholds.cause)
    if loss is None:
        return []
    confidence, reason = context.host_confidence()
    share = context.share(loss.recoverable_us)
    starved = context.mean_us(context.absent_us(Cause.host_launch))
    late = blamed(starved)
    beside = " beside what makes single ranks late" if max(starved.values()) > max(loss.lost_us.values()) + 1 else ""
    return [
        Finding(
            id="host_launch_bound",
            title=f"{ranks_in_words(late, context.ranks).capitalize()}: the device waits for the host to launch, which costs "
            f"{ms(loss.recoverable_us)} ({share:.0%}) of each {context.per}{beside}",
            ranks=late,
            evidence={
                "share_of_iteration": round(share, 4),
                "idle_us": by_rank(starved),
                "profiler_us": by_rank(context.profiler_us),
                **pace_of(context, late),
            },
            recoverable_us_per_iteration=loss.recoverable_us,
            confidence=confidence,
            confidence_reason=reason,
            action=_ACTION,
            events=context.events(Cause.host_launch, ranks=late),
            severe=share >= _SEVERE,
        )
    ]
