"""What the profiler itself cost, from the manifests: how far the profiled iterations are from those of the run as it is."""

from __future__ import annotations

import numpy as np

from bridge_profiling.analysis.caveats import name_ranks
from bridge_profiling.analysis.findings.context import Context
from bridge_profiling.analysis.findings.finding import Confidence, Event, Finding
from bridge_profiling.analysis.findings.losses import blamed, by_rank, ms

_ACTION = (
    "Judge times of the host by unprofiled iterations: this run's findings are less this cost. To have it smaller, record "
    "less: profiling.record_shapes=false, profiling.pytorch_profiler_collect_callstack=false, "
    "profiling.pytorch_profiler_profile_memory=false, fewer ranks (profiling.profile_ranks), or Nsight Systems "
    "(profiling.use_nsys_profiler=true)."
)


def find(context: Context) -> list[Finding]:
    """One finding for all ranks whose profiled iterations are longer than the others by more than the threshold.

    It costs the run nothing outside the window, so nothing is to be got back.

    Args:
        context: of one run.
    """
    shares, plain = {}, {}
    counts = []
    for manifest in context.manifests:
        if manifest.rank in context.profiler_us:
            others = manifest.durations_ns(profiled=False)
            plain[manifest.rank] = float(np.median(others)) / 1e3
            shares[manifest.rank] = context.profiler_us[manifest.rank] / plain[manifest.rank] if plain[manifest.rank] else 0.0
            counts.append((len(manifest.durations_ns(profiled=True)), len(others)))
    costly = sorted(rank for rank, share in shares.items() if share > context.thresholds.profiler)
    if not costly:
        return []
    worst = max(costly, key=lambda rank: shares[rank])
    profiled, unprofiled = min(counts)
    few = min(profiled, unprofiled) < 3
    return [
        Finding(
            id="profiler_overhead",
            title=f"The profiler makes an iteration {ms(context.profiler_us[worst])} ({shares[worst]:.0%}) longer",
            ranks=costly,
            evidence={
                "profiler_us": by_rank(context.profiler_us),
                "unprofiled_iteration_us": by_rank(plain),
                "share_of_unprofiled_iteration": {str(rank): round(share, 4) for rank, share in shares.items()},
                "iterations_compared": {"profiled": profiled, "unprofiled": unprofiled},
            },
            recoverable_us_per_iteration=None,
            confidence=Confidence.medium if few else Confidence.high,
            confidence_reason=f"only {profiled} profiled and {unprofiled} other iterations are compared" if few else "",
            action=_ACTION,
            events=[
                Event(rank, f"profiled iterations of {name_ranks([rank])}", duration_us=context.profiler_us[rank])
                for rank in blamed({rank: context.profiler_us[rank] for rank in costly})[:5]
            ],
            severe=shares[worst] > 1.0,
        )
    ]
