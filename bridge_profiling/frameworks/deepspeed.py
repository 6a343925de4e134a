"""Profiles a training loop around a DeepSpeed engine.

    with Profiling(engine, use_pytorch_profiler=True, profile_step_start=3, profile_step_end=5) as profiling:
        for batch in profiling.steps(loader):
            loss = engine(batch)
            engine.backward(loss)
            engine.step()

DeepSpeed has measurements of its own: a FLOPs profiler, a wall-clock breakdown and autotuning. The manifest has a note where
they disturb the window; this module switches none of them on or off.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import deepspeed
from deepspeed.accelerator import get_accelerator

from bridge_profiling.capture.work import IterationWork
from bridge_profiling.common.errors import TrainingLogger
from bridge_profiling.frameworks import loops
from bridge_profiling.frameworks.loops import Batch
from bridge_profiling.frameworks.parallel_layout import FoundLayout, layout_of_sizes, size_of
from bridge_profiling.frameworks.phases import PhaseWatch, RangeOf
from bridge_profiling.frameworks.session import Job, OutputDir, config_from
from bridge_profiling.layout import ParallelLayout
from bridge_profiling.settings.profiling import Window

logger = TrainingLogger(__name__)

#: Axes of a DeepSpeed pipeline's topology.
_AXES = {"pipe": "pp", "data": "dp", "model": "tp"}


class Profiling(loops.Profiling):
    """A context manager around a training loop; every rank creates one, after `deepspeed.initialize`.

    Inside the window `engine(…)` is a range `forward`, `engine.backward` is `backward` and includes the reduction of its
    gradients, `engine.step` at the boundary is `optimizer`, each wait for a batch `data-loading`, `engine.save_checkpoint`
    `checkpoint`. ZeRO's own steps are ranges inside: `ZeRO::reduce` and `ZeRO::all_gather` of stages 1 and 2, and DeepSpeed's
    names in stage 3.

    Args:
        engine: the engine that `deepspeed.initialize` returned.
        output_dir: root of captures; overrides BRIDGE_PROFILING_DIR.
        layout: where each rank is, if the engine does not say.
        work: the computation of one iteration of the whole job.
        settings: fields of `bridge_profiling.ProfilingConfig`.

    Raises:
        ProfilingConfigError: an invalid request, or an unknown setting.
    """

    def __init__(
        self,
        engine: Any,
        *,
        output_dir: OutputDir = None,
        layout: ParallelLayout | None = None,
        work: IterationWork | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(config_from("Profiling", settings), output_dir, layout=layout, work=work)
        self._engine = engine
        #: The engine's steps at the begin of the open iteration.
        self._steps_before = 0

    def steps(self, batches: Iterable[Batch], start: int | None = None, micro_batches: int | None = None) -> Iterator[Batch]:
        """As of every loop; counts on from the engine's own steps, which a resume restores.

        If an epoch ends between two steps of the engine, its last batches and the first of the next epoch share an iteration.
        """
        return super().steps(batches, self._engine.global_steps if start is None else start, micro_batches)

    def _begin(self, iteration: int | None = None) -> None:
        if not self._session.in_iteration:
            self._steps_before = self._engine.global_steps
        super()._begin(iteration)

    def _stepped(self) -> bool:
        return self._engine.global_steps > self._steps_before

    def _describe(self) -> Job:
        engine, config = self._engine, self._session.config
        found = _layout(engine)
        disturbances = _disturbances(engine, config.window) if config.enabled else []
        for note in disturbances:
            logger.warning("%s", note)
        facts = {
            "name": "deepspeed",
            "version": deepspeed.__version__,
            "zero_stage": engine.zero_optimization_stage(),
            "precision": "fp16" if engine.fp16_enabled() else "bf16" if engine.bfloat16_enabled() else "fp32",
            "gradient_accumulation": engine.gradient_accumulation_steps(),
            "batch_size": engine.train_micro_batch_size_per_gpu(),
            **size_of(engine.module.parameters()),
            "notes": [*(found.notes if self._layout is None else []), *disturbances],
        }
        return Job(found.layout, facts)

    def _watch(self, phases: PhaseWatch) -> None:
        engine = self._engine
        # The loop does not call a pipeline's engine itself.
        phases.model(engine if not hasattr(engine, "train_batch") else engine.module)
        phases.backward()
        phases.data_loaders()
        phases.checkpoints()
        phases.function(engine, "backward", "backward")
        # `step` runs for every micro-batch, `_take_model_step` for the one that completes a step.
        phases.function(engine, "_take_model_step" if hasattr(engine, "_take_model_step") else "step", "optimizer")
        phases.function(engine, "save_checkpoint", "checkpoint")
        if engine.optimizer is not None and engine.zero_optimization_stage() in (1, 2):
            _name_zero_steps(phases, engine.optimizer, self._session.range)
        if not self._session.config.use_nsys_profiler:
            _repeat_nvtx(phases, get_accelerator(), self._session.range)


def _name_zero_steps(phases: PhaseWatch, optimizer: Any, range_of: RangeOf) -> None:
    """Open ranges where ZeRO 1 and 2 reduce gradients, `ZeRO::reduce`, and gather parameters, `ZeRO::all_gather`."""
    phases.run_inside(optimizer, "reduce_ipg_grads", lambda *_, **__: range_of("ZeRO::reduce"), optional=True)
    module = importlib.import_module(type(optimizer).__module__)
    phases.run_inside(module, "all_gather_dp_groups", lambda *_, **__: range_of("ZeRO::all_gather"), optional=True)


def _repeat_nvtx(phases: PhaseWatch, accelerator: Any, range_of: RangeOf) -> None:
    """Open a range with each NVTX range of DeepSpeed, for a profiler that does not see NVTX."""
    push, pop, of_thread = accelerator.range_push, accelerator.range_pop, threading.local()

    def range_push(text: str, *arguments: Any, **keywords: Any) -> Any:
        one = range_of(text)
        one.__enter__()
        vars(of_thread).setdefault("ranges", []).append(one)
        return push(text, *arguments, **keywords)

    def range_pop(*arguments: Any, **keywords: Any) -> Any:
        if ranges := vars(of_thread).get("ranges"):
            ranges.pop().__exit__(None, None, None)
        return pop(*arguments, **keywords)

    phases.replace(accelerator, "range_push", range_push)
    phases.replace(accelerator, "range_pop", range_pop)


def _disturbances(engine: Any, window: Window) -> list[str]:
    """Effects of DeepSpeed's own measurements on this window, in sentences."""
    notes = []
    step = engine.flops_profiler_profile_step()
    if engine.flops_profiler_enabled() and step in window:
        setting = "autotuning.start_profile_step" if engine.autotuning_enabled() else "flops_profiler.profile_step"
        notes.append(
            f"DeepSpeed's FLOPs profiler runs in iteration {step}, inside the window {window}: on rank 0 it waits for the"
            f" device around every module, so that iteration is slower than others. Set {setting} outside the window"
        )
    if engine.wall_clock_breakdown():
        cause = ", which the FLOPs profiler switches on" if engine.flops_profiler_enabled() else ""
        notes.append(
            f"wall_clock_breakdown is on{cause}: DeepSpeed waits for the device when it logs its timers, every iteration."
            " Switch it off to capture the training undisturbed"
        )
    end = engine.autotuning_end_profile_step()
    if engine.autotuning_enabled() and window.last >= end:
        notes.append(
            f"DeepSpeed's autotuning ends the process in iteration {end}, before the window {window} is complete."
            f" Move the window to {engine.autotuning_start_profile_step()}-{end}"
        )
    return notes


def _layout(engine: Any) -> FoundLayout:
    """Where DeepSpeed puts each rank."""
    grid = getattr(engine, "grid", None)
    if grid is not None:
        topology = grid.topology()
        kinds = {axis: _AXES.get(axis, axis) for axis in topology.get_axis_names()}
        sizes = {kind: topology.get_dim(axis) for axis, kind in kinds.items() if kind != "dp"}
        # Its last axis varies fastest.
        return layout_of_sizes(sizes, "-".join(reversed(kinds.values())))
    sizes = {
        "tp": max(getattr(engine, "mp_world_size", 1), engine.autotp_size() if hasattr(engine, "autotp_size") else 1),
        "cp": getattr(engine, "sequence_parallel_size", 1),
    }
    if engine.has_moe_layers:
        sizes["ep"] = deepspeed.utils.groups._get_max_expert_size()
    return layout_of_sizes(sizes, "tp-cp-ep-dp-pp")
