"""The training whose iterations the GPU benchmarks time: the project's own recipe, model, optimizer and step, made small.

An iteration takes about 20 ms and is bound by the host: the worst case for profiling's cost to the host. Each ends with a
synchronization of the device, so that its duration is complete. On a machine without a GPU it is `gpt_tiny`.
"""

from __future__ import annotations

import copy
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch

from benchmarks.gpu_sizes import Sizes
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

#: Iterations before anything is measured: compilation, autotuning, allocator and clocks.
_WARM_UP = 30

#: How torch names the threads that compute the gradients, before the device's number.
_AUTOGRAD_THREAD = "pt_autograd"


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


def _threads() -> set[int]:
    """This process's threads."""
    return {int(name) for name in os.listdir("/proc/self/task")}


def _computing_threads() -> set[int]:
    """The threads that launch a step's kernels: the main one and autograd's; on a CPU, the main one computes the gradients."""
    computing = {os.getpid()}
    for thread in _threads():
        with suppress(FileNotFoundError):
            if Path(f"/proc/self/task/{thread}/comm").read_text().startswith(_AUTOGRAD_THREAD):
                computing.add(thread)
    return computing


def _bind(thread: int, cores: set[int]) -> None:
    with suppress(ProcessLookupError):
        os.sched_setaffinity(thread, cores)


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


class Training:
    """A training that runs iterations on demand, with a hook around them or without any profiling code.

    Garbage is collected only between measurements, on every side alike.

    Args:
        sizes: of the model and the batch.

    Attributes:
        next_iteration: number of the next iteration within a hook; those without one have no numbers.
    """

    def __init__(self, sizes: Sizes) -> None:
        self._stack = ExitStack()
        process = LaunchEnv.read()
        device = rank_device(process)
        self.cuda = device.type == "cuda"
        config = sized_config(sizes, cuda=self.cuda)
        if not self.cuda:
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
        self.next_iteration = 0
        self._elsewhere: set[int] = set()
        self._known: set[int] = set()
        gc.disable()
        self.plain(_WARM_UP)
        gc.collect()
        gc.freeze()

    def close(self) -> None:
        """Destroy the process groups."""
        self._stack.close()

    def plain(self, count: int) -> list[int]:
        """Run iterations without profiling code; the nanoseconds of each."""
        return [self._timed(self._plain_iteration) for _ in range(count)]

    def hooked(self, hook: ProfilingHook, count: int) -> list[int]:
        """Run iterations as the training loop does, within this open hook; the nanoseconds of each, the hook's included."""
        self._loop.hook = hook
        return [self._timed(partial(self._hooked_iteration, hook)) for _ in range(count)]

    def pairs(self, hook: ProfilingHook, hook_first: Sequence[bool]) -> tuple[list[int], list[int]]:
        """Run pairs of one iteration without profiling code and one within this open hook, which does not count the former.

        Args:
            hook: an open hook.
            hook_first: for each pair, which of the two goes first.

        Returns:
            Nanoseconds of the plain iterations, and of the others.
        """
        self._loop.hook = hook
        return self._in_pairs(self._plain_iteration, partial(self._hooked_iteration, hook), hook_first)

    def pairs_disturbed(self, work: Callable[[], object], disturbed_first: Sequence[bool]) -> tuple[list[int], list[int]]:
        """Run pairs of two undisturbed iterations and two during which another thread does `work`.

        Args:
            work: begins with the first of the two iterations, and ends before anything else is timed.
            disturbed_first: for each pair, which of the two goes first.

        Returns:
            Nanoseconds of the undisturbed two iterations, and of the others.
        """
        with ThreadPoolExecutor(1) as other:
            running: list[Future] = []

            def undisturbed() -> None:
                self._plain_iteration()
                self._plain_iteration()

            def disturbed() -> None:
                running.append(other.submit(work))
                undisturbed()

            def settle() -> None:
                while running:
                    running.pop().result()

            return self._in_pairs(undisturbed, disturbed, disturbed_first, settle)

    def _in_pairs(
        self,
        first: Callable[[], None],
        second: Callable[[], None],
        swapped: Sequence[bool],
        between: Callable[[], None] = lambda: None,
    ) -> tuple[list[int], list[int]]:
        """Time two sides in pairs, the second before the first where `swapped` says so; the nanoseconds of each side."""
        sides: tuple[list[int], list[int]] = ([], [])
        for swap in swapped:
            for index in (1, 0) if swap else (0, 1):
                sides[index].append(self._timed((first, second)[index]))
                between()
        return sides

    def stay_on(self, core: int) -> None:
        """From now on, compute only on this core; a profiler's threads may use all cores, as in any training.

        On many cores a process is faster or slower by 10% for minutes, depending on where its threads happen to run. On the
        training's core, nsys' own threads would take time from the step, which they do not in a user's training.

        Raises:
            RuntimeError: on a GPU, the thread that computes the gradients was not found.
        """
        computing = _computing_threads()
        if self.cuda and len(computing) < 2:
            raise RuntimeError(f"no thread is called {_AUTOGRAD_THREAD}…: this torch names them otherwise")
        self._elsewhere, self._known = os.sched_getaffinity(0), _threads()
        for thread in computing:
            _bind(thread, {core})

    def _timed(self, iteration: Callable[[], None]) -> int:
        if self._elsewhere:
            # They run on the core of the thread that started them.
            for thread in _threads() - self._known:
                self._known.add(thread)
                _bind(thread, self._elsewhere)
        began = perf_counter_ns()
        iteration()
        return perf_counter_ns() - began

    def _plain_iteration(self) -> None:
        self._plain._step(self._iterators)
        torch.cuda.synchronize()

    def _hooked_iteration(self, hook: ProfilingHook) -> None:
        with hook.iteration(self.next_iteration):
            self._loop._step(self._iterators)
            torch.cuda.synchronize()
        self.next_iteration += 1

    def rest(self) -> None:
        """Let a pending teardown of CUPTI finish, as the hook does when it closes: it waits for calls to CUDA."""
        if self.cuda and os.environ.get("TEARDOWN_CUPTI") == "1":
            for _ in range(20):
                torch.cuda.synchronize()
                time.sleep(0.01)
