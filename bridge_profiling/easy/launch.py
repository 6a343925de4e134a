"""Which rank this process is, and what its launch is called, without a word between ranks: they may never meet.

Nothing here waits for another rank. Where ranks must agree on a name, the first one leaves it in the store that the launcher or
torch.distributed keeps for the job, and the others find it there.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from bridge_profiling.launch_env import LAUNCH_VARIABLE, LaunchEnv, initialized_distributed

#: How long torchrun's store may take to answer. It runs already when a rank starts.
_STORE_PATIENCE = timedelta(seconds=30)


def name_the_launch(environ: MutableMapping[str, str] = os.environ) -> None:
    """See to it that captures of all ranks go into one folder, and those of another launch into another.

    Call it before a hook is opened: where the launch has no name, a hook has rank 0 broadcast one, which takes all ranks.
    """
    if LaunchEnv.read(environ).launch_is_named:
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
        key = f"bridge_profiling/launch/{LaunchEnv.read(environ).restarts or 0}"
        return store.compare_set(key, "", uuid.uuid4().hex).decode()
    except Exception:
        return None  # What the launcher tells is nearly as good.


def _store(environ: MutableMapping[str, str]) -> Any:
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        from torch.distributed import TCPStore

        rendezvous = LaunchEnv.read(environ).rendezvous
        if rendezvous is None:
            return None
        host, port = rendezvous
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_STORE_PATIENCE)
    distributed = initialized_distributed()
    return distributed.distributed_c10d._get_default_store() if distributed is not None else None


def _from_the_launcher(environ: MutableMapping[str, str]) -> str | None:
    env = LaunchEnv.read(environ)
    return env.launch_id if env.world_size > 1 else None
