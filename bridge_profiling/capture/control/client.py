"""Asks a running job for a capture, from the desk: finds its directory, files the request, and hears what becomes of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bridge_profiling.capture.control.mailbox import ACCEPTED, PROGRESS, Mailbox
from bridge_profiling.capture.control.planning import JobState, admit, open_request
from bridge_profiling.capture.control.request import CaptureRequest
from bridge_profiling.capture.files import folder_name
from bridge_profiling.config import DEFAULT_OUTPUT_DIR, Window
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.processes import pid_space

#: A job that has not been heard of for so many of its own looks, and seconds, does not answer.
_SILENT_LOOKS, _SILENT_SECONDS = 10, 30.0

_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Asked:
    """What became of a request that was not refused.

    Attributes:
        request: as it was made.
        state: of the job, when it was made.
        accepted: what rank 0 decided; None where nobody waited for that.
        answers: of the ranks that are to be profiled, by rank.
    """

    request: CaptureRequest
    state: JobState
    accepted: dict[str, Any] | None = None
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def ranks(self) -> list[int]:
        """The ranks that are to be profiled."""
        return list(self.accepted["ranks"]) if self.accepted is not None else []

    @property
    def silent(self) -> list[int]:
        """Those that have not answered."""
        return [rank for rank in self.ranks if rank not in self.answers]

    @property
    def refusing(self) -> dict[int, str]:
        """Those that cannot do it, and why."""
        return {rank: str(one["reason"]) for rank, one in sorted(self.answers.items()) if one.get("status") != "armed"}

    @property
    def folder(self) -> str:
        """The name of the capture's folder."""
        assert self.accepted is not None
        return folder_name(Window(self.accepted["start"], self.accepted["end"]), self.accepted["attempt"])


def mailbox_of(run: Path) -> Mailbox:
    """Where a job listens.

    Args:
        run: its output directory, or the directory of the job that holds it.

    Raises:
        ProfilingConfigError: no job has ever listened there.
    """
    for root in (run, run / DEFAULT_OUTPUT_DIR):
        if (root / "on-demand" / PROGRESS).is_file():
            return Mailbox(root.absolute())
    raise ProfilingConfigError(
        f"no job listens in {run}" if run.is_dir() else f"{run} is no directory",
        why="a job that can be asked for captures writes on-demand/progress.json into its output directory",
        instead="Name the output directory of a running job; one that was launched without a profiler listens with"
        " profiling.output_dir=DIRECTORY, and none does with profiling.on_demand=false",
    )


def ask(mailbox: Mailbox, request: CaptureRequest, *, wait: float | None = None) -> Asked:
    """Ask for a capture.

    Args:
        mailbox: of the job.
        request: a checked one.
        wait: seconds to wait for an answer; 0 waits for none, and None as long as a job that runs needs.

    Raises:
        ProfilingConfigError: it is refused, by what the job says of itself or by the job.
        KeyboardInterrupt: Ctrl-C; its text says what becomes of the request.
    """
    state = state_of(mailbox)
    if state.ended is None:
        _check_alive(mailbox, state)
        if state.open is not None:
            raise open_request(state)
    request = replace(request, run=state.run)
    admit(request, state)
    try:
        if not mailbox.file(request.as_json()):
            raise open_request(state)
    except OSError as error:
        raise ProfilingConfigError(
            f"{mailbox.directory} cannot be written", why=str(error), instead="Ask as the user who runs the job"
        ) from error
    patience = 4 * state.poll_seconds + 10 if wait is None else wait
    asked = Asked(request, state)
    if patience <= 0:
        return asked
    try:
        return _answered(mailbox, _accepted(mailbox, asked, patience), patience)
    except KeyboardInterrupt:
        # Whoever gives up waiting for it does not want it carried out later.
        taken_back = mailbox.withdraw(request.id)
        raise KeyboardInterrupt(
            "the request is withdrawn" if taken_back else "the job has the request already, and carries it out if it can"
        ) from None


def state_of(mailbox: Mailbox) -> JobState:
    """What a job says of itself.

    Raises:
        ProfilingConfigError: nothing that can be read.
    """
    mailbox.names()
    try:
        return JobState.from_json(mailbox.read(PROGRESS))
    except (KeyError, TypeError) as error:
        raise ProfilingConfigError(
            f"{mailbox.directory / PROGRESS} does not tell where the job is",
            why="it was written by another version of bridge_profiling, or is damaged",
            instead="Ask with the version that the job runs with",
        ) from error


def _check_alive(mailbox: Mailbox, state: JobState) -> None:
    """Refuse a job that has gone without a word, or hangs."""
    if state.pid_space is not None and state.pid_space == pid_space() and not _runs(state.pid):
        raise ProfilingConfigError(
            "the job has ended without a word",
            why=f"its rank 0, process {state.pid}, is gone",
            instead="Ask a job that is running",
        )
    try:
        age = mailbox.age_of_progress()
    except OSError as error:
        raise ProfilingConfigError(
            f"{mailbox.directory} cannot be written", why=str(error), instead="Ask as the user who runs the job"
        ) from error
    if age is None or age > max(_SILENT_LOOKS * state.poll_seconds, _SILENT_SECONDS):
        heard = "never" if age is None else f"{age:.0f} s ago"
        raise ProfilingConfigError(
            f"the job does not answer: it was heard of {heard}",
            why=f"rank 0 on {state.host}, process {state.pid}, looks every {state.poll_seconds:g} s when it runs",
            instead="See whether the job still runs, and ask again",
        )


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    try:
        # A process that has ended and that nobody has waited for can still be signalled.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return True


def _accepted(mailbox: Mailbox, asked: Asked, patience: float) -> Asked:
    id_ = asked.request.id
    for _ in _until(patience):
        found = _decision(mailbox, id_)
        if found is not None:
            return replace(asked, accepted=found)
    if mailbox.withdraw(id_):
        raise ProfilingConfigError(
            f"the job did not read the request within {patience:g} s",
            why=f"its rank 0 looks every {asked.state.poll_seconds:g} s, or is busy, or hangs; the request is withdrawn",
            instead="See whether the job still runs, and ask again with a longer --wait",
        )
    # Taken in that very moment.
    for _ in _until(10.0):
        found = _decision(mailbox, id_)
        if found is not None:
            return replace(asked, accepted=found)
    raise ProfilingConfigError("the job took the request and has not decided", instead="See whether the job still runs")


def _decision(mailbox: Mailbox, id_: str) -> dict[str, Any] | None:
    """What rank 0 decided, if it has.

    Raises:
        ProfilingConfigError: it refused.
    """
    mailbox.names()
    refusal = mailbox.refusal(id_)
    if refusal is not None:
        raise ProfilingConfigError(refusal)
    for name in (ACCEPTED, f"done/{id_}.json"):
        found = mailbox.read(name)
        if found.get("id") == id_:
            return found
    return None


def _answered(mailbox: Mailbox, asked: Asked, patience: float) -> Asked:
    """Wait until every rank that is to be profiled has answered."""
    for _ in _until(patience):
        # Once the iterations are past, rank 0 has put the answers together.
        done = mailbox.read(f"done/{asked.request.id}.json").get("answers")
        answers = {int(rank): one for rank, one in done.items()} if done else mailbox.answers(asked.request.id)
        asked = replace(asked, answers=answers)
        if not asked.silent or done:
            break
    return asked


def _until(seconds: float) -> Iterator[None]:
    deadline = time.monotonic() + seconds
    yield
    while time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        yield
