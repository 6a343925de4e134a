"""`bridge-profiling compare`: prints what changed from one run to another, as `analysis.compare` finds it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from bridge_profiling.cli import common
from bridge_profiling.errors import ProfilingConfigError

if TYPE_CHECKING:
    from bridge_profiling.analysis.compare import Comparison


def compare(
    base: Annotated[Path, Argument(metavar="BASE", help="The baseline: like RUN of analyze.")],
    other: Annotated[Path, Argument(metavar="OTHER", help="The run to compare with BASE.")],
    also_base: Annotated[list[Path] | None, Option(metavar="RUN", help="Another run like BASE; repeatable.")] = None,
    also_other: Annotated[list[Path] | None, Option(metavar="RUN", help="Another run like OTHER; repeatable.")] = None,
    as_json: common.JsonOption = False,
    json_schema: common.JsonSchemaOption = False,
    output: common.PageOption = None,
    fail_over: Annotated[
        str | None,
        Option(metavar="PERCENT", help="Exit code 3 if slower with confidence by more than this: 5%."),
    ] = None,
    workers: common.WorkersOption = None,
) -> None:
    """Show what changed from BASE to OTHER: whether they are comparable, the difference, its confidence, and where it is.

    Exit code 3: --fail-over is exceeded. 1: a capture could not be read, or only in part. 2: invalid request.
    """
    limit = None if fail_over is None else _share(fail_over)
    sides = [base, *(also_base or [])], [other, *(also_other or [])]
    with common.open_runs(*sides[0], *sides[1], output=output, workers=workers) as runs:
        from bridge_profiling.analysis.compare import compare as compared

        found = compared(runs[: len(sides[0])], runs[len(sides[0]) :])
        errors = [error for run in runs for error in run.errors]
    from bridge_profiling.report.comparison_view import comparison_view

    common.show(comparison_view(found), output, found.to_json() if as_json else None)
    common.finish(errors)
    if limit is not None:
        _judge(found, limit, fail_over or "")


def _share(text: str) -> float:
    """`5%`, `5 %` or `5` as 0.05."""
    number = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%?\s*", text)
    if number is None:
        raise ProfilingConfigError(f"--fail-over {text!r} is not a percentage", instead="Type for example 5%")
    return float(number[1]) / 100


def _judge(found: Comparison, limit: float, typed: str) -> None:
    """Exit with code 3 if the limit is exceeded; print a message if that is unknown, since a CI job may rely on it."""
    if found.regressed(limit):
        common.print_error(f"the median iteration is slower by more than {typed}")
        raise typer.Exit(common.REGRESSION)
    if found.step is None or found.step.verdict == "unknown":
        why = "the iteration times are unknown" if found.step is None else found.step.reason
        typer.echo(f"warning: --fail-over {typed} cannot be judged: {why}", err=True)
