"""How fast hosts launch, as evidence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bridge_profiling.analysis.findings.context import Context


def pace_of(context: Context, ranks: Sequence[int]) -> dict[str, Any]:
    """Numbers of a typical iteration of some ranks: kernels, how long one is in the mean, and what launching one takes.

    Args:
        context: of one run.
        ranks: whose.
    """
    names = ("kernel_count", "mean_kernel_us", "launch_call_us", "graph_kernel_count")
    found = {}
    for name in names:
        values = context.typical_us(context.grid(context.pace, name)) if context.pace.num_rows else {}
        found[name] = {str(rank): round(values[rank], 3) for rank in ranks if rank in values}
    return found
