"""Profiling for a script without a framework. Each name is loaded when it is used; importing this package loads no torch.

- `auto_profile`: decorates a function that does one step, and profiles some of its calls.
- `phase`, `phase_times`, `reset_phase_times`: name and time a part of a step.
- `quick_benchmark`: measures how many steps per second a model makes.
- `PerformanceCounter`, `MemoryProfiler`: time between pairs of calls by name, and device memory at labelled points.
- `GPUMonitor`, `TrainingMonitor`: from `bridge_profiling.monitor`.

An unchanged script needs none of them: `bridge-profiling run train.py`.
"""

# ruff: noqa: F401  # __all__ lists the names of the table

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridge_profiling.bench.step import quick_benchmark
    from bridge_profiling.frameworks.auto_profile import auto_profile
    from bridge_profiling.frameworks.phase_times import PhaseTime, phase, phase_times, reset_phase_times
    from bridge_profiling.frameworks.points import MemoryProfiler, PerformanceCounter
    from bridge_profiling.monitor import GPUMonitor, TrainingMonitor

_MODULES = {
    "auto_profile": "bridge_profiling.frameworks.auto_profile",
    **dict.fromkeys(("PhaseTime", "phase", "phase_times", "reset_phase_times"), "bridge_profiling.frameworks.phase_times"),
    **dict.fromkeys(("MemoryProfiler", "PerformanceCounter"), "bridge_profiling.frameworks.points"),
    "quick_benchmark": "bridge_profiling.bench.step",
    **dict.fromkeys(("GPUMonitor", "TrainingMonitor"), "bridge_profiling.monitor"),
}

__all__ = [*_MODULES]


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
