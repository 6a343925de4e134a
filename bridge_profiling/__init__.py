"""Profile Megatron-Core training launched with NeMo-Run: the right iterations, the right ranks, nothing lost.

Importing this package loads neither torch nor nemo_run, so it works on a login node and inside a rank alike.
"""

from bridge_profiling.config import FaultToleranceConfig, ProfilingConfig
from bridge_profiling.errors import CaptureError, ProfilingConfigError, TraceError

__version__ = "0.1.0"

__all__ = ["CaptureError", "FaultToleranceConfig", "ProfilingConfig", "ProfilingConfigError", "TraceError", "__version__"]
