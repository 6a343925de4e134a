"""Causes that are code of the training loop: each class adds one, in the iterations between `enter` and `leave`.

Numbers come from `table.py`. A plant acts on the ranks it is given; on the others it does nothing.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tools.injected_captures.everyday.training import Batch, Training

_MEBIBYTE = 1 << 20

#: Names of the files that a contender's process watches: one asks it to work, it answers with the other.
CONTEND, READY = "contend-{gpu}", "contend-{gpu}.ready"

#: Where these files are.
CONTENDERS_VARIABLE = "EVERYDAY_CONTENDERS"

_READY_SECONDS = 30.0


class Plant:
    """What a training calls. This one does nothing."""

    training: Training

    def __init__(self, *, ranks: tuple[int, ...], rank: int) -> None:
        self.here, self.rank = rank in ranks, rank

    def prepare(self, training: Training) -> None:
        """Called once, when the model is there."""
        self.training = training

    def enter(self) -> None:
        """Called before iterations that have the fault."""

    def leave(self) -> None:
        """Called after them: what other trainings of the process would feel ends."""

    def batch(self, batch: Batch, count: int) -> Batch:
        """A batch as the data set gives it; `count` were given before."""
        return batch

    def before_micro_batch(self, iteration: int, number: int) -> None:
        """Called at the beginning of each micro-batch."""

    def after_micro_batch(self, loss: Tensor, iteration: int, number: int) -> None:
        """Called with each micro-batch's loss after its backward pass."""

    def before_step(self, iteration: int) -> None:
        """Called before the optimizer's step."""

    def after_step(self, iteration: int) -> None:
        """Called after the optimizer's step."""


class MovingAverage(Plant):
    """A moving average of weights, parameter by parameter."""

    def prepare(self, training: Training) -> None:
        super().prepare(training)
        self.average = [parameter.detach().clone() for parameter in training.model.parameters()]

    @torch.no_grad()
    def after_step(self, iteration: int) -> None:
        for mean, parameter in zip(self.average, self.training.model.parameters(), strict=True):
            mean.mul_(0.999).add_(parameter, alpha=0.001)


class WeightNorms(Plant):
    """The norm of each weight is read for a log, in every iteration."""

    def after_step(self, iteration: int) -> None:
        self.norms = [parameter.detach().norm().item() for parameter in self.training.model.parameters()]


class HardExamples(Plant):
    """A boolean mask of what exceeds the mean, for each parameter's gradient; the host waits for its size."""

    def before_step(self, iteration: int) -> None:
        for parameter in self.training.model.parameters():
            sizes = parameter.grad.flatten()[: 1 << 16].abs()
            self.large = sizes[sizes > sizes.mean()]


class GarbageCollection(Plant):
    """`gc.collect()` in every `every`th iteration, in a process that has many objects."""

    def __init__(self, *, every: int, objects: int, **here: Any) -> None:
        super().__init__(**here)
        self.every, self.objects = every, objects
        self.kept: list[Any] = []

    def enter(self) -> None:
        if self.here:
            self.kept = [[number] for number in range(self.objects)]

    def leave(self) -> None:
        self.kept = []

    def before_micro_batch(self, iteration: int, number: int) -> None:
        if self.here and number == 0 and (iteration - 1) % self.every == 0:
            gc.collect()


class Checkpoint(Plant):
    """The weights are saved before every `every`th iteration by the first of the ranks."""

    def __init__(self, *, every: int, **here: Any) -> None:
        super().__init__(**here)
        self.every = every

    def after_step(self, iteration: int) -> None:
        if self.here and iteration % self.every == 2:
            path = f"checkpoint-{os.getpid()}.pt"
            torch.save(self.training.model.state_dict(), path)
            os.unlink(path)


class ExtraCompute(Plant):
    """Matrix products that nobody needs; with `rotate`, on another rank in each iteration."""

    def __init__(self, *, products: int, size: int, rotate: bool = False, **here: Any) -> None:
        super().__init__(**here)
        self.products, self.size, self.rotate = products, size, rotate

    def prepare(self, training: Training) -> None:
        super().prepare(training)
        self.matrix = torch.randn(self.size, self.size, device=training.device, dtype=torch.bfloat16)
        self.result = torch.empty_like(self.matrix)

    def before_micro_batch(self, iteration: int, number: int) -> None:
        if iteration % 2 == self.rank if self.rotate else self.here:
            for _ in range(self.products):
                torch.mm(self.matrix, self.matrix, out=self.result)


class SlowHost(Plant):
    """Python works, or sleeps, before each block's forward pass."""

    def __init__(self, *, ms: float, sleep: bool = False, **here: Any) -> None:
        super().__init__(**here)
        self.seconds, self.sleep = ms / 1e3, sleep

    def prepare(self, training: Training) -> None:
        super().prepare(training)
        if self.here:
            for module in training.model.modules():
                if type(module).__name__ in ("Block", "Residual"):
                    module.register_forward_pre_hook(lambda module, inputs: self._pause())

    def _pause(self) -> None:
        if self.sleep:
            time.sleep(self.seconds)
            return
        until = time.perf_counter() + self.seconds
        while time.perf_counter() < until:
            pass


class Contention(Plant):
    """Another process multiplies matrices on this rank's GPU."""

    def prepare(self, training: Training) -> None:
        super().prepare(training)
        folder = Path(os.environ[CONTENDERS_VARIABLE])
        gpu = training.device.index or 0
        self.request, self.answer = folder / CONTEND.format(gpu=gpu), folder / READY.format(gpu=gpu)
        self.enter()
        self.leave()

    def enter(self) -> None:
        if self.here:
            self.request.touch()
            self._await(present=True)

    def leave(self) -> None:
        if self.here:
            self.request.unlink()
            self._await(present=False)

    def _await(self, *, present: bool) -> None:
        until = time.monotonic() + _READY_SECONDS
        while self.answer.exists() != present:
            if time.monotonic() > until:
                raise TimeoutError(f"{self.answer}: no answer")
            time.sleep(0.002)


class EmptyCache(Plant):
    """The allocator gives all memory back after every step, or every micro-batch."""

    def after_step(self, iteration: int) -> None:
        if self.training.device.type == "cuda":
            torch.cuda.empty_cache()


class Lengths(Plant):
    """Batches of another length on one rank, or of lengths that change from batch to batch and differ between ranks."""

    def __init__(self, *, shares: tuple[tuple[float, ...], ...], **here: Any) -> None:
        super().__init__(**here)
        self.shares = shares[self.rank]

    def batch(self, batch: Batch, count: int) -> Batch:
        tokens = batch[0]
        return (tokens[:, : int((tokens.shape[1] - 1) * self.shares[count % len(self.shares)]) + 1].contiguous(),)


class PartialBatches(Plant):
    """A batch of a size that was not there before, now and then: what is compiled for a size is compiled again."""

    def __init__(self, *, every: int, **here: Any) -> None:
        super().__init__(**here)
        self.every, self.short = every, 0

    def enter(self) -> None:
        self.training.samples.count = 0

    def batch(self, batch: Batch, count: int) -> Batch:
        if count % self.every != self.every // 2:
            return batch
        self.short += 1
        return tuple(tensor[: -self.short] for tensor in batch)


class TinyKernels(Plant):
    """Statistics of gradients, computed with a handful of tiny operations for each piece."""

    def __init__(self, *, pieces: int, **here: Any) -> None:
        super().__init__(**here)
        self.pieces = pieces

    def prepare(self, training: Training) -> None:
        super().prepare(training)
        self.values = torch.rand(self.pieces, 64, device=training.device)

    def before_step(self, iteration: int) -> None:
        for piece in self.values:
            piece.mul_(0.9).add_(0.1).clamp_(0.0, 1.0)


class Leak(Plant):
    """Every iteration keeps a tensor that is never let go."""

    def __init__(self, *, mebibytes: int, **here: Any) -> None:
        super().__init__(**here)
        self.mebibytes = mebibytes
        self.kept: list[Tensor] = []

    def after_step(self, iteration: int) -> None:
        self.kept.append(torch.zeros(self.mebibytes * _MEBIBYTE, dtype=torch.uint8, device=self.training.device))

    def leave(self) -> None:
        self.kept.clear()


class HostTable(Plant):
    """A table is copied to the device from ordinary memory in each micro-batch."""

    def __init__(self, *, mebibytes: int, **here: Any) -> None:
        super().__init__(**here)
        self.table = torch.randn(mebibytes * _MEBIBYTE // 4)

    def before_micro_batch(self, iteration: int, number: int) -> None:
        if self.here:
            self.copy = self.table.to(self.training.device, copy=True)


PLANTS: dict[str, Callable[..., Plant]] = {
    one.__name__: one
    for one in (
        MovingAverage, WeightNorms, HardExamples, GarbageCollection, Checkpoint, ExtraCompute, SlowHost, Contention, EmptyCache,
        Lengths, PartialBatches, TinyKernels, Leak, HostTable,
    )
}  # fmt: skip
