"""The analysis as a job of its own, after the training and where its traces are: `launch/experiment.py --report`.

Submit host only. The report never decides whether the training succeeded.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge_profiling.config import OUTPUT_DIR_VARIABLE
from bridge_profiling.plugins.batch_script import path_in_job

if TYPE_CHECKING:
    import nemo_run as run

#: The job's name in the experiment.
NAME = "report"

#: The page's name, beside the captures' folders.
PAGE = "report.html"

#: Where a container of the report's job sees the directory of the training's.
_IN_CONTAINER = "/training"

#: Far more than a report takes; a short job waits less in the queue.
_TIME = "00:30:00"


def add_report(experiment: run.Experiment, training: Any, executor: run.Executor) -> None:
    """Add the report's job to an experiment; on Slurm it starts when the training has ended, however that ended.

    Args:
        experiment: the training's.
        training: the training's job, to which its plugins were applied.
        executor: where that runs, as it was before.
    """
    import nemo_run as run

    place = training.executor.env_vars[OUTPUT_DIR_VARIABLE]
    if isinstance(executor, run.SlurmExecutor):
        where, place = _beside(executor, training.executor, place)
    else:
        from recipes.executors import local

        where = local(env=executor.env_vars)
    arguments = ["report", place, "-o", os.path.join(place, PAGE)]
    script = run.Script(path="bridge_profiling.cli", entrypoint="python", m=True, args=arguments)
    experiment.add(script, executor=where, name=NAME, dependencies=[training.id])


def where_the_page_is(job: Any, captures: Path | None) -> str:
    """A line that says where the report is; or that there is none, which is not the training's failure.

    Args:
        job: the report's, when it has ended.
        captures: the directory of captures, when that is one here.
    """
    from torchx.specs import AppState

    page = None if captures is None else captures / PAGE
    if page is not None and page.is_file():
        return f"report: {page}"
    if job.state == AppState.SUCCEEDED:
        return f"report: {PAGE}, beside the captures"
    return f"there is no report: its job failed, as its log says, above and in {job.executor.job_dir}; the captures are whole"


def _beside(executor: run.SlurmExecutor, training: run.SlurmExecutor, place: str) -> tuple[run.SlurmExecutor, str]:
    """One task on one node without a GPU, in the same container; and where it finds the captures."""
    where = executor.clone()
    where.nodes = where.ntasks_per_node = 1
    where.launcher = None
    where.gpus_per_node = where.gpus_per_task = where.torchrun_nproc_per_node = None
    where.time = _TIME
    where.dependency_type = "afterany"
    below = path_in_job(place) if training.container_image is not None else None
    if below is not None:
        # Each job sees its own directory under that name, so the training's is mounted under another.
        directory = os.path.join(training.tunnel.job_dir, Path(training.job_dir).name)
        where.container_mounts = [*where.container_mounts, f"{directory}:{_IN_CONTAINER}"]
        place = os.path.join(_IN_CONTAINER, below)
    return where, place
