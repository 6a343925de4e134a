"""PyTorchProfilerPlugin: record the window with torch.profiler. Leaves the launcher unchanged and never imports torch."""

# No `from __future__ import annotations` here: the NeMo-Run CLI parses values by these annotations, and reads neither
# strings nor `X | Y`.

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional, Union

import nemo_run as run

from bridge_profiling.config import DEFAULT_MEMORY_SNAPSHOT_PATH
from bridge_profiling.errors import require
from bridge_profiling.overrides import check_plain_text
from bridge_profiling.plugins import checks
from bridge_profiling.plugins.executors import set_output_dir
from bridge_profiling.plugins.nemo_run_patches import patch_executor
from bridge_profiling.plugins.task import Task, script_arguments, write_settings


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
        fields = ("use_pytorch_profiler", *PyTorchProfilerPluginScriptArgs.__dataclass_fields__)
        ranks = checks.check_request(self, task, executor, fields)
        require(
            isinstance(self.memory_snapshot_path, str) and self.memory_snapshot_path,
            f"memory_snapshot_path={self.memory_snapshot_path!r} is not a path",
            instead=f"Type memory_snapshot_path={DEFAULT_MEMORY_SNAPSHOT_PATH!r}, or leave it out",
        )
        checks.check_without_nsys(task, executor)
        script_args = PyTorchProfilerPluginScriptArgs(
            self.profile_step_start,
            self.profile_step_end,
            ranks,
            self.record_memory_history,
            self.memory_snapshot_path,
            self.record_shapes,
        )
        arguments = script_arguments(task, self.script_args_converter_fn, script_args)
        if isinstance(task, run.Script) and arguments is None:
            check_plain_text(self.memory_snapshot_path, "memory_snapshot_path")
        write_settings(task, "profiling", {"use_pytorch_profiler": True, **vars(script_args)}, arguments)
        set_output_dir(executor)
        patch_executor(executor)
