"""`bridge-profiling analyze`: prints the numbers of a run, from `analysis`, as tables of `report`."""

from __future__ import annotations

from typing import Any

import typer

from bridge_profiling.cli import common


def analyze(
    run: common.RunArgument,
    as_json: common.JsonOption = False,
    json_schema: common.JsonSchemaOption = False,
    **reading: Any,
) -> None:
    """Show where each rank's time goes: device, iterations, kernels, communication, memory.

    Exit code 1: a capture could not be read, or only in part; the others are analyzed. 2: invalid request.
    """
    with common.open_runs(run, **reading) as (found,):
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
        print_tables(tables, limitations, common.console())
    common.finish(errors)
