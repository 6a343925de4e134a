"""The project's own recipe, model, optimizer and step, made small, as a training of the GPU benchmarks.

An iteration takes about 20 ms. On a machine without a GPU it is `gpt_tiny`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_sizes import Sizes
from benchmarks.gpu_training import Training
from bridge_profiling.capture import ProfilingHook
from bridge_profiling.launch_env import LaunchEnv
from recipes.catalog import get_recipe
from recipes.config import ConfigContainer
from recipes.finalize import finalize
from recipes.megatron import train
from recipes.megatron.cpu import adapt_to_cpu, megatron_on_cpu
from recipes.megatron.data import Batch
from recipes.megatron.layers import choose_transformer_impl
from recipes.megatron.setup import distributed, rank_device
from recipes.megatron.train import Loop

#: More than any benchmark runs, because the data must not end.
_ITERATIONS = 40_000


def sized_config(sizes: Sizes, *, cuda: bool) -> ConfigContainer:
    """`gpt_125m` on a GPU and `gpt_tiny` on a CPU, cut to these sizes; not finalized."""
    config = get_recipe("gpt_125m" if cuda else "gpt_tiny")()
    config.model.num_layers = sizes.layers
    if cuda:
        config.model.seq_length = 512
    if sizes.recompute:
        config.model.recompute_granularity = "full"
        config.model.recompute_method = "uniform"
        config.model.recompute_num_layers = 1
    config.train.train_iters = _ITERATIONS
    config.train.micro_batch_size = 1
    config.train.global_batch_size = sizes.micro_batches
    return config


class PlainLoop(Loop):
    """The training loop's step without any profiling code; a test checks that it is otherwise the same."""

    def _step(self, iterators: Sequence[Iterator[Batch] | None]) -> torch.Tensor | None:
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports = self._run_schedule(iterators, forward_only=False)
        updated, _, _ = self.optimizer.step()
        if updated:
            self.scheduler.step(1)
        return train._mean_loss(reports)

    def _forward_step(self, batches: Iterator[Batch] | None, chunk: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        batch: Batch = {}
        if batches is not None:
            batch = {name: tensor.to(self.device, non_blocking=True) for name, tensor in next(batches).items()}
            batch = train.context_parallel_share(batch)
        output = chunk(batch.get("tokens"), batch.get("position_ids"), batch.get("attention_mask"), labels=batch.get("labels"))
        return output, partial(train._loss, batch.get("loss_mask"))


class MegatronTraining(Training):
    """The recipe's training.

    Args:
        sizes: of the model and the batch.
    """

    def __init__(self, sizes: Sizes) -> None:
        self._stack = ExitStack()
        process = LaunchEnv.read()
        device = rank_device(process)
        cuda = device.type == "cuda"
        config = sized_config(sizes, cuda=cuda)
        if not cuda:
            adapt_to_cpu(config)
        choose_transformer_impl(config, device)
        finalize(config, process.world_size)
        self._stack.enter_context(megatron_on_cpu())
        self._stack.enter_context(distributed(config, process))
        nobody: Any = None
        self._loop = Loop(config, process, ProfilingHook(None, rank=0), nobody, nobody, None)
        self._plain = copy.copy(self._loop)
        self._plain.__class__ = PlainLoop
        self._iterators = self._loop._iterators(lambda: self._loop.data.train_batches(0))
        self.parameters = sum(one.numel() for chunk in self._loop.model for one in chunk.parameters())
        super().__init__(cuda=cuda)

    def close(self) -> None:
        """Destroy the process groups."""
        self._stack.close()

    def step(self) -> None:
        self._plain._step(self._iterators)

    def ranged_step(self, hook: ProfilingHook) -> None:
        self._loop.hook = hook
        self._loop._step(self._iterators)
