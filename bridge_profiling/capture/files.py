"""Names of a capture's files, and the number of the attempt that names their folder.

A restart into the same directory never overwrites the files of an earlier attempt, so all ranks of an attempt must agree on
its number. Under Slurm they agree by the job's identity, which every rank reads from its environment. Elsewhere rank 0
chooses, and broadcasts its choice once, when the hook opens.
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
from typing import Any

from bridge_profiling.atomic import create_exclusively, make_directory
from bridge_profiling.config import DEFAULT_MEMORY_SNAPSHOT_PATH, Window
from bridge_profiling.launch_env import LaunchEnv, initialized_distributed

#: The folders of captures under the output directory. manifest/ also holds each attempt's holder.
_CAPTURES = ("torch", "nsys", "memory")

#: The longest name of a file.
_NAME_BYTES = 255

#: How long to wait for the content of attempt.json: without hard links it is written a moment after the file is created.
_WRITTEN_SECONDS = 5.0


class CaptureFiles:
    """Names of one rank's files in one attempt of a window: 0 for the first, n for the n-th restart into the same root."""

    def __init__(self, root: Path, window: Window, attempt: int, rank: int, memory_snapshot_path: str) -> None:
        self.root, self.window, self.attempt, self.rank = root, window, attempt, rank
        folder = folder_name(window, attempt)
        self.torch_trace = root / "torch" / folder / f"rank-{rank}.pt.trace.json.gz"
        self.chakra_trace = root / "torch" / folder / f"rank-{rank}.et.json"
        self.nsys_report = root / "nsys" / folder / f"rank-{rank}.nsys-rep"
        self.manifest = root / "manifest" / folder / f"rank-{rank}.json"
        self._memory, self._memory_snapshot_path = root / "memory" / folder, memory_snapshot_path

    @property
    def memory_snapshot(self) -> Path:
        """Memory snapshot at the end of the window."""
        if self._memory_snapshot_path == DEFAULT_MEMORY_SNAPSHOT_PATH:
            return self._memory / f"rank-{self.rank}.pickle"
        asked = self.root / Path(self._memory_snapshot_path).expanduser()
        # The user's path names no attempt, and a restart must not overwrite the first one's snapshot.
        suffixes = itertools.chain([""], (f".{number}" for number in itertools.count(1)))
        names = (_shortened(asked.stem, f"_{self.rank}{suffix}{asked.suffix}") for suffix in suffixes)
        return next(path for path in map(asked.with_name, names) if not path.exists())

    def oom_snapshot(self, number: int) -> Path:
        """Memory snapshot of this rank's n-th out-of-memory error, counted from 1."""
        return self._memory / f"oom-rank-{self.rank}-{number}.pickle"


def _shortened(stem: str, end: str) -> str:
    """A file's name with this end, as long as file systems allow."""
    name = stem + end
    excess = len(os.fsencode(name)) - _NAME_BYTES
    return name if excess <= 0 else os.fsencode(stem)[:-excess].decode(errors="ignore") + end


def folder_name(window: Window, attempt: int) -> str:
    """`iter-10-12` for a first attempt, `iter-10-12.1` for the next."""
    return f"iter-{window}" + (f".{attempt}" if attempt else "")


def choose_attempt(root: Path, window: Window, rank: int, environ: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """The number of this attempt (0 for the first capture of `window` into `root`, then 1, 2, …) and its holder's name.

    Every rank of the job must call it after torch.distributed is initialized when the environment does not name the launch,
    because then rank 0's choice is broadcast; profiling communicates nowhere else. With the holder's name, later windows get
    their numbers without communication (`claim_attempt`).
    """
    env, distributed = LaunchEnv.read(environ), initialized_distributed()
    if env.launch_is_named or distributed is None or distributed.get_world_size() == 1:
        # Ranks that are not connected still agree by the job's id, where there is one.
        identity = env.launch_id if env.launch_is_named or env.job_id else str(uuid.uuid4())
        return claim_attempt(root, window, rank, identity), identity
    choice: list[Any] = [None, str(uuid.uuid4())]
    if rank == 0:
        try:
            choice[0] = claim_attempt(root, window, rank, choice[1])
        except OSError as error:
            choice[0] = error
    distributed.broadcast_object_list(choice, src=0)
    attempt, identity = choice
    if isinstance(attempt, OSError):
        raise attempt
    return attempt, identity


def claim_attempt(root: Path, window: Window, rank: int, identity: str) -> int:
    """The first attempt that is free, or that this identity holds and this rank has not written to."""
    for attempt in itertools.count():
        folder = folder_name(window, attempt)
        holder = root / "manifest" / folder / "attempt.json"
        if not holder.exists() and any((root / kind / folder).exists() for kind in _CAPTURES):
            continue
        make_directory(holder.parent)
        if create_exclusively(holder, json.dumps({"held_by": identity})) or (
            _held_by(holder) == identity and not (holder.parent / f"rank-{rank}.json").exists()
        ):
            return attempt
    raise AssertionError("unreachable")


def give_up_attempt(manifest: Path) -> None:
    """Remove this rank's manifest of a window that will not be captured, and the attempt when no rank is left in it."""
    with contextlib.suppress(OSError):
        manifest.unlink()
        if not any(manifest.parent.glob("rank-*.json")):
            (manifest.parent / "attempt.json").unlink()
            manifest.parent.rmdir()


def _held_by(holder: Path) -> str | None:
    deadline = time.monotonic() + _WRITTEN_SECONDS
    with contextlib.suppress(OSError):
        while not holder.stat().st_size and time.monotonic() < deadline:
            time.sleep(0.05)
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return json.loads(holder.read_text(encoding="utf-8"))["held_by"]
    return None
