"""Requests a capture from a running job, from any machine that sees its output directory: `bridge-profiling trigger`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from bridge_profiling.capture.control.planning import check_none_open, plan_capture
from bridge_profiling.capture.control.protocol import (
    AcceptedCapture,
    CaptureRequest,
    DoneCapture,
    JobStatus,
    RankAnswer,
    RequestDirectory,
)
from bridge_profiling.config import DEFAULT_OUTPUT_DIR
from bridge_profiling.errors import ProfilingConfigError, require
from bridge_profiling.processes import is_running, pid_space

#: A job does not respond if its status is older than this many polls, and seconds.
_SILENT_POLLS, _SILENT_SECONDS = 10, 30.0

#: How long rank 0 may take to decide on a request that it has taken.
_DECISION_SECONDS = 10.0

_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class TriggerResult:
    """The outcome of a request that was not refused.

    Attributes:
        request: as submitted.
        status: the job's, before the request.
        accepted: rank 0's decision; None if the client did not wait for it.
        answers: of the ranks to be profiled, by rank.
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


def find_requests(run: Path) -> RequestDirectory:
    """The request directory of a job.

    Args:
        run: its output directory, or the job directory that contains it.

    Raises:
        ProfilingConfigError: no job has published a status there.
    """
    for root in (run, run / DEFAULT_OUTPUT_DIR):
        directory = RequestDirectory(root.absolute())
        if (directory.path / "progress.json").is_file():
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
        KeyboardInterrupt: Ctrl-C; its text says what happens to the request.
    """
    status = directory.status()
    if status is None:
        raise ProfilingConfigError(
            f"{directory.path / 'progress.json'} is not a job's status",
            why="another version of bridge_profiling wrote it, or it is damaged",
            instead="Use the version of bridge_profiling that the job runs with",
        )
    try:
        if status.ended is None:
            _check_responsive(directory, status)
            check_none_open(status)
        request = replace(request, run=status.run)
        plan_capture(request, status)
        check_none_open(status, pending=not directory.submit(request))
    except OSError as error:
        raise ProfilingConfigError(
            f"{directory.path} cannot be written", why=str(error), instead="Trigger as the user who runs the job"
        ) from error
    result = TriggerResult(request, status)
    patience = 4 * status.poll_seconds + 10 if wait is None else wait
    if patience <= 0:
        return result
    try:
        return _await_answers(directory, result, patience)
    except KeyboardInterrupt:
        # A user who stops waiting does not want a capture later.
        withdrawn = directory.withdraw(request.id)
        raise KeyboardInterrupt(
            "the request is withdrawn" if withdrawn else "the job already has the request, and carries it out if it can"
        ) from None


def _check_responsive(directory: RequestDirectory, status: JobStatus) -> None:
    """Refuse a job that was killed, or hangs."""
    require(
        status.pid_space is None or status.pid_space != pid_space() or is_running(status.pid),
        "the job was killed",
        why=f"its rank 0, process {status.pid}, is not running",
        instead="Name a job that is running",
    )
    age = directory.seconds_since_update()
    require(
        age is not None and age <= max(_SILENT_POLLS * status.poll_seconds, _SILENT_SECONDS),
        f"the job does not respond: its last status is {age or 0:.0f} s old",
        why=f"rank 0 on {status.host}, process {status.pid}, updates it every {status.poll_seconds:g} s while it runs",
        instead="Check whether the job still runs, and try again",
    )


def _await_answers(directory: RequestDirectory, result: TriggerResult, patience: float) -> TriggerResult:
    """Wait for rank 0's decision, then for the ranks' answers."""
    result = _poll(directory, result, patience, lambda result: result.accepted is not None)
    if result.accepted is None:
        require(
            not directory.withdraw(result.request.id),
            f"the job did not read the request within {patience:g} s",
            why=f"its rank 0 polls every {result.status.poll_seconds:g} s, but is busy or hangs; the request is withdrawn",
            instead="Check whether the job still runs, and try again with a longer --wait",
        )
        result = _poll(directory, result, _DECISION_SECONDS, lambda result: result.accepted is not None)
        require(result.accepted, "the job took the request but has not decided", instead="Check whether the job still runs")
    return _poll(directory, result, patience, lambda result: not result.silent or isinstance(result.accepted, DoneCapture))


def _poll(
    directory: RequestDirectory, result: TriggerResult, seconds: float, is_enough: Callable[[TriggerResult], bool]
) -> TriggerResult:
    """Add decision and answers to `result`, until there are enough of them or the time is up."""
    request_id, deadline = result.request.id, time.monotonic() + seconds
    while True:
        if (refusal := directory.refusal(request_id)) is not None:
            raise ProfilingConfigError(refusal)
        done, accepted = directory.done(request_id), directory.accepted()
        if done is not None:
            # When a capture is over, rank 0 moves the answers there.
            result = replace(result, accepted=done, answers={answer.rank: answer for answer in done.answers.values()})
        elif accepted is not None and accepted.id == request_id:
            result = replace(result, accepted=accepted, answers=directory.answers(request_id))
        if is_enough(result) or time.monotonic() >= deadline:
            return result
        time.sleep(_POLL_SECONDS)
