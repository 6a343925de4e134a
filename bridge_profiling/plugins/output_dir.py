"""Tells the job where its profiles go, through the executor's environment, so that unmodified loops find it too.

The place is one the job can write and the submit host can find: the job's own directory. `profiling.output_dir` and a
value the user already set win over it. Without a job directory (the executor is not part of an experiment yet) nothing is
set, and the job writes to `profiles` where it runs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nemo_run as run

from bridge_profiling.config import OUTPUT_DIR_VARIABLE

#: Where NeMo-Run mounts or links the job's directory inside a container.
_IN_CONTAINER = "/nemo_run"

_CONTAINER_EXECUTORS = (run.DockerExecutor, run.DGXCloudExecutor, run.LeptonExecutor, run.SkypilotExecutor)


def set_output_dir(executor: Any) -> None:
    """Set BRIDGE_PROFILING_DIR for the job, unless the user did or the place is not known."""
    directory = job_directory(executor)
    if directory and isinstance(executor.env_vars, dict):
        executor.env_vars.setdefault(OUTPUT_DIR_VARIABLE, os.path.join(directory, "profiles"))


def job_directory(executor: Any) -> str | None:
    """The job's directory as the job sees it, or None where that is not known."""
    if not isinstance(executor, run.Executor) or not isinstance(executor.job_dir, str) or not executor.job_dir:
        return None
    if isinstance(executor, run.LocalExecutor):
        return executor.job_dir
    if isinstance(executor, run.SlurmExecutor):
        if executor.container_image is not None:
            return _IN_CONTAINER
        # Without a container the job runs in the tunnel's copy; by assign(), its job_dir is the experiment's there.
        return os.path.join(executor.tunnel.job_dir, Path(executor.job_dir).name)
    # Kubernetes executors give a pod no such directory by themselves.
    return _IN_CONTAINER if isinstance(executor, _CONTAINER_EXECUTORS) else None
