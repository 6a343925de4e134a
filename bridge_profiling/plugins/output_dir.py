"""Where a job's profiles go: a place the job can write and the submit host can get at, on each of NeMo-Run's executors.

Loops learn of it through the executor's environment, so that unmodified ones find it too; nsys through the prefix NeMo-Run
puts before the command. `profiling.output_dir` and a value the user already set win over the first. Without a job directory
(the executor is not part of an experiment yet) nothing is set, and the job writes to `profiles` where it runs.

Never submits anything and reads no cluster: it knows what NeMo-Run's executors mount, link and copy (docs/how-to/executors.md).
"""

from __future__ import annotations

import os
import re
import shlex
import types
from pathlib import Path
from typing import Any

import nemo_run as run

from bridge_profiling.config import OUTPUT_DIR_VARIABLE
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.plugins.launchers import current_launcher
from bridge_profiling.plugins.task import Task, read

#: Where NeMo-Run mounts, links or copies the job's directory.
_IN_CONTAINER = "/nemo_run"

#: Those whose job finds its directory there, and whose client finds it in the job's own directory or on a shared volume.
_LINKED = (run.DockerExecutor, run.DGXCloudExecutor, run.LeptonExecutor)

_SKYPILOT = (run.SkypilotExecutor, run.SkypilotJobsExecutor)


def check_output_dir(task: Task, executor: Any, *, nsys: bool = False) -> None:
    """Refuse an executor from which no profile would come back, before anything is changed.

    Args:
        task: what is profiled.
        executor: where.
        nsys: whether NeMo-Run is to run it under nsys, whose reports go beside the other profiles.

    Raises:
        ProfilingConfigError: the executor starts no task of ours, or its disks go with the job and nothing else is mounted.
    """
    if _starts_a_ray_cluster(executor):
        raise ProfilingConfigError(
            "KubeRayExecutor starts a Ray cluster, and no plugin reaches what runs on it",
            why="NeMo-Run hands it neither the launcher's nsys options nor a task's config",
            instead="Call ProfilingHook in the workers' own code, with profiling.output_dir on a volume they mount",
        )
    if isinstance(executor, run.KubeflowExecutor) and not executor.workdir_pvc:
        _refuse_unless_chosen(
            task,
            executor,
            "KubeflowExecutor without workdir_pvc",
            "its pods have no directory that outlives them",
            'Pass workdir_pvc="CLAIM", from which executor.pull_results(job) fetches the profiles',
            # Without the volume the pod starts the command as a list, with no shell to make the report's directory.
            choice=not nsys,
        )
    elif isinstance(executor, _SKYPILOT) and _loses_its_disks(executor) and not executor.storage_mounts:
        _refuse_unless_chosen(
            task,
            executor,
            f"{type(executor).__name__} without storage_mounts",
            "the machines are given back when the job ends, and their disks with them",
            "Pass storage_mounts with a bucket, in which the profiles then lie",
        )


def set_output_dir(executor: Any) -> None:
    """Set BRIDGE_PROFILING_DIR for the job, unless the user did or the place is not known; and nsys' reports likewise."""
    directory = job_directory(executor)
    if directory and isinstance(executor.env_vars, dict):
        executor.env_vars.setdefault(OUTPUT_DIR_VARIABLE, os.path.join(directory, "profiles"))
    if isinstance(executor, (*_LINKED, *_SKYPILOT, run.KubeflowExecutor)):
        executor.get_launcher_prefix = types.MethodType(_nsys_prefix, executor)
        executor.get_nsys_entrypoint = types.MethodType(_nsys_entrypoint, executor)


def job_directory(executor: Any) -> str | None:
    """The job's directory as the job sees it, or None where that is not known."""
    if not isinstance(executor, run.Executor):
        return None
    if isinstance(executor, _LINKED):
        return _IN_CONTAINER
    if isinstance(executor, _SKYPILOT):
        return _skypilot_directory(executor)
    if not isinstance(executor.job_dir, str) or not executor.job_dir:
        return None
    if isinstance(executor, run.LocalExecutor):
        return executor.job_dir
    if isinstance(executor, run.SlurmExecutor):
        if executor.container_image is not None:
            return _IN_CONTAINER
        # Without a container the job runs in the tunnel's copy; by assign(), its job_dir is the experiment's there.
        return os.path.join(executor.tunnel.job_dir, Path(executor.job_dir).name)
    if isinstance(executor, run.KubeflowExecutor) and executor.workdir_pvc:
        # Not its link /nemo_run: that is left out where the volume itself is mounted there, which is the default.
        return executor.code_dir
    return None


def _skypilot_directory(executor: Any) -> str | None:
    if not _loses_its_disks(executor):
        return _IN_CONTAINER
    # The first mount: a bucket that outlives the machines.
    mount = next(iter(executor.storage_mounts or ()), None)
    if mount is None or not executor.experiment_id:
        return None
    return os.path.join(mount, executor.experiment_id, Path(executor.job_dir).name)


def _loses_its_disks(executor: Any) -> bool:
    return isinstance(executor, run.SkypilotJobsExecutor) or executor.autodown


def _nsys_prefix(executor: Any) -> list[str] | None:
    """NeMo-Run's prefix, with the report's directory as the job sees it; NeMo-Run's own is the client's on some executors."""
    launcher = current_launcher(executor)
    if not launcher.nsys_profile:
        return None
    prefix = launcher.get_nsys_prefix(profile_dir=_report_root(executor))
    # Nodes may share the directory, and processes in their containers the same few numbers.
    return [re.sub(r"/profile_%p$", "/profile_%h_%p", argument) for argument in prefix]


def _nsys_entrypoint(executor: Any) -> tuple[str, str]:
    """nsys, and its report's directory before it: nsys reports to the temporary directory where that is missing.

    These executors write the command into a shell script, which is what makes this one text possible.
    """
    folder = os.path.join(_report_root(executor), current_launcher(executor).nsys_folder)
    return f"mkdir -p {shlex.quote(folder)} && nsys", ""


def _report_root(executor: Any) -> str:
    chosen = executor.env_vars.get(OUTPUT_DIR_VARIABLE)
    directory = job_directory(executor)
    if chosen and directory and chosen != os.path.join(directory, "profiles"):
        return chosen
    return directory or chosen or _IN_CONTAINER


def _starts_a_ray_cluster(executor: Any) -> bool:
    # By name: the class can only be imported with the kubernetes package.
    return any(base.__name__ == "KubeRayExecutor" for base in type(executor).__mro__)


def _refuse_unless_chosen(task: Task, executor: Any, what: str, why: str, instead: str, *, choice: bool = True) -> None:
    """Refuse, unless the user has said where the profiles go."""
    if choice and (OUTPUT_DIR_VARIABLE in executor.env_vars or read(task, "profiling", "output_dir")):
        return
    other = f', or set env_vars["{OUTPUT_DIR_VARIABLE}"] to a directory on a volume that stays' if choice else ""
    raise ProfilingConfigError(f"the profile of a job on {what} would be lost", why=why, instead=instead + other)
