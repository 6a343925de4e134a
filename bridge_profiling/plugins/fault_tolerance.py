"""FaultTolerancePlugin: start the job under NVIDIA's fault-tolerance launcher, which restarts ranks that die or hang.

Edits the executor and the task's `ft` section; switches nsys off, which that launcher does not support.
"""

# No `from __future__ import annotations` here: the NeMo-Run CLI parses values by these annotations, and reads neither
# strings nor `X | Y`.

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

import nemo_run as run

from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.plugins import conflicts
from bridge_profiling.plugins.launchers import current_launcher, replace_launcher
from bridge_profiling.plugins.local_arguments import keep_arguments_as_written
from bridge_profiling.plugins.output_dir import set_output_dir
from bridge_profiling.plugins.task import Task, append_arguments, check_converter, check_task, convert, is_on, write


@dataclass
class FaultTolerancePluginScriptArgs:
    """What a `script_args_converter_fn` of FaultTolerancePlugin is given."""

    enable_ft_package: bool
    calc_ft_timeouts: bool


@dataclass(kw_only=True)
class FaultTolerancePlugin(run.Plugin):
    """Run the job under NVIDIA's resiliency extension.

    Args:
        enable_ft_package: connect the ranks to the launcher's monitor.
        calc_ft_timeouts: derive the time-outs from what the monitor observes.
        num_in_job_restarts: restarts of the ranks inside one job.
        num_job_retries_on_failure: times the whole job is submitted again.
        initial_rank_heartbeat_timeout: seconds a rank may take to its first heartbeat.
        rank_heartbeat_timeout: seconds between later heartbeats.
        script_args_converter_fn: makes a run.Script's arguments, in place of the overrides.
    """

    enable_ft_package: bool = True
    calc_ft_timeouts: bool = True
    num_in_job_restarts: int = 3
    num_job_retries_on_failure: int = 2
    initial_rank_heartbeat_timeout: int = 1800
    rank_heartbeat_timeout: int = 300
    script_args_converter_fn: Optional[Callable[[FaultTolerancePluginScriptArgs], list[str]]] = None  # noqa: UP045

    def setup(self, task: Task, executor: Any) -> None:
        """Edit the executor and the task. A second call changes nothing.

        Raises:
            ProfilingConfigError: a request that cannot work. Nothing is changed then.
        """
        self._check(task)
        script_args = FaultTolerancePluginScriptArgs(self.enable_ft_package, self.calc_ft_timeouts)
        arguments = None
        if isinstance(task, run.Script) and self.script_args_converter_fn is not None:
            arguments = convert(self.script_args_converter_fn, script_args)

        if conflicts.nsys_launched(executor) or is_on(task, "profiling", "use_nsys_profiler"):
            conflicts.disable_nsys(task, executor)
        self._set_launcher(executor)
        executor.retries = self.num_job_retries_on_failure
        if arguments is not None:
            append_arguments(task, arguments)
        else:
            write(task, "ft", vars(script_args))
        set_output_dir(executor)
        keep_arguments_as_written(executor)

    def _set_launcher(self, executor: Any) -> None:
        timing = {
            "max_restarts": self.num_in_job_restarts,
            "initial_rank_heartbeat_timeout": self.initial_rank_heartbeat_timeout,
            "rank_heartbeat_timeout": self.rank_heartbeat_timeout,
        }
        launcher = current_launcher(executor)
        if not isinstance(launcher, run.FaultTolerance):
            replace_launcher(executor, run.FaultTolerance(**timing))
            return
        for name, value in timing.items():  # one set by hand keeps what else it was given
            setattr(launcher, name, value)

    def _check(self, task: Task) -> None:
        check_task(task, "FaultTolerancePlugin", {"ft": ("enable_ft_package", "calc_ft_timeouts")})
        check_converter(self.script_args_converter_fn)
        for name, least in (
            ("num_in_job_restarts", 0),
            ("num_job_retries_on_failure", 0),
            ("initial_rank_heartbeat_timeout", 1),
            ("rank_heartbeat_timeout", 1),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ProfilingConfigError(
                    f"FaultTolerancePlugin({name}={value!r}) is not a whole number of at least {least}",
                    why="the fault-tolerance launcher counts restarts, and heartbeats in seconds",
                    instead=f"Type a number, for example {name}={type(self).__dataclass_fields__[name].default}",
                )
