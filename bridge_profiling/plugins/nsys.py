"""NsysPlugin: run the job under Nsight Systems and mark the window for it.

A task that starts nsys itself (launch/pretrain.py does, on the ranks asked for alone) is told so in its settings; for any
other, NeMo-Run starts nsys around all of it. Never runs nsys itself.
"""

# No `from __future__ import annotations` here: the NeMo-Run CLI parses values by these annotations, and reads neither
# strings nor `X | Y`.

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional, Union

import nemo_run as run

from bridge_profiling.config import check_window, normalize_ranks
from bridge_profiling.nsys.command import launcher_options
from bridge_profiling.nsys.options import DEFAULT_TRACE, check_extra_args, check_trace, merge_options
from bridge_profiling.plugins import conflicts
from bridge_profiling.plugins.bounds import check_bounds
from bridge_profiling.plugins.launchers import check_launcher, settable_launcher
from bridge_profiling.plugins.local_arguments import keep_arguments_as_written
from bridge_profiling.plugins.nsys_prefix import mend_nsys_prefix, slurm_filename
from bridge_profiling.plugins.output_dir import check_output_dir, set_output_dir
from bridge_profiling.plugins.task import (
    Task,
    append_arguments,
    check_converter,
    check_task,
    convert,
    starts_nsys_itself,
    write,
)

logger = logging.getLogger(__name__)

_FIELDS = ("use_nsys_profiler", "profile_step_start", "profile_step_end", "profile_ranks", "record_shapes")


@dataclass
class NsysPluginScriptArgs:
    """What a `script_args_converter_fn` of NsysPlugin is given."""

    profile_step_start: int
    profile_step_end: int
    profile_ranks: Union[list[int], str]  # noqa: UP007
    record_shapes: bool


@dataclass(kw_only=True)
class NsysPlugin(run.Plugin):
    """Profile a window of iterations with Nsight Systems.

    Args:
        profile_step_start: first iteration captured, 0-based.
        profile_step_end: first iteration not captured any more.
        profile_ranks: global ranks, or `all`, or `pp` (one rank per pipeline stage); None is rank 0.
        nsys_trace: APIs to trace; None is `["nvtx", "cuda"]`.
        record_shapes: put tensor shapes into the NVTX ranges.
        nsys_gpu_metrics: sample GPU metrics too, each rank its own GPU; a machine that forbids it only says so.
        nsys_extra_args: options of `nsys profile`, merged over the default ones by option name; these win.
        export_sqlite: have nsys write an SQLite file beside its report.
        script_args_converter_fn: makes a run.Script's arguments, in place of the overrides.
    """

    profile_step_start: int
    profile_step_end: int
    profile_ranks: Optional[Union[list[int], str]] = None  # noqa: UP007, UP045
    nsys_trace: Optional[list[str]] = None  # noqa: UP045
    record_shapes: bool = False
    nsys_gpu_metrics: bool = False
    nsys_extra_args: Optional[list[str]] = None  # noqa: UP045
    export_sqlite: bool = False
    script_args_converter_fn: Optional[Callable[[NsysPluginScriptArgs], list[str]]] = None  # noqa: UP045

    def setup(self, task: Task, executor: Any) -> None:
        """Edit the launcher and the task. A second call changes nothing.

        Under fault tolerance nsys stays off everywhere, with a warning; the window is written all the same.

        Raises:
            ProfilingConfigError: a request that cannot work, or the torch profiler is on. Nothing is changed then.
        """
        script_args = self._checked(task, executor)
        supported = not conflicts.fault_tolerant(task, executor)
        arguments = self._arguments(task, script_args) if supported else None
        prefixed = self._prefixed(task, executor)
        nsys_options = self._nsys_options(prefixed)

        if not supported:
            conflicts.disable_nsys(task, executor)
        elif prefixed:
            self._set_launcher(settable_launcher(executor), executor, nsys_options)
            mend_nsys_prefix(executor)
        else:
            write(task, "profiling", self._own_options())
        if arguments is not None:
            append_arguments(task, arguments)
        elif supported or not self._converts(task):
            write(task, "profiling", {"use_nsys_profiler": supported, **vars(script_args)})
        set_output_dir(executor)
        keep_arguments_as_written(executor)

    def _prefixed(self, task: Task, executor: Any) -> bool:
        """Whether nsys runs around the whole task; whoever set the launcher's nsys by hand gets that one, too."""
        return not starts_nsys_itself(task) or conflicts.nsys_launched(executor)

    def _checked(self, task: Task, executor: Any) -> NsysPluginScriptArgs:
        check_task(task, "NsysPlugin", {"profiling": _FIELDS})
        check_window(self.profile_step_start, self.profile_step_end, name="profile_step")
        ranks = normalize_ranks([0] if self.profile_ranks is None else self.profile_ranks, name="profile_ranks")
        check_converter(self.script_args_converter_fn)
        check_launcher(executor)
        check_output_dir(task, executor, nsys=self._prefixed(task, executor))
        check_bounds(task, executor, end=self.profile_step_end, ranks=ranks)
        conflicts.refuse_pytorch_profiler(task)
        return NsysPluginScriptArgs(self.profile_step_start, self.profile_step_end, ranks, self.record_shapes)

    def _converts(self, task: Task) -> bool:
        return isinstance(task, run.Script) and self.script_args_converter_fn is not None

    def _arguments(self, task: Task, script_args: NsysPluginScriptArgs) -> list[str] | None:
        if not self._converts(task):
            return None
        assert self.script_args_converter_fn is not None
        return convert(self.script_args_converter_fn, script_args)

    def _nsys_options(self, prefixed: bool) -> list[str]:
        if self.nsys_trace is not None:
            check_trace(self.nsys_trace)
        extra_args = self.nsys_extra_args if self.nsys_extra_args is not None else []
        check_extra_args(extra_args)
        return launcher_options(extra_args, export_sqlite=self.export_sqlite and prefixed)

    def _own_options(self) -> dict[str, object]:
        """Settings of a task that starts nsys itself: those that were asked for."""
        asked: dict[str, object] = {}
        if self.nsys_trace is not None:
            asked["nsys_trace"] = self.nsys_trace
        if self.nsys_extra_args:
            asked["nsys_extra_args"] = self.nsys_extra_args
        if self.nsys_gpu_metrics:
            asked["nsys_gpu_metrics"] = True
        if self.export_sqlite:
            asked["nsys_export_sqlite"] = True
        return asked

    def _set_launcher(self, launcher: Any, executor: Any, options: list[str]) -> None:
        launcher.nsys_profile = True
        launcher.nsys_trace = list(self.nsys_trace) if self.nsys_trace is not None else list(DEFAULT_TRACE)
        if isinstance(executor, run.SlurmExecutor):
            launcher.nsys_filename = slurm_filename(executor)
        if options:
            launcher.nsys_extra_args = merge_options(_listed(launcher.nsys_extra_args), options)
        if self.nsys_gpu_metrics:
            _set_gpu_metrics(launcher, executor)


def _set_gpu_metrics(launcher: Any, executor: Any) -> None:
    if not hasattr(launcher, "nsys_gpu_metrics"):
        logger.warning("nsys_gpu_metrics=True has no effect: this launcher has no such field; a newer NeMo-Run has it")
        return
    launcher.nsys_gpu_metrics = True
    if isinstance(executor, run.Executor) and not isinstance(executor, (run.LocalExecutor, run.SlurmExecutor)):
        logger.warning(
            "nsys_gpu_metrics=True has no effect on %s: the nsys around this task gets no GPU's number there",
            type(executor).__name__,
        )


def _listed(options: Any) -> list[str]:
    return list(options) if isinstance(options, list) else []
