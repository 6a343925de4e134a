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
        from bridge_profiling.report import page, run_view
        from bridge_profiling.report.verdict import summarize
        from bridge_profiling.run import Run

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
            summary = summarize(found, thresholds)
            errors = found.errors
            # A page of nothing would replace a good one.
            readable_ranks = bool(summary.infos or summary.snapshots or not errors)
            if output is not None and readable_ranks:
                page.write_page(run_view.page_view(found, summary, output), output)
                errors = found.errors
            text = found.to_json(thresholds) if as_json else None
    if text is not None:
        typer.echo(text)
    elif readable_ranks:
        from rich.console import Console

        from bridge_profiling.report.terminal import print_report

        print_report(run_view.summary_view(summary), Console(highlight=False))
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
