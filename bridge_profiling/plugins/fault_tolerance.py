"""FaultTolerancePlugin: start the job under NVIDIA's fault-tolerance launcher, which restarts ranks that die or hang.

Turns nsys off, which that launcher does not support.
"""

# No `from __future__ import annotations` here: the NeMo-Run CLI parses values by these annotations, and reads neither
# strings nor `X | Y`.

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

import nemo_run as run

from bridge_profiling.common.errors import require
from bridge_profiling.plugins import checks
from bridge_profiling.plugins.executors import current_launcher, set_output_dir
from bridge_profiling.plugins.nemo_run_patches import patch_executor
from bridge_profiling.plugins.task import Task, check_task, script_arguments, write_settings


@dataclass
class FaultTolerancePluginScriptArgs:
    """The argument of FaultTolerancePlugin's `script_args_converter_fn`."""

    enable_ft_package: bool
    calc_ft_timeouts: bool


@dataclass(kw_only=True)
class FaultTolerancePlugin(run.Plugin):
    """Run the job under NVIDIA's resiliency extension.

    Args:
        enable_ft_package: connect the ranks to the launcher's monitor.
        calc_ft_timeouts: Megatron Bridge derives the time-outs from the observed heartbeats; the recipes keep the launcher's.
        num_in_job_restarts: restarts of the ranks inside one job.
        num_job_retries_on_failure: resubmissions of the whole job.
        initial_rank_heartbeat_timeout: maximum seconds until a rank's first heartbeat.
        rank_heartbeat_timeout: maximum seconds between later heartbeats.
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
        """Edit the executor and the task, or raise ProfilingConfigError and change nothing; a second call changes nothing."""
        script_args = FaultTolerancePluginScriptArgs(self.enable_ft_package, self.calc_ft_timeouts)
        check_task(task, "FaultTolerancePlugin", "ft", tuple(vars(script_args)))
        checks.check_flags(self)
        checks.check_executor(self, executor)
        self._check_numbers()
        arguments = script_arguments(task, self.script_args_converter_fn, script_args)

        if checks.nsys_on(task, executor):
            checks.disable_nsys(task, executor)
        self._set_launcher(executor)
        executor.retries = self.num_job_retries_on_failure
        write_settings(task, "ft", vars(script_args), arguments)
        set_output_dir(executor)
        patch_executor(executor)

    def _set_launcher(self, executor: Any) -> None:
        timing = {
            "max_restarts": self.num_in_job_restarts,
            "initial_rank_heartbeat_timeout": self.initial_rank_heartbeat_timeout,
            "rank_heartbeat_timeout": self.rank_heartbeat_timeout,
        }
        launcher = current_launcher(executor)
        if isinstance(launcher, run.FaultTolerance):  # set by hand: its other fields stay
            for name, value in timing.items():
                setattr(launcher, name, value)
            return
        executor.launcher = run.FaultTolerance(**timing)
        if isinstance(executor, run.Executor):
            # After a get_launcher() elsewhere, Slurm would skip the set-up that creates this launcher's files and tasks.
            executor._launcher_setup = False

    def _check_numbers(self) -> None:
        for name, least in (
            ("num_in_job_restarts", 0),
            ("num_job_retries_on_failure", 0),
            ("initial_rank_heartbeat_timeout", 1),
            ("rank_heartbeat_timeout", 1),
        ):
            value = getattr(self, name)
            require(
                isinstance(value, int) and not isinstance(value, bool) and value >= least,
                f"FaultTolerancePlugin({name}={value!r}) is not an integer of at least {least}",
                why="the fault-tolerance launcher counts restarts, and heartbeats in seconds",
                instead=f"Type for example {name}={type(self).__dataclass_fields__[name].default}",
            )
