"""NsysPlugin: run the job under Nsight Systems and mark the window for it.

Edits the launcher and the task; never runs nsys itself.
"""

# No `from __future__ import annotations` here: the NeMo-Run CLI parses values by these annotations, and reads neither
# strings nor `X | Y`.

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional, Union

import nemo_run as run

from bridge_profiling.config import check_window, normalize_ranks
from bridge_profiling.plugins import conflicts, nsys_command
from bridge_profiling.plugins.bounds import check_bounds
from bridge_profiling.plugins.launchers import check_launcher, settable_launcher
from bridge_profiling.plugins.local_arguments import keep_arguments_as_written
from bridge_profiling.plugins.output_dir import set_output_dir
from bridge_profiling.plugins.task import Task, append_arguments, check_converter, check_task, convert, write

logger = logging.getLogger(__name__)

#: On Slurm: the process, the job, the node and the task, so that reports of one job never share a name.
SLURM_FILENAME = "profile_%p_%q{SLURM_JOB_ID}_node%q{SLURM_NODEID}_rank%q{SLURM_PROCID}"

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
        nsys_gpu_metrics: sample GPU metrics too, where the executor can.
        nsys_extra_args: options of `nsys profile`, merged over the launcher's by option name; these win.
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
        nsys_options = self._nsys_options()

        if supported:
            self._set_launcher(settable_launcher(executor), executor, nsys_options)
        else:
            conflicts.disable_nsys(task, executor)
        if arguments is not None:
            append_arguments(task, arguments)
        elif supported or not self._converts(task):
            write(task, "profiling", {"use_nsys_profiler": supported, **vars(script_args)})
        set_output_dir(executor)
        keep_arguments_as_written(executor)

    def _checked(self, task: Task, executor: Any) -> NsysPluginScriptArgs:
        check_task(task, "NsysPlugin", {"profiling": _FIELDS})
        check_window(self.profile_step_start, self.profile_step_end, name="profile_step")
        ranks = normalize_ranks([0] if self.profile_ranks is None else self.profile_ranks, name="profile_ranks")
        check_converter(self.script_args_converter_fn)
        check_launcher(executor)
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

    def _nsys_options(self) -> list[str]:
        if self.nsys_trace is not None:
            nsys_command.check_trace(self.nsys_trace)
        extra_args = self.nsys_extra_args if self.nsys_extra_args is not None else []
        nsys_command.check_extra_args(extra_args)
        return nsys_command.with_sqlite(extra_args) if self.export_sqlite else extra_args

    def _set_launcher(self, launcher: Any, executor: Any, nsys_options: list[str]) -> None:
        launcher.nsys_profile = True
        launcher.nsys_trace = list(self.nsys_trace) if self.nsys_trace is not None else ["nvtx", "cuda"]
        if isinstance(executor, run.SlurmExecutor):
            launcher.nsys_filename = SLURM_FILENAME
        if nsys_options:
            launcher.nsys_extra_args = nsys_command.merge_options(_listed(launcher.nsys_extra_args), nsys_options)
        if self.nsys_gpu_metrics:
            _set_gpu_metrics(launcher, executor)


def _listed(options: Any) -> list[str]:
    return list(options) if isinstance(options, list) else []


def _set_gpu_metrics(launcher: Any, executor: Any) -> None:
    if not hasattr(launcher, "nsys_gpu_metrics"):
        logger.warning("nsys_gpu_metrics=True has no effect: this launcher has no such field; a newer NeMo-Run has it")
        return
    launcher.nsys_gpu_metrics = True
    if isinstance(executor, run.Executor) and not isinstance(executor, run.SlurmExecutor):
        logger.warning("nsys_gpu_metrics=True has no effect: NeMo-Run samples GPU metrics on Slurm only")
