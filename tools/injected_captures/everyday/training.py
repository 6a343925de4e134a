"""A training loop on plain PyTorch, as its tutorials write it, with the setting's faults and a plant in it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tools.injected_captures.everyday import fifth_images, fifth_models, models, more_models, third_models
from tools.injected_captures.everyday.plants import Plant
from tools.injected_captures.everyday.setting import Setting

#: Batches that a data set goes round.
DISTINCT_BATCHES = 4

Batch = tuple[Tensor, ...]

_IMAGES = ("convolution", "unet", "vision", "speech", "volume", "pair")

#: Models of each round after the first, and the module that makes their batches.
_LATER = (
    (more_models, more_models.MODELS),
    (third_models, third_models.THIRD_MODELS),
    (fifth_models, fifth_models.SEQUENCE_MODELS),
    (fifth_images, fifth_images.IMAGE_MODELS),
)


class Samples(IterableDataset):
    """Ready batches, each after the time that it takes to load."""

    def __init__(self, setting: Setting, plant: Plant, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.seconds = setting.data_ms / 1e3 if rank in setting.data_ranks else 0.0
        self.decode, self.slow_worker = setting.decode, setting.slow_worker
        self.plant, self.count = plant, 0
        self.batches = [_batch(setting, generator) for _ in range(DISTINCT_BATCHES)]

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        slow = self.seconds > 0 and (worker is None or worker.id == 0 or not self.slow_worker)
        while True:
            if slow:
                self._load()
            count, self.count = self.count, self.count + 1
            yield self.plant.batch(self.batches[count % DISTINCT_BATCHES], count)

    def _load(self) -> None:
        if not self.decode:
            time.sleep(self.seconds)
            return
        image, until = torch.rand(3, 192, 192), time.perf_counter() + self.seconds
        while time.perf_counter() < until:
            image = image.flip(-1).mul(0.9).add(0.1).clamp(0.0, 1.0)


def _batch(setting: Setting, generator: torch.Generator) -> Batch:
    for module, kinds in _LATER:
        if setting.model in kinds:
            return module.batch(setting, generator)
    if setting.model == "convolution":
        images = torch.randn(setting.batch, 3, setting.length, setting.length, generator=generator)
        return images, torch.randint(0, models.CLASSES, (setting.batch,), generator=generator)
    return (torch.randint(0, models.VOCABULARY, (setting.batch, setting.length + 1), generator=generator),)


class WrittenAdam(torch.optim.Optimizer):
    """AdamW as a paper writes it, parameter by parameter."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.steps = 0

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient, state = parameter.grad, self.state[parameter]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["mean"] = 0.9 * state["mean"] + 0.1 * gradient
                state["square"] = 0.999 * state["square"] + 0.001 * gradient**2
                mean = state["mean"] / (1 - 0.9**self.steps)
                square = state["square"] / (1 - 0.999**self.steps)
                parameter -= group["lr"] * (mean / (square.sqrt() + 1e-8) + 0.01 * parameter)


class Lion(torch.optim.Optimizer):
    """Steps of the sign of a moving average, parameter by parameter."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient, state = parameter.grad, self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                mean = state["mean"]
                parameter.mul_(1 - group["lr"] * 0.1)
                parameter.add_((mean * 0.9).add_(gradient, alpha=0.1).sign_(), alpha=-group["lr"])
                mean.mul_(0.99).add_(gradient, alpha=0.01)


class Lamb(torch.optim.Optimizer):
    """Adam whose step of each parameter is as long as a share of the parameter itself."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient, state = parameter.grad, self.state[parameter]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                mean, square = state["mean"].lerp_(gradient, 0.1), state["square"]
                square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
                update = mean.div(square.sqrt().add_(1e-6)).add_(parameter, alpha=0.01)
                length, size = parameter.norm(), update.norm()
                ratio = torch.where((length > 0) & (size > 0), length / size, torch.ones_like(length))
                parameter.sub_(update.mul_(ratio.clamp_(max=10.0)).mul_(group["lr"]))


#: Optimizers that are written by hand.
_BY_HAND: dict[str, type[torch.optim.Optimizer]] = {"written": WrittenAdam, "lion": Lion, "lamb": Lamb}


class Training:
    """A model, its optimizer and its data. Iterations go on from where the last call left them.

    Args:
        setting: what is trained, and how.
        plant: what is wrong besides the setting.
        rank: of this process.
        device: of this process.
    """

    def __init__(self, setting: Setting, plant: Plant, rank: int, device: torch.device) -> None:
        self.setting, self.plant, self.rank, self.device = setting, plant, rank, device
        torch.manual_seed(0)
        with device:
            model = models.build(setting)
        if setting.model in _IMAGES and setting.channels_last:
            model = model.to(memory_format=self._channels_last)
        if setting.compiled:
            for block in model.blocks:
                block.compile(dynamic=False)
        self.model = self._wrapped(model)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if setting.optimizer in _BY_HAND:
            self.optimizer = _BY_HAND[setting.optimizer](trained, lr=1e-4)
        else:
            self.optimizer = torch.optim.AdamW(
                trained, lr=1e-4,
                fused=setting.optimizer == "fused", foreach=setting.optimizer == "foreach",
            )  # fmt: skip
        self.scaler = torch.amp.GradScaler(device.type, enabled=setting.precision == "fp16" and device.type == "cuda")
        self.samples = Samples(setting, plant, rank)
        self.loader = DataLoader(
            self.samples, batch_size=None, pin_memory=setting.pinned and device.type == "cuda",
            num_workers=setting.workers, persistent_workers=setting.workers > 0,
        )  # fmt: skip
        self.losses: list[float] = []
        self._ready: Iterator[Batch] | None = None
        plant.prepare(self)

    def _wrapped(self, model: nn.Module) -> nn.Module:
        setting = self.setting
        if setting.strategy == "ddp" and not setting.reduce_by_hand:
            local = [name for name, _ in model.named_parameters() if ".local." in name]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, local)
            return DistributedDataParallel(
                model, bucket_cap_mb=setting.bucket_mb, gradient_as_bucket_view=True,
                find_unused_parameters=setting.find_unused,
            )  # fmt: skip
        if setting.strategy == "fully_shard":
            dtype = torch.bfloat16 if setting.precision == "bf16" else torch.float32
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            for block in model.blocks:
                if setting.shard_each == "module":
                    for module in block.modules():
                        if isinstance(module, nn.Linear | nn.LayerNorm):
                            fully_shard(module, mp_policy=policy)
                else:
                    fully_shard(block, mp_policy=policy)
            fully_shard(model, mp_policy=policy)
        return model

    def choose_precision(self) -> None:
        """Set what torch keeps for the whole process; trainings of one process differ in it."""
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self.setting.precision == "tf32"
        torch.backends.cudnn.benchmark = True

    def micro_batch(self, batch: Batch, iteration: int, number: int) -> None:
        """Forward and backward pass of micro-batch `number` of an iteration; after the last one, the optimizer's step."""
        setting = self.setting
        last = number == setting.micro_batches - 1
        self.plant.before_micro_batch(iteration, number)
        arguments = [tensor.to(self.device, non_blocking=True) for tensor in batch]
        if setting.model in _IMAGES and setting.channels_last:
            arguments[0] = arguments[0].contiguous(memory_format=self._channels_last)
        with self._without_reduction() if not (last or setting.sync_micro_batches) else nullcontext():
            with self.autocast():
                loss = self.model(*arguments) / setting.micro_batches
            self.scaler.scale(loss).backward()
        if setting.log == "micro_batch" or (setting.log == "iteration" and last):
            self.losses.append(loss.item())
        self.plant.after_micro_batch(loss, iteration, number)
        if last:
            if setting.reduce_by_hand:
                self._average()
            self._clip()
            self.plant.before_step(iteration)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.plant.after_step(iteration)

    def autocast(self) -> AbstractContextManager:
        """What the forward pass runs in."""
        if self.setting.precision not in ("bf16", "fp16") or self.setting.strategy == "fully_shard":
            return nullcontext()
        return torch.autocast(self.device.type, torch.float16 if self.scaler.is_enabled() else torch.bfloat16)

    @contextmanager
    def _without_reduction(self) -> Iterator[None]:
        if isinstance(self.model, DistributedDataParallel):
            with self.model.no_sync():
                yield
        elif self.setting.strategy == "fully_shard":
            self.model.set_requires_gradient_sync(False)
            yield
            self.model.set_requires_gradient_sync(True)
        else:
            yield

    def _average(self) -> None:
        """Average each gradient over ranks."""
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.setting.ranks

    @property
    def _channels_last(self) -> torch.memory_format:
        return torch.channels_last_3d if self.setting.model == "volume" else torch.channels_last

    def _clip(self) -> None:
        if self.setting.clipping:
            self.scaler.unscale_(self.optimizer)
        if self.setting.clipping == "foreach":
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        elif self.setting.clipping == "item":
            total = 0.0
            for parameter in self.model.parameters():
                total += parameter.grad.norm().item() ** 2
            scale = min(1.0, 1.0 / (total**0.5 + 1e-6))
            for parameter in self.model.parameters():
                parameter.grad.mul_(scale)

    def batches(self, iterations: int) -> Iterator[Batch]:
        """The batches of this many iterations."""
        source, self._ready = self._ready or iter(self.loader), None
        for _ in range(iterations * self.setting.micro_batches):
            yield next(source)

    def load_ahead(self) -> None:
        """Let workers, if there are any, start and load the first batch, as they have in the middle of a training."""
        if self.setting.workers:
            source = iter(self.loader)
            self._ready = chain([next(source)], source)

    def run(self, iterations: int, first: int = 0) -> list[float]:
        """Train this many iterations without a profiler; returns the milliseconds of each, as the host sees them."""
        each, started = [], time.perf_counter()
        for place, batch in enumerate(self.batches(iterations)):
            iteration, number = divmod(place, self.setting.micro_batches)
            self.micro_batch(batch, first + iteration, number)
            if number == self.setting.micro_batches - 1:
                ended = time.perf_counter()
                each.append((ended - started) * 1e3)
                started = ended
        return each

    def wait(self) -> None:
        """Until the devices of all ranks are done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if dist.is_initialized():
            dist.barrier()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
