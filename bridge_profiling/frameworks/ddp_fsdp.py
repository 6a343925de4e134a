"""Profiles a training loop around DistributedDataParallel, FullyShardedDataParallel or fully_shard.

    with Profiling(model, optimizer, use_pytorch_profiler=True, profile_step_start=3, profile_step_end=5) as profiling:
        for batch in profiling.steps(loader):
            ...

Finds the parallel layout in the wrapped model, names the phases of every captured iteration without a change in the loop, and
writes the wrapper's settings to the manifest. Also works with a plain model on one device.

fully_shard names its communication in annotations (`FSDP::all_gather (layers.3)`), FullyShardedDataParallel names nothing, and
nsys sees no annotations: this module adds the missing ranges, on the thread that does the work. Most of the functions it wraps
are private; a release without one of them is left alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from bridge_profiling.capture.work import IterationWork
from bridge_profiling.frameworks import loops, parallel_layout
from bridge_profiling.frameworks.phases import PhaseWatch, RangeOf
from bridge_profiling.frameworks.session import Job, OutputDir, config_from
from bridge_profiling.layout import ParallelLayout


class Profiling(loops.Profiling):
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
        super().__init__(config_from("Profiling", settings), output_dir, layout=layout, work=work)
        self._model, self._optimizer = model, optimizer

    def _describe(self) -> Job:
        found, facts = parallel_layout.describe(self._model)
        notes = found.notes if self._layout is None else []
        return Job(found.layout, facts | {"mesh": found.mesh or None, "notes": notes, "gradient_accumulation": 1})

    def _watch(self, phases: PhaseWatch) -> None:
        phases.everything(self._model, self._optimizer)
        name_wrapper_steps(phases, self._model, self._session.range)
        if self._session.config.use_nsys_profiler:
            repeat_annotations(phases, self._session.range)


def name_wrapper_steps(phases: PhaseWatch, model: torch.nn.Module, range_of: RangeOf) -> None:
    """Open ranges where units of FullyShardedDataParallel gather and reduce, with fully_shard's names, on any thread."""
    units = {id(handle): f" ({name})" if name else "" for name, handle in parallel_layout.wrapped_units(model)}
    if not units:
        return

    def of_unit(text: str, handle: Any) -> AbstractContextManager:
        # Units of other models get no range.
        return range_of(f"{text}{units[id(handle)]}") if id(handle) in units else nullcontext()

    def gathers(state: Any, handle: Any, *others: Any, **keywords: Any) -> AbstractContextManager:
        # A unit whose parameters are complete gathers nothing.
        return of_unit("FSDP::all_gather", handle) if handle.needs_unshard() else nullcontext()

    module = importlib.import_module("torch.distributed.fsdp._runtime_utils")
    phases.run_inside(module, "_unshard", gathers, optional=True)
    phases.run_inside(
        module, "_reduce_grad", lambda state, handle: of_unit("FSDP::post_backward_reduce", handle), optional=True
    )


def repeat_annotations(phases: PhaseWatch, range_of: RangeOf) -> None:
    """Open a range with each annotation of fully_shard's parameter groups, for a profiler that does not see annotations."""
    try:
        module = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    except ImportError:
        return
    annotation = module.record_function

    @contextmanager
    def repeated(name: str, *arguments: Any) -> Iterator[None]:
        with range_of(name), annotation(name, *arguments):
            yield

    phases.replace(module, "record_function", repeated)
