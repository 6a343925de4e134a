"""The directory that carries messages between `bridge-profiling trigger` and a running job.

Each is a small JSON file that is either complete or missing:

    on-demand/progress.json            rank 0, about once a second: the job's status
    on-demand/request.json             a request that rank 0 has not read yet; created by a link, so it never replaces another
    on-demand/withdrawn/ID.json        a client that no longer waits for this request, after rank 0 has read it
    on-demand/accepted/ID.json         rank 0: an accepted request, with its iterations and ranks
    on-demand/answers/ID/rank-N.json   each profiled rank's answer to it
    on-demand/refused/ID.json          rank 0: a request that was refused, and why
    on-demand/done/ID.json             rank 0: a capture that is over, with the ranks' answers

Only rank 0 writes, moves and removes files that all ranks read, so ranks cannot disagree. A message counts only if the rank's
user, the directory's owner or root wrote it.
"""

from __future__ import annotations

import contextlib
import grp
import json
import os
import pwd
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from bridge_profiling.capture.control.messages import (
    MAX_OPEN,
    AcceptedCapture,
    CaptureRequest,
    DoneCapture,
    JobStatus,
    RankAnswer,
    RefusedRequest,
)
from bridge_profiling.common.atomic import create_exclusively, make_directory, read_trusted, trusted_users, write_json
from bridge_profiling.common.errors import CaptureError
from bridge_profiling.common.printable import shell_path
from bridge_profiling.common.typed_json import read_typed

#: A request has a few hundred bytes. Other messages list ranks and their answers.
_MAX_REQUEST_BYTES, _MAX_BYTES = 1 << 16, 1 << 26

_Message = TypeVar("_Message")


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
        """Create the directory, and the one in which clients write, so that both belong to the job's user."""
        for folder in (self.path, self.path / "withdrawn"):
            make_directory(folder)

    def writing_group(self) -> str | None:
        """The group whose members can send messages, too; None if there is none but the owner's own."""
        for place in (self.root, self.path):
            found = place.stat()
            user, group = _name(pwd.getpwuid, found.st_uid, "user"), _name(grp.getgrgid, found.st_gid, "group")
            if found.st_mode & stat.S_IWGRP and user != group:
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

    def is_called_off(self, request_id: str) -> bool:
        """Whether the client no longer wants a request that rank 0 has taken."""
        return self._read(f"withdrawn/{request_id}.json", str) == request_id

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

    def call_off(self, request_id: str) -> None:
        """Ask rank 0 to drop a request that it has taken."""
        with contextlib.suppress(OSError):
            write_json(self.path / "withdrawn" / f"{request_id}.json", request_id)

    def seconds_since_update(self) -> float:
        """Age of the job's status by the file system's clock, as two machines' clocks may differ."""
        with tempfile.TemporaryFile(dir=self.path) as probe:
            return os.fstat(probe.fileno()).st_mtime - (self.path / "progress.json").stat().st_mtime

    # -- the job -------------------------------------------------------------------------------------------------------

    def write(self, name: str, message: JobStatus | AcceptedCapture | RankAnswer | RefusedRequest) -> None:
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

    def forget_call_off(self, request_id: str) -> None:
        """Remove what the client wrote, once the request is refused or over."""
        with contextlib.suppress(OSError):
            (self.path / "withdrawn" / f"{request_id}.json").unlink()

    def knows(self, request_id: str) -> bool:
        """Whether an earlier request has this name."""
        return self.capture(request_id) is not None or self.refusal(request_id) is not None

    def close(self, capture: AcceptedCapture, ended: str, *, withdrawn: bool = False) -> None:
        """Record how an accepted capture ended."""
        answers = {str(rank): answer for rank, answer in self.answers(capture.id).items()}
        done = DoneCapture(**vars(capture), ended=ended, answers=answers, withdrawn=withdrawn)
        self.write(f"done/{capture.id}.json", done)
        (self.path / "accepted" / f"{capture.id}.json").unlink(missing_ok=True)
        self.forget_call_off(capture.id)
        shutil.rmtree(self.path / "answers" / capture.id, ignore_errors=True)

    def _read(self, name: str, as_type: type[_Message]) -> _Message | None:
        path = self.path / name
        return _message(path, as_type, self._users) if path.name in _names(path.parent) else None


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


def _name(look_up: Callable[[int], Any], number: int, kind: str) -> str:
    try:
        return look_up(number)[0]
    except KeyError:
        return f"{kind} {number}"


def _names(folder: Path) -> list[str]:
    """The files in a folder. Only a listing makes an NFS client ask its server for new files."""
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return []
