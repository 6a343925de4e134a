"""`bridge-profiling analyze`: print the numbers of a run. They come from `analysis`; the tables from `report.run_tables`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bridge_profiling.cli.runs import UNREADABLE, print_errors, progress, readable


class EngineName(StrEnum):
    """Where captures are read."""

    process = "process"
    ray = "ray"


def analyze(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="Captures of any origin: a directory, a file, or a NeMo-Run experiment."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    parquet: Annotated[
        Path | None,
        typer.Option(metavar="DIRECTORY", help="Keep the ranks' tables here, as Parquet. RUN may be such a directory."),
    ] = None,
    engine: Annotated[
        EngineName, typer.Option(help="Read captures in processes of this machine, or on a Ray cluster.")
    ] = EngineName.process,
    ray_address: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="The Ray cluster's. Default: $RAY_ADDRESS, else one is started."),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Captures read at a time. Default: one per CPU.")] = None,
) -> None:
    """Say where each rank's time went: device, iterations, kernels, communication, memory.

    Exit code 1: a capture could not be read, or not to its end; the others are analysed. 2: the request itself is wrong.
    """
    with readable(run) as path:
        # Loaded here, so that `--help` and other commands do not wait for it.
        from bridge_profiling.analysis import Run

        if parquet is not None and parquet.exists() and not parquet.is_dir():
            raise typer.BadParameter(f"{parquet} is a file", param_hint="--parquet")
        with (
            progress("reading", "captures") as on_progress,
            Run(
                path, engine=engine.value, workers=workers, ray_address=ray_address, parquet=parquet, on_progress=on_progress
            ) as found,
        ):
            # Everything is asked before anything is printed: a bar and an answer do not share a screen.
            if as_json:
                text = found.to_json()
            else:
                from rich.console import Console

                from bridge_profiling.report.run_tables import print_sections, sections

                tables, limitations = sections(found), found.limitations
            errors = found.errors
    if as_json:
        typer.echo(text)
    else:
        print_sections(tables, limitations, Console(highlight=False))
    print_errors(errors)
    if errors:
        raise typer.Exit(UNREADABLE)
