"""Profiles a training loop around a DeepSpeed engine.

    with Profiling(engine, use_pytorch_profiler=True, profile_step_start=3, profile_step_end=5) as profiling:
        for batch in profiling.steps(loader):
            loss = engine(batch)
            engine.backward(loss)
            engine.step()

DeepSpeed has measurements of its own: a FLOPs profiler, a wall-clock breakdown and autotuning. The manifest has their settings
and results, and a note where they disturb the window; this module switches none of them on or off.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import deepspeed
from deepspeed.accelerator import get_accelerator

from bridge_profiling.capture.work import IterationWork
from bridge_profiling.common.errors import TrainingLogger
from bridge_profiling.common.launch_env import initialized_distributed
from bridge_profiling.frameworks.parallel_layout import FoundLayout, layout_of_sizes, size_of
from bridge_profiling.frameworks.phases import PhaseWatch, RangeOf
from bridge_profiling.frameworks.session import END, Batch, LoopProfiling, OutputDir, config_from, loader_facts
from bridge_profiling.layout import ParallelLayout
from bridge_profiling.settings.profiling import Window

logger = TrainingLogger(__name__)

#: Axes of a DeepSpeed pipeline's topology.
_AXES = {"pipe": "pp", "data": "dp", "model": "tp"}

_ZERO_SETTINGS = (
    *("overlap_comm", "reduce_scatter", "contiguous_gradients", "reduce_bucket_size", "allgather_bucket_size"),
    *("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters", "sub_group_size"),
    "zero_hpz_partition_size",
)


class Profiling(LoopProfiling):
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
        super().__init__(config_from("Profiling", settings), output_dir, layout, work)
        self._engine = engine
        self._driver.before_end = self._read_timers
        #: The engine's steps at the begin of the open iteration.
        self._steps_before = 0
        self._flops: dict[str, object] | None = None
        self._timed_iterations: list[int] = []
        self._timers_ms: dict[str, list[float | None]] = {}

    def steps(self, batches: Iterable[Batch], start: int | None = None, micro_batches: int | None = None) -> Iterator[Batch]:
        """Yield the batches, with an iteration around the loop's body for each step of the engine.

        If an epoch ends between two steps of the engine, its last batches and the first of the next epoch share an iteration.

        Args:
            batches: the loader, or any iterable.
            start: number of complete iterations; by default the engine's count, which a resume restores.
            micro_batches: batches per iteration; by default as many as the engine makes a step of.
        """
        engine, driver = self._engine, self._driver
        if micro_batches is not None:
            yield from super().steps(batches, engine.global_steps if start is None else start, micro_batches)
            return
        offset = 0 if start is None else start - engine.global_steps
        source = iter(batches)
        driver.describe(loader_facts(batches))
        self._end_stepped()
        batch = self._fetch(source)
        while batch is not END:
            if not driver.in_iteration:
                driver.begin_iteration(engine.global_steps + offset)
                self._steps_before = engine.global_steps
            yield batch
            batch = self._fetch(source)
            self._end_stepped()

    def _end_stepped(self) -> None:
        """End the open iteration, if the engine has made its step."""
        if self._engine.global_steps > self._steps_before:
            self._driver.end_iteration()

    def _describe(self) -> tuple[ParallelLayout, dict[str, object]]:
        engine, config, distributed = self._engine, self._driver.config, initialized_distributed()
        found = _layout(engine)
        disturbances = _disturbances(engine, config.window) if config.enabled else []
        for note in disturbances:
            logger.warning("%s", note)
        return found.layout, {
            "name": "deepspeed",
            "version": deepspeed.__version__,
            "backend": distributed.get_backend() if distributed is not None else None,
            "zero_stage": engine.zero_optimization_stage(),
            "zero": _zero(engine),
            "precision": "fp16" if engine.fp16_enabled() else "bf16" if engine.bfloat16_enabled() else "fp32",
            "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
            "micro_batch_size": engine.train_micro_batch_size_per_gpu(),
            "batch_size": engine.train_micro_batch_size_per_gpu(),
            **size_of(engine.module.parameters()),
            **self._measured(),
            "notes": [*(found.notes if self._layout is None else []), *disturbances],
        }

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
        self._watch_flops(phases)
        if engine.optimizer is not None and engine.zero_optimization_stage() in (1, 2):
            _name_zero_steps(phases, engine.optimizer, self._driver.range)
        if not self._driver.config.use_nsys_profiler:
            _repeat_nvtx(phases, get_accelerator(), self._driver.range)

    def _conclude(self, facts: dict[str, object]) -> None:
        facts |= self._measured()

    # -- DeepSpeed's own measurements -----------------------------------------------------------------------------------

    def _measured(self) -> dict[str, object]:
        """Settings and results so far. DeepSpeed counts complete steps, so its `profile_step=5` is iteration 5."""
        engine = self._engine
        autotuning = engine._config.autotuning_config
        return {
            "flops_profiler": {
                "enabled": bool(engine.flops_profiler_enabled()),
                "profile_step": engine.flops_profiler_profile_step(),
                "result": self._flops,
            },
            "wall_clock_breakdown": {
                "enabled": bool(engine.wall_clock_breakdown()),
                "iteration": self._timed_iterations,
                "timers_ms": self._timers_ms,
            },
            "autotuning": {
                "enabled": bool(autotuning.enabled),
                **{name: getattr(autotuning, name) for name in ("start_profile_step", "end_profile_step", "metric")},
            },
        }

    def _watch_flops(self, phases: PhaseWatch) -> None:
        """Keep the counts of the FLOPs profiler, which resets them at its end."""
        profiler = getattr(self._engine, "flops_profiler", None)
        if profiler is None:
            return
        end = profiler.end_profile

        def end_profile() -> None:
            if profiler.started:
                timers = self._engine.timers.get_timers()
                self._flops = {
                    # The engine has already counted this step.
                    "iteration": self._engine.global_steps - 1,
                    "forward_flops": int(profiler.get_total_flops()),
                    "forward_macs": int(profiler.get_total_macs()),
                    "parameters": int(profiler.get_total_params()),
                    # The profiler has no time of the root module; the engine's timers do.
                    "timers_ms": {name: round(timer.elapsed(reset=False), 3) for name, timer in timers.items()},
                }
            end()

        phases.replace(profiler, "end_profile", end_profile)

    def _read_timers(self, iteration: int) -> None:
        """Keep the wall-clock breakdown of the iteration that ends, in milliseconds, if DeepSpeed has one."""
        timers = self._engine.get_wall_clock_timers() if self._engine.wall_clock_breakdown() else {}
        if timers:
            self._timed_iterations.append(iteration)
        for name, milliseconds in timers.items():
            self._timers_ms.setdefault(name, []).append(round(milliseconds, 3))


def _name_zero_steps(phases: PhaseWatch, optimizer: Any, range_of: RangeOf) -> None:
    """Open ranges where ZeRO 1 and 2 reduce gradients, `ZeRO::reduce`, and gather parameters, `ZeRO::all_gather`."""
    phases.run_inside(optimizer, "reduce_ipg_grads", lambda *_, **__: range_of("ZeRO::reduce"), optional=True)
    module = importlib.import_module(type(optimizer).__module__)
    phases.run_inside(module, "all_gather_dp_groups", lambda *_, **__: range_of("ZeRO::all_gather"), optional=True)


def _repeat_nvtx(phases: PhaseWatch, accelerator: Any, range_of: RangeOf) -> None:
    """Open a range with each NVTX range of DeepSpeed, for a profiler that does not see NVTX."""
    thread = threading.local()
    push, pop = accelerator.range_push, accelerator.range_pop

    def ranges() -> list[AbstractContextManager]:
        return thread.__dict__.setdefault("ranges", [])

    def range_push(text: str, *arguments: Any, **keywords: Any) -> Any:
        one = range_of(text)
        one.__enter__()
        ranges().append(one)
        return push(text, *arguments, **keywords)

    def range_pop(*arguments: Any, **keywords: Any) -> Any:
        if ranges():
            ranges().pop().__exit__(None, None, None)
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


def _zero(engine: Any) -> dict[str, object]:
    """ZeRO's settings, as the engine has resolved them."""
    config = engine._config.zero_config
    settings = {name: getattr(config, name) for name in _ZERO_SETTINGS if hasattr(config, name)}
    for name in ("offload_optimizer", "offload_param"):
        offload = getattr(config, name, None)
        settings[name] = str(getattr(offload.device, "value", offload.device)) if offload is not None else None
    return {name: value if isinstance(value, bool | int | str | None) else str(value) for name, value in settings.items()}
