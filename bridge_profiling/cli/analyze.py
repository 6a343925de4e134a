"""`bridge-profiling analyze`: prints the numbers of a run, from `analysis`, as tables of `report`."""

from __future__ import annotations

from typing import Annotated

import typer

from bridge_profiling.cli.options import (
    BenchOption,
    EngineName,
    EngineOption,
    ParquetOption,
    RayAddressOption,
    RunArgument,
    WorkersOption,
    check_parquet,
)
from bridge_profiling.cli.runs import UNREADABLE, print_errors, progress, readable


def analyze(
    run: RunArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    bench: BenchOption = None,
    parquet: ParquetOption = None,
    engine: EngineOption = EngineName.process,
    ray_address: RayAddressOption = None,
    workers: WorkersOption = None,
) -> None:
    """Show where each rank's time goes: device, iterations, kernels, communication, memory.

    Exit code 1: a capture could not be read, or only in part; the others are analyzed. 2: the request itself is wrong.
    """
    with readable(run) as path:
        # Imported here: `--help` and other commands start faster without it.
        from bridge_profiling.run import Run

        check_parquet(parquet)
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
            if as_json:
                text = found.to_json()
            else:
                from rich.console import Console

                from bridge_profiling.report.run_view import run_tables
                from bridge_profiling.report.terminal import print_tables

                tables, limitations = run_tables(found), found.limitations
            errors = found.errors
    if as_json:
        typer.echo(text)
    else:
        print_tables(tables, limitations, Console(highlight=False))
    print_errors(errors)
    if errors:
        raise typer.Exit(UNREADABLE)
