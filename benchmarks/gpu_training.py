"""The training whose iterations the GPU benchmarks time, bound by the host: the worst case for profiling's cost to the host.

Each iteration ends with a synchronization of the device, so that its duration is complete. Where megatron-core is installed, it
is the project's own recipe (gpu_megatron.py); elsewhere a transformer of torch's layers, its parts in ranges like the recipe's.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch

from benchmarks.gpu_sizes import Sizes
from bridge_profiling.capture import ProfilingHook

#: Iterations before anything is measured: compilation, autotuning, allocator and clocks.
_WARM_UP = 30

#: How torch names the threads that compute the gradients, before the device's number.
_AUTOGRAD_THREAD = "pt_autograd"


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


class Training:
    """A training that runs iterations on demand, with a hook around them or without any profiling code.

    Garbage is collected only between measurements, on every side alike.

    Args:
        cuda: whether it computes on a GPU.

    Attributes:
        next_iteration: number of the next iteration within a hook; those without one have no numbers.
        parameters: of its model.
    """

    parameters: int

    def __init__(self, *, cuda: bool) -> None:
        self.cuda = cuda
        self.next_iteration = 0
        self._elsewhere: set[int] = set()
        self._known: set[int] = set()
        gc.disable()
        self.plain(_WARM_UP)
        gc.collect()
        gc.freeze()

    def step(self) -> None:
        """One step, without profiling code."""
        raise NotImplementedError

    def ranged_step(self, hook: ProfilingHook) -> None:
        """The same step, each of its parts in a range of the hook."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what the training holds."""

    def plain(self, count: int) -> list[int]:
        """Run iterations without profiling code; the nanoseconds of each."""
        return [self._timed(self._plain_iteration) for _ in range(count)]

    def hooked(self, hook: ProfilingHook, count: int) -> list[int]:
        """Run iterations as the training loop does, within this open hook; the nanoseconds of each, the hook's included."""
        return [self._timed(partial(self._hooked_iteration, hook)) for _ in range(count)]

    def pairs(self, hook: ProfilingHook, hook_first: Sequence[bool]) -> tuple[list[int], list[int]]:
        """Run pairs of one iteration without profiling code and one within this open hook, which does not count the former.

        Args:
            hook: an open hook.
            hook_first: for each pair, which of the two goes first.

        Returns:
            Nanoseconds of the plain iterations, and of the others.
        """
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
        self.step()
        self.synchronize()

    def _hooked_iteration(self, hook: ProfilingHook) -> None:
        with hook.iteration(self.next_iteration):
            self.ranged_step(hook)
            self.synchronize()
        self.next_iteration += 1

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.cuda:
            torch.cuda.synchronize()

    def rest(self) -> None:
        """Let a pending teardown of CUPTI finish, as the hook does when it closes: it waits for calls to CUDA."""
        if self.cuda and os.environ.get("TEARDOWN_CUPTI") == "1":
            for _ in range(20):
                torch.cuda.synchronize()
                time.sleep(0.01)


class TorchTraining(Training):
    """A transformer of torch's own layers, trained on noise: some hundred small kernels an iteration.

    Args:
        sizes: of the model and the batch.
    """

    def __init__(self, sizes: Sizes) -> None:
        cuda = torch.cuda.is_available()
        self._device = torch.device("cuda" if cuda else "cpu")
        width, self._micro_batches = (512, sizes.micro_batches) if cuda else (64, sizes.micro_batches)
        layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self._model = torch.nn.TransformerEncoder(layer, sizes.layers, enable_nested_tensor=False).to(self._device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._batch = torch.randn(2, 128 if cuda else 32, width, pin_memory=cuda)
        self.parameters = sum(one.numel() for one in self._model.parameters())
        super().__init__(cuda=cuda)

    def step(self) -> None:
        self._gradients()
        self._optimizer.step()

    def ranged_step(self, hook: ProfilingHook) -> None:
        with hook.range("forward-backward"):
            self._gradients(lambda: hook.range("data-loading"))
        with hook.range("optimizer"):
            self._optimizer.step()

    def _gradients(self, loading: Callable[[], Any] = nullcontext) -> None:
        self._optimizer.zero_grad()
        for _ in range(self._micro_batches):
            with loading():
                batch = self._batch.to(self._device, non_blocking=True)
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self.cuda):
                loss = self._model(batch).float().square().mean()
            loss.backward()
