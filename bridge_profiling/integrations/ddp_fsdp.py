"""Profiles a training loop around DistributedDataParallel, FullyShardedDataParallel or fully_shard.

    with Profiling(model, optimizer, use_pytorch_profiler=True, profile_step_start=3, profile_step_end=5) as profiling:
        for batch in profiling.steps(loader):
            ...

Finds the parallel layout in the wrapped model, names the phases of every captured iteration without a change in the loop, and
writes the wrapper's settings to the manifest. Also works with a plain model on one device.
"""

from __future__ import annotations

from typing import Any

import torch

from bridge_profiling.capture.record import IterationWork
from bridge_profiling.integrations import communication_ranges, parallel_layout
from bridge_profiling.integrations.driver import LoopProfiling, OutputDir, config_from
from bridge_profiling.integrations.phases import PhaseWatch
from bridge_profiling.launch_env import initialized_distributed
from bridge_profiling.layout import ParallelLayout


class Profiling(LoopProfiling):
    """A context manager around a training loop; every rank creates one, after the model is wrapped.

    Inside the window each call of the model is a range `forward`, each backward pass `backward`, each step of the optimizer
    `optimizer`, each wait for a batch `data-loading`, each `torch.save` or distributed checkpoint `checkpoint`; with FSDP,
    each unit's gathering and reducing is `FSDP::all_gather (unit)` and `FSDP::post_backward_reduce (unit)`. Name copies to the
    device in the loop: `with profiling.phase("host-to-device")`.

    Args:
        model: the wrapped model that the loop calls.
        optimizer: the optimizer to watch; every optimizer of the process by default.
        output_dir: root of captures; overrides BRIDGE_PROFILING_DIR.
        layout: where each rank is, for process groups without a device mesh.
        work: the computation of one iteration of the whole job.
        settings: fields of `bridge_profiling.ProfilingConfig`.

    Raises:
        ProfilingConfigError: an invalid request, or an unknown setting.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        output_dir: OutputDir = None,
        layout: ParallelLayout | None = None,
        work: IterationWork | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(config_from("Profiling", settings), output_dir, layout, work)
        self._model, self._optimizer = model, optimizer

    def _describe(self) -> tuple[ParallelLayout, dict[str, object]]:
        found, facts = parallel_layout.describe(self._model)
        notes = found.notes if self._layout is None else []
        return found.layout, facts | {"mesh": found.mesh or None, "backend": _backend(self._model), "notes": notes}

    def _watch(self, phases: PhaseWatch) -> None:
        phases.everything(self._model, self._optimizer)
        communication_ranges.name_wrapper_steps(phases, self._model, self._driver.range)
        if self._driver.config.use_nsys_profiler:
            communication_ranges.repeat_annotations(phases, self._driver.range)

    def _conclude(self, facts: dict[str, object]) -> None:
        if facts.get("name") == "ddp":
            facts["bucket_bytes"] = parallel_layout.bucket_bytes(self._model)


def _backend(model: torch.nn.Module) -> str | None:
    """The backend of collectives on this model's device; the default group has one backend per kind of device."""
    distributed = initialized_distributed()
    if distributed is None:
        return None
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    backends = dict(pair.split(":") for pair in str(distributed.get_backend_config()).split(",") if ":" in pair)
    return backends.get(device) or distributed.get_backend()
