"""`bridge-profiling doctor`: prints what would go wrong with a profile. The checks are in `bridge_profiling/doctor/`."""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from bridge_profiling.cli.options import JsonOption
from bridge_profiling.cli.output import FAILURE, QUIET, console, note
from bridge_profiling.common.printable import printable

if TYPE_CHECKING:
    from bridge_profiling.doctor import Request, Verdict

_STYLES = {"ok": "green", "warning": "yellow", "fails": "bold red", "unknown": "cyan"}


LauncherName = StrEnum("LauncherName", ["torchrun", "ft", "none"])


def doctor(
    arguments: Annotated[
        list[str] | None,
        Argument(
            metavar="[EXPERIMENT | section.field=value]…",
            help="A NeMo-Run experiment, or settings. Default: check this machine only.",
        ),
    ] = None,
    config: Annotated[list[Path] | None, Option(metavar="FILE", help="YAML file of settings; repeatable.")] = None,
    world_size: Annotated[int | None, Option(min=1, help="Ranks of the job.")] = None,
    nodes: Annotated[int | None, Option(min=1, help="Machines of the job.")] = None,
    output_dir: Annotated[
        Path | None, Option(metavar="DIRECTORY", help="Directory of captures; overrides the settings.")
    ] = None,
    launcher: Annotated[LauncherName | None, Option(help="The launcher of the ranks.")] = None,
    elsewhere: Annotated[bool, Option("--elsewhere", help="The job does not run on this machine.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Find what would go wrong with a profile, before the job waits in a queue.

    Exit code 0: no check fails. 1: at least one fails. 2: invalid request.
    """
    # Imported here: `--help` and other commands start faster without it.
    from bridge_profiling.doctor import Machine, diagnose

    machine = Machine()
    requests = _requests(arguments or [], config or [])
    for request in requests:
        request.world_size = world_size or request.world_size
        request.nodes = nodes or request.nodes
        request.output_dir = output_dir or request.output_dir
        request.launcher = launcher.value if launcher else request.launcher
        if elsewhere:
            request.elsewhere = request.elsewhere or "the job runs on other machines"
        elif "SLURM_JOB_ID" in os.environ:
            request.elsewhere = ""  # Inside an allocation, this machine is like the job's.
    diagnoses = [(request, diagnose(request, machine)) for request in requests]
    if as_json:
        runs = [{"name": request.name or None, "checks": list(map(asdict, verdicts))} for request, verdicts in diagnoses]
        document = {"schema_version": 1, "machine": socket.gethostname(), "runs": runs, "counts": _counts(diagnoses)}
        print(json.dumps(document, indent=1))
    else:
        _print(diagnoses)
    if any(verdict.status == "fails" for _, verdicts in diagnoses for verdict in verdicts):
        raise typer.Exit(FAILURE)


def _requests(arguments: Sequence[str], files: Sequence[Path]) -> list[Request]:
    from bridge_profiling.doctor import find_experiment, read_experiment
    from bridge_profiling.doctor.request import Request, apply_arguments, apply_file

    # A path may contain "=", but the name of a setting never contains "/".
    settings = [argument for argument in arguments if "=" in argument and "/" not in argument.partition("=")[0]]
    experiments = [argument for argument in arguments if argument not in settings]
    requests = [request for name in experiments for request in read_experiment(find_experiment(name))]
    if not requests:
        requests = [Request(name="the run" if settings or files else "")]
    for request in requests:
        for file in files:
            apply_file(request, file)
        apply_arguments(request, settings)
    return requests


def _counts(diagnoses: Sequence[tuple[Request, list[Verdict]]]) -> dict[str, int]:
    counted: Counter[str] = Counter(verdict.status for _, verdicts in diagnoses for verdict in verdicts)
    return {status: counted[status] for status in _STYLES}


def _print(diagnoses: Sequence[tuple[Request, list[Verdict]]]) -> None:
    from rich.text import Text

    # Soft wrap: a line that is piped to grep must stay whole.
    terminal = console()
    for request, verdicts in diagnoses:
        if len(diagnoses) > 1:
            terminal.print(Text(printable(request.name), style="bold"), soft_wrap=True)
        for verdict in verdicts:
            if QUIET.get() and verdict.status == "ok":
                continue
            line = Text.assemble(
                (f"{verdict.status:<8}", _STYLES[verdict.status]), printable(f"{verdict.check}: {verdict.found}")
            )
            terminal.print(line, soft_wrap=True)
            if verdict.instead:
                terminal.print(Text(f"        → {printable(verdict.instead)}", style="dim"), soft_wrap=True)
    note(", ".join(f"{number} {status}" for status, number in _counts(diagnoses).items() if number))
