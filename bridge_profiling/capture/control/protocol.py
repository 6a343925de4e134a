"""Messages between `bridge-profiling trigger` and a running job, and the directory that carries them.

Each is a small JSON file that is either complete or missing:

    on-demand/progress.json            rank 0, about once a second: the job's status
    on-demand/request.json             a request that rank 0 has not read yet; created by a link, so it never replaces another
    on-demand/lease-ID.json            a client that waits for this request: who it is, renewed while it runs
    on-demand/accepted/ID.json         rank 0: an accepted request, with its iterations and ranks
    on-demand/answers/ID/rank-N.json   each profiled rank's answer to it
    on-demand/refused/ID.json          rank 0: a request that was refused, and why
    on-demand/done/ID.json             rank 0: a capture that is over, with the ranks' answers

Only rank 0 writes, moves and removes files that all ranks read, so ranks cannot disagree. A message counts only if the rank's
user, the directory's owner or root wrote it, and if its values are those that we would write. Imports no torch.
"""

from __future__ import annotations

import contextlib
import grp
import json
import os
import pwd
import re
import shutil
import stat
import tempfile
import uuid
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

from bridge_profiling.atomic import create_exclusively, make_directory, read_trusted, trusted_users, write_json
from bridge_profiling.capture.files import folder_name
from bridge_profiling.config import MAX_ITERATION, PROFILERS, ProfilingConfig, Window, check_exclusive
from bridge_profiling.errors import CaptureError, ProfilingConfigError, did_you_mean, require
from bridge_profiling.layout import normalize_ranks
from bridge_profiling.printable import shell_path
from bridge_profiling.typed_json import read_typed

#: Settings that a request may change.
SETTINGS = (
    *("record_shapes", "pytorch_profiler_collect_shapes", "pytorch_profiler_collect_callstack", "nvtx_ranges"),
    *("pytorch_profiler_collect_chakra", "pytorch_profiler_profile_memory", "pytorch_profiler_device_only"),
    "pytorch_profiler_warmup",
)

#: A longer trace fills disks, and no viewer opens it.
MAX_ITERATIONS = 1000

#: Accepted requests that are open at a time: a rank reads all of them at each poll.
MAX_OPEN = 16

#: A request has a few hundred bytes. Other messages list ranks and their answers.
_MAX_REQUEST_BYTES, _MAX_BYTES = 1 << 16, 1 << 26

_EXAMPLE = 'Write for example {"iterations": 3, "start": 120, "ranks": [0, 1], "profilers": ["torch"]}'
#: A folder's number, and a job's size.
_MAX_ATTEMPT, _MAX_RANKS = 1_000_000, 10_000_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_Message = TypeVar("_Message")


def new_id() -> str:
    """A name for a request or a run: the time, and random digits that distinguish two in the same second."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}"


@dataclass(frozen=True, kw_only=True)
class CaptureRequest:
    """A capture requested from a running job. Values that no job can satisfy are refused on construction.

    Raises:
        ProfilingConfigError: a value is out of bounds, or the profilers exclude each other.
    """

    iterations: int  # how many to capture
    start: int | None = None  # the first one; None for the nearest that every rank can receive in time
    ranks: list[int] | str | None = None  # global ranks, `all` or `pp`; None for the job's own `profile_ranks`
    profilers: list[str] | None = None  # from PROFILERS; None for those the job was launched with, or torch
    # Fields of the section `profiling`, from SETTINGS, over those of the job.
    settings: dict[str, Any] = field(default_factory=dict)
    kind: Literal["request", "slow_iteration"] = "request"  # `slow_iteration` if a rank requests it by itself
    reason: str | None = None  # why, for the manifest
    requested_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))  # UTC, ISO 8601
    requested_by: str | None = None  # user and host
    run: str | None = None  # the run of the job that it is meant for; None for any
    leased: bool = False  # whether it is withdrawn when its client ends: see `Lease`
    id: str = field(default_factory=new_id)  # its name

    def __post_init__(self) -> None:
        require(
            1 <= self.iterations <= MAX_ITERATIONS,
            f"iterations={self.iterations} is not a number from 1 to {MAX_ITERATIONS}",
            instead="Type a small number, for example --iterations 3",
        )
        require(
            self.start is None or 0 <= self.start < 1 << 60,
            f"start={self.start} is not an iteration: they are counted from 0",
            instead="Leave it out to capture the nearest iterations possible",
        )
        for name in ("reason", "requested_by", "run"):
            require(len(getattr(self, name) or "") <= 1000, f"{name} is longer than 1000 characters")
        require(_NAME.fullmatch(self.id), f"id={self.id!r} is not a valid name", instead="Leave id out")
        if self.ranks is not None:
            object.__setattr__(self, "ranks", normalize_ranks(self.ranks, name="--ranks"))
        if self.profilers is not None:
            require(
                self.profilers and PROFILERS.keys() >= set(self.profilers),
                f"profilers={self.profilers} cannot start on demand",
                instead=did_you_mean(next((name for name in self.profilers if name not in PROFILERS), ""), PROFILERS),
            )
            check_exclusive(use_nsys_profiler="nsys" in self.profilers, use_pytorch_profiler="torch" in self.profilers)
            object.__setattr__(self, "profilers", [name for name in PROFILERS if name in self.profilers])
        for name, value in self.settings.items():
            require(
                name in SETTINGS,
                f"the setting {name!r} cannot be changed by a request",
                why="a running job takes over its other settings only when it starts",
                instead=did_you_mean(name, SETTINGS),
            )
            expected = type(getattr(ProfilingConfig, name))
            is_valid = type(value) is expected and (expected is bool or value >= 1)
            require(
                is_valid, f"the setting {name}={value!r} is not {'true or false' if expected is bool else 'a positive integer'}"
            )
        # All but the window, which the job decides.
        ProfilingConfig(**self.settings).finalize()


@dataclass(frozen=True, kw_only=True)
class AcceptedCapture(CaptureRequest):
    """A request that rank 0 accepted, with everything decided; every listed rank captures iterations `start <= i < end`.

    `launch` identifies the ranks of one launch, `run` this run of the job unlike its restarts, and `attempt` is the folder's
    number.
    """

    start: int = field()
    end: int
    ranks: list[int] = field()
    profilers: list[str] = field()
    launch: str
    run: str = field()
    attempt: int
    accepted_at_iteration: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.end == self.start + self.iterations, f"the window {self.start}:{self.end} has not {self.iterations} iterations"
        )
        require(0 <= self.attempt < _MAX_ATTEMPT, f"attempt={self.attempt} is not the number of a folder")
        require(self.ranks and self.profilers, "it names no rank or no profiler")
        require(max(len(self.run), len(self.launch)) <= 1000, "run or launch is longer than 1000 characters")

    @property
    def window(self) -> Window:
        """The iterations to capture."""
        return Window(self.start, self.end)

    @property
    def folder(self) -> str:
        """Name of the capture's folder."""
        return folder_name(self.window, self.attempt)


@dataclass(frozen=True, kw_only=True)
class RankAnswer:
    """One rank's answer to an accepted capture, with the iteration it was in; `reason` is why it refuses."""

    rank: int
    status: Literal["armed", "refused"]
    reason: str | None = None
    iteration: int | None = None


@dataclass(frozen=True, kw_only=True)
class RefusedRequest:
    """A request that rank 0 refused, as far as it could be read, and why."""

    refused: str
    request: CaptureRequest | str


@dataclass(frozen=True, kw_only=True)
class DoneCapture(AcceptedCapture):
    """An accepted capture that is over: how it ended, and the answers by rank."""

    ended: str
    answers: dict[str, RankAnswer]
    withdrawn: bool = False  # before its window began: ranks drop it


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Says that a request is still wanted. Its client renews it while it waits, and removes it when it is ended."""

    pid: int  # the client's process id
    pid_space: str | None  # the machine and container in which `pid` is valid; None if unknown
    renewed: int = 0  # how often it was renewed
    kept: bool = False  # whether the client has its answer: the request no longer depends on it

    def __post_init__(self) -> None:
        require(1 <= self.pid < 1 << 31 and len(self.pid_space or "") <= 1000, "pid or pid_space is out of bounds")


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """The status of a running job, published by rank 0."""

    run: str  # identifies this run of the job, unlike its restarts
    launch: str  # identifies the ranks of one launch
    job_id: str | None  # the launcher's job id
    host: str  # rank 0's host
    pid: int  # rank 0's process id
    pid_space: str | None  # the machine and container in which `pid` is valid; None if unknown
    poll_seconds: float  # how often ranks look for messages
    world_size: int  # number of ranks
    pipeline_ranks: list[int]  # one rank per pipeline stage
    profile_ranks: list[int] | str  # ranks captured unless a request names others
    profilers: list[str]  # profilers used unless a request names others
    train_iters: int | None  # iterations the training runs, if known
    warm_up: int = 1  # iterations before a window in which the torch profiler warms up, unless a request says otherwise
    iteration: int | None = None  # the iteration that rank 0 is in; None before its first
    completed: int = 0  # number of iterations timed
    fastest_ns: int | None = None  # the shortest of the last ten iterations, the loop's waits between them included
    median_ns: int | None = None  # the median of the last fifty, likewise
    # `[start, end]` of the windows it was launched with that are not over.
    windows: list[list[int]] = field(default_factory=list)
    records_memory: bool = False  # whether a memory history is being recorded for one of them
    cuda: bool = False  # whether rank 0 uses a CUDA device
    under_nsys: bool = False  # whether nsys runs around the ranks, or should
    nsys_captures_left: int = 0  # how many more captures that nsys can make
    slow_captures_left: int = 0  # how many more slow iterations the job captures
    open: list[AcceptedCapture] = field(default_factory=list)  # the accepted captures that are not over
    ended: str | None = None  # how the training ended

    def __post_init__(self) -> None:
        for name in ("run", "launch", "job_id", "host", "pid_space"):
            require(len(getattr(self, name) or "") <= 1000, f"{name} is longer than 1000 characters")
        for name, least, most in (
            ("pid", 1, 1 << 31), ("world_size", 1, _MAX_RANKS), ("iteration", 0, MAX_ITERATION),
            ("completed", 0, MAX_ITERATION), ("fastest_ns", 0, 1 << 63), ("median_ns", 0, 1 << 63),
            ("train_iters", 0, MAX_ITERATION), ("warm_up", 1, 1001),
        ):  # fmt: skip
            value = getattr(self, name)
            require(value is None or least <= value < most, f"{name}={value} is out of bounds")
        require(0 < self.poll_seconds <= 3600, f"poll_seconds={self.poll_seconds} is out of bounds")
        require(all(0 <= rank < self.world_size for rank in self.pipeline_ranks), "pipeline_ranks are outside the world")
        normalize_ranks(self.profile_ranks)
        require(self.profilers and PROFILERS.keys() >= set(self.profilers), f"profilers={self.profilers} are not known")
        for window in self.windows:
            require(len(window) == 2 and 0 <= window[0] < window[1] < MAX_ITERATION, f"{window} is not a window")


@dataclass(frozen=True)
class RequestDirectory:
    """The request directory of one job, below its output directory."""

    root: Path

    @property
    def path(self) -> Path:
        """`<output_dir>/on-demand`."""
        return self.root / "on-demand"

    def check(self) -> None:
        """Raise CaptureError where everyone could send messages, or replace them."""
        for place in (self.root, *self.root.parents):
            mode = place.stat().st_mode
            # In other directories with the sticky bit, such as /tmp, nobody can replace what belongs to another user.
            if mode & stat.S_IWOTH and (place == self.root or not mode & stat.S_ISVTX):
                raise CaptureError(f"every user of the machine can write to {place}; type `chmod o-w {shell_path(place)}`")
        found, users = self.path.lstat(), trusted_users(self.root)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in users or found.st_mode & stat.S_IWOTH:
            raise CaptureError(
                f"{self.path} is a link, belongs to user {found.st_uid}, or can be written by everyone; remove it"
            )

    def open(self) -> None:
        """Create the directory."""
        make_directory(self.path)

    def writing_group(self) -> str | None:
        """The group whose members can send messages, too; None if there is none but the owner's own."""
        for place in (self.root, self.path):
            found = place.stat()
            if found.st_mode & stat.S_IWGRP:
                user, group = _user_name(found.st_uid), _group_name(found.st_gid)
                if user != group:
                    return group
        return None

    @property
    def _users(self) -> set[int]:
        """The users whose messages count. `check` makes sure of the owner of the directory itself."""
        return trusted_users(self.root) | trusted_users(self.path)

    def status(self) -> JobStatus | None:
        """The job's status; None if it cannot be read."""
        return self._read("progress.json", JobStatus)

    def accepted(self) -> list[AcceptedCapture]:
        """The captures that are open, by their iterations."""
        folder, users = self.path / "accepted", self._users
        found = {name: _message(folder / name, AcceptedCapture, users) for name in _names(folder)[:MAX_OPEN]}
        named = [capture for name, capture in found.items() if capture is not None and name == f"{capture.id}.json"]
        return sorted(named, key=lambda capture: capture.start)

    def done(self, request_id: str) -> DoneCapture | None:
        """A capture that is over."""
        return self._read(f"done/{request_id}.json", DoneCapture)

    def capture(self, request_id: str) -> AcceptedCapture | None:
        """The capture that a request led to, open or over; None if it was not accepted."""
        return self._read(f"accepted/{request_id}.json", AcceptedCapture) or self.done(request_id)

    def lease(self, request_id: str) -> Lease | None:
        """The lease of a request's client."""
        return self._read(f"lease-{request_id}.json", Lease)

    def has_lease(self, request_id: str) -> bool:
        """Whether there is a lease, even if it cannot be read, as without file descriptors."""
        return os.path.lexists(self.path / f"lease-{request_id}.json")

    def end_lease(self, request_id: str) -> None:
        """Remove a lease."""
        with contextlib.suppress(OSError):
            (self.path / f"lease-{request_id}.json").unlink()

    def refusal(self, request_id: str) -> RefusedRequest | None:
        """A request that was refused."""
        return self._read(f"refused/{request_id}.json", RefusedRequest)

    def answers(self, request_id: str) -> dict[int, RankAnswer]:
        """The ranks' answers to a capture, by rank."""
        folder = self.path / "answers" / request_id
        users = self._users
        answers = [_message(folder / name, RankAnswer, users) for name in _names(folder) if name.startswith("rank-")]
        # After them: when a capture is over, rank 0 moves the answers there.
        done = self.done(request_id)
        found = done.answers.values() if done is not None else filter(None, answers)
        return {answer.rank: answer for answer in sorted(found, key=lambda answer: answer.rank)}

    # -- the client ----------------------------------------------------------------------------------------------------

    def submit(self, request: CaptureRequest) -> bool:
        """Create the request unless there is one; return whether it was created."""
        return create_exclusively(self.path / "request.json", json.dumps(asdict(request), indent=1) + "\n")

    def withdraw(self, request_id: str) -> bool:
        """Remove a request that rank 0 has not taken yet; whether it was removed."""
        pending = self._read("request.json", CaptureRequest)
        # One with another name is another user's, written after rank 0 took this one.
        if pending is not None and pending.id == request_id:
            with contextlib.suppress(FileNotFoundError):
                (self.path / "request.json").unlink()
                return True
        return False

    def seconds_since_update(self) -> float:
        """Age of the job's status by the file system's clock, as two machines' clocks may differ."""
        with tempfile.TemporaryFile(dir=self.path) as probe:
            return os.fstat(probe.fileno()).st_mtime - (self.path / "progress.json").stat().st_mtime

    # -- the job -------------------------------------------------------------------------------------------------------

    def write(self, name: str, message: JobStatus | AcceptedCapture | RankAnswer | RefusedRequest | Lease) -> None:
        """Write a message to a file of this name."""
        write_json(self.path / name, asdict(message))

    def pending(self) -> str | None:
        """Text of the request that rank 0 has not taken; None if there is none."""
        path = self.path / "request.json"
        return _text(path, _MAX_REQUEST_BYTES, self._users)[0] if path.name in _names(self.path) else None

    def take(self) -> tuple[str, str] | None:
        """Remove the pending request, so that it is neither withdrawn nor read again; its text, and why there is none."""
        taken = self.path / f".taken-{uuid.uuid4().hex}.json"
        try:
            os.replace(self.path / "request.json", taken)
        except OSError:
            return None
        text, problem = _text(taken, _MAX_REQUEST_BYTES, self._users)
        with contextlib.suppress(IsADirectoryError):
            taken.unlink()
        shutil.rmtree(taken, ignore_errors=True)  # only now: it would open a pipe, and block
        return text, problem.replace(taken.name, "request.json")

    def knows(self, request_id: str) -> bool:
        """Whether an earlier request has this name."""
        return self.capture(request_id) is not None or self.refusal(request_id) is not None

    def close(self, capture: AcceptedCapture, ended: str, *, withdrawn: bool = False) -> None:
        """Record how an accepted capture ended."""
        answers = {str(rank): answer for rank, answer in self.answers(capture.id).items()}
        done = DoneCapture(**vars(capture), ended=ended, answers=answers, withdrawn=withdrawn)
        self.write(f"done/{capture.id}.json", done)
        (self.path / "accepted" / f"{capture.id}.json").unlink(missing_ok=True)
        self.end_lease(capture.id)
        shutil.rmtree(self.path / "answers" / capture.id, ignore_errors=True)

    def _read(self, name: str, as_type: type[_Message]) -> _Message | None:
        path = self.path / name
        return _message(path, as_type, self._users) if path.name in _names(path.parent) else None


def parse_request(text: str) -> CaptureRequest:
    """Read a request; raises ProfilingConfigError unless it is a complete JSON object with known keys and valid values."""
    require(text.strip(), "the request is empty, or not a regular text file of at most 64 KiB", instead=_EXAMPLE)
    try:
        content = json.loads(text)
        if isinstance(content, dict):
            known = [each.name for each in fields(CaptureRequest)]
            unknown = [key for key in content if key not in known]
            why = f"its keys are {', '.join(known)}"
            instead = did_you_mean(unknown[0], known) if unknown else ""
            require(not unknown, f"the request has unknown keys {unknown}", why=why, instead=instead)
            for name, item in (("ranks", int), ("profilers", str)):
                if type(content.get(name)) is item:  # a single one needs no list
                    content[name] = [content[name]]
        return read_typed(content, CaptureRequest, "request")
    except (ValueError, RecursionError) as error:
        if isinstance(error, ProfilingConfigError):
            raise
        raise ProfilingConfigError("the request cannot be read", why=str(error), instead=_EXAMPLE) from error


def _message(path: Path, as_type: type[_Message], users: set[int]) -> _Message | None:
    """The message in a file; None if it is missing or damaged, or a stranger wrote it."""
    with contextlib.suppress(ValueError, RecursionError):
        return read_typed(json.loads(_text(path, _MAX_BYTES, users)[0]), as_type, path.name)
    return None


def _text(path: Path, max_bytes: int, users: set[int]) -> tuple[str, str]:
    """A file's text, and the reason why there is none."""
    try:
        return read_trusted(path, max_bytes, users).decode(), ""
    except UnicodeDecodeError as error:
        return "", f"{path.name} is not a regular text file: {error}"
    except OSError as error:
        return "", str(error)


def _user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _group_name(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return f"group {number}"


def _names(folder: Path) -> list[str]:
    """The files in a folder. Only a listing makes an NFS client ask its server for new files."""
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return []
