"""What this process's torch holds of device memory. Never imports torch, and starts no CUDA."""

from __future__ import annotations

import sys

#: The metrics that it tells, and where torch's statistics have them.
_STATISTICS = {
    "allocated_bytes": ("allocated_bytes", "current"),
    "allocated_peak_bytes": ("allocated_bytes", "peak"),
    "reserved_bytes": ("reserved_bytes", "current"),
}

MEMORY_METRICS = frozenset(_STATISTICS)


def device_memory() -> tuple[dict[str, float], dict[str, str]]:
    """Bytes of the caching allocator, over all devices that this process uses; or why there are none to tell.

    It calls no function of CUDA, so it may come from any thread, also while a CUDA graph is captured.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return {}, dict.fromkeys(_STATISTICS, "this process has not loaded torch")
    try:
        if not torch.cuda.is_initialized():
            return {}, dict.fromkeys(_STATISTICS, "this process uses no GPU")
        devices = [torch.cuda.memory_stats_as_nested_dict(device) for device in range(torch.cuda.device_count())]
        return {
            metric: sum(device[group]["all"][kind] for device in devices if device)
            for metric, (group, kind) in _STATISTICS.items()
        }, {}
    except (AttributeError, KeyError, RuntimeError) as error:
        # An allocator of another making, or torch half imported.
        return {}, dict.fromkeys(_STATISTICS, f"torch does not tell its memory: {type(error).__name__}: {error}")
