"""Profile Megatron-Core training launched with NeMo-Run: the right iterations, the right ranks, nothing lost.

Importing this package loads neither torch nor nemo_run, so it works on a login node and inside a rank alike.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridge_profiling.common.errors import CaptureError, ProfilingConfigError, TraceError
    from bridge_profiling.settings.profiling import FaultToleranceConfig, ProfilingConfig

__version__ = "0.1.0"

__all__ = ["CaptureError", "FaultToleranceConfig", "ProfilingConfig", "ProfilingConfigError", "TraceError", "__version__"]


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def __getattr__(name: str) -> Any:
    # Imported when asked for: every command imports this package first, and `--help` needs no settings.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "settings.profiling" if name.endswith("Config") else "common.errors"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
