"""Causes of the fifth round that are code of the training loop."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tools.injected_captures.everyday.plants import Plant

if TYPE_CHECKING:
    from tools.injected_captures.everyday.training import Batch, Training


def _bare(model: nn.Module) -> nn.Module:
    """The model without DDP around it."""
    return getattr(model, "module", model)


def _summarize(seconds: float) -> int:
    """Build and serialize a report of nested objects for this long; returns how often."""
    until, times = time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        rows = [{"name": f"value/{place}", "history": [place * 0.5, place * 0.25], "step": times} for place in range(200)]
        times += len(json.dumps({"rows": rows})) > 0
    return times


class Packing(Plant):
    """Documents are packed into sequences in Python, by the process that trains."""

    def __init__(self, *, ms: float, **here: Any) -> None:
        super().__init__(**here)
        self.seconds = ms / 1e3

    def batch(self, batch: Batch, count: int) -> Batch:
        until, words = time.perf_counter() + self.seconds, batch[0][0].tolist()
        while time.perf_counter() < until:
            packed = [f"{word:05d}" for word in words]
            self.length = len(" ".join(packed).split(" "))
        return batch


class MidCollect(Plant):
    """Garbage is collected after each forward pass, by a hook that was meant to save memory."""

    def __init__(self, *, objects: int, **here: Any) -> None:
        super().__init__(**here)
        self.objects = objects
        self.kept: list[Any] = []

    def prepare(self, training: Training) -> None:
        super().prepare(training)
        training.model.register_forward_hook(lambda *_: self._collect())

    def enter(self) -> None:
        self.kept = [[number] for number in range(self.objects)]

    def leave(self) -> None:
        self.kept = []

    def _collect(self) -> None:
        gc.collect()


class DelayedLoss(Plant):
    """The loss is copied to page-locked memory without waiting, and is read two iterations later: costs nothing."""

    def prepare(self, training: Training) -> None:
        super().prepare(training)
        self.cuda = training.device.type == "cuda"
        self.places = [torch.zeros((), pin_memory=self.cuda) for _ in range(3)]
        self.events = [torch.cuda.Event() for _ in range(3)] if self.cuda else []
        self.seen: list[float] = []

    def after_micro_batch(self, loss: Tensor, iteration: int, number: int) -> None:
        place = iteration % 3
        self.places[place].copy_(loss.detach(), non_blocking=True)
        oldest = (iteration + 1) % 3
        if self.cuda:
            self.events[place].record()
            self.events[oldest].synchronize()
        self.seen.append(float(self.places[oldest]))


class Histogram(Plant):
    """Generated images go to the host between both steps, for a histogram of their values in NumPy."""

    def after_micro_batch(self, loss: Tensor, iteration: int, number: int) -> None:
        values = self.training.images.float().cpu().numpy()
        self.counts = np.histogram(values, bins=64, range=(-1.0, 1.0))[0]


class Pool(Plant):
    """Features of earlier images are kept on the device, to compare with; none is ever dropped."""

    def __init__(self, **here: Any) -> None:
        super().__init__(**here)
        self.kept: list[Tensor] = []

    def after_step(self, iteration: int) -> None:
        self.kept.append(self.training.model.judge.features.clone())

    def leave(self) -> None:
        self.kept.clear()


class Episodes(Plant):
    """Python summarizes the episodes after each iteration, before the next rollout begins."""

    def __init__(self, *, ms: float, **here: Any) -> None:
        super().__init__(**here)
        self.seconds = ms / 1e3

    def after_step(self, iteration: int) -> None:
        if self.here:
            self.rows = _summarize(self.seconds)


class LateWait(Plant):
    """The device is waited for right after the loss was read, when it is done anyway: costs nothing."""

    def after_step(self, iteration: int) -> None:
        if self.training.device.type == "cuda":
            torch.cuda.synchronize(self.training.device)


class Watch(Plant):
    """A histogram of each gradient for a dashboard: its bounds, then its counts, come to the host one by one."""

    def before_step(self, iteration: int) -> None:
        self.counts = []
        for parameter in self.training.model.parameters():
            if parameter.grad is not None:
                values = parameter.grad.flatten().float()
                low, high = values.min().item(), values.max().item()
                self.counts.append(torch.histc(values, 64, min(low, 0.0), max(high, 1e-9)).tolist())


class DropRate(Plant):
    """The rate of dropped layers rises now and then; it is a number of Python that compiled layers read."""

    def __init__(self, *, every: int, **here: Any) -> None:
        super().__init__(**here)
        self.every, self.rises = every, 0

    def before_micro_batch(self, iteration: int, number: int) -> None:
        if number == 0 and iteration % self.every == self.every // 2:
            self.rises += 1
            for block in self.training.model.blocks:
                block.rate = 0.001 * self.rises


class LossRate(Plant):
    """The learning rate follows a running mean of the loss, which is on the device."""

    def prepare(self, training: Training) -> None:
        super().prepare(training)
        self.mean = torch.ones((), device=training.device)

    def after_micro_batch(self, loss: Tensor, iteration: int, number: int) -> None:
        self.mean.lerp_(loss.detach().float(), 0.1)

    def before_step(self, iteration: int) -> None:
        rate = 1e-4 * min(1.0, float(self.mean))
        for group in self.training.optimizer.param_groups:
            group["lr"] = rate


class Augment(Plant):
    """Images are flipped, shifted and dimmed one by one, by the process that trains."""

    def __init__(self, *, ms: float, **here: Any) -> None:
        super().__init__(**here)
        self.seconds = ms / 1e3

    def batch(self, batch: Batch, count: int) -> Batch:
        images, *others = batch
        images, until = images.clone(), time.perf_counter() + self.seconds
        for image in images:
            if time.perf_counter() > until:
                break
            image.copy_(image.flip(-1).roll((3, 5), (1, 2)).float().mul_(0.9).add_(8.0))
        while time.perf_counter() < until:
            images[0].copy_(images[0].flip(-1))
        return images, *others


class FloatImages(Plant):
    """Batches hold images as float32, where they could hold bytes."""

    def __init__(self, **here: Any) -> None:
        super().__init__(**here)
        self.ready: dict[int, Tensor] = {}

    def batch(self, batch: Batch, count: int) -> Batch:
        images, *others = batch
        if id(images) not in self.ready:
            self.ready[id(images)] = images.float()
        return self.ready[id(images)], *others


class Depths(Plant):
    """Volumes of other depths, by rank and batch, as shares of the usual depth; they are as deep as ever on average."""

    def __init__(self, *, shares: tuple[tuple[float, ...], ...], **here: Any) -> None:
        super().__init__(**here)
        self.shares = shares[self.rank]
        self.ready: dict[tuple[int, float], Batch] = {}

    def batch(self, batch: Batch, count: int) -> Batch:
        share = self.shares[count % len(self.shares)]
        key = id(batch[0]), share
        if key not in self.ready:
            volumes, tissues = batch
            depth = int(volumes.shape[2] * share) // 8 * 8
            self.ready[key] = (
                volumes.repeat(1, 1, 2, 1, 1)[:, :, :depth].contiguous(), tissues.repeat(1, 2, 1, 1)[:, :depth].contiguous()
            )  # fmt: skip
        return self.ready[key]


class Overlap(Plant):
    """What was predicted is compared with what was wanted on the host, voxel by voxel, in every iteration."""

    def after_micro_batch(self, loss: Tensor, iteration: int, number: int) -> None:
        predicted = _bare(self.training.model).scores.argmax(1).to(torch.uint8).cpu().numpy()
        self.counts = np.bincount(predicted.ravel(), minlength=8)


class SlowShards(Plant):
    """Some shards of the data are slow to read: every `of`th batch, on one rank."""

    def __init__(self, *, ms: float, of: int, **here: Any) -> None:
        super().__init__(**here)
        self.seconds, self.of = ms / 1e3, of

    def batch(self, batch: Batch, count: int) -> Batch:
        if self.here and count % self.of == 0:
            time.sleep(self.seconds)
        return batch


class Barrier(Plant):
    """Ranks meet at the end of each iteration, where they are together anyway: costs next to nothing."""

    def after_step(self, iteration: int) -> None:
        dist.barrier()


class HorizonMetrics(Plant):
    """The error of each step of a forecast, its square and its root are averaged over ranks, each by itself."""

    def after_micro_batch(self, loss: Tensor, iteration: int, number: int) -> None:
        self.means = []
        for error in _bare(self.training.model).errors.float().unbind():
            for value in (error.clone(), error.square(), error.sqrt()):
                dist.all_reduce(value)
                self.means.append(value)


class Averages(Plant):
    """Moving averages of the weights with several decays, tensor by tensor, to choose one later."""

    def __init__(self, *, decays: tuple[float, ...], **here: Any) -> None:
        super().__init__(**here)
        self.decays = decays

    def prepare(self, training: Training) -> None:
        super().prepare(training)
        self.averages = [
            {name: parameter.detach().clone() for name, parameter in training.model.named_parameters()} for _ in self.decays
        ]

    @torch.no_grad()
    def after_step(self, iteration: int) -> None:
        for name, parameter in self.training.model.named_parameters():
            for decay, average in zip(self.decays, self.averages, strict=True):
                average[name].mul_(decay).add_(parameter * (1.0 - decay))


class BackwardLog(Plant):
    """Python is busy for a while in the backward pass of each layer, on one rank."""

    def __init__(self, *, ms: float, **here: Any) -> None:
        super().__init__(**here)
        self.seconds = ms / 1e3

    def prepare(self, training: Training) -> None:
        super().prepare(training)
        if self.here:
            for block in _bare(training.model).blocks:
                block.register_full_backward_hook(lambda *_: self._log())

    def _log(self) -> None:
        self.rows = _summarize(self.seconds)


class Activations(Plant):
    """Mean, spread and largest value of what each layer returns are read in the forward pass."""

    def prepare(self, training: Training) -> None:
        super().prepare(training)
        self.values: list[float] = []
        for block in training.model.blocks:
            block.register_forward_hook(lambda module, inputs, output: self._read(output))

    def _read(self, output: Tensor) -> None:
        values = output.detach()
        self.values = [values.mean().item(), values.std().item(), values.abs().max().item()]


class TeacherTurns(Plant):
    """A rank asks the teacher about another batch, to log how sure it is: another rank in each iteration."""

    def prepare(self, training: Training) -> None:
        super().prepare(training)
        self.tokens = training.samples.batches[0][0][:, :-1].to(training.device)

    def before_micro_batch(self, iteration: int, number: int) -> None:
        if iteration % 2 == self.rank:
            self.sure = self.training.model.teachers[0](self.tokens).amax(-1).mean()


class FullGradients(Plant):
    """The norm of each gradient is that of the whole gradient, which is gathered from all ranks for it."""

    def before_step(self, iteration: int) -> None:
        self.norms = [parameter.grad.full_tensor().norm() for parameter in self.training.model.parameters()]


class LocalShards(Plant):
    """Each rank saves its shards of the weights before every `every`th iteration."""

    def __init__(self, *, every: int, **here: Any) -> None:
        super().__init__(**here)
        self.every = every

    def after_step(self, iteration: int) -> None:
        if iteration % self.every == 2:
            path = f"shards-{os.getpid()}.pt"
            torch.save({name: value.to_local() for name, value in self.training.model.named_parameters()}, path)
            os.unlink(path)


class MeanLoss(Plant):
    """The mean of all ranks' losses is read at the end of each iteration, where hosts wait anyway: costs next to nothing."""

    def after_micro_batch(self, loss: Tensor, iteration: int, number: int) -> None:
        self.loss = loss.detach().float().clone()

    def after_step(self, iteration: int) -> None:
        dist.all_reduce(self.loss)
        self.mean = self.loss.item()


class EarlyCache(Plant):
    """The allocator gives memory back between the last backward pass and the optimizer's step."""

    def before_step(self, iteration: int) -> None:
        if self.training.device.type == "cuda":
            torch.cuda.empty_cache()


class Summary(Plant):
    """One rank writes a summary of the last iteration before it begins the next one."""

    def __init__(self, *, ms: float, **here: Any) -> None:
        super().__init__(**here)
        self.seconds = ms / 1e3

    def before_micro_batch(self, iteration: int, number: int) -> None:
        if self.here and number == 0:
            self.rows = _summarize(self.seconds)


FIFTH_PLANTS: dict[str, Callable[..., Plant]] = {
    one.__name__: one
    for one in (
        Packing, MidCollect, DelayedLoss, Histogram, Pool, Episodes, LateWait, Watch, DropRate, LossRate, Augment, FloatImages,
        Depths, Overlap, SlowShards, Barrier, HorizonMetrics, Averages, BackwardLog, Activations, TeacherTurns, FullGradients,
        LocalShards, MeanLoss, EarlyCache, Summary,
    )
}  # fmt: skip
