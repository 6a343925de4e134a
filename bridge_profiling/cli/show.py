"""The commands that show a run: `report` its findings, `analyze` its numbers, `memory` its device memory."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from bridge_profiling.cli.options import FetchOption, JsonOption, JsonSchemaOption, PageOption, RunArgument, WorkersOption
from bridge_profiling.cli.output import console, finish, note, show
from bridge_profiling.cli.runs import open_runs
from bridge_profiling.common.errors import ProfilingConfigError, did_you_mean

if TYPE_CHECKING:
    from bridge_profiling.findings import Thresholds


def report(
    run: RunArgument,
    output: Annotated[
        Path | None,
        Option("--output", "-o", metavar="FILE", help="The page. Default: report.html; none with --json."),
    ] = None,
    page: Annotated[bool, Option(help="Write the page.")] = True,
    as_json: JsonOption = False,
    json_schema: JsonSchemaOption = False,
    threshold: Annotated[
        list[str] | None,
        Option(metavar="NAME=VALUE", help="Limit of a finding, such as data_loading=0.05."),
    ] = None,
    **reading: Any,
) -> None:
    """Show where an iteration's time goes, which ranks are responsible, and what to change, here and on one page.

    Exit code 1: a capture could not be read, or only in part; the report is about the others. 2: invalid request.
    """
    if output is None and not as_json:
        output = Path("report.html")
    if not page:
        output = None
    thresholds = _thresholds(threshold or [])
    with open_runs(run, output=output, thresholds=thresholds, **reading) as (found,):
        from bridge_profiling.report.run_view import screen_view

        # Everything is computed before anything is printed: a progress bar would overwrite the answer.
        conclusion = found.conclusion
        readable, errors = found.facts.readable, found.facts.errors
        if output is not None and readable:
            found.report(output)
        text = found.to_json() if as_json else None
        screen = screen_view(found.facts, conclusion) if readable and not as_json else None
    if text is not None:
        typer.echo(text)
    elif screen is not None:
        from bridge_profiling.report.terminal import print_report

        print_report(screen, console())
        if output is not None:
            note(f"\npage: {output}")
    finish(errors)


def analyze(
    run: RunArgument,
    as_json: JsonOption = False,
    json_schema: JsonSchemaOption = False,
    **reading: Any,
) -> None:
    """Show where each rank's time goes: device, iterations, kernels, communication, memory.

    Exit code 1: a capture could not be read, or only in part; the others are analyzed. 2: invalid request.
    """
    with open_runs(run, **reading) as (found,):
        # Everything is computed before anything is printed: a progress bar would overwrite the answer.
        if as_json:
            text = found.to_json()
        else:
            from bridge_profiling.report.run_view import run_tables
            from bridge_profiling.report.terminal import print_tables

            tables, limitations = run_tables(found.facts, found.bench), found.facts.limitations
        errors = found.facts.errors
    if as_json:
        typer.echo(text)
    else:
        print_tables(tables, limitations, console())
    finish(errors)


def memory(
    run: Annotated[Path, Argument(metavar="RUN", help="A memory snapshot, a directory of captures, or a NeMo-Run experiment.")],
    other: Annotated[Path | None, Argument(metavar="[OTHER]", help="The run to compare with RUN.")] = None,
    as_json: JsonOption = False,
    json_schema: JsonSchemaOption = False,
    output: PageOption = None,
    workers: WorkersOption = None,
    fetch: FetchOption = False,
) -> None:
    """Show how much device memory is in use at the peak, what uses it, and whether it grows; for two runs, the difference.

    Exit code 1: a capture could not be read, or records no memory. 2: invalid request.
    """
    paths = [run] if other is None else [run, other]
    with open_runs(*paths, output=output, workers=workers, fetch=fetch) as runs:
        from bridge_profiling.report import memory_view

        facts = [each.facts for each in runs]
        empty = [str(each.path) for each in facts if not each.memory.num_rows]
        if not empty:
            view, lines = memory_view.memory_view(facts), memory_view.picture_lines(facts)
            text = memory_view.dumps(facts) if as_json else None
        errors = [error for each in facts for error in each.errors]
    if empty:
        remedy = "profiling.record_memory_history=true, or with profiling.pytorch_profiler_profile_memory=true for totals only"
        finish([*errors, *(f"{path} records no memory. Profile with {remedy}." for path in empty)])
    show(view, output, text, lines)
    finish(errors)


def _thresholds(typed: list[str]) -> Thresholds:
    """Thresholds from NAME=VALUE, with defaults for all others."""
    from bridge_profiling.findings import Thresholds

    known = dataclasses.asdict(Thresholds())
    values: dict[str, Any] = {}
    for each in typed:
        name, _, value = each.partition("=")
        if name not in known:
            raise ProfilingConfigError(
                f"--threshold {name!r} is unknown", instead=did_you_mean(name, known, before="--threshold ")
            )
        is_text = isinstance(known[name], str)
        try:
            values[name] = type(known[name])(value)
            if is_text:
                re.compile(value)
            elif not math.isfinite(values[name]):
                raise ValueError(value)
        except (ValueError, re.error) as error:
            takes = "a regular expression" if is_text else "a number"
            raise ProfilingConfigError(f"--threshold {name} takes {takes}, not {value!r}") from error
    return Thresholds(**values)
