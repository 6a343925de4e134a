"""An executor's launcher, number of ranks, and job directory.

Real executors are never asked for `get_launcher()`: it replaces None by a Launcher permanently, after which
`executor.launcher = "torchrun"` fails an assertion, and on Slurm it rewrites `ntasks_per_node` at once.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import nemo_run as run
from nemo_run.core.execution.launcher import LAUNCHER_MAP, Launcher

from bridge_profiling.common.errors import require
from bridge_profiling.plugins.batch_script import RUNDIR, world_size
from bridge_profiling.settings.profiling import OUTPUT_DIR_VARIABLE

#: Executors whose jobs find their directory at RUNDIR; the client finds it in its own job directory or on a shared volume.
LINKED = (run.DockerExecutor, run.DGXCloudExecutor, run.LeptonExecutor)

SKYPILOT = (run.SkypilotExecutor, run.SkypilotJobsExecutor)


def current_launcher(executor: Any) -> Any:
    """The executor's launcher without changing it: a Launcher, a name, or None."""
    launcher = executor.launcher
    if launcher is None or isinstance(launcher, (str, Launcher)):
        return launcher
    return executor.get_launcher()  # an executor of another make, or a mock in a test


def check_launcher(executor: Any) -> None:
    """Raise ProfilingConfigError for a launcher's name that NeMo-Run does not know."""
    launcher = current_launcher(executor)
    require(
        not isinstance(launcher, str) or launcher in LAUNCHER_MAP,
        f"the executor's launcher {launcher!r} is not known",
        why=f"NeMo-Run has {', '.join(sorted(LAUNCHER_MAP))}",
        instead='Type launcher="torchrun", or leave it out',
    )


def settable_launcher(executor: Any) -> Any:
    """The executor's launcher as an object: a plain Launcher for None, the named class for a name."""
    launcher = current_launcher(executor)
    if launcher is None:
        executor.launcher = Launcher()
    elif isinstance(launcher, str):
        executor.launcher = LAUNCHER_MAP[launcher]()
    return current_launcher(executor)


def starts_every_rank(launcher: object) -> bool:
    """Whether the launcher, rather than the script, determines the number of ranks."""
    return isinstance(launcher, (run.Torchrun, run.FaultTolerance)) or launcher in ("torchrun", "ft")


def known_world_size(task: object, executor: Any) -> int | None:
    """The number of ranks, or None where a script or a later plugin may change it."""
    local = isinstance(executor, run.LocalExecutor)
    return world_size(
        type(executor).__name__,
        functools.partial(getattr, executor),
        launched=starts_every_rank(current_launcher(executor)),
        # LocalExecutor without a launcher starts one process, but a launcher may follow.
        undecided=local or isinstance(task, run.Script),
    )


def job_directory(executor: Any) -> str | None:
    """The job's directory as the job sees it, or None if it is unknown."""
    if not isinstance(executor, run.Executor):
        return None
    if isinstance(executor, LINKED) or (isinstance(executor, SKYPILOT) and not loses_its_disks(executor)):
        return RUNDIR
    if isinstance(executor, SKYPILOT):
        # The first mount: a bucket that outlives the machines.
        mount = next(iter(executor.storage_mounts or ()), "")
        known = mount and executor.experiment_id
        return os.path.join(mount, executor.experiment_id, Path(executor.job_dir).name) if known else None
    if not isinstance(executor.job_dir, str) or not executor.job_dir:
        return None
    if isinstance(executor, run.SlurmExecutor):
        # Without a container the job runs in the tunnel's copy; after assign(), its job_dir is the experiment's there.
        return RUNDIR if executor.container_image else os.path.join(executor.tunnel.job_dir, Path(executor.job_dir).name)
    if isinstance(executor, run.KubeflowExecutor) and executor.workdir_pvc:
        # Not the link /nemo_run: NeMo-Run omits it where the volume itself is mounted there, which is the default.
        return executor.code_dir
    return executor.job_dir if isinstance(executor, run.LocalExecutor) else None


def loses_its_disks(executor: Any) -> bool:
    """Whether a SkyPilot executor returns its machines when the job ends."""
    return isinstance(executor, run.SkypilotJobsExecutor) or executor.autodown


def default_output_dir(executor: Any) -> str | None:
    """The output directory of the job that an executor is assigned to; None if its directory is unknown."""
    directory = job_directory(executor)
    return os.path.join(directory, "profiles") if directory else None


def set_output_dir(executor: Any) -> None:
    """Set BRIDGE_PROFILING_DIR for the job, unless the user set it or the job's directory is unknown.

    Without a job directory (the executor is not part of an experiment yet) the job writes to `profiles` where it runs.
    """
    directory = default_output_dir(executor)
    if directory and isinstance(executor.env_vars, dict):
        executor.env_vars.setdefault(OUTPUT_DIR_VARIABLE, directory)
