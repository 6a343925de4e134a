"""`bridge-profiling memory`: prints what uses device memory, as `analysis.memory.tables` finds it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from bridge_profiling.cli.options import WorkersOption, check_output
from bridge_profiling.cli.runs import UNREADABLE, print_errors, progress, readable


def memory(
    run: Annotated[
        Path, typer.Argument(metavar="A", help="A memory snapshot, a directory of captures, or a NeMo-Run experiment.")
    ],
    other: Annotated[Path | None, typer.Argument(metavar="[B]", help="Another one to compare with A.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write a page as one HTML file.")
    ] = None,
    workers: WorkersOption = None,
) -> None:
    """Show how much device memory is in use at the peak, what uses it, and whether it grows; for two runs, the difference.

    Exit code 1: a capture could not be read, or records no memory. 2: the request itself is wrong.
    """
    check_output(output)
    with contextlib.ExitStack() as stack:
        asked = [(run, "A"), *([(other, "B")] if other is not None else [])]
        paths = [stack.enter_context(readable(path, hint)) for path, hint in asked]
        # Imported here: `--help` and other commands start faster without it.
        from bridge_profiling.errors import TraceError
        from bridge_profiling.report import memory_view
        from bridge_profiling.run import Run

        on_progress = stack.enter_context(progress("reading", "captures"))
        runs = [stack.enter_context(Run(path, workers=workers, on_progress=on_progress)) for path in paths]
        answer = memory_view.ask(*runs)
        errors = [error for each in runs for error in each.errors]
        empty = [str(each.path) for each in answer.runs if not each.devices]
        if empty:
            print_errors(errors)
            raise TraceError(
                f"{' and '.join(empty)} records no memory: profile with profiling.record_memory_history=true, or with"
                " profiling.pytorch_profiler_profile_memory=true for totals alone"
            )
        view = memory_view.memory_view(answer)
        if output is not None:
            from bridge_profiling.report.page import write_page

            write_page(view, output)
    if as_json:
        typer.echo(memory_view.dumps(answer))
    else:
        from rich.console import Console

        from bridge_profiling.report.terminal import print_answer

        print_answer(view, Console(highlight=False), memory_view.picture_lines(answer))
        if output is not None:
            typer.echo(f"page: {output}")
    print_errors(errors)
    if errors:
        raise typer.Exit(UNREADABLE)
