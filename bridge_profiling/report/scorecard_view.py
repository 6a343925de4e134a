"""The checklist in words."""

from __future__ import annotations

from collections.abc import Sequence

from bridge_profiling.report import words
from bridge_profiling.report.views import Row, TableView, table

#: The question of each check, and what its value is a share of.
_TEXTS = {
    "device_busy": ("GPU busy above {limit}", "busy"),
    "memory_headroom": ("at least {limit} of the memory free at the peak", "free"),
    "data_loading": ("data loading under {limit}", "of an iteration"),
    "mixed_precision": ("matrix products in 16 or 8 bits", "of their time"),
    "fused_attention": ("fused attention", "of attention's time"),
    "fused_optimizer": ("fused optimizer", "of the optimizer's time"),
    "compiled_or_graphed": ("compiled, or CUDA graphs", "of the kernels"),
    "overlapped_communication": ("communication overlapped", "hidden by compute"),
    "gradient_accumulation": ("optimizer and reductions under {limit}: enough accumulated", "of an iteration"),
}


def scorecard(rows: Sequence[Row]) -> TableView:
    """Rows of `Run.scorecard`."""
    columns = {
        "check": lambda row: _TEXTS[row["check"]][0].format(limit=words.percent(row["limit"])),
        "answer": lambda row: row["answer"],
        "measured": _measured,
    }
    return table("scorecard", "Checklist, by the rank that does worst", rows, columns)


def _measured(row: Row) -> str:
    if row["value"] is None:
        return row["reason"]
    on = "" if row["rank"] is None else f" on rank {row['rank']}"
    return f"{words.percent(row['value'])} {_TEXTS[row['check']][1]}{on}"
