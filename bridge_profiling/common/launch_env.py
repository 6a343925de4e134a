"""Rank, world size, node, job and rendezvous of this process, from what its launcher left in the environment.

The only module that reads these variables. Standard library only; nothing is imported, started or waited for.

Rules, the same for every caller:

- `RANK` wins: torchrun sets it, and so do users who start ranks by hand. Then mpirun, then srun. mpirun inside a Slurm job
  starts one daemon per node through srun, so Slurm's variables describe the daemon; srun's own PMI variables agree with them.
- A variable that is missing or not a number is unknown. Nothing here raises, except `check`.
- An unknown local rank stays None and is never derived from the global rank, which isn't a device number on a second node.
  Code that needs a device takes `device_index`: the local rank, else 0.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from bridge_profiling.common.errors import require

#: Names this launch on each of its ranks. Set by a launcher or a user whose ranks may not be able to communicate.
LAUNCH_VARIABLE = "BRIDGE_PROFILING_LAUNCH_ID"

#: Address of a rank's monitor, set by ft_launcher of NVIDIA's resiliency extension.
MONITOR_VARIABLE = "FT_RANK_MONITOR_IPC_SOCKET"

#: torch.distributed's default port.
_DEFAULT_PORT = 29500

#: Ports for Slurm jobs, by job id: two jobs on one machine need two.
_FIRST_PORT, _PORTS = 20000, 10000

#: A Slurm job may run several steps, and a step several torchruns: together these name one attempt of one launch.
#: MASTER_ADDR is left out: a node may call itself by another name than the others do.
_IDENTITY_VARIABLES = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "MASTER_PORT",
)
_RESTART_VARIABLES = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")

#: Rank, world size and local rank, as Open MPI, MVAPICH, and MPICH and Intel MPI (Hydra) name them.
_MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)

Launcher = Literal["torchrun", "slurm", "mpi", "ray", "none"]


@dataclass(frozen=True, kw_only=True)
class LaunchEnv:
    """This process among the job's."""

    launcher: Launcher = "none"  # who started it; `torchrun` for anything that sets RANK, `none` for a process on its own
    rank: int = 0  # global rank, 0 without a launcher
    world_size: int = 1  # number of ranks, 1 without a launcher
    local_rank: int | None = None  # rank on its node; None where the launcher does not say
    node_rank: int | None = None  # index of its node; None where the launcher does not say
    restarts: int | None = None  # how often the launcher has restarted the job; None where it does not say
    job_id: str | None = None  # Slurm's job id, else torchrun's run id
    # Host and port where the ranks meet; None where neither MASTER_ADDR nor Slurm says.
    rendezvous: tuple[str, int] | None = None
    # Host and port of torchrun's key-value store, which runs before the ranks do; None without one.
    agent_store: tuple[str, int] | None = None
    launch_id: str = ""  # common to the ranks of one launch; empty where nothing names it
    # Whether no other launch has the same launch_id: it was given, or names a Slurm step. torchrun's run id may be chosen by
    # the user, and come back.
    launch_is_named: bool = False
    fault_tolerant: bool = False  # started by ft_launcher, which watches this rank

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> LaunchEnv:
        """The place that the launcher gives this process."""
        in_step = "SLURM_STEP_ID" in environ
        return replace(
            cls._place(environ),
            node_rank=_number(environ, "GROUP_RANK", "NODE_RANK", *(["SLURM_NODEID"] if in_step else [])),
            restarts=_number(environ, *_RESTART_VARIABLES),
            job_id=environ.get("SLURM_JOB_ID") or environ.get("TORCHELASTIC_RUN_ID") or None,
            rendezvous=_rendezvous(environ),
            agent_store=_rendezvous(environ) if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else None,
            launch_id=_launch_id(environ),
            launch_is_named=bool(environ.get(LAUNCH_VARIABLE) or (environ.get("SLURM_JOB_ID") and in_step)),
            fault_tolerant=bool(environ.get(MONITOR_VARIABLE)),
        )

    @classmethod
    def _place(cls, environ: Mapping[str, str]) -> LaunchEnv:
        """Launcher, rank, world size and local rank alone."""
        rank, local_rank = _number(environ, "RANK"), _number(environ, "LOCAL_RANK")
        if rank is not None:
            # Ray sets these two in every worker; the frameworks on top of it set RANK.
            launcher: Launcher = "ray" if {"RAY_JOB_ID", "RAY_RAYLET_PID"} <= environ.keys() else "torchrun"
            size = _number(environ, "WORLD_SIZE")
            return cls(launcher=launcher, rank=rank, world_size=rank + 1 if size is None else size, local_rank=local_rank)
        # Only a step that srun started has this one: a batch script has the job's number of tasks, and is a single process.
        tasks, task = _number(environ, "SLURM_STEP_NUM_TASKS"), _number(environ, "SLURM_PROCID")
        for rank_name, size_name, local_name in _MPI_VARIABLES:
            rank, size = _number(environ, rank_name), _number(environ, size_name)
            if rank is not None and size is not None and size > 1 and (rank, size) != (task, tasks):
                return cls(launcher="mpi", rank=rank, world_size=size, local_rank=_number(environ, local_name))
        if task is not None and tasks is not None and tasks > 1:
            return cls(launcher="slurm", rank=task, world_size=tasks, local_rank=_number(environ, "SLURM_LOCALID"))
        return cls(local_rank=local_rank)

    @classmethod
    def current(cls, environ: Mapping[str, str] = os.environ) -> LaunchEnv:
        """As `read`; without a launcher, rank and world size of torch.distributed where this process has joined one."""
        env = cls.read(environ)
        distributed = initialized_distributed()
        if env.launcher != "none" or distributed is None:
            return env
        return replace(env, rank=distributed.get_rank(), world_size=distributed.get_world_size())

    @property
    def device_index(self) -> int:
        """Index of this rank's GPU on its node: its local rank, 0 where that is unknown."""
        return self.local_rank or 0

    @staticmethod
    def check(environ: Mapping[str, str] = os.environ) -> None:
        """Raise ProfilingConfigError for RANK without WORLD_SIZE, or a rank outside the world."""
        if "RANK" not in environ:
            return
        rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
        said = f"WORLD_SIZE={environ['WORLD_SIZE']}" if "WORLD_SIZE" in environ else "WORLD_SIZE is not set"
        require(
            rank is not None and world_size is not None and rank < world_size,
            f"RANK={environ['RANK']} and {said}",
            why="a rank needs to know how many ranks there are",
            instead="Unset RANK, or start with torchrun or srun",
        )


def export_for_torch(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what torch.distributed reads (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) for a rank of srun or mpirun.

    Variables that are set stay. A process that has RANK, or no launcher, is left alone.
    """
    env = LaunchEnv.read(environ)
    if "RANK" in environ or env.launcher == "none":
        return
    host, port = env.rendezvous or ("localhost", _DEFAULT_PORT)
    variables = {"RANK": env.rank, "WORLD_SIZE": env.world_size, "LOCAL_RANK": env.local_rank}
    for name, value in (variables | {"MASTER_ADDR": host, "MASTER_PORT": port}).items():
        if value is not None:
            environ.setdefault(name, str(value))


def initialized_distributed() -> Any:
    """torch.distributed if this process has joined a process group through it, else None. Never imports torch."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    joined = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if joined else None


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: gpu07-ib for `gpu[07-09,12]-ib,cpu1`."""
    found = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    return "".join(part or "" for part in found.groups()) if found else nodes


def _rendezvous(environ: Mapping[str, str]) -> tuple[str, int] | None:
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    host = environ.get("MASTER_ADDR") or first_host(nodes)
    if not host:
        return None
    job, port = _number(environ, "SLURM_JOB_ID"), _number(environ, "MASTER_PORT")
    if port is None:
        port = _DEFAULT_PORT if job is None else _FIRST_PORT + job % _PORTS
    return host, port


def _launch_id(environ: Mapping[str, str]) -> str:
    # A given name stands alone: workers of one driver need not have been started by one Slurm step, nor know of a port.
    given = environ.get(LAUNCH_VARIABLE)
    names = (LAUNCH_VARIABLE, *reversed(_RESTART_VARIABLES)) if given else _IDENTITY_VARIABLES
    text = "/".join(environ.get(name, "") for name in names)
    return text if given else text.strip("/")


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    """The value of the first of these variables that is a number."""
    texts = (environ.get(name, "") for name in names)
    return next((int(text) for text in texts if text.isascii() and text.isdigit()), None)
