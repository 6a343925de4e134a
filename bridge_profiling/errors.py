"""The errors users see. Each message says what is wrong, why, and what to type instead."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from functools import partial

from bridge_profiling.printable import printable


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
    return printable(f"{type(error).__name__}: {' '.join(str(error).split())}"[:500])


def print_error(error: object) -> None:
    """Print why a command ends, on standard error."""
    print(printable(f"error: {error}"), file=sys.stderr)


def install_command(extra: str) -> str:
    """The command that installs an extra, to be typed in a clone: no package index has this package."""
    return f"pip install '.[{extra}]' in a clone of bridge_profiling"
