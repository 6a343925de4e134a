"""Memory that the allocator holds and cannot use: it takes more of the device while enough of what it has is free.

Told from three things, each of which is enough:

- needless: what was reserved while as much was free already, in holes too small for the request, as far as the highest
  reserved amount is above the highest allocated one (`Run.memory`), is a large part of what is reserved.
- it goes on: each iteration reserves more, and beyond what it leaves allocated. In a steady state nothing more is reserved.
- an allocation failed that all the free memory together could have held.

Shown with them:

- inactive split blocks, as `torch.cuda.memory_stats` calls them: free parts of blocks of which other parts are in use, when
  the snapshot was taken. They show where it comes from, and cost nothing by themselves: at the end of an iteration holes are
  normal.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bridge_profiling.analysis.findings.context import Context, ranks_in_words
from bridge_profiling.analysis.findings.finding import Confidence, Event, Finding
from bridge_profiling.analysis.findings.memory_growth import steady_growth
from bridge_profiling.analysis.findings.memory_recordings import largest_sites, megabytes

#: The allocator takes small memory in pieces of 2 MiB and up to 10 MiB in pieces of 20: one now and then is its rounding.
_PIECE_BYTES = 20 * 1024 * 1024

#: Less than this altogether is rounding too: a few streams have a few pieces each.
_ROUNDING_BYTES = 10 * _PIECE_BYTES

_ACTION = (
    "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which lets blocks grow in place of taking new ones. If lengths "
    "vary, pad sequences to few lengths, or pack them; else max_split_size_mb or roundup_power2_divisions in the same "
    "variable, and long-lived tensors (gradient buffers, caches) allocated before the first iteration."
)


def find(context: Context) -> list[Finding]:
    """One finding for all devices of which fragmentation took more than the threshold, or takes more with each iteration.

    Args:
        context: of one run.
    """
    growth, failed = _needless_growth(context), _failed(context)
    rows = []
    for row in context.run.memory().to_pylist():
        key = row["rank"], row["device"]
        row |= {"growth": growth.get(key, 0.0), "failed": failed.get(key, 0)}
        if row["growth"] or row["failed"] or _share(row) > context.thresholds.memory_fragmentation:
            rows.append(row)
    if not rows:
        return []
    rows.sort(key=lambda row: (-row["failed"], -row["growth"], -(row["needlessly_reserved_bytes"] or 0), row["rank"]))
    worst = rows[0]
    split = worst["inactive_split_bytes"]
    holes = split is not None and split > context.thresholds.memory_fragmentation * worst["end_reserved_bytes"]
    return [
        Finding(
            id="memory_fragmentation",
            title=_title(worst, ranks_in_words(sorted({row["rank"] for row in rows}), context.ranks)),
            ranks=sorted({row["rank"] for row in rows}),
            evidence={"devices": [_evidence(row) for row in rows]},
            recoverable_us_per_iteration=None,
            confidence=Confidence.high if holes or worst["failed"] else Confidence.medium,
            confidence_reason=""
            if holes or worst["failed"]
            else "the holes themselves are not seen: they were gone when the snapshot was taken, or there is none",
            action=_ACTION,
            events=_events(context, worst),
            severe=bool(worst["failed"]),
        )
    ]


def _needless_growth(context: Context) -> dict[tuple[int, int], float]:
    """What each device's reserved memory grows by in an iteration beyond its allocated memory, where it keeps growing."""
    reserved: dict[tuple[int, int], list[int]] = {}
    free: dict[tuple[int, int], list[int]] = {}
    for row in context.run.memory_growth().to_pylist():
        if row["reserved_bytes"] is not None:
            reserved.setdefault((row["rank"], row["device"]), []).append(row["reserved_bytes"])
            free.setdefault((row["rank"], row["device"]), []).append(row["reserved_bytes"] - row["allocated_bytes"])
    # Both: memory that was freed makes more free as well, and takes nothing of the device.
    growth = {
        key: min(steady_growth(np.diff(amounts).tolist(), _PIECE_BYTES) for amounts in (reserved[key], free[key]))
        for key in reserved
    }
    return {key: size for key, size in growth.items() if size}


def _failed(context: Context) -> dict[tuple[int, int], int]:
    """The largest request of each device that failed although as much was reserved and free."""
    free = {
        (row["rank"], row["device"]): row["end_reserved_bytes"] - row["end_bytes"]
        for row in context.run.memory().to_pylist()
        if row["end_reserved_bytes"] is not None
    }
    failed: dict[tuple[int, int], int] = {}
    for row in context.run.out_of_memory().to_pylist():
        key, size = (row["rank"], row["device"]), row["requested_bytes"] or 0
        if 0 < size <= free.get(key, 0):
            failed[key] = max(size, failed.get(key, 0))
    return failed


def _share(row: dict[str, Any]) -> float:
    needless = row["needlessly_reserved_bytes"] or 0
    return needless / row["peak_reserved_bytes"] if needless > _ROUNDING_BYTES else 0.0


def _title(row: dict[str, Any], ranks: str) -> str:
    if row["failed"]:
        free = megabytes(row["end_reserved_bytes"] - row["end_bytes"])
        return f"{megabytes(row['failed'])} could not be allocated on {ranks}, with {free} reserved and free in smaller pieces"
    of_reserved = f"of the {megabytes(row['peak_reserved_bytes'])} that the allocator of {ranks} holds"
    if row["growth"]:
        return f"Fragmentation takes {megabytes(row['growth'])} more in each iteration, {of_reserved}"
    return f"Fragmentation takes {megabytes(row['needlessly_reserved_bytes'])} {of_reserved}"


def _evidence(row: dict[str, Any]) -> dict[str, Any]:
    split, reserved = row["inactive_split_bytes"], row["end_reserved_bytes"]
    return {
        "rank": row["rank"],
        "device": row["device"],
        "needlessly_reserved_bytes": row["needlessly_reserved_bytes"],
        "needless_growth_bytes_per_iteration": row["growth"],
        "failed_request_bytes": row["failed"] or None,
        "peak_reserved_bytes": row["peak_reserved_bytes"],
        "peak_allocated_bytes": row["peak_bytes"],
        "share_of_reserved": (row["needlessly_reserved_bytes"] or 0) / row["peak_reserved_bytes"],
        "inactive_split_bytes": split,
        "inactive_split_share": None if split is None else split / reserved,
    }


def _events(context: Context, row: dict[str, Any]) -> list[Event]:
    """What was still in use at the end sits between the holes."""
    return largest_sites(context.run.memory_sites(), row["rank"], row["device"], "end_bytes")
