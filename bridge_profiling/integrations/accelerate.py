"""Runs the profiling hook in a loop of your own around Hugging Face's Accelerate.

with AccelerateProfiling(accelerator, use_pytorch_profiler=True, profile_step_start=10, profile_step_end=12) as profiling:
    for batch in profiling.batches(loader):
        with accelerator.accumulate(model):
            ...
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import accelerate
import torch

from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.integrations.callback_hook import CallbackHook, config_from, world_size
from bridge_profiling.integrations.loop_profiling import END
from bridge_profiling.integrations.torch_phases import PhaseWatch
from bridge_profiling.layout import ParallelLayout

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

Batch = TypeVar("Batch")


class AccelerateProfiling:
    """Captures a window of iterations of a training loop around an Accelerator.

    An iteration is one optimizer step, found by `accelerator.sync_gradients`: with `gradient_accumulation_steps=4` and
    `accelerator.accumulate(model)` it holds four batches. It is open from the fetching of its first batch to the end of the
    loop's body for its last. Leaving the `with` by any way writes what was captured.

    Make it when models and optimizers are prepared: their calls are the ranges `forward` and `optimizer`.

    Args:
        accelerator: the Accelerator that trains.
        first_iteration: how many iterations are complete, after a resume: optimizer steps, counted from the training's begin.
        output_dir: root of what is written; wins over the settings' and over BRIDGE_PROFILING_DIR.
        settings: fields of `bridge_profiling.ProfilingConfig`.

    Raises:
        ProfilingConfigError: a request that cannot work, a setting that does not exist, or an Accelerator made with
            `ProfileKwargs`, which is to run a torch profiler of its own.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        first_iteration: int = 0,
        output_dir: str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> None:
        config = config_from("AccelerateProfiling", settings)
        if (config.use_pytorch_profiler or config.use_nsys_profiler) and getattr(accelerator, "profile_handler", None):
            raise ProfilingConfigError(
                "the Accelerator was made with ProfileKwargs, and AccelerateProfiling is to profile as well",
                why="accelerator.profile() and this both need the torch profiler and CUPTI, which serve one at a time",
                instead="Make the Accelerator without ProfileKwargs, or leave AccelerateProfiling out",
            )
        self._accelerator = accelerator
        self._hook = CallbackHook(config, output_dir)
        self._phases = PhaseWatch(nullcontext)
        self._next = first_iteration
        self._open = self._left = self._worked = False

    def __enter__(self) -> AccelerateProfiling:
        accelerator = self._accelerator
        self._hook.open(layout_of(accelerator.state))
        if self._hook.hook is not None:
            facts = facts_of(accelerator.state) | {"gradient_accumulation": accelerator.gradient_accumulation_steps}
            self._hook.hook.facts.update(facts)
            self._phases = PhaseWatch(self._range_of_phase)
            self._watch(accelerator)
        return self

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The loader's batches. Fetching one is the range `data-loading`; what the loop does with it is in its iteration."""
        source = iter(loader)
        if not _tells_its_end(loader):
            yield from self._batches_ahead(source)
            return
        fetched, more = 0, True
        while True:
            fresh = more and self._begin()
            try:
                with self.range("data-loading") if more else nullcontext():
                    batch = next(source)
            except StopIteration:
                if fresh:
                    self._abandon()
                return
            with self.step():
                yield batch
            fetched += 1
            more = not _exhausted(loader, fetched)

    def _batches_ahead(self, source: Iterator[Any]) -> Iterator[Any]:
        """The batches, each fetched at the end of the one before: no iteration begins where there is none left."""
        batch = self._fetch(source)
        while batch is not END:
            with self.step():
                yield batch
                batch = self._fetch(source)

    def _fetch(self, source: Iterator[Any]) -> Any:
        with self.range("data-loading"):
            return next(source, END)

    @contextmanager
    def step(self, iteration: int | None = None) -> Iterator[None]:
        """Around what a loop does with one batch, where `batches` does not fit.

        Args:
            iteration: its global number; counted on when it is not given. Batches that are accumulated share one.
        """
        self._begin(iteration)
        try:
            yield
        except GeneratorExit:
            # The loop over `batches` was left: by a `break`, or by an exception that only `__exit__` is told of.
            self._left = True
            raise
        except BaseException as error:
            self._abandon(error)
            raise
        self._end_batch()

    def range(self, name: str) -> AbstractContextManager:
        """A range of your own inside the window, such as `evaluation`."""
        return self._hook.phase(name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self._end_left()
        self._abandon(error)
        self._phases.detach()
        self._hook.close(error)

    def _begin(self, iteration: int | None = None) -> bool:
        """Begin the next iteration, unless one is open: its batches are being accumulated. Whether it did."""
        self._end_left()
        if self._open or self._hook.hook is None:
            return False
        self._open, self._worked = True, False
        self._next = self._next if iteration is None else iteration
        self._hook.begin_iteration(self._next)
        return True

    def _end_batch(self) -> None:
        if self._open and self._accelerator.sync_gradients:
            self._open = False
            self._next += 1
            self._phases.end_open()
            self._hook.end_iteration()

    def _end_left(self) -> None:
        """End a batch that a `break` left, unless that came before anything was done with it."""
        if self._left:
            self._left = False
            if self._worked:
                self._end_batch()

    def _range_of_phase(self, name: str) -> AbstractContextManager:
        self._worked = self._worked or name == "backward"
        return self.range(name)

    def _abandon(self, error: BaseException | None = None) -> None:
        """An iteration that has begun does not come to its optimizer step."""
        if self._open:
            self._open = False
            self._phases.end_open()
            self._hook.end_iteration(error or StopIteration())

    def _watch(self, accelerator: Accelerator) -> None:
        """Name what is done with what this Accelerator has prepared, until the end."""
        for model in getattr(accelerator, "_models", ()):
            self._phases.model(model)
        for optimizer in getattr(accelerator, "_optimizers", ()):
            wrapped = getattr(optimizer, "optimizer", None)
            if isinstance(wrapped, torch.optim.Optimizer):
                self._phases.optimizer(wrapped)
        self._phases.function(accelerator, "backward", "backward")
        for name in ("save_state", "save", "save_model"):
            self._phases.function(accelerator, name, "checkpoint")
        self._phases.function(accelerate.data_loader, "send_to_device", "host-to-device")


def _tells_its_end(loader: Iterable) -> bool:
    """Whether a loader says that it has no more batches before it is asked for one: prepared, or with a length."""
    return isinstance(loader, Sized) or hasattr(loader, "end_of_dataloader")


def _exhausted(loader: Iterable, fetched: int) -> bool:
    """Whether a loader is known to have no more batches: a prepared one says so, and one with a length can be counted."""
    if getattr(loader, "end_of_dataloader", False):
        return True
    return isinstance(loader, Sized) and fetched >= len(loader)


def layout_of(state: AcceleratorState) -> ParallelLayout:
    """Where Accelerate puts each rank: data-parallel, but for what its ParallelismConfig says."""
    config = getattr(state, "parallelism_config", None)
    if config is None:
        return ParallelLayout(world_size=world_size())
    # Its mesh is dp_replicate, dp_shard, cp, sp, tp: neighbours share a tensor-parallel group.
    return ParallelLayout(world_size=world_size(), tp=config.tp_size, cp=config.cp_size * getattr(config, "sp_size", 1))


def facts_of(state: AcceleratorState) -> dict[str, object]:
    """What the manifest says of the framework."""
    facts: dict[str, object] = {
        "name": "accelerate",
        "version": accelerate.__version__,
        "strategy": state.distributed_type.value,
        "precision": state.mixed_precision,
        "iteration": "optimizer step",
    }
    if state.distributed_type.value == "DEEPSPEED":
        facts["zero_stage"] = state.deepspeed_plugin.zero_stage
    if state.distributed_type.value == "FSDP":
        facts["fsdp_version"] = getattr(state.fsdp_plugin, "fsdp_version", 1)
    return facts
