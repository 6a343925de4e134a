"""The directory by which a running job is asked for a capture, and answers: small JSON files, each whole or not there.

    on-demand/progress.json       rank 0: where the job is, what it can do; about once a second
    on-demand/request.json        one request that rank 0 has not read yet; whoever makes it, makes it by a link, so
                                  that it never takes another's place
    on-demand/accepted.json       rank 0: the request that was accepted, and for which iterations and ranks
    on-demand/answers/ID/rank-N.json   what a rank that is to be profiled says to that
    on-demand/refused/ID.json     a request that was not accepted, and why
    on-demand/done/ID.json        a request whose iterations are past, and what the ranks said

Only rank 0 writes, moves and removes what all ranks read, so no two of them can disagree. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge_profiling.atomic import create_exclusively, write_json

FOLDER = "on-demand"

PROGRESS, REQUEST, ACCEPTED = "progress.json", "request.json", "accepted.json"

#: A request is a few hundred bytes; whatever is longer is none.
_MAX_BYTES = 1 << 16


@dataclass(frozen=True)
class Mailbox:
    """The directory of one job.

    Args:
        root: the job's output directory.
    """

    root: Path

    @property
    def directory(self) -> Path:
        """`<output_dir>/on-demand`."""
        return self.root / FOLDER

    def names(self) -> set[str]:
        """What lies in it. A listing and not a look at one file: only that makes NFS ask its server."""
        try:
            return set(os.listdir(self.directory))
        except OSError:
            return set()

    # -- at the desk -------------------------------------------------------------------------------------------------

    def read(self, name: str) -> dict[str, Any]:
        """What a file of it holds; empty while it is not there, or no JSON."""
        with contextlib.suppress(OSError, ValueError):
            content = json.loads((self.directory / name).read_text(encoding="utf-8"))
            return content if isinstance(content, dict) else {}
        return {}

    def file(self, request: Mapping[str, object]) -> bool:
        """Put a request where rank 0 looks, unless there is one.

        Returns:
            Whether it lies there now.

        Raises:
            OSError: nothing can be written there.
        """
        return create_exclusively(self.directory / REQUEST, json.dumps(request, indent=1) + "\n")

    def withdraw(self, id_: str) -> bool:
        """Take a request back that rank 0 has not taken yet; whether that was so."""
        if self.read(REQUEST).get("id") != id_:
            return False  # rank 0 has taken it, and what lies there now is somebody else's
        taken = self.directory / f".withdrawn.{id_}"
        try:
            os.rename(self.directory / REQUEST, taken)
        except FileNotFoundError:
            return False
        taken.unlink()
        return True

    def age_of_progress(self) -> float | None:
        """Seconds since the job was heard of last, by the file system's own clock; None where it never was.

        Raises:
            OSError: nothing can be written there.
        """
        probe = self.directory / f".clock.{os.getpid()}.{uuid.uuid4().hex}.tmp"
        probe.touch()
        try:
            # Both times are the file system's: clocks of two machines may be minutes apart.
            return probe.stat().st_mtime - (self.directory / PROGRESS).stat().st_mtime
        except FileNotFoundError:
            return None
        finally:
            probe.unlink(missing_ok=True)

    def refusal(self, id_: str) -> str | None:
        """Why a request was not accepted; None where it was not refused."""
        return self.read(f"refused/{id_}.json").get("refused")

    def answers(self, id_: str) -> dict[int, dict[str, Any]]:
        """What ranks say to an accepted request."""
        found = {}
        for path in (self.directory / "answers" / id_).glob("rank-*.json"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                answer = json.loads(path.read_text(encoding="utf-8"))
                found[int(answer["rank"])] = answer
        return found

    # -- in the job --------------------------------------------------------------------------------------------------

    def write(self, name: str, content: Mapping[str, object]) -> None:
        """Write a file of it, whole.

        Raises:
            OSError: it cannot be written.
        """
        write_json(self.directory / name, content)

    def look(self) -> tuple[object, str | None]:
        """The request that lies there: what changes when it is written on, and its text; None where that is unreadable."""
        path = self.directory / REQUEST
        try:
            found = path.stat(follow_symlinks=False)
        except OSError:
            return None, None
        return (found.st_ino, found.st_size, found.st_mtime_ns), _text(path)

    def take(self) -> str | None:
        """Take the request away, so that it can be neither withdrawn nor read twice; its text."""
        taken = self.directory / ".taken.json"
        try:
            os.replace(self.directory / REQUEST, taken)
        except OSError:
            return None
        try:
            return _text(taken) or ""
        finally:
            _remove(taken)

    def knows(self, id_: str) -> bool:
        """Whether a request of that name was done or refused."""
        return any((self.directory / folder / f"{id_}.json").exists() for folder in ("done", "refused"))

    def refuse(self, id_: str, text: object, reason: str) -> None:
        """Lay a request aside with the reason.

        Args:
            id_: its name.
            text: what it asked for, as far as it could be read.
            reason: why it is refused.
        """
        self.write(f"refused/{id_}.json", {"refused": reason, "request": text})

    def answer(self, id_: str, rank: int, **content: object) -> None:
        """Say as one rank what becomes of an accepted request."""
        self.write(f"answers/{id_}/rank-{rank}.json", {"rank": rank, **content})

    def close(self, accepted: Mapping[str, Any], how: str) -> None:
        """An accepted request is over: room for the next.

        Args:
            accepted: what `accepted.json` holds.
            how: what became of it.
        """
        id_ = str(accepted["id"])
        answers = {str(rank): answer for rank, answer in sorted(self.answers(id_).items())}
        self.write(f"done/{id_}.json", {**accepted, "ended": how, "answers": answers})
        (self.directory / ACCEPTED).unlink(missing_ok=True)
        shutil.rmtree(self.directory / "answers" / id_, ignore_errors=True)


def _text(path: Path) -> str | None:
    """What a file holds; None for what is no plain file, which might be waited for for ever, too long, or no text."""
    try:
        found = path.stat(follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_BYTES:
            return None
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
