"""PyTorchProfilerPlugin: record the window with torch.profiler.

Edits the task alone; never imports torch, and leaves the launcher as it is.
"""

# No `from __future__ import annotations` here: the NeMo-Run CLI parses values by these annotations, and reads neither
# strings nor `X | Y`.

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional, Union

import nemo_run as run

from bridge_profiling.config import DEFAULT_MEMORY_SNAPSHOT_PATH, check_window, normalize_ranks
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.plugins import conflicts
from bridge_profiling.plugins.bounds import check_bounds
from bridge_profiling.plugins.local_arguments import keep_arguments_as_written
from bridge_profiling.plugins.output_dir import check_output_dir, set_output_dir
from bridge_profiling.plugins.task import (
    Task,
    append_arguments,
    check_converter,
    check_plain_text,
    check_task,
    convert,
    write,
)

_FIELDS = (
    "use_pytorch_profiler",
    "profile_step_start",
    "profile_step_end",
    "profile_ranks",
    "record_memory_history",
    "memory_snapshot_path",
    "record_shapes",
)


@dataclass
class PyTorchProfilerPluginScriptArgs:
    """What a `script_args_converter_fn` of PyTorchProfilerPlugin is given."""

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
        profile_step_end: first iteration not captured any more.
        profile_ranks: global ranks, or `all`, or `pp` (one rank per pipeline stage); None is rank 0.
        record_memory_history: record every CUDA allocation, and write a snapshot at the window's end.
        memory_snapshot_path: where the snapshot goes; left alone, the job's own profile directory.
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
        """Edit the task. A second call changes nothing.

        Raises:
            ProfilingConfigError: a request that cannot work, or nsys is on. Nothing is changed then.
        """
        script_args = self._checked(task, executor)
        if isinstance(task, run.Script) and self.script_args_converter_fn is not None:
            append_arguments(task, convert(self.script_args_converter_fn, script_args))
        else:
            write(task, "profiling", {"use_pytorch_profiler": True, **vars(script_args)})
        set_output_dir(executor)
        keep_arguments_as_written(executor)

    def _checked(self, task: Task, executor: Any) -> PyTorchProfilerPluginScriptArgs:
        check_task(task, "PyTorchProfilerPlugin", {"profiling": _FIELDS})
        check_window(self.profile_step_start, self.profile_step_end, name="profile_step")
        ranks = normalize_ranks([0] if self.profile_ranks is None else self.profile_ranks, name="profile_ranks")
        check_converter(self.script_args_converter_fn)
        self._check_snapshot_path(task)
        check_output_dir(task, executor)
        check_bounds(task, executor, end=self.profile_step_end, ranks=ranks)
        conflicts.refuse_nsys(task, executor)
        return PyTorchProfilerPluginScriptArgs(
            self.profile_step_start,
            self.profile_step_end,
            ranks,
            self.record_memory_history,
            self.memory_snapshot_path,
            self.record_shapes,
        )

    def _check_snapshot_path(self, task: Task) -> None:
        if not isinstance(self.memory_snapshot_path, str) or not self.memory_snapshot_path:
            raise ProfilingConfigError(
                f"memory_snapshot_path={self.memory_snapshot_path!r} is not a path",
                instead=f"Type memory_snapshot_path={DEFAULT_MEMORY_SNAPSHOT_PATH!r}, or leave it out",
            )
        if isinstance(task, run.Script) and self.script_args_converter_fn is None:
            check_plain_text(self.memory_snapshot_path, "memory_snapshot_path")
