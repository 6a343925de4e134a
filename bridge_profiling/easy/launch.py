"""Which rank this process is, and what its launch is called, without a word between ranks: they may never meet.

Nothing here waits for another rank. Where ranks must agree on a name, the first one leaves it in the store that the launcher or
torch.distributed keeps for the job, and the others find it there.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from bridge_profiling.capture.attempt import LAUNCH_VARIABLE

#: How long torchrun's store may take to answer. It runs already when a rank starts.
_STORE_PATIENCE = timedelta(seconds=30)


@dataclass(frozen=True)
class Place:
    """Where a process stands in its job.

    Args:
        rank: global rank.
        world_size: number of ranks.
        local_rank: rank on this machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


def place(environ: MutableMapping[str, str] = os.environ) -> Place:
    """This process's place: as the launcher tells it, else as torch.distributed does, else alone."""
    if environ.get("RANK", "").isdigit() and environ.get("WORLD_SIZE", "").isdigit():
        rank = int(environ["RANK"])
        return Place(rank, int(environ["WORLD_SIZE"]), int(environ.get("LOCAL_RANK") or rank))
    distributed = _distributed()
    if distributed is not None:
        rank = distributed.get_rank()
        return Place(rank, distributed.get_world_size(), int(environ.get("LOCAL_RANK") or rank))
    return Place()


def name_the_launch(environ: MutableMapping[str, str] = os.environ) -> None:
    """See to it that captures of all ranks go into one folder, and those of another launch into another.

    Call it before a hook is opened: where the launch has no name, a hook has rank 0 broadcast one, which takes all ranks.
    """
    if environ.get(LAUNCH_VARIABLE) or (environ.get("SLURM_JOB_ID") and environ.get("SLURM_STEP_ID")):
        return
    environ[LAUNCH_VARIABLE] = _from_a_store(environ) or _from_the_launcher(environ) or uuid.uuid4().hex


@contextmanager
def launch_named(environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Inside the block the launch has a name; afterwards the environment, which processes inherit, is as it was."""
    before = environ.get(LAUNCH_VARIABLE)
    name_the_launch(environ)
    try:
        yield
    finally:
        if before is None:
            environ.pop(LAUNCH_VARIABLE, None)


def _from_a_store(environ: MutableMapping[str, str]) -> str | None:
    """The name that the first rank to ask left in the job's store; None where there is no store."""
    try:
        store = _store(environ)
        if store is None:
            return None
        key = f"bridge_profiling/launch/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        return store.compare_set(key, "", uuid.uuid4().hex).decode()
    except Exception:
        return None  # What the launcher tells is nearly as good.


def _store(environ: MutableMapping[str, str]) -> Any:
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        from torch.distributed import TCPStore

        host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_STORE_PATIENCE)
    distributed = _distributed()
    return distributed.distributed_c10d._get_default_store() if distributed is not None else None


def _from_the_launcher(environ: MutableMapping[str, str]) -> str | None:
    if int(environ.get("WORLD_SIZE") or 1) == 1:
        return None
    return "/".join(environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"))


def _distributed() -> Any:
    """torch.distributed, where this process has joined others through it."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    return distributed if distributed is not None and distributed.is_available() and distributed.is_initialized() else None
