"""The easy way in, for a script without a framework. Each name is loaded when it is used; importing this loads no torch.

- `auto_profile`: decorates a function that does one step; some of its calls are profiled.
- `phase`, `phase_times`, `reset_phase_times`: name and time a part of a step.
- `quick_benchmark`: how many steps a second a model makes.
- `GPUMonitor`, `TrainingMonitor`, `Counters`: from `bridge_profiling.monitor`.

A script that is to stay as it is needs none of them: `bridge-profiling run train.py`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridge_profiling.easy.auto import auto_profile
    from bridge_profiling.easy.benchmark import quick_benchmark
    from bridge_profiling.easy.phases import PhaseTime, phase, phase_times, reset_phase_times
    from bridge_profiling.monitor import Counters, GPUMonitor, TrainingMonitor

__all__ = [
    "Counters",
    "GPUMonitor",
    "PhaseTime",
    "TrainingMonitor",
    "auto_profile",
    "phase",
    "phase_times",
    "quick_benchmark",
    "reset_phase_times",
]

_HOMES = {
    "auto_profile": "bridge_profiling.easy.auto",
    "quick_benchmark": "bridge_profiling.easy.benchmark",
    **dict.fromkeys(("PhaseTime", "phase", "phase_times", "reset_phase_times"), "bridge_profiling.easy.phases"),
    **dict.fromkeys(("Counters", "GPUMonitor", "TrainingMonitor"), "bridge_profiling.monitor"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
