"""What Slurm tells a process about its job, in the words of torchrun. Loads no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping

_FIRST_PORT, _PORTS = 20000, 10000


def join_slurm_step(environ: MutableMapping[str, str] = os.environ) -> None:
    """Tell a process that srun started as one of several ranks what torchrun would tell it; what is told already stays."""
    if not one_of_a_slurm_step(environ) or "RANK" in environ:
        return
    host, port = meeting_point(environ)
    told = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": host or "localhost",
        "MASTER_PORT": str(port),
    }
    for name, value in told.items():
        environ.setdefault(name, value)


def one_of_a_slurm_step(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether srun started this process as one of several tasks."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    return "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ and tasks.isdigit() and int(tasks) > 1


def node_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """Which machine of its step this process is on; None outside a step."""
    return int(environ["SLURM_NODEID"]) if "SLURM_STEP_ID" in environ and "SLURM_NODEID" in environ else None


def meeting_point(environ: Mapping[str, str] = os.environ) -> tuple[str | None, int]:
    """Host and port where the ranks of a job can meet, the same for each of them; no host outside a job."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    job = environ.get("SLURM_JOB_ID", "")
    # Two jobs on one machine need two ports.
    return first_host(nodes) if nodes else None, _FIRST_PORT + (int(job) if job.isdigit() else 0) % _PORTS


def first_host(nodes: str) -> str:
    """The first host of a Slurm list: `gpu[07-09,12],cpu1` begins with gpu07."""
    found = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    return "".join(part or "" for part in found.groups()) if found else nodes
