"""Which attempt of a run this is, so that a restart into the same directory never overwrites what is there.

All ranks of one attempt must agree. Under Slurm they agree by the job's identity, which every rank reads from its
environment; elsewhere rank 0 chooses and tells the others once, when the hook opens.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from bridge_profiling.capture.files import create_whole, folder_name
from bridge_profiling.config import Window

_KINDS = ("torch", "nsys", "memory", "manifest")

#: A claim that is made where there are no hard links has its content a moment later.
_WRITTEN_SECONDS = 5.0

#: A Slurm job may run several steps, and a step several torchruns: together these name one attempt of one launch.
_IDENTITY_VARIABLES = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "MASTER_PORT",
)

#: Names this launch on every rank of it, for whoever starts ranks and may not have them communicate.
LAUNCH_VARIABLE = "BRIDGE_PROFILING_LAUNCH_ID"


def job_id(environ: Mapping[str, str] = os.environ) -> str | None:
    """The launcher's name for this job: Slurm's job id, else torchrun's run id."""
    return environ.get("SLURM_JOB_ID") or environ.get("TORCHELASTIC_RUN_ID") or None


def launch_name(environ: Mapping[str, str] = os.environ) -> str:
    """What the ranks of one launch have in common in their environments, without asking each other; may be empty."""
    if environ.get(LAUNCH_VARIABLE):
        # Alone: workers of one driver need not have been started by one Slurm step, nor know of a port.
        return _given_name(environ)
    # Not MASTER_ADDR: a node may call itself by another name than the others call it.
    return "/".join(environ.get(name, "") for name in _IDENTITY_VARIABLES).strip("/")


def _given_name(environ: Mapping[str, str]) -> str:
    names = (LAUNCH_VARIABLE, "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
    return "/".join(environ.get(name, "") for name in names)


def choose_attempt(root: Path, window: Window, rank: int, environ: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """The number of this attempt, 0 for the first capture of `window` into `root`, then 1, 2, …; and who holds it.

    Every rank of the job must call it when torch.distributed is up and neither LAUNCH_VARIABLE nor a Slurm step names the
    launch, because then rank 0's choice is broadcast; that is the only communication profiling ever does. With the holder's
    name, later windows are claimed without any (`claim_attempt`).

    Raises:
        OSError: `root` cannot be written.
    """
    if environ.get(LAUNCH_VARIABLE):
        identity = _given_name(environ)
        return claim_attempt(root, window, rank, identity), identity
    if environ.get("SLURM_JOB_ID") and environ.get("SLURM_STEP_ID"):
        identity = "/".join(environ.get(name, "") for name in _IDENTITY_VARIABLES)
        return claim_attempt(root, window, rank, identity), identity
    distributed = _distributed()
    identity = str(uuid.uuid4())
    if distributed is None:
        # No way to ask the others: torchrun's run id, where there is one, still keeps ranks together.
        run_id = environ.get("TORCHELASTIC_RUN_ID")
        identity = f"{run_id}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}" if run_id else identity
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
        if create_whole(claim, json.dumps({"held_by": identity})) or (
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


def _distributed():  # type: ignore[no-untyped-def]  # torch may be absent, and with it the type
    """torch.distributed, when several ranks are connected through it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return torch.distributed if torch.distributed.get_world_size() > 1 else None
