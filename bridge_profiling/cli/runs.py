"""Shared by the commands that read a run: they find its captures, and print errors and progress. Reads no captures."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from bridge_profiling.errors import TraceError

if TYPE_CHECKING:
    from bridge_profiling.analysis.session import OnProgress

#: Exit code if a capture cannot be read, or only in part.
UNREADABLE = 1

#: Shorter work shows no progress.
_PATIENCE_S = 1.0


@contextmanager
def readable(run: Path, hint: str = "RUN") -> Iterator[Path]:
    """The path of a run's captures; those of a NeMo-Run experiment are fetched first where they are on another machine.

    A run without captures ends the command with one line on standard error and exit code 1, a missing one with exit code 2.

    Args:
        run: a directory or file, or an experiment's id or title, with `/job` after it where it has several.
        hint: name of the command's argument.
    """
    try:
        yield _located(run, hint)
    except TraceError as error:
        print_errors([str(error)])
        raise typer.Exit(UNREADABLE) from error
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "bridge_profiling":
            raise
        typer.echo(f"error: reading captures needs {error.name}. Type pip install 'bridge-profiling[analysis]'.", err=True)
        raise typer.Exit(2) from error


def _located(run: Path, hint: str) -> Path:
    from bridge_profiling.experiments.captures import captures_of
    from bridge_profiling.experiments.jobs import experiment_of

    experiment = experiment_of(run)
    if experiment is None:
        if not run.exists():
            raise typer.BadParameter(f"{run} does not exist, as a file, a directory or a NeMo-Run experiment", param_hint=hint)
        return run
    with progress("fetching", "files") as on_progress:
        return captures_of(*experiment, on_progress=on_progress)


def print_errors(errors: list[str]) -> None:
    """Print each error on a line of standard error."""
    for error in errors:
        typer.echo(f"error: {' '.join(error.split())}", err=True)


@contextmanager
def progress(what: str, unit: str) -> Iterator[OnProgress]:
    """Show a progress bar on standard error for work of more than a second, if that is a terminal.

    Args:
        what: the work, such as "reading".
        unit: the items counted, such as "captures".
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeElapsedColumn())
    # Transient: only the answer stays on the screen.
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(what, total=None)
    # A timer starts the bar, because the first capture alone may take longer than a second.
    clock = threading.Timer(_PATIENCE_S, bar.start)
    clock.daemon = True
    clock.start()
    try:
        yield lambda done, total: bar.update(task, completed=done, total=total)
    finally:
        clock.cancel()
        clock.join()
        bar.stop()
