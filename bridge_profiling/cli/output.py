"""What commands print: the answer on standard output; notes, progress and errors."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from bridge_profiling.common.errors import require
from bridge_profiling.common.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

    from bridge_profiling.facts.captures import OnProgress
    from bridge_profiling.report.views import PageView

#: Exit code of a command that failed, or whose answer is not complete.
FAILURE = 1

#: Shorter work shows no progress.
_PATIENCE_S = 1.0

#: Whether --quiet is given.
QUIET = ContextVar("quiet", default=False)


def note(text: str, *, err: bool = False) -> None:
    """Print a line that is not part of the answer, unless --quiet is given."""
    if not QUIET.get():
        echo(text, err=err)


def echo(text: str, *, err: bool = False) -> None:
    """Print lines of text, whatever the names in them hold."""
    typer.echo(printable(text, lines=True), err=err)


def print_error(text: str) -> None:
    """Print an error on one line of standard error."""
    # Spaces stay: a path can have several in a row.
    echo(f"error: {' '.join(filter(None, map(str.strip, text.splitlines())))}", err=True)


def finish(errors: Sequence[str], limitations: Sequence[str] = ()) -> None:
    """Print notes on the answer, and the captures' errors; exit code 1 if there are any."""
    for sentence in limitations:
        note(f"- {sentence}")
    for error in errors:
        print_error(error)
    if errors:
        raise typer.Exit(FAILURE)


def console() -> Console:
    """Standard output with Rich. NO_COLOR removes all styles; FORCE_COLOR keeps them in a pipe."""
    from rich.console import Console

    return Console(highlight=False, color_system=None if os.environ.get("NO_COLOR") else "auto")


def show(view: PageView, output: Path | None, as_json: str | None, lines: Iterable[str] = ()) -> None:
    """Write the page to `-o`, and print its JSON text if given, else the page's content with `lines` under the verdict."""
    if output is not None:
        from bridge_profiling.report.page import write_page

        write_page(view, output)
    if as_json is not None:
        typer.echo(as_json)
        return
    from bridge_profiling.report.terminal import print_answer

    print_answer(view, console(), lines)
    if output is not None:
        note(f"page: {output}")


def check_output(output: Path | None) -> None:
    """Refuse an output file that cannot be written, before any capture is read."""
    writable = output is None or (output.parent.is_dir() and not output.is_dir())
    require(writable, f"{output} cannot be written", instead="Type -o and a file in an existing directory")


@contextmanager
def progress(what: str, unit: str) -> Iterator[OnProgress]:
    """Show a progress bar (reading … 3/8 captures) on standard error, if that is a terminal, for more than a second's work."""
    if QUIET.get() or not sys.stderr.isatty():
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
