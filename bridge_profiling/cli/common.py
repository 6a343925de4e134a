"""Shared by the commands: options, opening runs, progress, notes, errors and child processes. Reads no captures."""

from __future__ import annotations

import errno
import functools
import inspect
import io
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from bridge_profiling.common.errors import ProfilingConfigError, TraceError, did_you_mean, install_command, require, shortage
from bridge_profiling.common.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

    from bridge_profiling.facts.captures import OnProgress
    from bridge_profiling.report.views import PageView
    from bridge_profiling.run import Run

#: Exit codes. A command that a signal ends has 128 and the signal's number, as in a shell.
FAILURE, USAGE, REGRESSION, UNDECIDED = 1, 2, 3, 4

#: Signals that end a command: Ctrl-C, a batch system's, and a closed terminal's.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

#: After the first of them, others change nothing for so long: removing workers and files takes less.
_CLEAN_UP_S = 10.0

#: Errors of a disk: a request that can be carried out elsewhere has failed.
_DISK_FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

#: Typer's or Click's, depending on Typer's release.
_UsageError: type[Any]
_ClickException: type[Any]
_UsageError, _ClickException = typer.BadParameter.__mro__[1:3]

#: Shorter work shows no progress.
_PATIENCE_S = 1.0

#: Whether --quiet is given.
QUIET = ContextVar("quiet", default=False)


EngineName = StrEnum("EngineName", ["process", "ray"])
ProfilerName = StrEnum("ProfilerName", ["torch", "memory", "nsys"])


class NotInListError(typer.BadParameter):
    """A value that is none of an option's, with what to type instead."""


def closed(names: type[StrEnum]) -> dict[str, Any]:
    """Arguments of an `Option` with one of these values: an error names the most similar one."""

    def parse(typed: str) -> StrEnum:
        try:
            return names(typed)
        except ValueError:
            raise NotInListError(f"{typed!r} does not exist. {did_you_mean(typed, list(names))}.") from None

    return {"parser": parse, "metavar": f"[{'|'.join(names)}]"}


RunArgument = Annotated[Path, Argument(metavar="RUN", help="Captures: a directory, a file, or a NeMo-Run experiment.")]
JsonOption = Annotated[bool, Option("--json", help="Print JSON.")]


def _print_schema(context: typer.Context, wanted: bool) -> None:
    if wanted:
        from bridge_profiling.report.documents import schema_text

        typer.echo(schema_text(context.info_name or ""), nl=False)
        raise typer.Exit


#: Eager: the command's arguments need not be typed.
JsonSchemaOption = Annotated[
    bool, Option("--json-schema", callback=_print_schema, is_eager=True, help="Print the JSON Schema of --json and exit.")
]
PageOption = Annotated[Path | None, Option("--output", "-o", metavar="FILE", help="Write a page as one HTML file.")]
_WORKERS = Option(min=1, help="Captures to read at once. Default: one per CPU.")
WorkersOption = Annotated[int | None, _WORKERS]
_FETCH = Option("--fetch", help="Copy an experiment's captures from another machine first, over its SSH tunnel.")
FetchOption = Annotated[bool, _FETCH]

#: The type, the option and the default of each parameter.
_Options = dict[str, tuple[Any, Any, Any]]

_READING: _Options = {
    "bench": (
        Path | None,
        Option(metavar="FILE", help="Results of `bridge-profiling bench`. Default: bench.json in RUN."),
        None,
    ),
    "parquet": (
        Path | None,
        Option(metavar="DIRECTORY", file_okay=False, help="Keep tables here as Parquet. RUN may be such a directory."),
        None,
    ),
    "engine": (
        EngineName,
        Option(**closed(EngineName), help="Read captures in processes on this machine or on a Ray cluster."),
        EngineName.process,
    ),
    "ray_address": (str | None, Option(metavar="ADDRESS", help="Ray cluster. Default: $RAY_ADDRESS, or a new one."), None),
    "workers": (int | None, _WORKERS, None),
    "fetch": (bool, _FETCH, False),
    "cycle": (int | None, Option(min=1, metavar="N", help="Cycle of a schedule that repeats, from 1. Default: newest."), None),
}
_RESULT: _Options = {
    "output": (Path | None, Option("--output", "-o", metavar="FILE", help="Add the result to this file."), None),
    "as_json": (bool, Option("--json", help="Print JSON."), False),
}
_FLAGS: _Options = {
    "quiet": (bool, Option("--quiet", "-q", help="Print only the answer and errors."), False),
    "no_color": (bool, Option("--no-color", help="Print without colors, as NO_COLOR=1 does."), False),
}


@functools.cache
def _groups() -> dict[str, _Options]:
    """Options that a command takes with one parameter, such as `**reading` (arguments of `Run`)."""
    # Imported when a command is built: `--help` of all commands needs no settings.
    from bridge_profiling.frameworks.run_request import OPTIONS
    from bridge_profiling.settings import recording

    settings: _Options = {
        **{name: (bool, Option(recording.option(name), help=text), False) for name, (_, text) in recording.FLAGS.items()},
        "settings": (
            list[str] | None,
            Option("--set", metavar="FIELD=VALUE", help="A setting of `profiling`; repeatable."),
            None,
        ),
        "config_file": (
            Path | None,
            Option("--config", metavar="FILE", help="YAML file of settings, under the others."),
            None,
        ),
    }
    request: _Options = {name: (str | None, Option(metavar=value, help=text), None) for name, (value, text) in OPTIONS.items()}
    request["profiler"] = ProfilerName | None, Option(**closed(ProfilerName), help=OPTIONS["profiler"][1]), None
    return {"reading": _READING, "recording": settings, "request": request | settings, "result": _RESULT}


def with_options(command: Callable[..., None], *, flags: bool = False) -> Callable[..., None]:
    """The command with the options of `_groups` that its last parameter stands for, such as `**reading`, and with the flags."""
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    groups = [_groups()[name] for name, each in signature.parameters.items() if each.kind is each.VAR_KEYWORD]

    @functools.wraps(command)
    def run_command(**given: Any) -> None:
        if flags:
            # Set before or after the command's name, for the rest of the command.
            QUIET.set(given.pop("quiet") or QUIET.get())
            if given.pop("no_color"):
                os.environ["NO_COLOR"] = "1"
        command(**given)

    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])
        for group in [*groups, _FLAGS if flags else {}]
        for name, (kind, option, default) in group.items()
    ]
    # Typer reads either of the two, depending on its release.
    run_command.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    run_command.__annotations__ = {each.name: each.annotation for each in [*own, *options]}
    return run_command


#: `with_options`, with the flags that every command of `bridge-profiling` has.
with_flags = functools.partial(with_options, flags=True)


class Interrupted(KeyboardInterrupt):
    """A signal of `ENDING` arrived."""


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Raise `Interrupted` where a signal of `ENDING` arrives, so that blocks on the way out clean up; yields those received.

    Ignored signals stay ignored (nohup, a shell's background job).
    """
    received: list[int] = []
    raised_at = -_CLEAN_UP_S

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal raised_at
        if frame is not None and frame.f_code is raise_again.__code__:
            # The timer is faster than a busy machine: what is raised there is dropped as well.
            received.extend({number} - {signal.SIGALRM})
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            return
        if number != signal.SIGALRM:
            received.append(number)
            if time.monotonic() - raised_at < _CLEAN_UP_S:
                return
        if received:
            raised_at = time.monotonic()
            raise Interrupted

    def raise_again(lost: Any) -> None:
        # Python drops an exception that is raised in a finalizer or a callback, which also every import has.
        if isinstance(lost.exc_value, Interrupted):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
        elif not received:
            report_lost(lost)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    numbers = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, interrupt) for number in (*numbers, signal.SIGALRM)}
    report_lost, sys.unraisablehook = sys.unraisablehook, raise_again
    try:
        yield received
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous.items():
            # A second Ctrl-C while the interpreter ends would only print a traceback.
            signal.signal(number, signal.SIG_IGN if received else handler)
        sys.unraisablehook = report_lost


def exit_code(app: typer.Typer) -> int:
    """Run an app's command, and print what ended it on one line of standard error; a user who types Ctrl-C knows it."""
    with interruptible() as received:
        try:
            code = _exit_code(app)
            _flush_output()
            is_cut_off = code == 128 + signal.SIGINT  # what Typer makes of `Interrupted`; older releases raise
        except (KeyboardInterrupt, typer.Abort):
            code, is_cut_off = 128 + signal.SIGINT, True
        except BrokenPipeError:  # `| head` has seen enough
            _discard_output()
            code, is_cut_off = FAILURE, False
        except BaseException:
            # Also what a library makes of the signal, as DuckDB does.
            if not received:
                raise
            code, is_cut_off = FAILURE, True
        if is_cut_off and received and received[0] != signal.SIGINT:
            with suppress(OSError):  # the terminal may be gone
                print_error(f"ended by {signal.Signals(received[0]).name}")
    return 128 + received[0] if received else code


def _flush_output() -> None:
    """Write the rest of standard output. A full disk loses it, which the exit code says already."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError:
        _discard_output()


def _discard_output() -> None:
    """Write what is left for standard output nowhere."""
    with suppress(OSError, ValueError):  # it has no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _exit_code(app: typer.Typer) -> int:
    try:
        # The number of a closed standard stream would be that of the next file to be opened, and children write to it.
        while (unused := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(unused, True)
        os.close(unused)
        sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
        if any(option.startswith("error") for option in sys.warnoptions):
            # What a library deprecates, NeMo-Run's at least, ends no command; Python shows it instead.
            warnings.simplefilter("default")
        if sys.stdout is None:
            raise OSError("standard output is closed. Redirect it, to /dev/null for instance")
        if isinstance(sys.stdout, io.TextIOWrapper):
            # Captures hold names in any script, and our sentences dashes and arrows: what an encoding lacks becomes "?".
            sys.stdout.reconfigure(errors="replace")
        code = app(standalone_mode=False) or 0
        sys.stdout.flush()
        return code
    except ProfilingConfigError as error:
        print_error(str(error))
        return FAILURE if getattr(error.__cause__, "errno", None) in _DISK_FAILURES else USAGE
    except _ClickException as error:
        message = error.format_message().strip()
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(message)
        elif message:
            context = getattr(error, "ctx", None)
            end = "" if message[-1] in ".?" else "."
            is_complete = context is None or isinstance(error, NotInListError)
            help_command = "" if is_complete else f" Type {context.command_path} --help."  # type: ignore[union-attr]
            print_error(f"{message[0].lower()}{message[1:]}{end}{help_command}")
        return USAGE if isinstance(error, _UsageError) else FAILURE
    except BrokenPipeError:
        raise
    except (TraceError, OSError) as error:
        filename = getattr(error, "filename", None)
        reason = getattr(error, "strerror", None) or str(error)
        print_error(shortage(error) or (f"{filename}: {reason}" if filename else reason))
        return FAILURE
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "bridge_profiling":
            raise
        print_error(f"this command needs {error.name}, which is not installed. Type {install_command('analysis')}.")
        return USAGE
    except Exception as error:
        if (short := shortage(error)) is None:
            raise
        print_error(short)
        return FAILURE


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


@contextmanager
def open_runs(*paths: Path, output: Path | None = None, fetch: bool = False, **options: Any) -> Iterator[list[Run]]:
    """Open runs with one progress bar; with `fetch`, captures of NeMo-Run experiments are copied from other machines first.

    A path is a directory or file, or an experiment's id or title, followed by `/job` if it has several jobs; `output` is the
    value of `-o`, and `options` are those of `Run`.
    """
    check_output(output)
    located = [_locate(path, fetch) for path in paths]
    # Imported here: `--help` and other commands start faster without it.
    from bridge_profiling.facts.engines import without_pandas
    from bridge_profiling.run import Run

    with ExitStack() as stack:
        stack.enter_context(without_pandas())
        on_progress = stack.enter_context(progress("reading", "captures"))
        yield [stack.enter_context(Run(path, on_progress=on_progress, **options)) for path in located]


def _locate(path: Path, fetch: bool) -> Path:
    from bridge_profiling.experiments.captures import captures_of
    from bridge_profiling.experiments.jobs import experiment_of

    experiment = experiment_of(path)
    if experiment is None:
        require(path.exists(), f"{path} does not exist", instead="Type a file, a directory or a NeMo-Run experiment")
        return path
    with progress("fetching", "files") as on_progress:
        return captures_of(*experiment, remote=fetch, on_progress=on_progress)


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


def wait_for(
    start: Callable[[], subprocess.Popen[bytes]],
    forwarded: Mapping[int, int | None],
    *,
    insist: Callable[[subprocess.Popen[bytes], threading.Event, int], None] | None = None,
) -> tuple[int, int | None]:
    """Start a child process and wait for it; returns its exit code, as Popen has it, and the last signal received here.

    `forwarded` has the signal to send to the child for each signal received here; None sends nothing. The first that is
    sent starts `insist` in a thread, with the child, an event that is set once the child has ended, and the signal sent.
    """
    received, early = list[int](), list[int]()
    child: subprocess.Popen[bytes] | None = None
    ended, threads = threading.Event(), list[threading.Thread]()

    def forward(number: int, frame: object) -> None:
        received.append(number)
        if child is None:
            early.append(number)
        elif (sent := forwarded[number]) is not None:
            child.send_signal(sent)
            if insist and not threads:
                threads.append(threading.Thread(target=insist, args=(child, ended, sent)))
                threads[0].start()

    # The child inherits ignored signals (nohup), and they stay ignored here.
    numbers = [number for number in forwarded if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, forward) for number in numbers}
    try:
        child = start()
        for number in early:
            forward(number, None)
        code = child.wait()
    finally:
        ended.set()
        for number, handler in previous.items():
            signal.signal(number, handler)
        for thread in threads:
            thread.join()
    return code, received[-1] if received else None
