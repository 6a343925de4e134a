"""How fast a model is: `quick_benchmark(model, (32, 3, 224, 224))`. The measuring itself is `bridge_profiling.bench.step`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from bridge_profiling.bench.step import StepTiming, measure_step
from bridge_profiling.errors import ProfilingConfigError


class ModelTiming(StepTiming):
    """A model's pace; printed as one line."""

    def __str__(self) -> str:
        assert self.samples_per_s is not None
        rate, time = self.samples_per_s, self.seconds.scaled(1e3)
        known = rate.low is not None and rate.high is not None
        bounds = f" ({rate.low:,.1f} to {rate.high:,.1f} at 95 %)" if known else " (too few iterations for bounds)"
        told = f"{rate.median:,.1f} samples/s{bounds}, {time.median:.3f} ms an iteration"
        return f"{told}; {self.iterations} iterations on {self.device} after {self.warmup} to warm up"


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
) -> ModelTiming:
    """Measure a model's forward pass, or its forward and backward pass, on the device where it lies.

    The model is left as it was: its mode, gradients and buffers, and the random numbers that come next.

    Args:
        model: on its device.
        input_shape: of the input, the batch first; filled with random numbers. Or the input itself, one tensor or several.
        train: the backward pass as well, in training mode. Without, in evaluation mode, and nothing is kept for gradients.
        dtype: of the random input; None for the model's. Integers are 0 and 1, which every embedding knows.
        loss: what is differentiated, made of what the model gives; None for its `loss`, else the mean of all it gives.
        warmup: iterations before the first that counts.
        iterations: iterations that count; of fewer than 6 no bounds can be told.
        max_seconds: stop early when those that count have taken so long.

    Raises:
        ProfilingConfigError: no batch, or nothing to differentiate.
    """
    inputs = _inputs(model, input_shape, dtype)
    if train and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ProfilingConfigError("train=True, and no parameter of the model requires a gradient", instead="Leave train out")
    make_loss = loss or _loss

    def forward() -> None:
        model(*inputs)

    def forward_backward() -> None:
        make_loss(model(*inputs)).backward()
        model.zero_grad()

    with _left_as_it_was(model, inputs[0].device), torch.set_grad_enabled(train):
        model.train(train)
        timing = measure_step(
            forward_backward if train else forward,
            warmup=warmup,
            iterations=iterations,
            max_seconds=max_seconds,
            samples_per_iteration=inputs[0].shape[0],
        )
    return ModelTiming(**vars(timing))


def _inputs(model: torch.nn.Module, asked: Any, dtype: torch.dtype | None) -> list[torch.Tensor]:
    if isinstance(asked, torch.Tensor):
        inputs = [asked]
    elif asked and all(isinstance(one, torch.Tensor) for one in asked):
        inputs = list(asked)
    else:
        like = next((one for one in [*model.parameters(), *model.buffers()] if one.is_floating_point()), torch.empty(0))
        kind = dtype or like.dtype
        floating = kind.is_floating_point or kind.is_complex
        make = torch.randn if floating else (lambda *shape, **options: torch.randint(2, shape, **options))
        with torch.random.fork_rng(devices=_cuda(like.device)):
            inputs = [make(*asked, dtype=kind, device=like.device)]
    if not inputs[0].ndim or not inputs[0].shape[0]:
        raise ProfilingConfigError(
            f"input_shape={tuple(inputs[0].shape)} holds no sample", instead="Give the batch first, as in (32, 3, 224, 224)"
        )
    return inputs


def _loss(output: Any) -> torch.Tensor:
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    given = [one for one in tree_leaves(output) if isinstance(one, torch.Tensor) and one.requires_grad]
    if not given:
        raise ProfilingConfigError(
            f"the model gives {type(output).__name__}, in which there is nothing to differentiate",
            instead="Pass loss=, a function that makes a loss of what the model gives",
        )
    return torch.stack([one.float().mean() for one in given]).sum()


@contextmanager
def _left_as_it_was(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
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
            for buffer, before in buffers:
                buffer.copy_(before)


def _cuda(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []
