"""NVTX ranges and annotations: around the iterations and phases of a training, and megatron-core's own inside them."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

from bridge_profiling.capture.nvtx_client import ranges_for_profiler


class NvtxRange:
    """A range pushed on enter and popped on exit, never raising on exit.

    Args:
        name: the range's text.
        push: takes the text.
        pop: takes the text.
    """

    __slots__ = ("_name", "_pop", "_push")

    def __init__(self, name: str, push: Callable[[str], object], pop: Callable[[str], object]) -> None:
        self._name, self._push, self._pop = name, push, pop

    def __enter__(self) -> None:
        self._push(self._name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # megatron-core's pop raises when an exception in the model has left its own ranges open. A range is never worth an
        # error in training, least of all one that hides the real one.
        with contextlib.suppress(RuntimeError, ValueError):
            self._pop(self._name)


def range_functions(*, megatron_ranges: bool) -> tuple[Callable[[str], object], Callable[[str], object]]:
    """Push and pop of NVTX ranges.

    Args:
        megatron_ranges: switch on megatron-core's own ranges, and share its stack of ranges; needs a GPU.

    Returns:
        `(push, pop)`, each taking the range's text.

    Raises:
        CaptureError: there is no CUDA device, and the library of the profiler around this process cannot be used.
    """
    import torch

    if not torch.cuda.is_available():
        push, pop = ranges_for_profiler()
        return push, lambda name: pop()

    if megatron_ranges and importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.core"):
        from megatron.core.utils import configure_nvtx_profiling, nvtx_range_pop, nvtx_range_push

        configure_nvtx_profiling(True)
        return nvtx_range_push, nvtx_range_pop
    return torch.cuda.nvtx.range_push, lambda name: torch.cuda.nvtx.range_pop()


@functools.cache
def standing_ranges() -> Callable[[str], AbstractContextManager]:
    """Makes the ranges of `nvtx_ranges`, which are emitted in every iteration: NVTX on a GPU, torch's annotations on a CPU."""
    import torch

    if torch.cuda.is_available():
        push, pop = range_functions(megatron_ranges=True)
        return lambda name: NvtxRange(name, push, pop)
    return torch.profiler.record_function
