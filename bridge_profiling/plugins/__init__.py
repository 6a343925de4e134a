"""NeMo-Run plugins that profile a job: add one to an experiment, on the submit host.

Importing this package loads neither nemo_run nor torch; the first plugin imported from it loads nemo_run. No module here
imports torch or megatron, so a login node needs neither.
"""

# ruff: noqa: F401  # __all__ lists the names of the table

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridge_profiling.plugins.fault_tolerance import FaultTolerancePlugin, FaultTolerancePluginScriptArgs
    from bridge_profiling.plugins.profilers import (
        NsysPlugin,
        NsysPluginScriptArgs,
        PyTorchProfilerPlugin,
        PyTorchProfilerPluginScriptArgs,
    )
    from bridge_profiling.plugins.ray_workers import RayWorkersPlugin

_MODULES = {
    "fault_tolerance": ("FaultTolerancePlugin", "FaultTolerancePluginScriptArgs"),
    "profilers": ("NsysPlugin", "NsysPluginScriptArgs", "PyTorchProfilerPlugin", "PyTorchProfilerPluginScriptArgs"),
    "ray_workers": ("RayWorkersPlugin",),
}

__all__ = [name for names in _MODULES.values() for name in names]


def __getattr__(name: str) -> Any:
    # nemo_run imports torch where torch is installed, which takes seconds, so only a plugin that is used loads it.
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
