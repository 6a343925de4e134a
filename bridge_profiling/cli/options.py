"""Options that commands share. A command takes a group of them with its last parameter, such as `**reading`."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from bridge_profiling.cli.output import QUIET
from bridge_profiling.frameworks import run_request
from bridge_profiling.settings import recording

EngineName = StrEnum("EngineName", ["process", "ray"])
ProfilerName = StrEnum("ProfilerName", ["torch", "memory", "nsys"])


RunArgument = Annotated[Path, Argument(metavar="RUN", help="Captures: a directory, a file, or a NeMo-Run experiment.")]
JsonOption = Annotated[bool, Option("--json", help="Print JSON.")]


def _print_schema(context: typer.Context, wanted: bool) -> None:
    if wanted:
        from bridge_profiling.report.documents import schema_text

        typer.echo(schema_text(context.info_name or ""), nl=False)
        raise typer.Exit


#: Eager: the command's arguments need not be typed.
JsonSchemaOption = Annotated[
    bool, Option("--json-schema", callback=_print_schema, is_eager=True, help="Print the JSON Schema of --json and exit.")
]
PageOption = Annotated[Path | None, Option("--output", "-o", metavar="FILE", help="Write a page as one HTML file.")]
_WORKERS = Option(min=1, help="Captures to read at once. Default: one per CPU.")
WorkersOption = Annotated[int | None, _WORKERS]
_FETCH = Option("--fetch", help="Copy an experiment's captures from another machine first, over its SSH tunnel.")
FetchOption = Annotated[bool, _FETCH]

#: The type, the option and the default of each parameter.
_Options = dict[str, tuple[Any, Any, Any]]

_READING: _Options = {
    "bench": (
        Path | None,
        Option(metavar="FILE", help="Results of `bridge-profiling bench`. Default: bench.json in RUN."),
        None,
    ),
    "parquet": (
        Path | None,
        Option(metavar="DIRECTORY", file_okay=False, help="Keep tables here as Parquet. RUN may be such a directory."),
        None,
    ),
    "engine": (
        EngineName,
        Option(help="Read captures in processes on this machine or on a Ray cluster."),
        EngineName.process,
    ),
    "ray_address": (str | None, Option(metavar="ADDRESS", help="Ray cluster. Default: $RAY_ADDRESS, or a new one."), None),
    "workers": (int | None, _WORKERS, None),
    "fetch": (bool, _FETCH, False),
    "cycle": (int | None, Option(min=1, metavar="N", help="Cycle of a schedule that repeats, from 1. Default: newest."), None),
}
_RESULT: _Options = {
    "output": (Path | None, Option("--output", "-o", metavar="FILE", help="Add the result to this file."), None),
    "as_json": (bool, Option("--json", help="Print JSON."), False),
}
_FLAGS: _Options = {
    "quiet": (bool, Option("--quiet", "-q", help="Print only the answer and errors."), False),
    "no_color": (bool, Option("--no-color", help="Print without colors, as NO_COLOR=1 does."), False),
}
_RECORDING: _Options = {
    **{name: (bool, Option(recording.option(name), help=text), False) for name, (_, text) in recording.FLAGS.items()},
    "settings": (list[str] | None, Option("--set", metavar="FIELD=VALUE", help="A setting of `profiling`; repeatable."), None),
    "config_file": (Path | None, Option("--config", metavar="FILE", help="YAML file of settings, under the others."), None),
}
_REQUEST: _Options = {
    **{name: (str | None, Option(metavar=value, help=text), None) for name, (value, text) in run_request.OPTIONS.items()},
    "profiler": (
        list[ProfilerName] | None,
        Option(
            help="The profiler, repeatable: memory goes with another one. Default: that of --config, else torch.",
        ),
        None,
    ),
    **_RECORDING,
}
_GROUPS = {"reading": _READING, "recording": _RECORDING, "request": _REQUEST, "result": _RESULT}


def with_options(command: Callable[..., None], *, flags: bool = False) -> Callable[..., None]:
    """The command with the options of `_GROUPS` that its last parameter stands for, such as `**reading`, and with the flags."""
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    groups = [_GROUPS[name] for name, each in signature.parameters.items() if each.kind is each.VAR_KEYWORD]

    @functools.wraps(command)
    def run_command(**given: Any) -> None:
        if flags:
            # Set before or after the command's name, for the rest of the command.
            QUIET.set(given.pop("quiet") or QUIET.get())
            if given.pop("no_color"):
                os.environ["NO_COLOR"] = "1"
        command(**given)

    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])
        for group in [*groups, _FLAGS if flags else {}]
        for name, (kind, option, default) in group.items()
    ]
    # Typer reads either of the two, depending on its release.
    run_command.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    run_command.__annotations__ = {each.name: each.annotation for each in [*own, *options]}
    return run_command


#: `with_options`, with the flags that every command of `bridge-profiling` has.
with_flags = functools.partial(with_options, flags=True)
