"""Profiles a training loop around DistributedDataParallel, FullyShardedDataParallel or fully_shard.

    with Profiling(model, optimizer, use_pytorch_profiler=True, profile_step_start=3, profile_step_end=5) as profiling:
        for batch in profiling.steps(loader):
            ...

Finds the parallel layout in the wrapped model, names the phases of every captured iteration without a line in the loop, and
notes in the manifest how the model is wrapped. A plain model, trained on one device, is served as well.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from bridge_profiling.capture.work import IterationWork
from bridge_profiling.integrations import communication_ranges, wrapped_models
from bridge_profiling.integrations.callback_hook import config_from, connected, world_size
from bridge_profiling.integrations.loop_profiling import LoopProfiling
from bridge_profiling.integrations.torch_phases import PhaseWatch
from bridge_profiling.layout import ParallelLayout


class Profiling(LoopProfiling):
    """A context manager around a training loop; every rank makes one, after the model is wrapped.

    Inside the window each call of the model is a range `forward`, each backward pass `backward`, each step of the optimizer
    `optimizer`, each wait for a batch `data-loading`, each `torch.save` or distributed checkpoint `checkpoint`; and in FSDP the
    gathering and reducing of each unit `FSDP::all_gather (unit)` and `FSDP::post_backward_reduce (unit)`. Copies to the device
    are named by hand: `with profiling.phase("host-to-device")`.

    Args:
        model: the wrapped model, the one that the loop calls.
        optimizer: whose steps are ranges; every optimizer of the process when it is not given.
        output_dir: root of what is written; wins over BRIDGE_PROFILING_DIR.
        layout: where each rank stands, where the model cannot tell it (groups without a device mesh).
        work: what one iteration of the whole job computes.
        settings: fields of `bridge_profiling.ProfilingConfig`.

    Raises:
        ProfilingConfigError: a request that cannot work, or a setting that does not exist.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        output_dir: str | os.PathLike[str] | None = None,
        layout: ParallelLayout | None = None,
        work: IterationWork | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(config_from("Profiling", settings), output_dir, layout, work)
        self._model, self._optimizer = model, optimizer

    def _describe(self) -> tuple[ParallelLayout, dict[str, object]]:
        found, facts = wrapped_models.describe(self._model)
        facts["mesh"] = found.mesh or None
        facts["backend"] = _backend(self._model) if connected() else None
        facts["world_size"] = world_size()
        facts["iteration"] = "optimizer step"
        facts["notes"] = found.notes if self._layout is None else []
        return found.layout, facts

    def _watch(self, phases: PhaseWatch) -> None:
        phases.everything(self._model, self._optimizer)
        self._undo.append(communication_ranges.name_wrapper_steps(self._model, self._hook.range))
        if self._config.use_nsys_profiler:
            self._undo.append(communication_ranges.repeat_annotations(self._hook.range))

    def _conclude(self, facts: dict[str, object]) -> None:
        if facts.get("name") == "ddp":
            facts["bucket_bytes"] = wrapped_models.bucket_bytes(self._model)


def _backend(model: torch.nn.Module) -> str:
    """What carries the collectives of this model's device: a default group has one backend for each kind of device."""
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    backends = dict(pair.split(":") for pair in str(dist.get_backend_config()).split(",") if ":" in pair)
    return backends.get(device) or dist.get_backend()
