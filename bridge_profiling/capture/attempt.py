"""Which attempt of a run this is, so that a restart into the same directory never overwrites what is there.

All ranks of one attempt must agree. Under Slurm they agree by the job's identity, which every rank reads from its
environment; elsewhere rank 0 chooses and tells the others once, when the hook opens.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from bridge_profiling.atomic import create_exclusively
from bridge_profiling.capture.files import folder_name
from bridge_profiling.config import Window
from bridge_profiling.launch_env import LaunchEnv, initialized_distributed

_KINDS = ("torch", "nsys", "memory", "manifest")

#: A claim that is made where there are no hard links has its content a moment later.
_WRITTEN_SECONDS = 5.0


def choose_attempt(root: Path, window: Window, rank: int, environ: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """The number of this attempt (0 for the first capture of `window` into `root`, then 1, 2, …) and the name of its holder.

    Every rank of the job must call it when torch.distributed is up and the environment does not name the launch, because
    then rank 0's choice is broadcast; profiling communicates nowhere else. With the holder's name, later windows are
    claimed without communication (`claim_attempt`).

    Raises:
        OSError: `root` cannot be written.
    """
    env = LaunchEnv.read(environ)
    if env.launch_is_named:
        return claim_attempt(root, window, rank, env.launch_id), env.launch_id
    distributed = initialized_distributed()
    identity = str(uuid.uuid4())
    if distributed is None or distributed.get_world_size() == 1:
        # The other ranks cannot be asked; a job's id, where there is one, still keeps them together.
        identity = env.launch_id if env.job_id else identity
        return claim_attempt(root, window, rank, identity), identity
    choice: list[object] = [None, identity]
    if rank == 0:
        try:
            choice = [claim_attempt(root, window, rank, identity), identity]
        except OSError as error:
            choice = [error, identity]
    distributed.broadcast_object_list(choice, src=0)
    if isinstance(choice[0], OSError):
        raise choice[0]
    assert isinstance(choice[0], int)
    return choice[0], str(choice[1])


def claim_attempt(root: Path, window: Window, rank: int, identity: str) -> int:
    """The first attempt that is free, or that this identity holds already and this rank has not written to.

    Raises:
        OSError: `root` cannot be written.
    """
    for attempt in itertools.count():
        folder = folder_name(window, attempt)
        claim = root / "manifest" / folder / "attempt.json"
        if not claim.exists() and any((root / kind / folder).exists() for kind in _KINDS if kind != "manifest"):
            continue
        claim.parent.mkdir(parents=True, exist_ok=True)
        if create_exclusively(claim, json.dumps({"held_by": identity})) or (
            _holder(claim) == identity and not (claim.parent / f"rank-{rank}.json").exists()
        ):
            return attempt
    raise AssertionError("unreachable")


def give_up_attempt(manifest: Path) -> None:
    """Leave no trace of a window that was claimed and will not be captured: this rank's manifest, and the last one's claim."""
    with contextlib.suppress(OSError):
        manifest.unlink()
        if not any(manifest.parent.glob("rank-*.json")):
            (manifest.parent / "attempt.json").unlink()
            manifest.parent.rmdir()


def _holder(claim: Path) -> str | None:
    deadline = time.monotonic() + _WRITTEN_SECONDS
    while _is_empty(claim) and time.monotonic() < deadline:
        time.sleep(0.05)
    try:
        return json.loads(claim.read_text(encoding="utf-8"))["held_by"]
    except (ValueError, KeyError, TypeError):
        return None


def _is_empty(claim: Path) -> bool:
    try:
        return not claim.stat().st_size
    except OSError:
        return False
