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

        # Findings first: one pass over the captures then reads everything that is needed.
        judged = found.findings() if findings else []
        errors, ranks = found.errors, len(found.entries())
        if not ranks:
            finish([*errors, f"{run} holds no trace to merge"])
        aligned = found.caveats("clock_offsets") if ranks > 1 else ()
        # Findings have evaluated everything else already.
        limitations = found.limitations if findings else sentences([*found.capture_caveats, *aligned])
        with progress("merging", "ranks") as on_merged:
            count = found.merge(output, host=host, findings=findings, on_progress=on_merged)
    annotated = f" and {len(judged)} findings" if judged else ""
    note(f"{output}: {count} events of {ranks} ranks{annotated}. Open it at https://ui.perfetto.dev")
    for sentence in limitations:
        note(f"- {sentence}")
    finish(errors)
