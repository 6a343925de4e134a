"""`bridge-profiling merge`: writes one Perfetto trace of all ranks, with `report.merged_trace`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from bridge_profiling.cli.common import RunArgument, WorkersOption, finish, note, open_runs, progress


def merge(
    run: RunArgument,
    output: Annotated[
        Path, Option("--output", "-o", metavar="FILE", help="The trace, compressed if the name ends with .gz.")
    ] = Path("all_ranks.json.gz"),
    host: Annotated[bool, Option(help="Include the hosts' ranges in addition to the devices' work.")] = True,
    findings: Annotated[bool, Option(help="Annotate the findings of `report`.")] = True,
    workers: WorkersOption = None,
) -> None:
    """Merge the traces of all ranks into one, on one clock. Open it at https://ui.perfetto.dev.

    Exit code 1: a capture could not be read, or only in part; the others are merged. 2: invalid request.
    """
    with open_runs(run, output=output, workers=workers) as (found,):
        from bridge_profiling.analysis.caveats import sentences
        from bridge_profiling.report.merged_trace import write_merged_trace

        # Findings first: one pass over the captures then reads everything that is needed.
        judged = found.findings() if findings else []
        offsets = found.clock_offsets() if len(found.entries()) > 1 else None
        errors, aligned = found.errors, () if offsets is None else found.caveats("clock_offsets")
        # Findings have evaluated everything else already.
        limitations = found.limitations if findings else sentences([*found.capture_caveats, *aligned])
        if not found.entries():
            finish([*errors, f"{run} holds no trace to merge"])
        with progress("merging", "ranks") as on_merged:
            count = write_merged_trace(
                found.entries(), output, clock_offsets=offsets, host=host, findings=judged, on_progress=on_merged
            )
        ranks = len(found.entries())
    annotated = f" and {len(judged)} findings" if judged else ""
    note(f"{output}: {count} events of {ranks} ranks{annotated}. Open it at https://ui.perfetto.dev")
    for sentence in limitations:
        note(f"- {sentence}")
    finish(errors)
