"""Requests a capture from a running job, from any machine that sees its output directory: `bridge-profiling trigger`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from bridge_profiling.capture.control.directory import RequestDirectory
from bridge_profiling.capture.control.messages import AcceptedCapture, CaptureRequest, DoneCapture, JobStatus, RankAnswer
from bridge_profiling.capture.control.planning import plan_capture
from bridge_profiling.common.errors import CaptureError, ProfilingConfigError, TraceError, require
from bridge_profiling.common.processes import is_running, pid_space
from bridge_profiling.manifest import find_captures
from bridge_profiling.settings.profiling import DEFAULT_OUTPUT_DIR

#: A job does not respond if its status is older than this many polls, and seconds.
_SILENT_POLLS, _SILENT_SECONDS = 10, 30.0

#: How long rank 0 may take to decide on a request that it has taken.
_DECISION_SECONDS = 10.0

_POLL_SECONDS = 0.05

#: How often a client that waits for a capture checks that the job still runs.
_CHECK_SECONDS = 3.0


@dataclass(frozen=True)
class TriggerResult:
    """The outcome of a request that was not refused.

    `status` is the job's before the request, `accepted` None if the client did not wait for it, `answers` are by rank.
    """

    request: CaptureRequest
    status: JobStatus
    accepted: AcceptedCapture | None = None
    answers: dict[int, RankAnswer] = field(default_factory=dict)

    @property
    def silent(self) -> list[int]:
        """Ranks that have not answered."""
        return [rank for rank in (self.accepted.ranks if self.accepted else []) if rank not in self.answers]

    @property
    def refusals(self) -> dict[int, str | None]:
        """Ranks that cannot capture, and why."""
        return {rank: answer.reason for rank, answer in sorted(self.answers.items()) if answer.status == "refused"}


class Waiting:
    """The time in which a client waits for its request, as a `with` block. If the block is interrupted, by Ctrl-C or a closed
    pipe, the request is withdrawn unless the capture has begun.

    Args:
        directory: the job's.
        request: the request.

    Attributes:
        outcome: what happens to the request of a block that was interrupted.
    """

    def __init__(self, directory: RequestDirectory, request: CaptureRequest) -> None:
        self._directory, self._request = directory, request
        self.outcome = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Refused, or withdrawn already.
        if kind is None or issubclass(kind, ProfilingConfigError):
            return
        self.outcome = "the request is withdrawn"
        if self._directory.withdraw(self._request.id):
            return
        capture = self._directory.capture(self._request.id)
        if isinstance(capture, DoneCapture):
            self.outcome = "the capture is over"
            return
        self._directory.call_off(self._request.id)
        if capture is not None:
            self.outcome += f", unless the job reaches iteration {capture.start} first"


def find_requests(run: Path) -> RequestDirectory:
    """The request directory of a job, from its output directory or the job directory that contains it."""
    for root in (run, run / DEFAULT_OUTPUT_DIR):
        directory = RequestDirectory(root.absolute())
        if (directory.path / "progress.json").is_file():
            try:
                directory.check()
            except CaptureError as error:
                raise ProfilingConfigError("this job takes no requests", why=str(error)) from None
            return directory
    raise ProfilingConfigError(
        f"no job listens in {run}" if run.is_dir() else f"the directory {run} does not exist",
        why="a job that listens for requests writes on-demand/progress.json into its output directory",
        instead="Name the output directory of a running job. A job without a profiler listens if it is launched with"
        " profiling.output_dir=DIRECTORY; profiling.on_demand=false turns listening off",
    )


def trigger(directory: RequestDirectory, request: CaptureRequest, *, wait: float | None = None) -> TriggerResult:
    """Request a capture from a running job.

    Args:
        directory: the job's.
        request: the capture.
        wait: seconds to wait for the decision, and for the ranks' answers; 0 does not wait, None waits as long as a running
            job needs.

    Raises:
        ProfilingConfigError: the job cannot carry it out, refuses it, or does not respond.
    """
    status = directory.status()
    if status is None:
        raise ProfilingConfigError(
            f"{directory.path / 'progress.json'} is not a job's status",
            why="another version of bridge_profiling wrote it, or it is damaged",
            instead="Use the version of bridge_profiling that the job runs with",
        )
    request = replace(request, run=status.run)
    try:
        if status.ended is None:
            _check_responsive(directory, status)
        plan_capture(request, status)
        is_submitted = directory.submit(request)
    except OSError as error:
        what = f"{directory.path} cannot be written"
        raise ProfilingConfigError(what, why=str(error), instead="Trigger as the user who runs the job") from error
    require(is_submitted, "another request is open: the job has not read it yet", instead="Try again in a few seconds")
    patience = 4 * status.poll_seconds + 10 if wait is None else wait
    if patience <= 0:
        return TriggerResult(request, status)
    return _await_answers(directory, request, status, patience)


def await_captures(directory: RequestDirectory, result: TriggerResult) -> TriggerResult:
    """Wait until the captures of an accepted request are written; returns the result with the ranks' last answers.

    Raises:
        ProfilingConfigError: the job was killed or stops responding, or the request was withdrawn.
    """
    accepted = result.accepted
    if accepted is None:
        return result
    ranks = {rank for rank in accepted.ranks if rank not in result.refusals}
    checked, deadline = time.monotonic(), math.inf
    while not ranks <= _written(directory.root, accepted.folder) and time.monotonic() < deadline:
        if time.monotonic() - checked > _CHECK_SECONDS:
            checked, status, done = time.monotonic(), directory.status(), directory.done(accepted.id)
            if done is not None and done.withdrawn:
                raise ProfilingConfigError(f"the request was {done.ended}", instead="Request it again")
            if status is not None and status.ended is None:
                _check_responsive(directory, status)
            elif deadline == math.inf:
                deadline = checked + _DECISION_SECONDS
        time.sleep(_POLL_SECONDS)
    return replace(result, answers=directory.answers(result.request.id))


def _written(root: Path, folder: str) -> set[int]:
    """Ranks that have written all that they will write of a capture."""
    try:
        return {capture.rank for capture in find_captures(root, folder) if capture.manifest.final}
    except TraceError:
        return set()


def _check_responsive(directory: RequestDirectory, status: JobStatus) -> None:
    """Refuse a job that was killed, or hangs."""
    require(
        status.pid_space is None or status.pid_space != pid_space() or is_running(status.pid),
        f"the job was killed: its rank 0, process {status.pid}, is not running",
        instead="Name a job that is running",
    )
    age = directory.seconds_since_update()
    require(
        age <= max(_SILENT_POLLS * status.poll_seconds, _SILENT_SECONDS),
        f"the job does not respond: its last status is {age:.0f} s old",
        why=f"rank 0 on {status.host}, process {status.pid}, updates it every {status.poll_seconds:g} s while it runs",
        instead="Check whether the job still runs, and try again",
    )


def _await_answers(directory: RequestDirectory, request: CaptureRequest, status: JobStatus, patience: float) -> TriggerResult:
    """Wait for rank 0's decision, then until every rank has answered or the capture is over."""

    def decision() -> AcceptedCapture | None:
        refusal = directory.refusal(request.id)
        if refusal is not None:
            raise ProfilingConfigError(refusal.refused)
        return directory.capture(request.id)

    accepted = _wait_for(decision, patience)
    if accepted is None:
        require(
            not directory.withdraw(request.id),
            f"the job did not read the request within {patience:g} s",
            why=f"its rank 0 polls every {status.poll_seconds:g} s, but is busy or hangs; the request is withdrawn",
            instead="Check whether the job still runs, and try again with a longer --wait",
        )
        accepted = _wait_for(decision, _DECISION_SECONDS)
    if accepted is None:
        directory.call_off(request.id)
        raise ProfilingConfigError("the job took the request but has not decided", instead="Check that the job still runs")
    is_answered = set(accepted.ranks).issubset
    last = _wait_for(lambda: accepted if is_answered(directory.answers(request.id)) else directory.done(request.id), patience)
    return TriggerResult(request, status, last or accepted, directory.answers(request.id))


def _wait_for(look: Callable[[], AcceptedCapture | None], seconds: float) -> AcceptedCapture | None:
    """Call `look` until it finds the capture or the time is up."""
    deadline = time.monotonic() + seconds
    while (found := look()) is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return found
