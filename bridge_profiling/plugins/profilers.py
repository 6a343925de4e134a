"""The plugins that profile a window of iterations: NsysPlugin and PyTorchProfilerPlugin. They never import torch.

For nsys, a task that starts nsys itself on the profiled ranks (`launch.tasks.pretrain_script` and `pretrain_partial`) receives
settings; for any other task NeMo-Run starts nsys around all processes. The torch profiler leaves the launcher unchanged.
"""

# No `from __future__ import annotations` here: the NeMo-Run CLI parses values by these annotations, and reads neither
# strings nor `X | Y`.

import atexit
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Union

import nemo_run as run

from bridge_profiling.common.errors import require
from bridge_profiling.nsys.command import DEFAULT_TRACE, check_extra_args, check_trace, launcher_options, merge_options
from bridge_profiling.plugins import checks
from bridge_profiling.plugins.executors import current_launcher, set_output_dir, settable_launcher, starts_every_rank
from bridge_profiling.plugins.nemo_run_patches import patch_executor
from bridge_profiling.plugins.task import Task, script_arguments, starts_nsys, write_settings
from bridge_profiling.settings.overrides import check_plain_text
from bridge_profiling.settings.profiling import DEFAULT_MEMORY_SNAPSHOT_PATH, OUTPUT_DIR_VARIABLE

#: One report per task on Slurm: job, node, task, and torch's rank, which is the task's where srun starts all ranks.
_SLURM_FILENAME = "profile_%p_%q{SLURM_JOB_ID}_node%q{SLURM_NODEID}_rank%q{SLURM_PROCID}"


@dataclass
class NsysPluginScriptArgs:
    """The argument of NsysPlugin's `script_args_converter_fn`."""

    profile_step_start: int
    profile_step_end: int
    profile_ranks: Union[list[int], str]  # noqa: UP007
    record_shapes: bool


@dataclass(kw_only=True)
class NsysPlugin(run.Plugin):
    """Profile a window of iterations with Nsight Systems.

    Args:
        profile_step_start: first iteration captured, 0-based.
        profile_step_end: first iteration after the window.
        profile_ranks: global ranks, or `all`, or `pp` (one rank per pipeline stage); None means rank 0.
        nsys_trace: APIs to trace; None means `["nvtx", "cuda"]`.
        record_shapes: put tensor shapes into the NVTX ranges.
        nsys_gpu_metrics: also sample GPU metrics, each rank its own GPU; machines that forbid it print a message.
        nsys_extra_args: options of `nsys profile`; they override the defaults by option name.
        export_sqlite: have nsys write an SQLite file next to its report.
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
        """Edit the launcher and the task, or raise ProfilingConfigError and change nothing; a second call changes nothing.

        With fault tolerance nsys is turned off everywhere, with a warning; the window is still written.
        """
        checks.check_executor(self, executor)
        # A user who turned the launcher's nsys on by hand keeps it.
        prefixed = not starts_nsys(task) or checks.nsys_launched(executor)
        script_args = checks.check_request(self, task, executor, NsysPluginScriptArgs, "use_nsys_profiler", nsys=True)
        checks.check_without_pytorch_profiler(task, executor)
        supported = not checks.fault_tolerant(task, executor)
        arguments = script_arguments(task, self.script_args_converter_fn if supported else None, script_args)
        options = self._checked_options(prefixed)

        if not supported:
            checks.disable_nsys(task, executor)
        elif prefixed:
            self._set_launcher(settable_launcher(executor), executor, options)
        else:
            settings = {name: getattr(self, name) for name in ("nsys_trace", "nsys_extra_args", "nsys_gpu_metrics")}
            settings["nsys_export_sqlite"] = self.export_sqlite
            write_settings(task, "profiling", {name: value for name, value in settings.items() if value})
        if supported or not isinstance(task, run.Script) or self.script_args_converter_fn is None:
            write_settings(task, "profiling", {"use_nsys_profiler": supported, **vars(script_args)}, arguments)
        _finish(task, executor, "nsys")

    def _checked_options(self, prefixed: bool) -> list[str]:
        if self.nsys_trace is not None:
            check_trace(self.nsys_trace)
        extra_args = self.nsys_extra_args if self.nsys_extra_args is not None else []
        check_extra_args(extra_args)
        return launcher_options(extra_args, export_sqlite=self.export_sqlite and prefixed)

    def _set_launcher(self, launcher: Any, executor: Any, options: list[str]) -> None:
        launcher.nsys_profile = True
        launcher.nsys_trace = list(self.nsys_trace) if self.nsys_trace is not None else list(DEFAULT_TRACE)
        if isinstance(executor, run.SlurmExecutor):
            # Under torchrun one report holds all ranks of a node, so a rank in its name would be wrong.
            torchrun = starts_every_rank(current_launcher(executor))
            launcher.nsys_filename = _SLURM_FILENAME.partition("_rank")[0] if torchrun else _SLURM_FILENAME
        if options:
            given = launcher.nsys_extra_args if isinstance(launcher.nsys_extra_args, list) else []
            launcher.nsys_extra_args = merge_options(given, options)
        if self.nsys_gpu_metrics:
            launcher.nsys_gpu_metrics = True


@dataclass
class PyTorchProfilerPluginScriptArgs:
    """The argument of PyTorchProfilerPlugin's `script_args_converter_fn`."""

    profile_step_start: int
    profile_step_end: int
    profile_ranks: Union[list[int], str]  # noqa: UP007
    record_memory_history: bool
    memory_snapshot_path: str
    record_shapes: bool


@dataclass(kw_only=True)
class PyTorchProfilerPlugin(run.Plugin):
    """Profile a window of iterations with torch.profiler.

    Args:
        profile_step_start: first iteration captured, 0-based.
        profile_step_end: first iteration after the window.
        profile_ranks: global ranks, or `all`, or `pp` (one rank per pipeline stage); None means rank 0.
        record_memory_history: record every CUDA allocation, and write a snapshot at the end of the window.
        memory_snapshot_path: path of the snapshot; the default means the job's profile directory.
        record_shapes: record tensor shapes in the trace.
        script_args_converter_fn: makes a run.Script's arguments, in place of the overrides.
    """

    profile_step_start: int
    profile_step_end: int
    profile_ranks: Optional[Union[list[int], str]] = None  # noqa: UP007, UP045
    record_memory_history: bool = False
    memory_snapshot_path: str = DEFAULT_MEMORY_SNAPSHOT_PATH
    record_shapes: bool = False
    script_args_converter_fn: Optional[Callable[[PyTorchProfilerPluginScriptArgs], list[str]]] = None  # noqa: UP045

    def setup(self, task: Task, executor: Any) -> None:
        """Edit the task, or raise ProfilingConfigError and change nothing; a second call changes nothing."""
        script_args = checks.check_request(self, task, executor, PyTorchProfilerPluginScriptArgs, "use_pytorch_profiler")
        require(
            isinstance(self.memory_snapshot_path, str) and self.memory_snapshot_path,
            f"memory_snapshot_path={self.memory_snapshot_path!r} is not a path",
            instead=f"Type memory_snapshot_path={DEFAULT_MEMORY_SNAPSHOT_PATH!r}, or leave it out",
        )
        checks.check_without_nsys(task, executor)
        arguments = script_arguments(task, self.script_args_converter_fn, script_args)
        if isinstance(task, run.Script) and arguments is None:
            check_plain_text(self.memory_snapshot_path, "memory_snapshot_path")
        write_settings(task, "profiling", {"use_pytorch_profiler": True, **vars(script_args)}, arguments)
        _finish(task, executor, "torch")


def _finish(task: object, executor: Any, profiler: str) -> None:
    """Edit the executor as both plugins do. When this process ends, say so if a local script is over and opened no hook."""
    checks.note_asked(executor, profiler)
    set_output_dir(executor)
    patch_executor(executor)
    if isinstance(task, run.Script) and isinstance(executor, run.LocalExecutor):
        atexit.register(_announce, executor, os.getpid())


def _announce(executor: Any, process: int) -> None:
    # A process that this one forked exits, too. Nothing is expected where fault tolerance has switched nsys off.
    if os.getpid() != process or not executor.job_dir or checks.nsys_disabled(executor):
        return
    job, captures = Path(executor.job_dir), Path(executor.env_vars.get(OUTPUT_DIR_VARIABLE) or "")
    # NeMo-Run writes the file _DONE when the jobs of an experiment are over.
    if (job.parent / "_DONE").exists() and not any(captures.glob("manifest/*/rank-*.json")):
        print(
            f"{job.name} captured nothing: the script does not read profiling overrides, unless it failed early, as its log in"
            f" {job} shows. Have it call apply_overrides of bridge_profiling.settings.overrides and open a ProfilingHook, or"
            " type bridge-profiling run instead of python",
            file=sys.stderr,
        )
