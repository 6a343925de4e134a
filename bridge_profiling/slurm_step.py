"""What srun tells a process of its step: its rank among the tasks, and where they can meet. Loads no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

#: What torch.distributed takes for itself when nobody names a port.
_DEFAULT_PORT = 29500

_FIRST_PORT, _PORTS = 20000, 10000


@dataclass(frozen=True)
class SlurmTask:
    """One of several tasks of a step.

    Attributes:
        rank: among all tasks.
        size: number of tasks.
        local_rank: among the tasks of its machine.
    """

    rank: int
    size: int
    local_rank: int


def slurm_task(environ: Mapping[str, str] = os.environ) -> SlurmTask | None:
    """What srun started this process as; None for a step of one task, a batch script or an allocation's shell.

    Args:
        environ: variables.
    """
    # Only a step that srun started has this one: a batch script has the job's number of tasks, and is a single process.
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    if "SLURM_PROCID" not in environ or not tasks.isdigit() or int(tasks) < 2:
        return None
    return SlurmTask(int(environ["SLURM_PROCID"]), int(tasks), int(environ.get("SLURM_LOCALID", "0")))


def join_slurm_step(environ: MutableMapping[str, str] = os.environ) -> None:
    """Tell a process that srun started as one of several tasks what torchrun would tell it; what is told already stays."""
    task = slurm_task(environ)
    if task is None or "RANK" in environ:
        return
    host, port = meeting_point(environ)
    told = {
        "RANK": str(task.rank),
        "WORLD_SIZE": str(task.size),
        "LOCAL_RANK": str(task.local_rank),
        "MASTER_ADDR": host or "localhost",
        "MASTER_PORT": str(port),
    }
    for name, value in told.items():
        environ.setdefault(name, value)


def node_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """Which machine of its step this process is on; None outside a step."""
    return int(environ["SLURM_NODEID"]) if "SLURM_STEP_ID" in environ and "SLURM_NODEID" in environ else None


def meeting_point(environ: Mapping[str, str] = os.environ) -> tuple[str | None, int]:
    """Host and port where the ranks of a job can meet, the same for each of them; no host outside a job."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    job = environ.get("SLURM_JOB_ID", "")
    # Two jobs on one machine need two ports.
    return first_host(nodes) if nodes else None, _FIRST_PORT + int(job) % _PORTS if job.isdigit() else _DEFAULT_PORT


def first_host(nodes: str) -> str:
    """The first host of a Slurm list: `gpu[07-09,12]-ib,cpu1` begins with gpu07-ib."""
    found = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    return "".join(part or "" for part in found.groups()) if found else nodes
