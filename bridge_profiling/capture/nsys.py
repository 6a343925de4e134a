"""The nsys backend: tells an nsys that runs around the process when the window opens and closes.

nsys itself is started outside, by the launcher. Started without it, a rank records nothing and its manifest says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from bridge_profiling.capture.backend import Backend
from bridge_profiling.capture.nvtx import NvtxRange, range_functions
from bridge_profiling.errors import CaptureError


def runs_under_nsys(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether an nsys is attached to this process, as its injection shows in the environment."""
    injected = environ.get("LD_PRELOAD", "") + environ.get("CUDA_INJECTION64_PATH", "")
    return "NSYS_PROFILING_SESSION_ID" in environ or "ToolsInjection" in injected


class NsysBackend(Backend):
    """Opens nsys' cudaProfilerApi capture range for the window, with a range around every iteration and phase."""

    name = "nsys"

    _emit: Any = None

    def open(self) -> None:
        """Refuse where nothing could be recorded, so that the manifest tells why instead of a report being missing."""
        import torch

        if not torch.cuda.is_available():
            raise CaptureError("the window is marked through the CUDA profiler API, and this process sees no CUDA device")
        if not runs_under_nsys():
            raise CaptureError(
                "this rank does not run under nsys; launch it with NsysPlugin, or type"
                " `nsys profile --capture-range=cudaProfilerApi --capture-range-end=stop …` before the command"
            )
        push, pop = range_functions(megatron_ranges=self.config.nvtx_ranges)
        self._push: Callable[[str], object] = push
        self._pop: Callable[[str], object] = pop

    def start(self) -> None:
        """Open the capture range; a range per operator only when shapes are asked for (1.47 x the step, not 1.13 x)."""
        import torch

        torch.cuda.check_error(int(torch.cuda.cudart().cudaProfilerStart()))
        if self.config.record_shapes:
            self._emit = torch.autograd.profiler.emit_nvtx(record_shapes=True)
            self._emit.__enter__()

    def iteration_range(self, iteration: int) -> AbstractContextManager:
        """`iteration_<global iteration>`."""
        return self.phase_range(f"iteration_{iteration}")

    def phase_range(self, name: str) -> AbstractContextManager:
        """An NVTX range."""
        return NvtxRange(name, self._push, self._pop)

    def stop(self, interrupted: list[int]) -> Callable[[], None] | None:
        """Close the capture range."""
        import torch

        try:
            if self._emit is not None:
                self._emit.__exit__(None, None, None)
        finally:
            torch.cuda.check_error(int(torch.cuda.cudart().cudaProfilerStop()))
        return None
