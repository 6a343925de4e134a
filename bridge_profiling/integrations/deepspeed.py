"""Profiles a training loop around a DeepSpeed engine.

    with Profiling(engine, use_pytorch_profiler=True, profile_step_start=3, profile_step_end=5) as profiling:
        for batch in profiling.steps(loader):
            loss = engine(batch)
            engine.backward(loss)
            engine.step()

DeepSpeed measures too: its FLOPs profiler, its wall-clock breakdown and its autotuning. What they are set to and what they
found is noted in the manifest, and where they disturb the window, a note says so; none of them is switched on or off here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from bridge_profiling.capture.work import IterationWork
from bridge_profiling.integrations import communication_ranges
from bridge_profiling.integrations.callback_hook import config_from, connected, world_size
from bridge_profiling.integrations.deepspeed_measurements import Measurements
from bridge_profiling.integrations.loop_profiling import END, LoopProfiling
from bridge_profiling.integrations.parallel_layout import FoundLayout, layout_of_sizes
from bridge_profiling.integrations.torch_phases import PhaseWatch
from bridge_profiling.layout import ParallelLayout

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch")

#: Axes of a DeepSpeed pipeline's topology.
_AXES = {"pipe": "pp", "data": "dp", "model": "tp"}

_ZERO_SETTINGS = (
    *("overlap_comm", "reduce_scatter", "contiguous_gradients", "reduce_bucket_size", "allgather_bucket_size"),
    *(
        "prefetch_bucket_size",
        "param_persistence_threshold",
        "max_live_parameters",
        "sub_group_size",
        "zero_hpz_partition_size",
    ),
)


class Profiling(LoopProfiling):
    """A context manager around a training loop; every rank makes one, after `deepspeed.initialize`.

    Inside the window `engine(…)` is a range `forward`, `engine.backward` is `backward` with the reduction of its gradients, the
    boundary's `engine.step` is `optimizer`, each wait for a batch `data-loading`, `engine.save_checkpoint` `checkpoint`. ZeRO's
    own steps are ranges inside: `ZeRO::reduce` and `ZeRO::all_gather` of stages 1 and 2, and DeepSpeed's names in stage 3.

    Args:
        engine: what `deepspeed.initialize` gave.
        output_dir: root of what is written; wins over BRIDGE_PROFILING_DIR.
        layout: where each rank stands, where the engine does not tell it.
        work: what one iteration of the whole job computes.
        settings: fields of `bridge_profiling.ProfilingConfig`.

    Raises:
        ProfilingConfigError: a request that cannot work, or a setting that does not exist.
    """

    def __init__(
        self,
        engine: Any,
        *,
        output_dir: str | os.PathLike[str] | None = None,
        layout: ParallelLayout | None = None,
        work: IterationWork | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(config_from("Profiling", settings), output_dir, layout, work)
        self._engine = engine
        self._measurements = Measurements(engine)
        #: The engine's steps when the iteration began that is open.
        self._running: int | None = None

    def __enter__(self) -> Profiling:
        self._running = None
        return super().__enter__()

    def steps(self, batches: Iterable[Batch], start: int | None = None, micro_batches: int | None = None) -> Iterator[Batch]:
        """The batches, with an iteration around the loop's body for each that the engine makes a step of.

        An epoch may end between two steps: its last batches and the next one's first share an iteration then, as they share
        the engine's step.

        Args:
            batches: the loader, or any iterable.
            start: number of iterations that are complete; what the engine counts, which a resume restores.
            micro_batches: batches that make one iteration; as many as the engine makes a step of.
        """
        engine = self._engine
        if micro_batches is not None:
            yield from super().steps(batches, engine.global_steps if start is None else start, micro_batches)
            return
        offset = 0 if start is None else start - engine.global_steps
        source = iter(batches)
        self._end_stepped()
        batch = self._fetch(source)
        while batch is not END:
            if self._running is None:
                self._begin(engine.global_steps + offset)
                self._running = engine.global_steps
            yield batch
            batch = self._fetch(source)
            self._end_stepped()

    def _end_stepped(self) -> None:
        """End the iteration that is open, if the engine has made its step."""
        if self._running is not None and self._engine.global_steps > self._running:
            self._end()

    def _describe(self) -> tuple[ParallelLayout, dict[str, object]]:
        engine = self._engine
        found = _layout(engine)
        notes = [] if self._layout is not None else found.notes
        disturbances = self._measurements.notes(self._config.window) if self._config.enabled else []
        facts: dict[str, object] = {
            "name": "deepspeed",
            "version": deepspeed.__version__,
            "iteration": "optimizer step",
            "backend": dist.get_backend() if connected() else None,
            "world_size": world_size(),
            "zero_stage": engine.zero_optimization_stage(),
            "zero": _zero(engine),
            "precision": "fp16" if engine.fp16_enabled() else "bf16" if engine.bfloat16_enabled() else "fp32",
            "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
            "micro_batch_size": engine.train_micro_batch_size_per_gpu(),
            "parameters": sum(getattr(one, "ds_numel", one.numel()) for one in engine.module.parameters()),
            **self._measurements.settings(),
            "notes": [*notes, *disturbances],
        }
        for note in disturbances:
            logger.warning("%s", note)
        return found.layout, facts

    def _watch(self, phases: PhaseWatch) -> None:
        engine = self._engine
        # A pipeline's engine is not called itself.
        phases.model(engine if not hasattr(engine, "train_batch") else engine.module)
        phases.backward()
        phases.data_loaders()
        phases.checkpoints()
        phases.function(engine, "backward", "backward")
        # `step` comes with every micro-batch, and this with the one that makes a step of them.
        phases.function(engine, "_take_model_step" if hasattr(engine, "_take_model_step") else "step", "optimizer")
        phases.function(engine, "save_checkpoint", "checkpoint")
        self._undo.append(self._measurements.watch())
        if engine.optimizer is not None and engine.zero_optimization_stage() in (1, 2):
            self._undo.append(communication_ranges.name_zero_steps(engine.optimizer, self._hook.range))
        if not self._config.use_nsys_profiler:
            self._undo.append(communication_ranges.repeat_nvtx(get_accelerator(), self._hook.range))

    def _end(self, error: BaseException | None = None) -> None:
        if self._hook.hook is not None and self._hook.hook.capturing:
            self._safely(lambda: self._measurements.read_timers(self._hook.iteration))
        self._running = None
        super()._end(error)

    def _conclude(self, facts: dict[str, object]) -> None:
        facts |= self._measurements.settings()


def _layout(engine: Any) -> FoundLayout:
    """Where DeepSpeed puts each rank."""
    grid = getattr(engine, "grid", None)
    if grid is not None:
        topology = grid.topology()
        kinds = {axis: _AXES.get(axis, axis) for axis in topology.get_axis_names()}
        sizes = {kind: topology.get_dim(axis) for axis, kind in kinds.items() if kind != "dp"}
        # Its last axis varies fastest.
        return layout_of_sizes(world_size(), sizes, "-".join(reversed(kinds.values())))
    sizes = {
        "tp": max(getattr(engine, "mp_world_size", 1), engine.autotp_size() if hasattr(engine, "autotp_size") else 1),
        "cp": getattr(engine, "sequence_parallel_size", 1),
    }
    if engine.has_moe_layers:
        sizes["ep"] = deepspeed.utils.groups._get_max_expert_size()
    return layout_of_sizes(world_size(), sizes, "tp-cp-ep-dp-pp")


def _zero(engine: Any) -> dict[str, object]:
    """ZeRO's settings, as the engine has resolved them."""
    settings = engine._config.zero_config
    told = {name: getattr(settings, name) for name in _ZERO_SETTINGS if hasattr(settings, name)}
    for name in ("offload_optimizer", "offload_param"):
        offload = getattr(settings, name, None)
        told[name] = str(getattr(offload.device, "value", offload.device)) if offload is not None else None
    return {name: value if isinstance(value, bool | int | str | None) else str(value) for name, value in told.items()}
