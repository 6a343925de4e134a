"""What the profiler itself cost, from manifests: iterations it captured against those of the same run that it did not touch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bridge_profiling.manifest import RankCapture

#: Fewer iterations on a side say nothing about how long one usually is.
_ENOUGH = 2


def profiler_cost_us(manifests: Sequence[RankCapture]) -> dict[int, float]:
    """By how much the median profiled iteration is longer than the median other one, by rank; ranks that cannot tell left out.

    Args:
        manifests: of the profiled ranks.
    """
    found = {}
    for manifest in manifests:
        profiled, plain = manifest.durations_ns(profiled=True), manifest.durations_ns(profiled=False)
        if len(profiled) >= 1 and len(plain) >= _ENOUGH:
            found[manifest.rank] = float(np.median(profiled) - np.median(plain)) / 1e3
    return found
