"""A user's own step, measured: `step.measure_step` of what a factory gives, as a result."""

from __future__ import annotations

from typing import Any

import torch

from bridge_profiling.bench.factories import called, factory_of
from bridge_profiling.bench.failures import THEIR_ERRORS, MeasurementError, told
from bridge_profiling.bench.requests import StepRequest
from bridge_profiling.bench.step import measure_step
from bridge_profiling.bench.world import circumstances, plain
from bridge_profiling.errors import ProfilingConfigError


def measure(request: StepRequest) -> dict[str, Any]:
    """Measure a step.

    Args:
        request: what is measured.

    Raises:
        ProfilingConfigError: there is no such factory, or it gives something that cannot be called.
        MeasurementError: the factory or the step failed.
    """
    step = called(factory_of(request.step, "--step"), "--step")
    if not callable(step):
        raise ProfilingConfigError(
            f"--step {request.step} gives {type(step).__name__}, which cannot be called",
            instead="Return a function without arguments that does one iteration",
        )
    try:
        timing = measure_step(
            step,
            warmup=request.warmup,
            iterations=request.iterations,
            max_seconds=request.seconds,
            samples_per_iteration=request.samples,
        )
    except THEIR_ERRORS as error:
        raise MeasurementError(f"--step {request.step}: the step failed: {told(error)}") from error
    device = torch.device("cuda", torch.cuda.current_device()) if timing.device == "cuda" else torch.device("cpu")
    row = {
        "warmup": timing.warmup,
        "iterations": timing.iterations,
        "time_us": plain(timing.seconds.scaled(1e6)),
        "iterations_per_s": plain(timing.iterations_per_s),
        "samples_per_iteration": request.samples,
        "samples_per_s": None if timing.samples_per_s is None else plain(timing.samples_per_s),
    }
    return circumstances("step", device, subject=request.step) | {"rows": [row]}
