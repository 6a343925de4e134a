"""`bridge-profiling analyze`: prints the numbers of a run, from `analysis`, as tables of `report`."""

from __future__ import annotations

import typer

from bridge_profiling.cli.common import (
    BenchOption,
    EngineName,
    EngineOption,
    JsonOption,
    ParquetOption,
    RayAddressOption,
    RunArgument,
    WorkersOption,
    console,
    finish,
    open_runs,
)


def analyze(
    run: RunArgument,
    as_json: JsonOption = False,
    bench: BenchOption = None,
    parquet: ParquetOption = None,
    engine: EngineOption = EngineName.process,
    ray_address: RayAddressOption = None,
    workers: WorkersOption = None,
) -> None:
    """Show where each rank's time goes: device, iterations, kernels, communication, memory.

    Exit code 1: a capture could not be read, or only in part; the others are analyzed. 2: invalid request.
    """
    with open_runs(run, engine=engine.value, ray_address=ray_address, bench=bench, parquet=parquet, workers=workers) as (
        found,
    ):
        # Everything is computed before anything is printed: a progress bar would overwrite the answer.
        if as_json:
            text = found.to_json()
        else:
            from bridge_profiling.report.run_view import run_tables
            from bridge_profiling.report.terminal import print_tables

            tables, limitations = run_tables(found), found.limitations
        errors = found.errors
    if as_json:
        typer.echo(text)
    else:
        print_tables(tables, limitations, console())
    finish(errors)
