"""`bridge-profiling trigger`: request a capture from a running job. The client is `capture/control/client.py`."""

from __future__ import annotations

import getpass
import json
import os
import socket
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from bridge_profiling.cli.options import JsonOption, ProfilerName
from bridge_profiling.cli.output import FAILURE, echo, print_error
from bridge_profiling.common.errors import ProfilingConfigError, TraceError, require
from bridge_profiling.common.printable import shell_path
from bridge_profiling.settings.profiling import ProfilingConfig
from bridge_profiling.settings.recording import FLAGS, apply, check_flags, to_overrides
from bridge_profiling.settings.window import parse_ranks

if TYPE_CHECKING:
    from bridge_profiling.capture.control.client import TriggerResult


def trigger(
    run: Annotated[Path, Argument(metavar="RUN", help="A running job: its output directory, job directory, or experiment.")],
    iterations: Annotated[int, Option("--iterations", "-n", min=1, help="Number of iterations to capture.")] = 2,
    start: Annotated[int | None, Option(min=0, metavar="I", help="First iteration. Default: the nearest possible.")] = None,
    ranks: Annotated[str | None, Option(metavar="0,1|all|pp", help="Ranks. Default: the job's profile_ranks.")] = None,
    profiler: Annotated[
        list[ProfilerName] | None,
        Option(help="Profiler to use, repeatable. Default: the job's, else torch."),
    ] = None,
    reason: Annotated[str | None, Option(metavar="TEXT", help="Why you need the capture, for the manifest.")] = None,
    wait: Annotated[bool, Option("--wait", help="Wait until the captures are written, and print where.")] = False,
    timeout: Annotated[
        float | None, Option(min=0, metavar="SECONDS", help="Time to wait for the ranks' answers; 0 to not wait.")
    ] = None,
    as_json: JsonOption = False,
    **recording: Any,
) -> None:
    """Profile a job that is already running, without a restart.

    Exit code 2: the request is refused and the job is unchanged. 1: a rank cannot capture, has not answered, or with --wait has
    not captured everything.
    """
    require(not wait or timeout != 0, "--wait and --timeout 0 exclude each other", instead="Leave one of them out")
    from bridge_profiling.capture.control import client
    from bridge_profiling.capture.control.messages import CaptureRequest

    memory = recording.pop("memory")
    profilers = None if profiler is None else [each.value for each in profiler]
    settings = _settings(recording, profilers)
    wanted = None if ranks is None else parse_ranks(ranks)
    request = CaptureRequest(
        iterations=iterations,
        start=start,
        ranks=wanted,
        profilers=profilers,
        settings=settings,
        reason=reason,
        requested_by=f"{_user()}@{socket.gethostname()}",
    )
    directory = client.find_requests(_output_dir(run))
    if memory:
        status = directory.status()
        request = replace(request, profilers=[*(profilers or (status.profilers if status else ["torch"])), "memory"])
    waiting = client.Waiting(directory, request)
    try:
        with waiting if timeout != 0 else nullcontext():
            result = client.trigger(directory, request, wait=timeout)
            if not as_json:
                echo(_in_words(result, directory.root, captured=wait))
            if wait:
                result = client.await_captures(directory, result)
    except KeyboardInterrupt:
        echo(f"stopped waiting: {waiting.outcome}", err=True)
        raise typer.Exit(FAILURE) from None  # which the signal's exit code replaces
    if as_json:
        typer.echo(json.dumps(_as_json(result, directory.root), indent=1))
    is_whole = not wait or _print_captures(result, directory.root, quiet=as_json)
    if result.silent or result.refusals or not is_whole:
        raise typer.Exit(FAILURE)


def _settings(options: Mapping[str, Any], profilers: list[str] | None) -> dict[str, object]:
    """The settings of a request for the options typed: those that differ from the defaults, or that a request may change."""
    from bridge_profiling.capture.control.messages import SETTINGS

    flags = {name: options[name] for name in FLAGS if name in options}
    config, file = ProfilingConfig(), options["config_file"]
    check_flags(flags, profilers)
    overrides = to_overrides(flags, options["settings"])
    apply(config, overrides, file)
    # A default that was typed replaces the job's own value.
    typed = {override.partition("=")[0].removeprefix("profiling.") for override in overrides}
    if file is not None:
        from bridge_profiling.settings.overrides import load_yaml

        typed |= set(load_yaml(file)["profiling"] or ())
    default = asdict(ProfilingConfig())
    return {
        name: value for name, value in asdict(config).items() if value != default[name] or (name in typed and name in SETTINGS)
    }


def _print_captures(result: TriggerResult, root: Path, *, quiet: bool) -> bool:
    """Print how a capture ended; returns whether each rank has captured everything."""
    from bridge_profiling.frameworks.outcome import lines
    from bridge_profiling.manifest import find_captures

    if result.accepted is None:
        return False
    try:
        captures = find_captures(root, result.accepted.folder)
    except TraceError as error:
        print_error(str(error))
        return False
    for line in [] if quiet else lines(root, captures, next_to_others=result.accepted.folder):
        echo(line)
    complete = {capture.rank for capture in captures if capture.manifest.status == "complete"}
    return complete >= set(result.accepted.ranks)


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
            instead=f"Type it there: bridge-profiling trigger {shell_path(path)}",
        )
    return Path(path)


def _in_words(result: TriggerResult, root: Path, *, captured: bool) -> str:
    from bridge_profiling.facts.words import named_ranks

    accepted, status = result.accepted, result.status
    if accepted is None:
        return f"request {result.request.id} is in {root}; did not wait for an answer"
    seconds = (accepted.start - accepted.accepted_at_iteration) * (status.median_ns or 0) / 1e9
    lines = [
        f"accepted: iterations {accepted.start} to {accepted.window.last} of {named_ranks(accepted.ranks)}"
        f" with {' and '.join(accepted.profilers)}",
        f"the job was at iteration {accepted.accepted_at_iteration}, and captures in about {seconds:.0f} s",
    ]
    lines += [f"rank {rank} cannot capture: {reason}" for rank, reason in result.refusals.items()]
    if result.silent:
        lines.append(f"no answer yet from {named_ranks(result.silent)}: {root / 'on-demand' / 'answers' / accepted.id}")
    if len(result.refusals) < len(accepted.ranks) and not captured:
        folder = root / accepted.profilers[0] / accepted.folder
        lines.append(f"then type: bridge-profiling report {shell_path(folder)}")
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
