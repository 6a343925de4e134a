"""`bridge-profiling memory`: prints what uses device memory, as `analysis.memory.tables` finds it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument

from bridge_profiling.cli import common


def memory(
    run: Annotated[Path, Argument(metavar="RUN", help="A memory snapshot, a directory of captures, or a NeMo-Run experiment.")],
    other: Annotated[Path | None, Argument(metavar="[OTHER]", help="The run to compare with RUN.")] = None,
    as_json: common.JsonOption = False,
    json_schema: common.JsonSchemaOption = False,
    output: common.PageOption = None,
    workers: common.WorkersOption = None,
) -> None:
    """Show how much device memory is in use at the peak, what uses it, and whether it grows; for two runs, the difference.

    Exit code 1: a capture could not be read, or records no memory. 2: invalid request.
    """
    paths = [run] if other is None else [run, other]
    with common.open_runs(*paths, output=output, workers=workers) as runs:
        from bridge_profiling.report import memory_view

        answer = memory_view.ask(*runs)
        errors = [error for each in runs for error in each.errors]
    empty = [str(each.path) for each in answer.runs if not each.devices]
    if empty:
        remedy = "profiling.record_memory_history=true, or with profiling.pytorch_profiler_profile_memory=true for totals only"
        common.finish([*errors, *(f"{path} records no memory. Profile with {remedy}." for path in empty)])
    text = memory_view.dumps(answer) if as_json else None
    common.show(memory_view.memory_view(answer), output, text, memory_view.picture_lines(answer))
    common.finish(errors)
