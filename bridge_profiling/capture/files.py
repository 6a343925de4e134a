"""Names of a capture's files, and the number of the attempt that names their folder.

A restart into the same directory never overwrites the files of an earlier attempt, so all ranks of an attempt must agree on
its number. Under Slurm they agree by the job's identity, which every rank reads from its environment. Elsewhere those that
capture agree through the store of torch.distributed when the hook opens. Not by a collective: it would block every rank where
the hook is opened on some of them only.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from bridge_profiling.capture.signals import raised_by_handler
from bridge_profiling.common.atomic import create_exclusively, make_directory
from bridge_profiling.common.errors import TrainingLogger, one_line
from bridge_profiling.common.launch_env import LaunchEnv, initialized_distributed
from bridge_profiling.settings.profiling import DEFAULT_MEMORY_SNAPSHOT_PATH, Window

logger = TrainingLogger(__name__)

Result = TypeVar("Result")

#: The folders of captures under the output directory. manifest/ also holds each attempt's holder.
_CAPTURES = ("torch", "nsys", "memory")

#: The longest name of a file.
_NAME_BYTES = 255

#: How long to wait for the content of attempt.json: without hard links it is written a moment after the file is created.
_WRITTEN_SECONDS = 5.0

#: How long ranks wait for each other's hooks to open.
_AGREE_SECONDS = 10.0

#: How long the store may take to answer in addition.
_ANSWER_SECONDS = 2.0


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


def choose_attempt(
    root: Path,
    window: Window,
    rank: int,
    environ: Mapping[str, str] = os.environ,
    *,
    ranks: Sequence[int] = (),
    world_size: int = 0,
) -> tuple[int, str]:
    """The number of this attempt (0 for the first capture of `window` into `root`, then 1, 2, …) and its holder's name.

    Ranks of a launch that the environment does not name agree through the store of torch.distributed, where that is initialized
    already; profiling communicates nowhere else. With the holder's name, later windows get their numbers without communication
    (`claim_attempt`).

    Args:
        root: where to write.
        window: the window.
        rank: this rank.
        environ: what names the launch.
        ranks: those that capture this window. They wait for each other, at most 10 s.
        world_size: number of ranks among which these are.
    """
    env, distributed = LaunchEnv.read(environ), initialized_distributed()
    # Ranks that cannot agree otherwise still do by the job's id, where there is one.
    identity, first = env.launch_id if env.launch_is_named or env.job_id else str(uuid.uuid4()), 0
    if not env.launch_is_named and distributed is not None and distributed.get_world_size() > 1:
        try:
            # Others are not in this process group, such as those of another Ray actor.
            peers = ranks if distributed.get_world_size() == world_size else ()
            store = distributed.distributed_c10d._get_default_store()
            first, identity = asked_in_time(
                _AGREE_SECONDS + _ANSWER_SECONDS, lambda: _agree(store, root, window, rank, {*peers, rank})
            )
        except Exception as error:
            if raised_by_handler(error):
                raise
            logger.warning("rank %d: the ranks cannot agree on a folder of window %s: %s", rank, window, one_line(error))
    return claim_attempt(root, window, rank, identity, first), identity


def asked_in_time(seconds: float, ask: Callable[[], Result]) -> Result:
    """The result of a call to a store of torch.distributed; TimeoutError if it takes longer.

    torch waits without a limit for a server that hangs or is stopped, whatever the store's timeout. Then the thread that made
    the call stays behind.
    """
    answer: futures.Future[Result] = futures.Future()

    def call() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    Thread(target=call, name="bridge_profiling store", daemon=True).start()
    if not futures.wait([answer], seconds).done:
        raise TimeoutError("the store of torch.distributed does not answer")
    return answer.result()


def _agree(store: Any, root: Path, window: Window, rank: int, ranks: set[int]) -> tuple[int, str]:
    """The number that is free for each rank, and the attempt's holder.

    Each rank stores the number that is free in its directory. The last one decides for all, or the first to run out of time. A
    rank that comes later finds the decision. No call here waits for a key: it would block the store for the training.
    """
    prefix = f"bridge_profiling/attempt/{window}"
    # A process may open several hooks for a window, and another process group may use the same store.
    prefix += f"/{store.add(f'{prefix}/opened-by-{rank}', 1)}"
    keys, decided = {one: f"{prefix}/rank-{one}" for one in sorted(ranks)}, f"{prefix}/decided"
    store.set(keys[rank], str(_free_attempt(root, window)))
    if store.add(f"{prefix}/arrived", 1) != len(ranks):
        _await_decision(store, decided, _AGREE_SECONDS)
        # One asks for the numbers of all: 1,000 ranks that do at once keep the store busy for a minute.
        if not store.check([decided]) and store.add(f"{prefix}/asks", 1) > 1:
            _await_decision(store, decided, _ANSWER_SECONDS / 2)
    if not store.check([decided]):
        numbers = {one: int(store.get(key)) for one, key in keys.items() if store.check([key])}
        missing = sorted(ranks - numbers.keys())
        choice = {"attempt": max(numbers.values()), "held_by": uuid.uuid4().hex, "missing": missing}
        store.compare_set(decided, "", json.dumps(choice))
    choice = json.loads(store.get(decided))
    silent = set(choice["missing"])
    if silent and rank == min(ranks - silent, default=rank):
        logger.warning(
            "rank(s) %s opened no ProfilingHook for window %s within %.0f s: the others do not wait for them."
            " Open it on every rank that profile_ranks names, with the same window",
            ", ".join(map(str, sorted(silent))), window, _AGREE_SECONDS,
        )  # fmt: skip
    return choice["attempt"], choice["held_by"]


def _await_decision(store: Any, decided: str, seconds: float) -> None:
    deadline, pause = time.monotonic() + seconds, 0.005
    while not store.check([decided]) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, 0.5)


def _free_attempt(root: Path, window: Window) -> int:
    """The first attempt that nobody holds, as far as this rank can see."""
    with contextlib.suppress(OSError):
        for attempt in itertools.count():
            folder = folder_name(window, attempt)
            if not (root / "manifest" / folder / "attempt.json").exists() and not _has_captures(root, folder):
                return attempt
    return 0


def _has_captures(root: Path, folder: str) -> bool:
    return any((root / kind / folder).exists() for kind in _CAPTURES)


def claim_attempt(root: Path, window: Window, rank: int, identity: str, first: int = 0) -> int:
    """The first attempt from `first` on that is free, or that this identity holds and this rank has not written to."""
    for attempt in itertools.count(first):
        folder = folder_name(window, attempt)
        holder = root / "manifest" / folder / "attempt.json"
        if not holder.exists() and _has_captures(root, folder):
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
