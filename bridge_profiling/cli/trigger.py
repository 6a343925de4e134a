"""`bridge-profiling trigger`: ask a job that is running for a capture. The asking is in `capture/asking.py`."""

from __future__ import annotations

import getpass
import json
import os
import shlex
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bridge_profiling.errors import ProfilingConfigError

if TYPE_CHECKING:
    from bridge_profiling.capture.control.client import Asked

#: Exit code when a rank cannot do what the job accepted, or has not answered.
_NOT_ALL = 1

#: That of a program that Ctrl-C has ended.
_INTERRUPTED = 130

_LISTED = 8


def trigger(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The output directory of a running job, its job directory, or its experiment.")
    ],
    iterations: Annotated[int, typer.Option("--iterations", "-n", help="How many iterations to capture.")] = 2,
    start: Annotated[int | None, typer.Option(metavar="I", help="The first of them. Default: the nearest possible.")] = None,
    ranks: Annotated[str | None, typer.Option(metavar="0,1|all|pp", help="Default: those of the job's config.")] = None,
    profiler: Annotated[
        list[str] | None, typer.Option(metavar="torch|memory|nsys", help="Default: the job's own, else torch. Repeatable.")
    ] = None,
    shapes: Annotated[bool, typer.Option("--shapes", help="Record tensor shapes.")] = False,
    stacks: Annotated[bool, typer.Option("--stacks", help="Record Python stacks.")] = False,
    reason: Annotated[str | None, typer.Option(metavar="TEXT", help="Why; it goes into the manifest.")] = None,
    wait: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="How long to wait for the ranks' answers; 0 for none.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Profile a job that is already running, without a restart.

    Exit code 2: the request is refused, and the job was left alone. 1: a rank cannot do it, or did not answer.
    """
    from bridge_profiling.capture.control.client import ask, mailbox_of
    from bridge_profiling.capture.control.request import CaptureRequest, check_request
    from bridge_profiling.config import parse_ranks

    request = check_request(
        CaptureRequest(
            iterations=iterations,
            start=start,
            ranks=None if ranks is None else parse_ranks(ranks),
            profilers=profiler,
            shapes=shapes,
            stacks=stacks,
            reason=reason,
            requested_by=f"{_user()}@{socket.gethostname()}",
        )
    )
    mailbox = mailbox_of(_located(run))
    try:
        asked = ask(mailbox, request, wait=wait)
    except KeyboardInterrupt as stopped:
        typer.echo(f"stopped waiting: {stopped}", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    if as_json:
        typer.echo(json.dumps(_as_json(asked, mailbox.root), indent=1))
    else:
        for line in _told(asked, mailbox.root):
            typer.echo(line)
    if asked.accepted is not None and (asked.silent or asked.refusing):
        raise typer.Exit(_NOT_ALL)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run as a number that has no name
        return str(os.getuid())


def _located(run: Path) -> Path:
    """The directory that is meant: itself, or where the job of an experiment writes."""
    from bridge_profiling.experiments.jobs import experiment_of, locate_captures

    experiment = experiment_of(run)
    if experiment is None:
        return run
    job, path = locate_captures(*experiment)
    if job.ssh_tunnel is not None:
        there = f"{job.ssh_tunnel.get('user')}@{job.ssh_tunnel.get('host')}"
        raise ProfilingConfigError(
            f"the job runs at the other end of a tunnel, {there}",
            why="a request is a file in the job's output directory, and that is there",
            instead=f"Type it there: bridge-profiling trigger {shlex.quote(path)}",
        )
    return Path(path)


def _told(asked: Asked, root: Path) -> list[str]:
    if asked.accepted is None:
        return [f"the request {asked.request.id} lies in {root}; nobody has waited for an answer"]
    accepted, state = asked.accepted, asked.state
    away = (accepted["start"] - (accepted["accepted_at_iteration"] or 0)) * (state.median_ns or 0) / 1e9
    lines = [
        f"accepted: iterations {accepted['start']} to {accepted['end'] - 1} of rank{_listing(asked.ranks)}"
        f" with {' and '.join(accepted['profilers'])}",
        f"the job was at iteration {accepted['accepted_at_iteration']}, and there in about {away:.0f} s",
    ]
    lines += [f"rank {rank} cannot: {why}" for rank, why in asked.refusing.items()]
    if asked.silent:
        lines.append(f"no answer yet from rank{_listing(asked.silent)}: {root / 'on-demand' / 'answers' / asked.request.id}")
    if len(asked.refusing) < len(asked.ranks):
        folder = root / accepted["profilers"][0] / asked.folder
        lines.append(f"then type: bridge-profiling report {shlex.quote(str(folder))}")
    return lines


def _listing(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:_LISTED])
    more = f" and {len(ranks) - _LISTED} more" if len(ranks) > _LISTED else ""
    return f"{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _as_json(asked: Asked, root: Path) -> dict[str, object]:
    return {
        "id": asked.request.id,
        "accepted": asked.accepted,
        "manifests": str(root / "manifest" / asked.folder) if asked.accepted else None,
        "answers": {str(rank): answer for rank, answer in sorted(asked.answers.items())},
        "silent": asked.silent,
    }
