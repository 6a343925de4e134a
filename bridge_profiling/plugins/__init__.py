"""NeMo-Run plugins that ask a job for a profile: add one to an experiment, on the submit host.

Importing this package loads neither nemo_run nor torch; the first plugin taken from it loads nemo_run. No module here
ever imports torch or megatron, so a login node needs neither.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridge_profiling.plugins.fault_tolerance import FaultTolerancePlugin, FaultTolerancePluginScriptArgs
    from bridge_profiling.plugins.nsys import NsysPlugin, NsysPluginScriptArgs
    from bridge_profiling.plugins.preemption import PreemptionPlugin, PreemptionPluginScriptArgs
    from bridge_profiling.plugins.pytorch_profiler import PyTorchProfilerPlugin, PyTorchProfilerPluginScriptArgs
    from bridge_profiling.plugins.ray_workers import RayWorkersPlugin

_MODULES = {
    "FaultTolerancePlugin": "fault_tolerance",
    "FaultTolerancePluginScriptArgs": "fault_tolerance",
    "NsysPlugin": "nsys",
    "NsysPluginScriptArgs": "nsys",
    "PreemptionPlugin": "preemption",
    "PreemptionPluginScriptArgs": "preemption",
    "PyTorchProfilerPlugin": "pytorch_profiler",
    "PyTorchProfilerPluginScriptArgs": "pytorch_profiler",
    "RayWorkersPlugin": "ray_workers",
}

__all__ = [
    "FaultTolerancePlugin",
    "FaultTolerancePluginScriptArgs",
    "NsysPlugin",
    "NsysPluginScriptArgs",
    "PreemptionPlugin",
    "PreemptionPluginScriptArgs",
    "PyTorchProfilerPlugin",
    "PyTorchProfilerPluginScriptArgs",
    "RayWorkersPlugin",
]


def __getattr__(name: str) -> Any:
    # nemo_run imports torch wherever torch is installed (seconds), so it is loaded only for a plugin that is used.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
