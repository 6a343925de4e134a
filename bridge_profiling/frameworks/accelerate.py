"""Profiles a training loop around Hugging Face's Accelerate.

with AccelerateProfiling(accelerator, use_pytorch_profiler=True, profile_step_start=10, profile_step_end=12) as profiling:
    for batch in profiling.batches(loader):
        with accelerator.accumulate(model):
            ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import accelerate
import torch

from bridge_profiling.common.errors import require
from bridge_profiling.frameworks.parallel_layout import size_of_model
from bridge_profiling.frameworks.phases import PhaseWatch
from bridge_profiling.frameworks.session import (
    END,
    Batch,
    Closing,
    OutputDir,
    ProfilingDriver,
    config_from,
    loader_facts,
    world_size,
)
from bridge_profiling.layout import ParallelLayout


class AccelerateProfiling(Closing):
    """Captures a window of iterations of a training loop around an Accelerator.

    An iteration is one optimizer step, found by `accelerator.sync_gradients`: with `gradient_accumulation_steps=4` and
    `accelerator.accumulate(model)` it contains four batches. It begins with fetching its first batch and ends after the loop's
    body for its last. Leaving the `with` block in any way writes the capture.

    Create it after models and optimizers are prepared: their calls are the ranges `forward` and `optimizer`.

    Args:
        accelerator: the Accelerator that trains.
        first_iteration: number of complete iterations after a resume: optimizer steps since the beginning of the training.
        output_dir: root of captures; overrides the settings' and BRIDGE_PROFILING_DIR.
        settings: fields of `bridge_profiling.ProfilingConfig`.

    Raises:
        ProfilingConfigError: an invalid request, an unknown setting, or an Accelerator created with `ProfileKwargs`, which runs
            a torch profiler of its own.
    """

    def __init__(
        self, accelerator: accelerate.Accelerator, *, first_iteration: int = 0, output_dir: OutputDir = None, **settings: Any
    ) -> None:
        config = config_from("AccelerateProfiling", settings)
        profiles = config.use_pytorch_profiler or config.use_nsys_profiler
        require(
            not (profiles and getattr(accelerator, "profile_handler", None)),
            "the Accelerator was created with ProfileKwargs, and AccelerateProfiling has a profiler too",
            why="accelerator.profile() and this both need the torch profiler and CUPTI, which serve one at a time",
            instead="Create the Accelerator without ProfileKwargs, or leave AccelerateProfiling out",
        )
        self._accelerator = accelerator
        self._driver = ProfilingDriver(config, output_dir)
        self._next = first_iteration
        #: Whether a `break` left the last batch, and whether the iteration has had a backward pass.
        self._left = self._worked = False

    def __enter__(self) -> Self:
        state = self._accelerator.state
        facts = facts_of(state) | {"gradient_accumulation": self._accelerator.gradient_accumulation_steps}
        self._driver.open(layout_of(state), facts, watch=self._watch, range_of=self._range_of_phase)
        models = list(getattr(self._accelerator, "_models", ()))
        if len(models) == 1:
            self._driver.describe(self._driver.guard(size_of_model, models[0]) or {})
        return self

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the loader's batches. Fetching one is the range `data-loading`; the loop's body belongs to its iteration."""
        source = iter(loader)
        self._driver.describe(loader_facts(loader))
        if not isinstance(loader, Sized) and not hasattr(loader, "end_of_dataloader"):
            # Fetch each batch at the end of the previous one, so no iteration begins after the last batch.
            batch = self._fetch(source)
            while batch is not END:
                with self.step():
                    yield batch
                    batch = self._fetch(source)
            return
        fetched, more = 0, True
        while True:
            begun = more and self._begin()
            batch = self._fetch(source) if more else next(source, END)
            if batch is END:
                if begun:
                    self._driver.abandon_iteration()
                return
            with self.step():
                yield batch
            fetched += 1
            # A prepared loader marks its last batch; one with a length can be counted.
            over = isinstance(loader, Sized) and fetched >= len(loader)
            more = not (getattr(loader, "end_of_dataloader", False) or over)

    @contextmanager
    def step(self, iteration: int | None = None) -> Iterator[None]:
        """A context manager around the work on one batch, if `batches` does not fit; accumulated batches share an iteration."""
        self._begin(iteration)
        try:
            yield
        except GeneratorExit:
            # The loop over `batches` was left by a `break` or an exception, which only `__exit__` can distinguish.
            self._left = True
            raise
        except BaseException as error:
            self._driver.abandon_iteration(error)
            raise
        self._end_batch()

    def range(self, name: str) -> AbstractContextManager:
        """A range of your own inside the window, such as `evaluation`."""
        return self._driver.phase(name)

    def _close(self, error: BaseException | None) -> None:
        if error is None:
            self._end_left()
        super()._close(error)

    def _begin(self, iteration: int | None = None) -> bool:
        """Begin the next iteration, unless one is open for accumulation, and return whether it began."""
        self._end_left()
        if self._driver.in_iteration:
            return False
        self._worked = False
        self._next = self._next if iteration is None else iteration
        self._driver.begin_iteration(self._next)
        return self._driver.in_iteration

    def _end_batch(self) -> None:
        if self._driver.in_iteration and self._accelerator.sync_gradients:
            self._next += 1
            self._driver.end_iteration()

    def _end_left(self) -> None:
        """End a batch that a `break` left, unless the `break` came before its backward pass."""
        if self._left:
            self._left = False
            if self._worked:
                self._end_batch()

    def _range_of_phase(self, name: str) -> AbstractContextManager:
        self._worked = self._worked or name == "backward"
        return self._driver.phase(name)

    def _watch(self, phases: PhaseWatch) -> None:
        """Watch the models and optimizers that this Accelerator has prepared."""
        accelerator = self._accelerator
        for model in getattr(accelerator, "_models", ()):
            phases.model(model)
        for optimizer in getattr(accelerator, "_optimizers", ()):
            wrapped = getattr(optimizer, "optimizer", None)
            if isinstance(wrapped, torch.optim.Optimizer):
                phases.optimizer(wrapped)
        phases.function(accelerator, "backward", "backward")
        for name in ("save_state", "save", "save_model"):
            phases.function(accelerator, name, "checkpoint")
        phases.function(accelerate.data_loader, "send_to_device", "host-to-device")


def layout_of(state: accelerate.state.AcceleratorState) -> ParallelLayout:
    """Where Accelerate puts each rank: data-parallel, except for the dimensions of its ParallelismConfig."""
    config = getattr(state, "parallelism_config", None)
    if config is None:
        return ParallelLayout(world_size=world_size())
    # Its mesh is dp_replicate, dp_shard, cp, sp, tp: neighbours share a tensor-parallel group.
    return ParallelLayout(world_size=world_size(), tp=config.tp_size, cp=config.cp_size * getattr(config, "sp_size", 1))


def facts_of(state: accelerate.state.AcceleratorState) -> dict[str, object]:
    """The manifest's `framework` section."""
    strategy = state.distributed_type.value
    facts: dict[str, object] = {
        "name": "accelerate",
        "version": accelerate.__version__,
        "strategy": strategy,
        "precision": state.mixed_precision,
        "iteration": "optimizer step",
    }
    if strategy == "DEEPSPEED":
        facts["zero_stage"] = state.deepspeed_plugin.zero_stage
    if strategy == "FSDP":
        facts["fsdp_version"] = getattr(state.fsdp_plugin, "fsdp_version", 1)
    return facts
