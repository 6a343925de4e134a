"""RayWorkersPlugin: have a job profile some of its Ray workers, by the environment variables of NeMo RL's convention.

NeMo-Run writes variables into Slurm's batch script without quotes, and a SlurmRay launcher's between double ones: a JSON value
arrives as something else. They are written here so that the job gets them as they are. Leaves the task as it is.
"""

# No `from __future__ import annotations` here: the NeMo-Run CLI parses values by these annotations, and reads neither
# strings nor `X | Y`.

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

import nemo_run as run

from bridge_profiling.config import Window, check_window
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.plugins.launchers import check_launcher, current_launcher
from bridge_profiling.plugins.output_dir import check_output_dir, set_output_dir
from bridge_profiling.plugins.task import Task
from bridge_profiling.ray_request import (
    EXTRA_OPTIONS_VARIABLE,
    PATTERNS_VARIABLE,
    PROFILER_VARIABLE,
    STEP_RANGE_VARIABLE,
    RayRequest,
    check_options,
    parse_patterns,
    parse_profiler,
)

_VARIABLES = (STEP_RANGE_VARIABLE, PATTERNS_VARIABLE, PROFILER_VARIABLE, EXTRA_OPTIONS_VARIABLE)

#: A path of the user's that holds NeMo-Run's name for the job's directory; without a container that text is replaced.
_OTHER_PATH = re.compile(r"(?<=[\w.@+-])/nemo_run|/nemo_run(?=[\w.@+-])")


@dataclass(kw_only=True)
class RayWorkersPlugin(run.Plugin):
    """Profile a window of steps of some Ray workers.

    The workers' code says which they are and where their steps are (`bridge_profiling.integrations.ray`, or NeMo RL itself).

    Args:
        profile_step_start: first step captured, counted from 1.
        profile_step_end: first step not captured any more.
        worker_patterns: shell patterns of worker names, separated by commas: `*policy*,*vllm*`.
        profiler: `nsys` or `torch`; NeMo RL's own code knows nsys alone.
        nsys_extra_options: options of `nsys profile` without their dashes, over the default ones.
    """

    profile_step_start: int
    profile_step_end: int
    worker_patterns: str
    profiler: str = "nsys"
    nsys_extra_options: Optional[dict[str, Any]] = None  # noqa: UP045

    def setup(self, task: Task, executor: Any) -> None:
        """Set the variables in the job's environment. A second call changes nothing.

        Raises:
            ProfilingConfigError: a request that cannot work, or variables that are set elsewhere already. Nothing is changed
                then.
        """
        variables = self._request().variables()
        check_launcher(executor)
        check_output_dir(task, executor)
        _refuse_set_elsewhere(executor, variables)
        if isinstance(executor, run.SlurmExecutor):
            lines = (executor.setup_lines or "").splitlines()
            lines += [line for line in _exports(variables) if line not in lines]
            executor.setup_lines = "\n".join(lines)
        else:
            executor.env_vars.update(variables)
        set_output_dir(executor)

    def _request(self) -> RayRequest:
        check_window(self.profile_step_start, self.profile_step_end, name="profile_step")
        if self.profile_step_start < 1:
            raise ProfilingConfigError(
                f"profile_step_start={self.profile_step_start} is no step of Ray workers",
                why="their steps are counted from 1",
                instead="Type profile_step_start=1 or more",
            )
        return RayRequest(
            Window(self.profile_step_start, self.profile_step_end),
            parse_patterns(self.worker_patterns),
            parse_profiler(self.profiler),
            check_options(self.nsys_extra_options or {}, name="nsys_extra_options"),
        )


def _refuse_set_elsewhere(executor: Any, variables: Mapping[str, str]) -> None:
    launcher = current_launcher(executor)
    theirs = getattr(launcher, "env_vars", None) if isinstance(launcher, run.SlurmRay) else None
    for place, found in (("the executor's env_vars", executor.env_vars), ("the SlurmRay launcher's env_vars", theirs or {})):
        for name in _VARIABLES:
            if name in found and found[name] != variables.get(name):
                raise ProfilingConfigError(
                    f"RayWorkersPlugin and {place} both set {name}",
                    why="the job gets one of them",
                    instead=f"Leave {name} out of {place}",
                )
    if EXTRA_OPTIONS_VARIABLE in variables and isinstance(executor, run.DGXCloudExecutor):
        raise ProfilingConfigError(
            f"nsys_extra_options do not reach a job on {type(executor).__name__}",
            why="NeMo-Run writes the variable into a script without quotes, and its JSON would lose its own",
            instead="Leave them out, or set the variable in the script that starts the driver",
        )


def _exports(variables: Mapping[str, str]) -> list[str]:
    """Lines of the batch script that set these variables as they are."""
    # A quote that closes and one that opens again, inside the path, are nothing to a shell.
    words = {name: _OTHER_PATH.sub("/''nemo_run", shlex.quote(value)) for name, value in variables.items()}
    return [f"export {name}={word}" for name, word in words.items()]
