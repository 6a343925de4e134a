"""`bridge-profiling report`: prints the findings of a run, and writes them as one page."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bridge_profiling.cli.options import (
    BenchOption,
    EngineName,
    EngineOption,
    ParquetOption,
    RayAddressOption,
    RunArgument,
    WorkersOption,
    check_output,
    check_parquet,
)
from bridge_profiling.cli.runs import UNREADABLE, print_errors, progress, readable

if TYPE_CHECKING:
    from bridge_profiling.analysis.findings import Thresholds


def report(
    run: RunArgument,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The page. Default: report.html; with --json, none."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers and findings as JSON.")] = False,
    threshold: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Limit at which a number becomes a finding, such as data_loading=0.05."),
    ] = None,
    bench: BenchOption = None,
    parquet: ParquetOption = None,
    engine: EngineOption = EngineName.process,
    ray_address: RayAddressOption = None,
    workers: WorkersOption = None,
) -> None:
    """Show where an iteration's time goes, which ranks are responsible, and what to change, here and on one page.

    Exit code 1: a capture could not be read, or only in part; the others are judged. 2: the request itself is wrong.
    """
    if output is None and not as_json:
        output = Path("report.html")
    check_output(output)
    check_parquet(parquet)
    with readable(run) as path:
        # Imported here: `--help` and other commands start faster without it.
        from bridge_profiling.report.answers import summarize
        from bridge_profiling.report.html import write_page
        from bridge_profiling.run import Run
        from bridge_profiling.traces.discover import WHICH_WINDOW

        thresholds = _thresholds(threshold or [])
        with (
            progress("reading", "captures") as on_progress,
            Run(
                path,
                engine=engine.value,
                workers=workers,
                ray_address=ray_address,
                parquet=parquet,
                on_progress=on_progress,
                bench=bench,
            ) as found,
        ):
            # Everything is computed before anything is printed: a progress bar would overwrite the answer.
            summary = write_page(found, output, thresholds).summary if output is not None else summarize(found, thresholds)
            text = found.to_json(thresholds) if as_json else None
            errors = found.errors
            notices = [caveat.text for caveat in found.caveats() if caveat.code in WHICH_WINDOW]
    if text is not None:
        typer.echo(text)
    else:
        from rich.console import Console

        from bridge_profiling.report.findings_terminal import print_verdict

        for notice in notices:
            typer.echo(f"{notice}\n")
        print_verdict(summary, Console(highlight=False))
        typer.echo(f"\nThe page: {output}")
    print_errors(errors)
    if errors:
        raise typer.Exit(UNREADABLE)


def _thresholds(typed: list[str]) -> Thresholds:
    """Thresholds from NAME=VALUE, with defaults for all others."""
    from bridge_profiling.analysis.findings import Thresholds

    known = {name: type(value) for name, value in dataclasses.asdict(Thresholds()).items()}
    values: dict[str, Any] = {}
    for each in typed:
        name, _, value = each.partition("=")
        if name not in known:
            raise typer.BadParameter(f"{name!r} is not a threshold: type one of {', '.join(known)}", param_hint="--threshold")
        try:
            values[name] = known[name](value)
        except ValueError as error:
            raise typer.BadParameter(f"{name} takes a number, not {value!r}", param_hint="--threshold") from error
    return Thresholds(**values)
