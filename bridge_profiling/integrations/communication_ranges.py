"""Ranges around what sharded training sends: which unit gathers its parameters, and which reduces its gradients.

fully_shard names these steps itself, as torch profiler annotations: `FSDP::all_gather (layers.3)`,
`FSDP::post_backward_reduce (layers.3)`; DeepSpeed's ZeRO 3 has NVTX ranges of its own. What is missing is added while a
training is watched: the wrapper class and ZeRO 1 and 2 name nothing, under nsys nobody sees annotations, and under the torch
profiler nobody sees NVTX. They are opened on whatever thread does it: a CUDA device's backward pass has its own.

Most of what is wrapped here is private. A release without it is left as it is, and its collectives stay without these names.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from bridge_profiling.integrations.wrapped_models import wrapped_units

#: Gives the range of a name, or a nullcontext where there is none to open; it may be called on any thread.
RangeOf = Callable[[str], AbstractContextManager]

#: What takes the ranges away again.
Undo = Callable[[], None]

_GATHER, _REDUCE = "FSDP::all_gather", "FSDP::post_backward_reduce"

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


def name_wrapper_steps(model: torch.nn.Module, range_of: RangeOf) -> Undo:
    """Open ranges where units of FullyShardedDataParallel gather and reduce, with fully_shard's names.

    Args:
        model: holds the units.
        range_of: gives the range of a name.
    """
    units = {id(handle): name for name, handle in wrapped_units(model)}

    def gathers(state: Any, handle: Any, *others: Any, **keywords: Any) -> str | None:
        # A unit whose parameters are there already has nothing to gather.
        return _of_unit(_GATHER, units.get(id(handle))) if handle and handle.needs_unshard() else None

    def reduces(state: Any, handle: Any) -> str | None:
        return _of_unit(_REDUCE, units.get(id(handle)))

    if not units:
        return lambda: None
    module = importlib.import_module("torch.distributed.fsdp._runtime_utils")
    undo = ExitStack()
    undo.callback(_range_calls(module, "_unshard", gathers, range_of))
    undo.callback(_range_calls(module, "_reduce_grad", reduces, range_of))
    return undo.close


def repeat_annotations(range_of: RangeOf) -> Undo:
    """Open a range with each annotation of fully_shard's parameter groups, for a profiler that does not see annotations.

    Args:
        range_of: gives the range of a name.
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

    return replace(module, "record_function", Repeated)


def name_zero_steps(optimizer: Any, range_of: RangeOf) -> Undo:
    """Open ranges where ZeRO 1 and 2 reduce gradients, `ZeRO::reduce`, and gather parameters, `ZeRO::all_gather`.

    Args:
        optimizer: DeepSpeed's own, around the one that steps.
        range_of: gives the range of a name.
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
        range_of: gives the range of a name.
    """
    open_ranges = threading.local()
    push, pop = accelerator.range_push, accelerator.range_pop

    def range_push(text: str, *arguments: Any, **keywords: Any) -> Any:
        one = range_of(text)
        one.__enter__()
        if not hasattr(open_ranges, "stack"):
            open_ranges.stack = []
        open_ranges.stack.append(one)
        return push(text, *arguments, **keywords)

    def range_pop(*arguments: Any, **keywords: Any) -> Any:
        if getattr(open_ranges, "stack", None):
            open_ranges.stack.pop().__exit__(None, None, None)
        return pop(*arguments, **keywords)

    undo = ExitStack()
    undo.callback(replace(accelerator, "range_push", range_push))
    undo.callback(replace(accelerator, "range_pop", range_pop))
    return undo.close


def _of_unit(step: str, unit: str | None) -> str | None:
    """A step's name as fully_shard writes it; the root has no name, and another model's unit (None) no range."""
    return None if unit is None else f"{step} ({unit})" if unit else step


def _range_calls(owner: Any, name: str, text: Callable[..., str | None], range_of: RangeOf) -> Undo:
    original = getattr(owner, name, None)
    if original is None:
        return lambda: None

    @functools.wraps(original)
    def ranged(*arguments: Any, **keywords: Any) -> Any:
        told = text(*arguments, **keywords)
        if told is None:
            return original(*arguments, **keywords)
        with range_of(told):
            return original(*arguments, **keywords)

    return replace(owner, name, ranged)


def replace(owner: Any, name: str, replacement: Any) -> Undo:
    """Put `replacement` in the place of `owner.name`; the undo takes it out, unless someone has put another there since."""
    original, own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, replacement)

    def undo() -> None:
        if vars(owner).get(name) is replacement:
            setattr(owner, name, original) if own else delattr(owner, name)

    return undo
