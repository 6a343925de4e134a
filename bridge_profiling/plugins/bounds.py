"""Checks a window and its ranks against the run's length and size, where the submit host can see them."""

from __future__ import annotations

from typing import Any

import nemo_run as run

from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.plugins.launchers import current_launcher, starts_every_rank
from bridge_profiling.plugins.task import Task, read_integer


def check_bounds(task: Task, executor: Any, *, end: int, ranks: list[int] | str) -> None:
    """Refuse a window that ends past the last iteration, and ranks the job does not have.

    Raises:
        ProfilingConfigError: only where the bound is certain; everything else is checked again in the job.
    """
    train_iters = read_integer(task, "train", "train_iters")
    if train_iters is not None and end > train_iters:
        raise ProfilingConfigError(
            f"profile_step_end={end} lies past train.train_iters={train_iters}",
            why=f"the run's last iteration is {train_iters - 1}, so the window would not be captured whole",
            instead=f"Set profile_step_end to at most {train_iters}, or raise train.train_iters",
        )
    world_size = known_world_size(task, executor)
    outside = [] if world_size is None or isinstance(ranks, str) else [rank for rank in ranks if rank >= world_size]
    if outside:
        raise ProfilingConfigError(
            f"profile_ranks={ranks} names {', '.join(map(str, outside))}, but the executor starts {world_size} ranks",
            why="ranks are counted from 0",
            instead="List ranks of this job, or type profile_ranks='all'",
        )


def known_world_size(task: Task, executor: Any) -> int | None:
    """The number of ranks, where the executor decides it; None where a script or a later plugin may."""
    launched = starts_every_rank(current_launcher(executor))
    if isinstance(executor, run.LocalExecutor):
        # Without a launcher LocalExecutor starts one process whatever ntasks_per_node says, but a launcher may follow.
        tasks = executor.ntasks_per_node if launched else None
    elif isinstance(executor, run.SlurmExecutor) and not executor.heterogeneous:
        tasks = executor.torchrun_nproc_per_node if launched else None
        if tasks is None and (launched or isinstance(task, run.Partial)):
            tasks = executor.ntasks_per_node
    else:
        return None
    if isinstance(tasks, int) and isinstance(executor.nodes, int):
        return tasks * executor.nodes
    return None
