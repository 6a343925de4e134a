"""`bridge-profiling compare`: prints what changed from one run to another, or through several, and judges the change."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from bridge_profiling.cli.options import FetchOption, JsonOption, JsonSchemaOption, PageOption, WorkersOption
from bridge_profiling.cli.output import echo, finish, print_error, show
from bridge_profiling.cli.runs import open_runs
from bridge_profiling.common.errors import ProfilingConfigError, require

if TYPE_CHECKING:
    from bridge_profiling.compare import Comparison

Against = StrEnum("Against", ["first", "previous"])

#: Exit codes.
_REGRESSION, _UNDECIDED = 3, 4


def compare(
    base: Annotated[Path, Argument(metavar="BASE", help="The baseline: like RUN of analyze.")],
    other: Annotated[Path, Argument(metavar="OTHER", help="The run to compare with BASE.")],
    more: Annotated[
        list[Path] | None,
        Argument(metavar="MORE", help="Later runs: compares three or more in order.", show_default=False),
    ] = None,
    also_base: Annotated[list[Path] | None, Option(metavar="RUN", help="Another run like BASE; repeatable.")] = None,
    also_other: Annotated[list[Path] | None, Option(metavar="RUN", help="Another run like OTHER; repeatable.")] = None,
    as_json: JsonOption = False,
    json_schema: JsonSchemaOption = False,
    output: PageOption = None,
    fail_over: Annotated[
        str | None,
        Option(metavar="PERCENT", help="Exit code 3 if slower with confidence by more than this: 5%."),
    ] = None,
    strict: Annotated[bool, Option("--strict", help="Exit code 4 if --fail-over cannot be judged.")] = False,
    against: Annotated[
        Against | None,
        Option(
            help="Of three or more runs, the one that --fail-over compares the last with. Default: first.",
        ),
    ] = None,
    workers: WorkersOption = None,
    fetch: FetchOption = False,
) -> None:
    """Show what changed from BASE to OTHER: whether they are comparable, the difference, its confidence, and where it is.

    Exit code 3: --fail-over is exceeded. 4: it cannot be judged, and --strict is given. 1: a capture could not be read, or only
    in part. 2: invalid request.
    """
    limit = _limit(fail_over, strict, against)
    sides = [base, *(also_base or [])], [other, *(also_other or [])]
    if more:
        require(
            not also_base and not also_other,
            f"--also-base and --also-other with {len(more) + 2} runs",
            why="they add runs to the two sides of a comparison of two",
            instead="Name two runs, or all runs in order without these options",
        )
    else:
        require(against is None, "--against with two runs", instead="Leave it out: OTHER is compared with BASE")
    with open_runs(*sides[0], *sides[1], *(more or []), output=output, workers=workers, fetch=fetch) as runs:
        from bridge_profiling.compare import compare as compared
        from bridge_profiling.compare import compare_series

        found = compare_series(runs) if more else compared(runs[: len(sides[0])], runs[len(sides[0]) :])
        errors = [error for run in runs for error in run.facts.errors]
    from bridge_profiling.compare import Series
    from bridge_profiling.report.comparison_view import comparison_view, series_view

    if isinstance(found, Series):
        view, judged = series_view(found), getattr(found.runs[-1], f"against_{against or Against.first}")
    else:
        view, judged = comparison_view(found), found
    show(view, output, found.to_json() if as_json else None)
    if errors and strict:
        print_error(f"--fail-over {fail_over} cannot be judged: a capture could not be read. Capture that run again.")
    finish(errors)
    if limit is not None:
        _judge(judged, limit, f"{fail_over}", strict)


def _limit(fail_over: str | None, strict: bool, against: Against | None) -> float | None:
    """The limit of --fail-over as a share; None without one."""
    if fail_over is None:
        option = "--strict" if strict else f"--against {against}"
        require(not strict and against is None, f"{option} without --fail-over", instead=f"Type --fail-over 5% {option}")
        return None
    number = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%?\s*", fail_over)
    if number is None:
        raise ProfilingConfigError(f"--fail-over {fail_over!r} is not a percentage", instead="Type for example 5%")
    return float(number[1]) / 100


def _judge(found: Comparison, limit: float, typed: str, strict: bool) -> None:
    """Exit with code 3 if the limit, as typed, is exceeded; if that is unknown say so, and exit with code 4 if strict."""
    if found.regressed(limit):
        print_error(f"the median iteration is slower by more than {typed}")
        raise typer.Exit(_REGRESSION)
    if found.undecided is None:
        return
    text = f"--fail-over {typed} cannot be judged: {found.undecided}"
    if strict:
        print_error(f"{text}. {_remedy(found)}.")
        raise typer.Exit(_UNDECIDED)
    echo(f"warning: {text}", err=True)


def _remedy(found: Comparison) -> str:
    """What makes the limit decidable."""
    if found.step is None:
        return "Mark iterations in both runs, for example with bridge-profiling run"
    if found.step.verdict == "unknown":
        return (
            "Let both trainings run 50 iterations beyond the window, or compare several runs per side with --also-base and "
            "--also-other"
        )
    return "Capture a new baseline that does the same work on the same devices"
