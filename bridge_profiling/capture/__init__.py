"""Profiling inside a rank: the hook that a training loop calls, its profilers, and the files that they write.

Runs in the job. Imports torch only when a profiler is asked for, megatron-core only where it is installed, and
never nemo_run.
"""

from bridge_profiling.capture.hook import ProfilingHook
from bridge_profiling.capture.nsys_profiler import start_under_nsys
from bridge_profiling.capture.work import IterationWork
from bridge_profiling.layout import ParallelLayout
from bridge_profiling.settings.window import select_ranks

__all__ = ["IterationWork", "ParallelLayout", "ProfilingHook", "select_ranks", "start_under_nsys"]
