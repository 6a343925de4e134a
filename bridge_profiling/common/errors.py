"""The errors users see. Each message says what is wrong, why, and what to type instead."""

from __future__ import annotations

import difflib
import errno
import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import CO_VARARGS
from itertools import pairwise
from traceback import walk_tb
from types import FrameType
from typing import Any

from bridge_profiling.common.printable import printable


class ProfilingConfigError(ValueError):
    """A request that cannot be carried out, raised before anything is changed or submitted.

    Args:
        what: what is wrong, naming the setting and its value.
        why: the reason it cannot work.
        instead: what to type instead.
    """

    def __init__(self, what: str, *, why: str = "", instead: str = "") -> None:
        self.what, self.why, self.instead = what, why, instead
        reason = f"{what.rstrip('.')}; {why.rstrip('.')}." if why else f"{what.rstrip('.')}."
        super().__init__(f"{reason} {instead.rstrip('.')}." if instead else reason)

    def __reduce__(self) -> tuple:
        # Exceptions pickle as cls(*args); ours take keywords, and NeMo-Run moves exceptions between processes.
        return (partial(type(self), self.what, why=self.why, instead=self.instead), ())


class CaptureError(RuntimeError):
    """A capture that failed inside a job. Logged and written to the manifest; never raised into the training."""


class TraceError(RuntimeError):
    """A capture file that cannot be read. The message names the file."""


def require(condition: object, what: str, *, why: str = "", instead: str = "") -> None:
    """Raise `ProfilingConfigError(what, why=why, instead=instead)` unless `condition` is true."""
    if not condition:
        raise ProfilingConfigError(what, why=why, instead=instead)


def did_you_mean(word: str, known: Iterable[str], *, before: str = "") -> str:
    """What to type instead of a word that is not in a closed list: the most similar one, or any of them.

    `before` is typed before the word, such as `--profiler `.
    """
    known = list(known)
    nearest = difflib.get_close_matches(word, known, n=1)
    return f"Type {before}{nearest[0]}" if nearest else f"Type one of {', '.join(known)}"


def one_line(error: BaseException) -> str:
    """The error's type and message, at most 500 characters on one line."""
    return printable(f"{type(error).__name__}: {' '.join(text_of(error).split())}"[:500])


def passed_a_handler(error: BaseException) -> bool:
    """Whether a signal handler raised `error`, as far as its traceback shows: a function that is written in Python."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return any(_is_handler(frame, interrupted) for interrupted, frame in pairwise(frames))


def _is_handler(frame: FrameType, interrupted: FrameType) -> bool:
    """Whether a function was called as a handler is: with a number and the frame that it interrupts.

    This finds one that has replaced itself before it raised, and one that is wrapped, as by functools.partial.
    """
    values, code = frame.f_locals, frame.f_code
    names = code.co_varnames[: code.co_argcount]
    rest = values.get(code.co_varnames[len(names) + code.co_kwonlyargcount]) if code.co_flags & CO_VARARGS else ()
    arguments = [*map(values.get, names), *(rest or ())]
    return any(isinstance(number, int) and given is interrupted for number, given in pairwise(arguments))


def is_contained(error: BaseException) -> bool:
    """Whether `error`, of the training's own code that we have called, ends there: all but Ctrl-C and a signal handler's."""
    return not (isinstance(error, KeyboardInterrupt) or passed_a_handler(error))


@contextmanager
def contained() -> Iterator[None]:
    """Contain what the training's own code raises where we call it, SystemExit included: a log handler, a stream, `__int__`."""
    try:
        yield
    except BaseException as error:
        if not is_contained(error):
            raise


def text_of(value: object, longest: int = 10_000) -> str:
    """The beginning of `str(value)`, whatever its class does there."""
    try:
        return str(value)[:longest]
    except BaseException as error:
        if not is_contained(error):
            raise
        return f"<{type(value).__name__}, whose text raises {type(error).__name__}>"


def say(text: str) -> None:
    """Print a line on standard error, unless that is closed or its reader is gone."""
    with contained():
        if sys.stderr is not None:
            print(printable(text), file=sys.stderr, flush=True)


class TrainingLogger(logging.LoggerAdapter):
    """Logs from inside a training. Where a handler or a filter of the training's raises, the line goes to standard error."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name))

    def log(self, level: int, msg: object, *args: object, **keywords: Any) -> None:
        """As `logging.Logger.log`, and raises nothing."""
        failed = True
        with contained():
            # The caller's line, not this one.
            super().log(level, msg, *args, stacklevel=2, **keywords)
            failed = False
        if failed:
            with contained():
                say(f"bridge_profiling: {str(msg) % args}")


def shortage(error: BaseException | None) -> str | None:
    """The resource that a machine is short of, if an error or one of its causes says so; None for any other error.

    Libraries are recognized by the names of their errors, so that none is imported.
    """
    while error is not None:
        name, text = type(error).__name__, str(error)
        unmapped = isinstance(error, ImportError) and ("failed to map segment" in text or "annot allocate memory" in text)
        out_of_memory = isinstance(error, MemoryError) or name == "OutOfMemoryException" or unmapped
        if out_of_memory or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            return "there is not enough memory. Use a machine with more, or raise the limit (ulimit -v, or the job's)"
        if isinstance(error, RuntimeError) and "start new thread" in text:
            return "no thread can be started. Raise the limit of processes (ulimit -u) or of memory (ulimit -v)"
        if name == "IOException":  # DuckDB's
            return text.partition("\n")[0]
        error = error.__cause__ or error.__context__
    return None


def print_error(error: object) -> None:
    """Print why a command ends, on standard error."""
    print(printable(f"error: {error}"), file=sys.stderr)


def install_command(extra: str) -> str:
    """The command that installs an extra, to be typed in a clone: no package index has this package."""
    return f"pip install '.[{extra}]' in a clone of bridge_profiling"
