"""RayWorkersPlugin: profile some Ray workers of a job through NeMo RL's environment variables. Leaves the task unchanged.

NeMo-Run writes variables into Slurm's batch script without quotes, and a SlurmRay launcher's between double quotes: both change
JSON values. This plugin writes them into `setup_lines`, quoted.
"""

# No `from __future__ import annotations` here: the NeMo-Run CLI parses values by these annotations, and reads neither
# strings nor `X | Y`.

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Optional

import nemo_run as run

from bridge_profiling.common.errors import require
from bridge_profiling.plugins.batch_script import exports
from bridge_profiling.plugins.checks import check_executor, check_output_dir
from bridge_profiling.plugins.executors import check_launcher, current_launcher, set_output_dir
from bridge_profiling.plugins.nemo_run_patches import patch_executor
from bridge_profiling.plugins.task import Task
from bridge_profiling.settings.ray import EXTRA_OPTIONS_VARIABLE, VARIABLES, RayRequest
from bridge_profiling.settings.window import ARGUMENTS, check_window


@dataclass(kw_only=True)
class RayWorkersPlugin(run.Plugin):
    """Profile a window of steps of some Ray workers.

    The workers' own code names them and marks their steps (`bridge_profiling.frameworks.ray`, or NeMo RL itself).

    Args:
        profile_step_start: first step captured, counted from 1.
        profile_step_end: first step after the window.
        worker_patterns: shell patterns of worker names, separated by commas: `*policy*,*vllm*`.
        profiler: `nsys` or `torch`; NeMo RL's own code supports only nsys.
        nsys_extra_options: options of `nsys profile` without their dashes; they override the defaults.
    """

    profile_step_start: int
    profile_step_end: int
    worker_patterns: str
    profiler: str = "nsys"
    nsys_extra_options: Optional[dict[str, Any]] = None  # noqa: UP045

    def setup(self, task: Task, executor: Any) -> None:
        """Set the variables in the job's environment, or raise ProfilingConfigError and change nothing."""
        check_executor(self, executor)
        window = check_window(self.profile_step_start, self.profile_step_end, replace(ARGUMENTS, first=1))
        options = self.nsys_extra_options or {}
        request = RayRequest.checked(window, self.worker_patterns, self.profiler, options, name="nsys_extra_options")
        variables = request.variables()
        check_launcher(executor)
        check_output_dir(task, executor)
        _check_unset(executor, variables)
        if isinstance(executor, run.SlurmExecutor):
            lines = (executor.setup_lines or "").splitlines()
            executor.setup_lines = "\n".join([*lines, *(line for line in exports(variables) if line not in lines)])
        else:
            executor.env_vars.update(variables)
        set_output_dir(executor)
        patch_executor(executor)


def _check_unset(executor: Any, variables: Mapping[str, str]) -> None:
    launcher = current_launcher(executor)
    launcher_variables = launcher.env_vars or {} if isinstance(launcher, run.SlurmRay) else {}
    for place, found in (
        ("the executor's env_vars", executor.env_vars),
        ("the SlurmRay launcher's env_vars", launcher_variables),
    ):
        for name in VARIABLES:
            require(
                name not in found or found[name] == variables.get(name),
                f"RayWorkersPlugin and {place} both set {name}",
                why="the job receives only one of the values",
                instead=f"Leave {name} out of {place}",
            )
    kubeflow = isinstance(executor, run.KubeflowExecutor) and executor.workdir_pvc
    require(
        EXTRA_OPTIONS_VARIABLE not in variables or not (kubeflow or isinstance(executor, run.DGXCloudExecutor)),
        f"nsys_extra_options do not reach a job on {type(executor).__name__}",
        why="NeMo-Run writes the variable into a script without quotes, which changes its JSON",
        instead="Leave them out, or set the variable in the script that starts the driver",
    )
