"""How fast memory is copied between host and device: both ways, from pinned and from pageable memory, by size."""

from __future__ import annotations

import time
from typing import Any

import torch

from bridge_profiling.bench.requests import CopiesRequest
from bridge_profiling.bench.samples import Estimate, estimate
from bridge_profiling.bench.world import circumstances, plain, require_cuda

_SAMPLE_S, _MOST_COPIES, _MOST_SAMPLES, _WARMUP = 0.002, 50, 30, 3


def measure(request: CopiesRequest) -> dict[str, Any]:
    """Measure every kind of copy at every size, on this process' current device.

    Args:
        request: what is measured.

    Raises:
        UnavailableError: there is no CUDA device.
    """
    require_cuda()
    device = torch.device("cuda", torch.cuda.current_device())
    rows = [
        _row(direction, pinned, size, request.seconds, device)
        for direction in ("HtoD", "DtoH")
        for pinned in (True, False)
        for size in request.sizes
    ]
    return circumstances("copies", device) | {"rows": rows}


def _row(direction: str, pinned: bool, size: int, budget_s: float, device: torch.device) -> dict[str, Any]:
    host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    on_device = torch.empty(size, dtype=torch.uint8, device=device)
    source, target = (host, on_device) if direction == "HtoD" else (on_device, host)
    # 251 is prime: bytes that were left out or moved would not fit.
    source.copy_(torch.arange(size, dtype=torch.int64).remainder_(251).to(torch.uint8))
    target.zero_()
    target.copy_(source)
    torch.cuda.synchronize()
    correct = bool(torch.equal(target.cpu(), source.cpu()))
    seconds = _timed(source, target, pinned, budget_s)
    return {
        "direction": direction,
        "host_memory": "pinned" if pinned else "pageable",
        "bytes": size,
        "time_us": plain(seconds.scaled(1e6)),
        "bandwidth_gbs": float(f"{size / seconds.median / 1e9:.6g}"),
        "correct": correct,
    }


def _timed(source: torch.Tensor, target: torch.Tensor, pinned: bool, budget_s: float) -> Estimate:
    for _ in range(_WARMUP):
        target.copy_(source, non_blocking=pinned)
    torch.cuda.synchronize()
    started = time.perf_counter()
    once = max(_sample(source, target, pinned, 1), time.perf_counter() - started)
    copies = int(min(max(_SAMPLE_S / once, 1), _MOST_COPIES))
    samples = int(min(max(budget_s / (once * copies), 6), _MOST_SAMPLES))
    return estimate([_sample(source, target, pinned, copies) / copies for _ in range(samples)])


def _sample(source: torch.Tensor, target: torch.Tensor, pinned: bool, copies: int) -> float:
    """Seconds of some copies one after the other, by the device's clock."""
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    for _ in range(copies):
        target.copy_(source, non_blocking=pinned)
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / 1e3
