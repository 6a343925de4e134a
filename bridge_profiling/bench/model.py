"""Measures how fast a model is: `quick_benchmark(model, (32, 3, 224, 224))`."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from bridge_profiling.bench.step import StepTiming, measure_step
from bridge_profiling.errors import ProfilingConfigError, require


def quick_benchmark(
    model: torch.nn.Module,
    input_shape: Sequence[int] | torch.Tensor | Sequence[torch.Tensor],
    *,
    train: bool = False,
    dtype: torch.dtype | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    warmup: int = 5,
    iterations: int = 30,
    max_seconds: float | None = None,
) -> StepTiming:
    """Measure a model's forward pass, or its forward and backward pass, on its device.

    Restores the model's mode, gradients and buffers, and the state of the random number generators.

    Args:
        model: on its device.
        input_shape: shape of the input, the batch first, to fill with random numbers; or the input itself, one or more tensors.
        train: measure the backward pass too, in training mode. Otherwise in evaluation mode without gradients.
        dtype: of the random input; None for the model's. Integers are 0 and 1, which are valid in every embedding.
        loss: computes the loss from the model's output; None for the output's `loss`, else the mean of all its tensors.
        warmup: iterations before the first measured one.
        iterations: number of measured iterations; fewer than 6 give no bounds.
        max_seconds: stop early when the measured iterations have taken this long.

    Raises:
        ProfilingConfigError: an invalid shape, an empty batch, nothing to measure or to differentiate, or random numbers for a
            model that takes integers.
    """
    require(
        warmup >= 0 and iterations >= 1, f"warmup={warmup} and iterations={iterations} measure nothing", instead="Omit them"
    )
    inputs = _inputs(model, input_shape, dtype)
    trainable = any(parameter.requires_grad for parameter in model.parameters())
    require(not train or trainable, "train=True, and no parameter of the model requires a gradient", instead="Leave train out")
    make_loss = loss or _loss

    def forward() -> None:
        model(*inputs)

    def forward_backward() -> None:
        make_loss(model(*inputs)).backward()
        model.zero_grad()

    with _restored(model, inputs[0].device), torch.set_grad_enabled(train):
        model.train(train)
        try:
            return measure_step(
                forward_backward if train else forward,
                warmup=warmup,
                iterations=iterations,
                max_seconds=max_seconds,
                samples_per_iteration=inputs[0].shape[0],
            )
        except RuntimeError as error:
            # An embedding that got random numbers as token numbers.
            kind = inputs[0].dtype
            if isinstance(input_shape, torch.Tensor) or not _is_continuous(kind) or "'indices'" not in str(error):
                raise
            raise ProfilingConfigError(
                f"the model looks its input up, and input_shape was filled with random numbers of {kind}",
                instead="Pass dtype=torch.long for token numbers, or the input itself",
            ) from error


def _inputs(model: torch.nn.Module, asked: Any, dtype: torch.dtype | None) -> list[torch.Tensor]:
    if isinstance(asked, torch.Tensor):
        inputs = [asked]
    elif isinstance(asked, list | tuple) and asked and all(isinstance(one, torch.Tensor) for one in asked):
        inputs = list(asked)
    else:
        tensors = [*model.parameters(), *model.buffers()]
        like = next((one for one in tensors if _is_continuous(one.dtype)), torch.empty(0))
        kind, shape = dtype or like.dtype, _shape(asked)
        make = torch.randn if _is_continuous(kind) else partial(torch.randint, 2)
        with torch.random.fork_rng(devices=_cuda(like.device)):
            inputs = [make(shape, dtype=kind, device=like.device)]
    given = tuple(inputs[0].shape)
    require(given and given[0], f"input_shape={given} holds no sample", instead="Give the batch first, as in (32, 3, 224, 224)")
    return inputs


def _shape(asked: Any) -> tuple[int, ...]:
    try:
        shape = tuple(operator.index(size) for size in asked)
    except TypeError:
        shape = (-1,)
    require(
        all(size >= 0 for size in shape),
        f"input_shape={reprlib.repr(asked)} is not the shape of one tensor",
        instead="Give the batch first, as in (32, 3, 224, 224); for several inputs, or other ones, the tensors themselves",
    )
    return shape


def _is_continuous(kind: torch.dtype) -> bool:
    return kind.is_floating_point or kind.is_complex


def _loss(output: Any) -> torch.Tensor:
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    tensors = [one for one in tree_leaves(output) if isinstance(one, torch.Tensor) and one.requires_grad]
    require(
        tensors,
        f"the model's output, {type(output).__name__}, contains nothing to differentiate",
        instead="Pass loss=, a function that computes a loss from the model's output",
    )
    return torch.stack([one.float().mean() for one in tensors]).sum()


@contextmanager
def _restored(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    named = [(module._buffers, name, one) for module in model.modules() for name, one in module._buffers.items()]
    # Buffers of a lazy module have no values before its first call.
    buffers = [(of, name, one, one.clone()) for of, name, one in named if one is not None and not is_lazy(one)]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices=_cuda(device)):
            yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for of_module, name, buffer, before in buffers:
                # The same tensor with its former values: a model may have replaced it.
                of_module[name] = buffer.copy_(before)


def _cuda(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []
