"""Names a launch for all of its ranks, so that they choose the same folder. Loads torch only for torchrun's store."""

from __future__ import annotations

import functools
import os
import uuid
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from bridge_profiling.capture.files import asked_in_time
from bridge_profiling.common.launch_env import LAUNCH_VARIABLE, LaunchEnv, initialized_distributed

#: How long torchrun's store may take to answer. It runs before the first rank starts.
_STORE_SECONDS = 10.0


def name_launch(environ: MutableMapping[str, str] = os.environ) -> None:
    """Name the launch in the environment, so all ranks choose the same folder and other launches another, without a barrier.

    The first rank to ask leaves a name in the store of torchrun or torch.distributed, and the others find it there. Without a
    name, the hooks of the ranks that capture wait for each other.
    """
    env = LaunchEnv.read(environ)
    if env.launch_is_named:
        return
    name = env.launch_id if env.world_size > 1 else ""
    distributed = initialized_distributed()
    # The launcher's own id is nearly as good as a name from its store.
    with suppress(Exception):
        connect: Any = None
        if env.agent_store is not None:
            from torch.distributed import TCPStore  # here: loading torch may take longer than the store

            (host, port), limit = env.agent_store, timedelta(seconds=_STORE_SECONDS)
            connect = functools.partial(TCPStore, host, port, is_master=False, wait_for_workers=False, timeout=limit)
        elif distributed is not None:
            connect = distributed.distributed_c10d._get_default_store
        if connect is not None:
            key = f"bridge_profiling/launch/{env.restarts or 0}"
            name = asked_in_time(_STORE_SECONDS, lambda: connect().compare_set(key, "", uuid.uuid4().hex).decode())
    environ[LAUNCH_VARIABLE] = name or uuid.uuid4().hex


@contextmanager
def restored(variable: str) -> Iterator[None]:
    """Restore an environment variable at the end of the block."""
    before = os.environ.get(variable)
    try:
        yield
    finally:
        os.environ.pop(variable, None)
        if before is not None:
            os.environ[variable] = before
