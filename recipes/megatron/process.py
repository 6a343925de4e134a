"""Which of the job's processes this one is, as its launcher says: torchrun, Slurm, or nobody."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Process:
    """This process among the job's.

    Attributes:
        rank: global rank.
        world_size: number of ranks.
        local_rank: rank on its machine; the number of its GPU.
        address: host and port where ranks meet, or None where the environment says it to torch itself.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    address: str | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Process:
        """As torchrun tells it, else as Slurm tells the tasks of a step; a process without a launcher is alone."""
        if "RANK" in environment:
            return cls(int(environment["RANK"]), int(environment.get("WORLD_SIZE", 1)), int(environment.get("LOCAL_RANK", 0)))
        # Only a step started by srun has this one: a batch script or an allocation's shell is a single process.
        tasks = int(environment.get("SLURM_STEP_NUM_TASKS", 1))
        if tasks == 1:
            return cls()
        host = environment.get("MASTER_ADDR") or _first_host(environment["SLURM_STEP_NODELIST"])
        port = environment.get("MASTER_PORT") or 20000 + int(environment["SLURM_JOB_ID"]) % 10000
        return cls(int(environment["SLURM_PROCID"]), tasks, int(environment["SLURM_LOCALID"]), f"tcp://{host}:{port}")

    @property
    def device(self) -> torch.device:
        """The GPU of the process's local rank, where there are GPUs."""
        return torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")


def _first_host(nodes: str) -> str:
    """The first of Slurm's compressed host names: `node[03-05,9]-a,other` begins with `node03-a`."""
    match = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\]([^,]*))?", nodes)
    assert match is not None
    return "".join(part or "" for part in match.groups())
