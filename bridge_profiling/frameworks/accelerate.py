"""Profiles a training loop around Hugging Face's Accelerate.

with Profiling(accelerator, use_pytorch_profiler=True, profile_step_start=10, profile_step_end=12) as profiling:
    for batch in profiling.steps(loader):
        with accelerator.accumulate(model):
            ...
"""

from __future__ import annotations

from typing import Any

import accelerate
import torch

from bridge_profiling.common.errors import require
from bridge_profiling.frameworks import loops
from bridge_profiling.frameworks.parallel_layout import size_of_model
from bridge_profiling.frameworks.phases import PhaseWatch
from bridge_profiling.frameworks.session import Job, OutputDir, config_from, world_size
from bridge_profiling.layout import ParallelLayout


class Profiling(loops.Profiling):
    """A context manager around a training loop with an Accelerator; create it after models and optimizers are prepared.

    An iteration is one optimizer step, found by `accelerator.sync_gradients`: with `gradient_accumulation_steps=4` and
    `accelerator.accumulate(model)` it contains four batches. Calls of the prepared models and optimizers are the ranges
    `forward` and `optimizer`.

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
        config = config_from("Profiling", settings)
        profiles = config.use_pytorch_profiler or config.use_nsys_profiler
        require(
            not (profiles and getattr(accelerator, "profile_handler", None)),
            "the Accelerator was created with ProfileKwargs, and Profiling has a profiler too",
            why="accelerator.profile() and this both need the torch profiler and CUPTI, which serve one at a time",
            instead="Create the Accelerator without ProfileKwargs, or leave Profiling out",
        )
        super().__init__(config, output_dir, first_iteration=first_iteration)
        self._accelerator = accelerator

    def _stepped(self) -> bool:
        return self._accelerator.sync_gradients

    def _describe(self) -> Job:
        accelerator = self._accelerator
        models = list(getattr(accelerator, "_models", ()))
        facts = facts_of(accelerator.state) | {"gradient_accumulation": accelerator.gradient_accumulation_steps}
        if len(models) == 1:
            facts |= self._session.guard(size_of_model, models[0]) or {}
        return Job(layout_of(accelerator.state), facts)

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
    return {
        "name": "accelerate",
        "version": accelerate.__version__,
        "strategy": state.distributed_type.value,
        "precision": state.mixed_precision,
        "iteration": "optimizer step",
    }
