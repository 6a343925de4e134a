"""Causes of the sixth round that are code of the training loop, and one that costs nothing."""

from __future__ import annotations

import gc
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as distributed_checkpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tools.injected_captures.everyday.plants import CONTENDERS_VARIABLE, GarbageCollection, PartialBatches, Plant

if TYPE_CHECKING:
    from tools.injected_captures.everyday.training import Batch, Training


class RandomPixels(Plant):
    """The pixels of a batch are the first of all pixels in a random order, which is drawn anew for each batch."""

    def __init__(self, *, pixels: int, **here: Any) -> None:
        super().__init__(**here)
        self.pixels = pixels

    def batch(self, batch: Batch, count: int) -> Batch:
        chosen = torch.randperm(self.pixels)[: len(batch[0])] % len(batch[0])
        return tuple(tensor[chosen] for tensor in batch)


class Epochs(Plant):
    """Epochs are a few batches long, and each starts the processes that load data, as a loader does unless told otherwise."""

    def __init__(self, *, batches: int, **here: Any) -> None:
        super().__init__(**here)
        self.batches = batches

    def prepare(self, training: Training) -> None:
        super().prepare(training)
        workers, pinned = training.setting.workers, training.loader.pin_memory
        self.loader = partial(DataLoader, training.samples, batch_size=None, num_workers=workers, pin_memory=pinned)
        training.loader = self

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield from islice(self.loader(), self.batches)


class ImageByImage(Plant):
    """Images are augmented on the device, each by itself, and each of its colors."""

    def prepare(self, training: Training) -> None:
        super().prepare(training)
        training.model.register_forward_pre_hook(lambda _, inputs: (self._augmented(inputs[0]), *inputs[1:]))

    def _augmented(self, images: Tensor) -> Tensor:
        done = []
        for image in images:
            mean = image.mean()
            image = (image - mean) * random.uniform(0.8, 1.2) + mean * random.uniform(0.8, 1.2)
            colors = [(color - 0.01).div_(random.uniform(0.9, 1.1)) for color in image]
            done.append(torch.stack(colors).add_(torch.randn_like(image), alpha=0.05).clamp_(-3.0, 3.0))
        return torch.stack(done).contiguous(memory_format=torch.channels_last)


class StepInBackward(Plant):
    """Each parameter has an optimizer of its own, which steps as soon as its gradient is there, to save memory."""

    def prepare(self, training: Training) -> None:
        super().prepare(training)
        self.optimizers = {one: torch.optim.AdamW([one], lr=1e-4, foreach=False) for one in training.model.parameters()}
        for parameter in self.optimizers:
            parameter.register_post_accumulate_grad_hook(self._step)

    def _step(self, parameter: nn.Parameter) -> None:
        self.optimizers[parameter].step()
        self.optimizers[parameter].zero_grad()


class MathAttention(Plant):
    """Fused kernels of attention are switched off, as somebody did to look for NaN."""

    def enter(self) -> None:
        self._switch(False)

    def leave(self) -> None:
        self._switch(True)

    def _switch(self, on: bool) -> None:
        for switch in (torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.enable_mem_efficient_sdp):
            switch(on)
        torch.backends.cuda.enable_cudnn_sdp(on)


class Lists(Plant):
    """Sentences are lists of Python, and each becomes a tensor on the device by itself."""

    def prepare(self, training: Training) -> None:
        super().prepare(training)
        words, _, wanted = training.samples.batches[0]
        self.lists = [*words.tolist(), *wanted.tolist()]

    def before_micro_batch(self, iteration: int, number: int) -> None:
        self.sentences = [torch.tensor(words, device=self.training.device) for words in self.lists]


class Curriculum(PartialBatches):
    """Sequences of another length, now and then, that were not there before."""

    def batch(self, batch: Batch, count: int) -> Batch:
        if count % self.every != self.every // 2:
            return batch
        self.short += 1
        return tuple(tensor[:, : -self.short * (tensor.shape[1] // 16)] for tensor in batch)


class LayerClip(Plant):
    """Gradients of each layer are clipped to a percentile of the layer's norms so far, which Python keeps."""

    def prepare(self, training: Training) -> None:
        super().prepare(training)
        self.layers: list[tuple[list[Tensor], list[float]]] = [([*one.parameters()], []) for one in training.model.blocks]

    def before_step(self, iteration: int) -> None:
        for parameters, norms in self.layers:
            norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
            norms.append(norm.item())
            nn.utils.clip_grads_with_norm_(parameters, float(np.percentile(norms, 10)), norm)


class RewardMetrics(Plant):
    """Each number that is logged is gathered from all ranks and read by itself, in every micro-batch."""

    def after_micro_batch(self, loss: Tensor, iteration: int, number: int) -> None:
        chosen, rejected = self.training.model.module.rewards.float()
        values = {
            "loss": loss.detach(), "chosen": chosen, "rejected": rejected, "margin": chosen - rejected,
            "accuracy": (chosen > rejected).float(), "spread": (chosen - rejected).square(),
        }  # fmt: skip
        self.logged = {name: self._mean(value.float().mean()) for name, value in values.items()}

    def _mean(self, value: Tensor) -> float:
        everywhere = value.new_empty(self.training.setting.ranks)
        dist.all_gather_into_tensor(everywhere, value[None])
        return everywhere.mean().item()


class TurnsToCollect(GarbageCollection):
    """Each rank collects garbage when it likes: in every second iteration, in which the others do not."""

    def before_micro_batch(self, iteration: int, number: int) -> None:
        if self.here and number == 0 and iteration % 2 == self.rank:
            gc.collect()


class MicroCache(Plant):
    """The allocator gives memory back after every micro-batch."""

    def after_micro_batch(self, loss: Tensor, iteration: int, number: int) -> None:
        if self.training.device.type == "cuda":
            torch.cuda.empty_cache()


class Meter(Plant):
    """The loss of all ranks is summed for a log, and nobody waits for the sum: costs next to nothing."""

    work: dist.Work | None = None

    def after_micro_batch(self, loss: Tensor, iteration: int, number: int) -> None:
        if self.work is not None:
            self.work.wait()
        self.sum = loss.detach().float().clone()
        self.work = dist.all_reduce(self.sum, async_op=True)


class SavedShards(Plant):
    """All ranks save the model with `torch.distributed.checkpoint` before every `every`th iteration."""

    def __init__(self, *, every: int, **here: Any) -> None:
        super().__init__(**here)
        self.every = every

    def after_step(self, iteration: int) -> None:
        if iteration % self.every == 2:
            folder = Path(os.environ[CONTENDERS_VARIABLE]) / "shards"
            distributed_checkpoint.save({"model": self.training.model.state_dict()}, checkpoint_id=folder)


class Uploader(Plant):
    """A thread of one rank's process serializes what it is to upload, most of the time: Python runs one thread at once."""

    def __init__(self, *, busy_ms: float, idle_ms: float, **here: Any) -> None:
        super().__init__(**here)
        self.busy, self.idle = busy_ms / 1e3, idle_ms / 1e3

    def enter(self) -> None:
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._serialize)
        if self.here:
            self.thread.start()

    def leave(self) -> None:
        self.ended.set()
        if self.here:
            self.thread.join()

    def _serialize(self) -> None:
        while not self.ended.wait(self.idle):
            until = time.perf_counter() + self.busy
            while time.perf_counter() < until:
                self.text = json.dumps([{"name": f"value/{place}", "value": place * 0.5} for place in range(100)])


class SynchronizedNorms(Plant):
    """Batch norms have the statistics of all ranks, each by collectives of its own."""

    def prepare(self, training: Training) -> None:
        super().prepare(training)
        if training.device.type == "cuda":
            nn.SyncBatchNorm.convert_sync_batchnorm(training.model)


SIXTH_PLANTS: dict[str, Callable[..., Plant]] = {
    one.__name__: one
    for one in (
        RandomPixels, Epochs, ImageByImage, StepInBackward, MathAttention, Lists, Curriculum, LayerClip, RewardMetrics,
        TurnsToCollect, MicroCache, Meter, SavedShards, Uploader, SynchronizedNorms,
    )
}  # fmt: skip
