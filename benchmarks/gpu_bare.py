"""Each profiler driven bare, with the hook's settings, for comparison with blocks of the hook.

The profiler is only started and stopped: no ranges, no manifest, no files.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from bridge_profiling import ProfilingConfig
from bridge_profiling.capture.memory_history import MAX_ENTRIES
from bridge_profiling.capture.ranges import NvtxRange, range_functions
from bridge_profiling.nsys.command import CAPTURE_RANGE


class Bare:
    """A profiler without a hook. The order is: open, arm (in the iteration before the window), start, stop."""

    def open(self) -> None:
        """Called before the block's first iteration."""

    def arm(self) -> None:
        """Called before the last iteration that is not in the window."""

    def start(self) -> None:
        """Called before the window's first iteration; the device is idle."""

    def stop(self) -> None:
        """Called after the window's last iteration; the device is idle."""


class BareTorch(Bare):
    """`torch.profiler.profile`, by prepare_trace, start_trace and stop_trace."""

    def __init__(self, config: ProfilingConfig) -> None:
        self._config = config

    def arm(self) -> None:
        activities = [] if self._config.pytorch_profiler_device_only else [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._chakra: Any = None
        if self._config.pytorch_profiler_collect_chakra:
            descriptor, name = tempfile.mkstemp(suffix=".json")
            os.close(descriptor)
            self._chakra_file = Path(name)
            self._chakra = torch.profiler.ExecutionTraceObserver().register_callback(name)
        self._profile = torch.profiler.profile(
            activities=activities,
            record_shapes=self._config.wants_shapes,
            with_stack=self._config.pytorch_profiler_collect_callstack,
            profile_memory=self._config.pytorch_profiler_profile_memory,
            execution_trace_observer=self._chakra,
        )
        self._profile.prepare_trace()

    def start(self) -> None:
        self._profile.start_trace()

    def stop(self) -> None:
        self._profile.stop_trace()
        self._release()

    def stop_and_export(self, path: Path) -> None:
        """Called instead of `stop`; torch compresses a file whose name ends with .gz."""
        self._profile.stop_trace()
        self._profile.export_chrome_trace(str(path))
        self._release()

    def _release(self) -> None:
        del self._profile
        if self._chakra is not None:
            self._chakra.unregister_callback()
            self._chakra_file.unlink()


class BareMemory(Bare):
    """CUDA's allocation history, switched on and off."""

    def open(self) -> None:
        torch.cuda.memory._record_memory_history(max_entries=MAX_ENTRIES, stacks="python")

    def stop(self) -> None:
        torch.cuda.memory._record_memory_history(enabled=None)


class BareNsys(Bare):
    """nsys' capture range, opened and closed; with `emit_nvtx` if shapes are requested."""

    def __init__(self, config: ProfilingConfig) -> None:
        self._shapes = config.record_shapes and torch.cuda.is_available()

    def start(self) -> None:
        self._stack = ExitStack()
        if torch.cuda.is_available():
            cudart: Any = torch.cuda.cudart()
            torch.cuda.check_error(int(cudart.cudaProfilerStart()))
            self._stack.callback(lambda: torch.cuda.check_error(int(cudart.cudaProfilerStop())))
        else:
            self._stack.enter_context(NvtxRange(CAPTURE_RANGE, *range_functions(megatron_ranges=False)))
        if self._shapes:
            self._stack.enter_context(torch.autograd.profiler.emit_nvtx(record_shapes=True))

    def stop(self) -> None:
        self._stack.close()


def bare(config: ProfilingConfig) -> Bare:
    """The profiler that this config enables."""
    if config.use_pytorch_profiler:
        return BareTorch(config)
    return BareNsys(config) if config.use_nsys_profiler else BareMemory()
