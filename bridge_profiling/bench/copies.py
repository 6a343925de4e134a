"""Copies between host and device: both directions, pinned and pageable memory, by size."""

from __future__ import annotations

import itertools
import time
from functools import partial
from typing import Any

import torch

from bridge_profiling.bench.ranks import conditions, device_seconds, plan, require_cuda
from bridge_profiling.bench.requests import CopiesRequest
from bridge_profiling.bench.results import estimate

_WARMUP, _MIN_SAMPLES = 3, 6


def measure(request: CopiesRequest) -> dict[str, Any]:
    """Measure every kind of copy at every size on the current device of this process."""
    require_cuda()
    device = torch.device("cuda", torch.cuda.current_device())
    cells = itertools.product(("HtoD", "DtoH"), (True, False), request.sizes)
    return conditions("copies", device) | {"rows": [_row(*cell, request.seconds, device) for cell in cells]}


def _row(direction: str, pinned: bool, size: int, budget_s: float, device: torch.device) -> dict[str, Any]:
    host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    on_device = torch.empty(size, dtype=torch.uint8, device=device)
    source, target = (host, on_device) if direction == "HtoD" else (on_device, host)
    # 251 is prime, so missing or moved bytes are noticed.
    source.copy_(torch.arange(size, dtype=torch.int64).remainder_(251).to(torch.uint8))
    target.zero_()
    target.copy_(source)
    torch.cuda.synchronize()
    correct = bool(torch.equal(target.cpu(), source.cpu()))
    copy = partial(target.copy_, source, non_blocking=pinned)
    device_seconds(copy, _WARMUP)
    started = time.perf_counter()
    once_s = max(device_seconds(copy, 1), time.perf_counter() - started)
    copies, samples = plan(once_s, budget_s, min_samples=_MIN_SAMPLES)
    seconds = estimate([device_seconds(copy, copies) / copies for _ in range(samples)])
    return {
        "direction": direction,
        "host_memory": "pinned" if pinned else "pageable",
        "bytes": size,
        "time_us": seconds.scaled(1e6).as_json(),
        "bandwidth_gbs": float(f"{size / seconds.median / 1e9:.6g}"),
        "correct": correct,
    }
