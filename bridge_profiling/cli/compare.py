"""`bridge-profiling compare`: prints what changed from one run to another, as `analysis.compare` finds it."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bridge_profiling.cli.options import WorkersOption, check_output
from bridge_profiling.cli.runs import UNREADABLE, print_errors, progress, readable

if TYPE_CHECKING:
    from bridge_profiling.analysis.compare import Comparison

#: Exit code if an iteration became slower by more than --fail-over, with confidence.
REGRESSED = 3


def compare(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="The baseline: like RUN of analyze.")],
    other: Annotated[Path, typer.Argument(metavar="OTHER", help="The run to compare with BASE.")],
    also_base: Annotated[
        list[Path] | None, typer.Option(metavar="RUN", help="Another run like BASE; repeatable. Uses Welch's t over the runs.")
    ] = None,
    also_other: Annotated[list[Path] | None, typer.Option(metavar="RUN", help="Another run like OTHER; repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write a page as one HTML file.")
    ] = None,
    fail_over: Annotated[
        str | None,
        typer.Option(metavar="PERCENT", help="Exit code 3 if iterations are certainly slower by more than this, such as 5%."),
    ] = None,
    workers: WorkersOption = None,
) -> None:
    """Show what changed from BASE to OTHER: whether they are comparable, the difference, its confidence, and where it is.

    Exit code 3: --fail-over is exceeded. 1: a capture could not be read, or only in part. 2: the request itself is wrong.
    """
    limit = None if fail_over is None else _share(fail_over)
    check_output(output)
    named = (("BASE", [base, *(also_base or [])]), ("OTHER", [other, *(also_other or [])]))
    with contextlib.ExitStack() as stack:
        paths = [[stack.enter_context(readable(path, hint)) for path in side] for hint, side in named]
        # Imported here: `--help` and other commands start faster without it.
        from bridge_profiling.analysis.compare import compare as compared
        from bridge_profiling.run import Run

        on_progress = stack.enter_context(progress("reading", "captures"))
        sides = [[stack.enter_context(Run(path, workers=workers, on_progress=on_progress)) for path in side] for side in paths]
        found = compared(*sides)
        errors = [error for side in sides for run in side for error in run.errors]
    from bridge_profiling.report.comparison_view import comparison_view

    view = comparison_view(found)
    if output is not None:
        from bridge_profiling.report.page import write_page

        write_page(view, output)
    if as_json:
        typer.echo(found.to_json())
    else:
        from rich.console import Console

        from bridge_profiling.report.terminal import print_answer

        print_answer(view, Console(highlight=False))
        if output is not None:
            typer.echo(f"page: {output}")
    print_errors(errors)
    if errors:
        raise typer.Exit(UNREADABLE)
    if limit is not None:
        _judge(found, limit, fail_over or "")


def _share(text: str) -> float:
    """`5%`, `5 %` or `5` as 0.05."""
    number = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%?\s*", text)
    if number is None:
        raise typer.BadParameter(f"{text!r} is not a percentage: type for example 5%", param_hint="--fail-over")
    return float(number[1]) / 100


def _judge(found: Comparison, limit: float, typed: str) -> None:
    """Exit with code 3 if the limit is exceeded; print a message if that is unknown, since a CI job may rely on it."""
    if found.regressed(limit):
        typer.echo(f"error: the median iteration is slower by more than {typed}", err=True)
        raise typer.Exit(REGRESSED)
    if found.step is None or found.step.verdict == "unknown":
        why = "no iterations are known" if found.step is None else found.step.reason
        typer.echo(f"--fail-over {typed} cannot be judged: {why}", err=True)
