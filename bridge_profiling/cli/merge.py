"""`bridge-profiling merge`: write one Perfetto trace of all ranks. The work is `report.merged_trace`'s."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bridge_profiling.cli.options import RunArgument, WorkersOption, check_output
from bridge_profiling.cli.runs import UNREADABLE, print_errors, progress, readable


def merge(
    run: RunArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The merged trace; .gz in its name compresses it.")
    ] = Path("all_ranks.json.gz"),
    host: Annotated[bool, typer.Option(help="The hosts' ranges too, not the devices' work alone.")] = True,
    findings: Annotated[bool, typer.Option(help="Annotate what `report` finds.")] = True,
    workers: WorkersOption = None,
) -> None:
    """Merge all ranks' traces into one, on one clock; open it at https://ui.perfetto.dev.

    Exit code 1: a capture could not be read, or not to its end; the others are merged. 2: the request itself is wrong.
    """
    with readable(run) as path:
        # Loaded here, so that `--help` and other commands do not wait for it.
        from bridge_profiling.analysis import Run
        from bridge_profiling.report.merged_trace import write_merged_trace

        check_output(output)
        with progress("reading", "captures") as on_progress, Run(path, workers=workers, on_progress=on_progress) as found:
            # First: what findings need is then answered in the one pass over the captures.
            judged = found.findings() if findings else []
            offsets = found.clock_offsets() if len(found.entries()) > 1 else None
            errors, limitations = found.errors, found.limitations
            with progress("merging", "ranks") as on_merged:
                count = write_merged_trace(
                    found.entries(), output, clock_offsets=offsets, host=host, findings=judged, on_progress=on_merged
                )
            ranks = len(found.entries())
    annotated = f" and {len(judged)} findings" if judged else ""
    typer.echo(f"{output}: {count} events of {ranks} ranks{annotated}. Open it at https://ui.perfetto.dev")
    for sentence in limitations:
        typer.echo(f"- {sentence}")
    print_errors(errors)
    if errors:
        raise typer.Exit(UNREADABLE)
