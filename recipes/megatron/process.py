"""Which of the job's processes this one is, as its launcher says: torchrun, Slurm, or nobody."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from bridge_profiling.slurm_step import meeting_point, slurm_task


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
        task = slurm_task(environment)
        if task is None:
            return cls()
        host, port = meeting_point(environment)
        address = f"{environment.get('MASTER_ADDR') or host}:{environment.get('MASTER_PORT') or port}"
        return cls(task.rank, task.size, task.local_rank, f"tcp://{address}")

    @property
    def device(self) -> torch.device:
        """The GPU of the process's local rank, where there are GPUs."""
        return torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")
