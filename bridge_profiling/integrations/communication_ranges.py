"""Ranges around the communication of sharded training: which unit gathers its parameters, and which reduces its gradients.

fully_shard names these steps as torch profiler annotations: `FSDP::all_gather (layers.3)`,
`FSDP::post_backward_reduce (layers.3)`; DeepSpeed's ZeRO 3 has NVTX ranges of its own. This module adds the missing names:
FullyShardedDataParallel and ZeRO 1 and 2 name nothing, nsys sees no annotations, and the torch profiler sees no NVTX. Ranges
open on the thread that does the work: a CUDA device's backward pass has its own.

Most of the functions wrapped here are private. A release without one of them is left alone, and its collectives have no names.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from bridge_profiling.integrations.phases import RangeOf, Undo, replace_attribute
from bridge_profiling.integrations.wrapped_models import wrapped_units

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


def name_wrapper_steps(model: torch.nn.Module, range_of: RangeOf) -> Undo:
    """Open ranges where units of FullyShardedDataParallel gather and reduce, with fully_shard's names.

    Args:
        model: the model that contains the units.
        range_of: returns the range for a name, on any thread.
    """
    undo = ExitStack()
    units = {id(handle): f" ({name})" if name else "" for name, handle in wrapped_units(model)}
    if not units:
        return undo.close

    def gathers(state: Any, handle: Any, *others: Any, **keywords: Any) -> str | None:
        # A unit whose parameters are complete gathers nothing. Units of other models get no range.
        return f"FSDP::all_gather{units[id(handle)]}" if id(handle) in units and handle.needs_unshard() else None

    def reduces(state: Any, handle: Any) -> str | None:
        return f"FSDP::post_backward_reduce{units[id(handle)]}" if id(handle) in units else None

    module = importlib.import_module("torch.distributed.fsdp._runtime_utils")
    undo.callback(_range_calls(module, "_unshard", gathers, range_of))
    undo.callback(_range_calls(module, "_reduce_grad", reduces, range_of))
    return undo.close


def repeat_annotations(range_of: RangeOf) -> Undo:
    """Open a range with each annotation of fully_shard's parameter groups, for a profiler that does not see annotations.

    Args:
        range_of: returns the range for a name, on any thread.
    """
    try:
        module = importlib.import_module(_FULLY_SHARD)
    except ImportError:
        return lambda: None
    annotation = module.record_function

    class Repeated(annotation):  # type: ignore[misc, valid-type]
        def __enter__(self) -> Any:
            self._repeated = range_of(self.name)
            self._repeated.__enter__()
            return super().__enter__()

        def __exit__(self, *ending: Any) -> Any:
            outcome = super().__exit__(*ending)
            self._repeated.__exit__(*ending)
            return outcome

    return replace_attribute(module, "record_function", Repeated)


def name_zero_steps(optimizer: Any, range_of: RangeOf) -> Undo:
    """Open ranges where ZeRO 1 and 2 reduce gradients, `ZeRO::reduce`, and gather parameters, `ZeRO::all_gather`.

    Args:
        optimizer: DeepSpeed's own, around the one that steps.
        range_of: returns the range for a name, on any thread.
    """
    undo = ExitStack()
    undo.callback(_range_calls(optimizer, "reduce_ipg_grads", lambda *_, **__: "ZeRO::reduce", range_of))
    module = importlib.import_module(type(optimizer).__module__)
    undo.callback(_range_calls(module, "all_gather_dp_groups", lambda *_, **__: "ZeRO::all_gather", range_of))
    return undo.close


def repeat_nvtx(accelerator: Any, range_of: RangeOf) -> Undo:
    """Open a range with each NVTX range of DeepSpeed, for a profiler that does not see NVTX.

    Args:
        accelerator: DeepSpeed's.
        range_of: returns the range for a name, on any thread.
    """
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

    undo = ExitStack()
    undo.callback(replace_attribute(accelerator, "range_push", range_push))
    undo.callback(replace_attribute(accelerator, "range_pop", range_pop))
    return undo.close


def _range_calls(owner: Any, name: str, name_range: Callable[..., str | None], range_of: RangeOf) -> Undo:
    """Run calls of `owner.name` in the range that `name_range` names for the call's arguments, if it names one."""
    original = getattr(owner, name, None)
    if original is None:
        return lambda: None

    @functools.wraps(original)
    def ranged(*arguments: Any, **keywords: Any) -> Any:
        text = name_range(*arguments, **keywords)
        if text is None:
            return original(*arguments, **keywords)
        with range_of(text):
            return original(*arguments, **keywords)

    return replace_attribute(owner, name, ranged)
