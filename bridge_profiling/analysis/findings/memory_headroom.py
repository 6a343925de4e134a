"""Devices that are nearly full at their peak: the next longer sequence, or a fragmented moment, runs out of memory.

An out-of-memory error that was recorded is such a peak, whatever is known of the device.
"""

from __future__ import annotations

from typing import Any

from bridge_profiling.analysis.findings.context import Context, ranks_in_words
from bridge_profiling.analysis.findings.finding import Confidence, Event, Finding
from bridge_profiling.analysis.findings.memory_recordings import device_bytes, gigabytes, largest_sites, megabytes

_ACTION = (
    "Needed less: recompute activations (model.recompute_granularity=selective, or full with model.recompute_method "
    "and model.recompute_num_layers), shard the optimizer (ddp.use_distributed_optimizer), model.sequence_parallel with "
    "tensor parallelism, a smaller train.micro_batch_size, or more tensor, pipeline or context parallelism."
)

_CACHED = "the allocator reserved it, but tensors hold less: it frees what it caches before it runs out, at the price of stalls"

_CACHE = (
    "What tensors hold is less than what the allocator keeps: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True keeps it from "
    "holding memory it cannot use. "
)


def find(context: Context) -> list[Finding]:
    """One finding for all devices of which less is left at the peak than the threshold, or that ran out of memory.

    The peak is what the allocator reserved; of devices whose size no capture tells, nothing is said.

    Args:
        context: of one run.
    """
    failed = {(row["rank"], row["device"]): row for row in context.run.out_of_memory().to_pylist()}
    rows = []
    for row in context.run.memory().to_pylist():
        capacity = device_bytes(context.run.infos, row["rank"], row["device"])
        peak = row["peak_reserved_bytes"] or row["peak_bytes"]
        left = max(1 - peak / capacity, 0.0) if capacity and peak else None
        error = failed.get((row["rank"], row["device"]))
        if error or (left is not None and left < context.thresholds.memory_headroom):
            rows.append(row | {"capacity": capacity, "peak": peak, "left": left, "error": error})
    if not rows:
        return []
    rows.sort(key=lambda row: (row["error"] is None, row["left"] or 0.0, row["rank"]))
    fullest = rows[0]
    # Memory that no tensor holds is given back before a request fails, at the price of stalls.
    held = bool(fullest["error"]) or fullest["peak_bytes"] / fullest["capacity"] > 1 - context.thresholds.memory_headroom
    return [
        Finding(
            id="memory_headroom",
            title=_title(fullest, ranks_in_words(sorted({row["rank"] for row in rows}), context.ranks)),
            ranks=sorted({row["rank"] for row in rows}),
            evidence={"devices": [_evidence(row) for row in rows]},
            recoverable_us_per_iteration=None,
            confidence=Confidence.high if held else Confidence.medium,
            confidence_reason="" if held else _CACHED,
            action=_ACTION if held else _CACHE + _ACTION,
            events=_events(context, fullest),
            severe=bool(fullest["error"]) or (held and fullest["left"] < context.thresholds.memory_headroom / 2),
        )
    ]


def _title(row: dict[str, Any], ranks: str) -> str:
    who = ranks[0].upper() + ranks[1:]
    if row["error"]:
        asked = megabytes(row["error"]["requested_bytes"] or 0)
        return f"{who} ran out of memory: {asked} were asked for at a peak of {gigabytes(row['peak'])}"
    return f"{who}: {gigabytes(row['peak'])} of {gigabytes(row['capacity'])} are taken at the peak, {row['left']:.0%} is left"


def _evidence(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "rank": row["rank"],
        "device": row["device"],
        "device_bytes": row["capacity"],
        "peak_allocated_bytes": row["peak_bytes"],
        "peak_reserved_bytes": row["peak_reserved_bytes"],
        "left_share": row["left"],
        "failed_request_bytes": row["error"]["requested_bytes"] if row["error"] else None,
    }


def _events(context: Context, row: dict[str, Any]) -> list[Event]:
    error = row["error"]
    found = [Event(row["rank"], f"out of memory at {error['site']}", start_ns=error["time_ns"])] if error else []
    if row["peak_ns"] is not None:
        found.append(Event(row["rank"], "peak of allocated memory", start_ns=row["peak_ns"]))
    return [*found, *largest_sites(context.run.memory_sites(), row["rank"], row["device"], "bytes_at_peak")]
