"""A run's copies as evidence: what they moved, and how fast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bridge_profiling.analysis.findings.context import Context


def copies_of(context: Context, ranks: Sequence[int], *, pageable: bool) -> list[dict[str, Any]]:
    """Kinds of copies over the whole capture, most time first.

    Args:
        context: of one run.
        ranks: whose.
        pageable: those of pageable memory, or the others.
    """
    rows = [
        row
        for row in context.run.copies().to_pylist()
        if row["source"] == context.source and row["rank"] in ranks and (row["host_memory"] == "pageable") == pageable
    ]
    rows.sort(key=lambda row: (-row["total_us"], row["rank"]))
    names = ("rank", "direction", "host_memory", "count", "bytes", "total_us", "bandwidth_gbs")
    return [{name: row[name] for name in names} for row in rows[:8]]
