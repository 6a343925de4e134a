"""Ranges around the communication of sharded training: which unit gathers its parameters, and which reduces its gradients.

fully_shard names these steps as torch profiler annotations: `FSDP::all_gather (layers.3)`,
`FSDP::post_backward_reduce (layers.3)`; DeepSpeed's ZeRO 3 has NVTX ranges of its own. This module adds the missing names:
FullyShardedDataParallel and ZeRO 1 and 2 name nothing, nsys sees no annotations, and the torch profiler sees no NVTX. Ranges
open on the thread that does the work: a CUDA device's backward pass has its own.

Most of the functions wrapped here are private. A release without one of them is left alone, and its collectives have no names.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from bridge_profiling.integrations.parallel_layout import wrapped_units
from bridge_profiling.integrations.phases import PhaseWatch, RangeOf


def name_wrapper_steps(phases: PhaseWatch, model: torch.nn.Module, range_of: RangeOf) -> None:
    """Open ranges where units of FullyShardedDataParallel gather and reduce, with fully_shard's names, on any thread."""
    units = {id(handle): f" ({name})" if name else "" for name, handle in wrapped_units(model)}
    if not units:
        return

    def of_unit(text: str, handle: Any) -> AbstractContextManager:
        # Units of other models get no range.
        return range_of(f"{text}{units[id(handle)]}") if id(handle) in units else nullcontext()

    def gathers(state: Any, handle: Any, *others: Any, **keywords: Any) -> AbstractContextManager:
        # A unit whose parameters are complete gathers nothing.
        return of_unit("FSDP::all_gather", handle) if handle.needs_unshard() else nullcontext()

    module = importlib.import_module("torch.distributed.fsdp._runtime_utils")
    _run_inside(phases, module, "_unshard", gathers)
    _run_inside(phases, module, "_reduce_grad", lambda state, handle: of_unit("FSDP::post_backward_reduce", handle))


def repeat_annotations(phases: PhaseWatch, range_of: RangeOf) -> None:
    """Open a range with each annotation of fully_shard's parameter groups, for a profiler that does not see annotations."""
    try:
        module = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    except ImportError:
        return
    annotation = module.record_function

    @contextmanager
    def repeated(name: str, *arguments: Any) -> Iterator[None]:
        with range_of(name), annotation(name, *arguments):
            yield

    phases.replace(module, "record_function", repeated)


def name_zero_steps(phases: PhaseWatch, optimizer: Any, range_of: RangeOf) -> None:
    """Open ranges where ZeRO 1 and 2 reduce gradients, `ZeRO::reduce`, and gather parameters, `ZeRO::all_gather`."""
    _run_inside(phases, optimizer, "reduce_ipg_grads", lambda *_, **__: range_of("ZeRO::reduce"))
    module = importlib.import_module(type(optimizer).__module__)
    _run_inside(phases, module, "all_gather_dp_groups", lambda *_, **__: range_of("ZeRO::all_gather"))


def repeat_nvtx(phases: PhaseWatch, accelerator: Any, range_of: RangeOf) -> None:
    """Open a range with each NVTX range of DeepSpeed, for a profiler that does not see NVTX."""
    thread = threading.local()
    push, pop = accelerator.range_push, accelerator.range_pop

    def ranges() -> list[AbstractContextManager]:
        return thread.__dict__.setdefault("ranges", [])

    def range_push(text: str, *arguments: Any, **keywords: Any) -> Any:
        one = range_of(text)
        one.__enter__()
        ranges().append(one)
        return push(text, *arguments, **keywords)

    def range_pop(*arguments: Any, **keywords: Any) -> Any:
        if ranges():
            ranges().pop().__exit__(None, None, None)
        return pop(*arguments, **keywords)

    phases.replace(accelerator, "range_push", range_push)
    phases.replace(accelerator, "range_pop", range_pop)


def _run_inside(phases: PhaseWatch, owner: Any, name: str, range_of: Callable[..., AbstractContextManager]) -> None:
    if hasattr(owner, name):
        phases.run_inside(owner, name, range_of)
