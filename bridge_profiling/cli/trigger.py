"""`bridge-profiling trigger`: request a capture from a running job. The client is `capture/control/client.py`."""

from __future__ import annotations

import getpass
import json
import os
import shlex
import socket
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from bridge_profiling.cli.common import FAILURE, INTERRUPTED, JsonOption
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.report import words

if TYPE_CHECKING:
    from bridge_profiling.capture.control.client import TriggerResult


def trigger(
    run: Annotated[Path, Argument(metavar="RUN", help="A running job: its output directory, job directory, or experiment.")],
    iterations: Annotated[int, Option("--iterations", "-n", help="Number of iterations to capture.")] = 2,
    start: Annotated[int | None, Option(metavar="I", help="First iteration. Default: the nearest possible.")] = None,
    ranks: Annotated[str | None, Option(metavar="0,1|all|pp", help="Ranks. Default: the job's profile_ranks.")] = None,
    profiler: Annotated[
        list[str] | None,
        Option(metavar="torch|memory|nsys", help="Profiler to use, repeatable. Default: the job's, else torch."),
    ] = None,
    shapes: Annotated[bool, Option("--shapes", help="Record tensor shapes.")] = False,
    stacks: Annotated[bool, Option("--stacks", help="Record Python stacks.")] = False,
    reason: Annotated[str | None, Option(metavar="TEXT", help="Why you need the capture, for the manifest.")] = None,
    wait: Annotated[float | None, Option(min=0, metavar="SECONDS", help="Time to wait for answers; 0 to not wait.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Profile a job that is already running, without a restart.

    Exit code 2: the request is refused and the job is unchanged. 1: a rank cannot capture, or has not answered.
    """
    from bridge_profiling.capture.control import client
    from bridge_profiling.capture.control.protocol import CaptureRequest
    from bridge_profiling.config import parse_ranks

    request = CaptureRequest(
        iterations=iterations,
        start=start,
        ranks=None if ranks is None else parse_ranks(ranks),
        profilers=profiler,
        shapes=shapes,
        stacks=stacks,
        reason=reason,
        requested_by=f"{_user()}@{socket.gethostname()}",
    )
    directory = client.find_requests(_output_dir(run))
    try:
        result = client.trigger(directory, request, wait=wait)
    except KeyboardInterrupt as stopped:
        typer.echo(f"stopped waiting: {stopped}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    typer.echo(json.dumps(_as_json(result, directory.root), indent=1) if as_json else _in_words(result, directory.root))
    if result.silent or result.refusals:
        raise typer.Exit(FAILURE)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in a container, a user id may have no name
        return str(os.getuid())


def _output_dir(run: Path) -> Path:
    """`run` itself, or where the job of an experiment writes."""
    from bridge_profiling.experiments.jobs import experiment_of, locate_captures

    experiment = experiment_of(run)
    if experiment is None:
        return run
    job, path = locate_captures(*experiment)
    if job.ssh_tunnel is not None:
        raise ProfilingConfigError(
            f"the job runs on the remote side of a tunnel, {job.ssh_tunnel.get('user')}@{job.ssh_tunnel.get('host')}",
            why="a request is a file in the job's output directory, which is there",
            instead=f"Type it there: bridge-profiling trigger {shlex.quote(path)}",
        )
    return Path(path)


def _in_words(result: TriggerResult, root: Path) -> str:
    accepted, status = result.accepted, result.status
    if accepted is None:
        return f"request {result.request.id} is in {root}; did not wait for an answer"
    seconds = (accepted.start - accepted.accepted_at_iteration) * (status.median_ns or 0) / 1e9
    lines = [
        f"accepted: iterations {accepted.start} to {accepted.window.last} of {words.ranks(accepted.ranks)}"
        f" with {' and '.join(accepted.profilers)}",
        f"the job was at iteration {accepted.accepted_at_iteration}, and captures in about {seconds:.0f} s",
    ]
    lines += [f"rank {rank} cannot capture: {reason}" for rank, reason in result.refusals.items()]
    if result.silent:
        lines.append(f"no answer yet from {words.ranks(result.silent)}: {root / 'on-demand' / 'answers' / accepted.id}")
    if len(result.refusals) < len(accepted.ranks):
        folder = root / accepted.profilers[0] / accepted.folder
        lines.append(f"then type: bridge-profiling report {shlex.quote(str(folder))}")
    return "\n".join(lines)


def _as_json(result: TriggerResult, root: Path) -> dict[str, object]:
    accepted = result.accepted
    return {
        "id": result.request.id,
        "accepted": None if accepted is None else asdict(accepted),
        "manifests": None if accepted is None else str(root / "manifest" / accepted.folder),
        "answers": {str(rank): asdict(answer) for rank, answer in sorted(result.answers.items())},
        "silent": result.silent,
    }
