"""Duration of a training step, warmed up, repeated and with bounds: the user's own, or that of a model (`quick_benchmark`).

On a GPU the host may run ahead, as in training.
"""

from __future__ import annotations

import copy
import itertools
import operator
import reprlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from bridge_profiling.bench.results import Estimate, estimate
from bridge_profiling.common.errors import ProfilingConfigError, require


@dataclass(frozen=True)
class StepTiming:
    """Timing of a step; printed on one line. Unpacks to the mean milliseconds of an iteration and the mean throughput:

        milliseconds, samples_per_s = quick_benchmark(model, (32, 3, 224, 224))

    Args:
        warmup: iterations before the first that counts.
        seconds: duration of one iteration.
        device: device whose clock was used, `cuda` or `cpu`.
        samples_per_iteration: samples processed by one iteration; None if unknown.
    """

    warmup: int
    seconds: Estimate
    device: str
    samples_per_iteration: int | None = None

    @property
    def iterations(self) -> int:
        """Number of iterations that counted."""
        return self.seconds.count

    @property
    def iterations_per_s(self) -> Estimate:
        """Iterations per second."""
        return self.seconds.inverted()

    @property
    def samples_per_s(self) -> Estimate | None:
        """Samples per second; None if the number of samples per iteration is unknown."""
        return None if self.samples_per_iteration is None else self.seconds.inverted(self.samples_per_iteration)

    def __iter__(self) -> Iterator[float]:
        rate = self.samples_per_s or self.iterations_per_s
        return iter((self.seconds.mean * 1e3, rate.mean))

    def __str__(self) -> str:
        rate, unit = (self.samples_per_s, "samples") if self.samples_per_s else (self.iterations_per_s, "iterations")
        known = rate.low is not None and rate.high is not None
        bounds = f"{rate.low:,.1f} to {rate.high:,.1f} at 95%" if known else "too few iterations for bounds"
        milliseconds = self.seconds.scaled(1e3)
        return (
            f"{rate.median:,.1f} {unit}/s ({bounds}), {milliseconds.median:.3f} ms per iteration ({milliseconds.mean:.3f} on"
            f" average); {self.iterations} iterations on {self.device} after {self.warmup} to warm up"
        )


def measure_step(
    step: Callable[[], object],
    *,
    warmup: int = 5,
    iterations: int = 30,
    max_seconds: float | None = None,
    samples_per_iteration: int | None = None,
) -> StepTiming:
    """Call a step repeatedly and time each call.

    If CUDA is in use after the warm-up, events on the current stream mark the end of each iteration, and nothing waits for them
    before the last: an iteration then takes as long as on the device, or on the host if that is slower. Otherwise the host's
    clock is read between calls.

    Args:
        step: one iteration; its return value is ignored.
        warmup: calls before the first that counts, at least 0: they compile, allocate and tune.
        iterations: calls that count, at least 1; fewer than 6 give no bounds.
        max_seconds: stop early once the calls that count have taken this long; at least one counts.
        samples_per_iteration: samples processed by one call.
    """
    for _ in range(warmup):
        step()
    cuda = torch.cuda.is_initialized()
    if cuda:
        torch.cuda.synchronize()
    mark: Callable[[], Any] = _event if cuda else time.perf_counter
    started, marks = time.perf_counter(), [mark()]
    while len(marks) <= iterations:
        step()
        marks.append(mark())
        if max_seconds is not None and time.perf_counter() - started > max_seconds:
            break
    if cuda:
        torch.cuda.synchronize()
    pairs = itertools.pairwise(marks)
    samples = [before.elapsed_time(after) / 1e3 if cuda else after - before for before, after in pairs]
    return StepTiming(warmup, estimate(samples), "cuda" if cuda else "cpu", samples_per_iteration)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


# -- a model ----------------------------------------------------------------------------------------------------------


def quick_benchmark(
    model: torch.nn.Module,
    input_shape: Sequence[int] | torch.Tensor | Sequence[torch.Tensor],
    num_iterations: int = 30,
    warmup: int = 5,
    *,
    train: bool = False,
    dtype: torch.dtype | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    device: torch.device | str | None = None,
    max_seconds: float | None = None,
    quiet: bool = False,
) -> StepTiming:
    """Measure the forward pass, or the forward and backward pass, of a copy of a model, and print the result on one line.

    Leaves the model and the state of the random number generators as they are.

    Args:
        model: on any device.
        input_shape: shape of the input, the batch first, to fill with random numbers; or the input itself, one or more tensors.
        num_iterations: number of measured iterations; fewer than 6 give no bounds.
        warmup: iterations before the first measured one.
        train: measure the backward pass too, in training mode. Otherwise in evaluation mode without gradients.
        dtype: of the random input; None for the model's. Integers are 0 and 1, which are valid in every embedding.
        loss: computes the loss from the model's output; None for the output's `loss`, else the mean of all its tensors.
        device: where to measure; None for the GPU if there is one and the model is on the CPU, else where the model is.
        max_seconds: stop early when the measured iterations have taken this long.
        quiet: print nothing.

    Raises:
        ProfilingConfigError: an invalid shape, an empty batch, nothing to measure or to differentiate, or random numbers for a
            model that takes integers.
    """
    require(
        warmup >= 0 and num_iterations >= 1,
        f"warmup={warmup} and num_iterations={num_iterations} measure nothing",
        instead="Leave them out",
    )
    here = next((one.device for one in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    to_gpu = device is None and here.type == "cpu" and torch.cuda.is_available()
    chosen = torch.device("cuda" if to_gpu else device or here)
    trainable = any(parameter.requires_grad for parameter in model.parameters())
    require(not train or trainable, "train=True, and no parameter of the model requires a gradient", instead="Leave train out")
    copied, make_loss = copy.deepcopy(model).to(chosen).train(train), loss or _loss

    def forward() -> None:
        copied(*inputs)

    def forward_backward() -> None:
        make_loss(copied(*inputs)).backward()
        copied.zero_grad()

    of_cuda = {here, chosen} - {torch.device("cpu")} if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices=[one for one in of_cuda if one.type == "cuda"]), torch.set_grad_enabled(train):
        inputs = [one.to(chosen) for one in _inputs(model, input_shape, dtype)]
        try:
            timing = measure_step(
                forward_backward if train else forward,
                warmup=warmup,
                iterations=num_iterations,
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
    if not quiet:
        print(timing)
    return timing


def _inputs(model: torch.nn.Module, asked: Any, dtype: torch.dtype | None) -> list[torch.Tensor]:
    if isinstance(asked, torch.Tensor):
        inputs = [asked]
    elif isinstance(asked, list | tuple) and asked and all(isinstance(one, torch.Tensor) for one in asked):
        inputs = list(asked)
    else:
        tensors = [*model.parameters(), *model.buffers()]
        like = next((one for one in tensors if _is_continuous(one.dtype)), torch.empty(0))
        kind = dtype or like.dtype
        try:
            shape = tuple(operator.index(size) for size in asked)
        except TypeError:
            shape = (-1,)
        require(
            all(size >= 0 for size in shape),
            f"input_shape={reprlib.repr(asked)} is not the shape of one tensor",
            instead="Give the batch first, as in (32, 3, 224, 224); for several inputs, or other ones, the tensors themselves",
        )
        make = torch.randn if _is_continuous(kind) else partial(torch.randint, 2)
        inputs = [make(shape, dtype=kind, device=like.device)]
    given = tuple(inputs[0].shape)
    require(given and given[0], f"input_shape={given} holds no sample", instead="Give the batch first, as in (32, 3, 224, 224)")
    return inputs


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
