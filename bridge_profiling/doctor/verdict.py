"""The result of a check: one line and what to do about it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from bridge_profiling.doctor.machine import Unavailable
from bridge_profiling.errors import ProfilingConfigError

#: `fails` for a certain failure; `unknown` for anything that could not be checked, never `ok`.
Status = Literal["ok", "warning", "fails", "unknown"]

#: A check without its arguments: a request, a machine, and in parts of a check anything they share.
Check = Callable[..., Iterator["Verdict"]]


@dataclass(frozen=True)
class Verdict:
    """One line of the diagnosis: the check's name, its status, the finding, and what to do about it (may be empty)."""

    check: str
    status: Status
    found: str
    instead: str = ""


def ok(found: str) -> Verdict:
    """Nothing to do."""
    return Verdict("", "ok", found)


def warning(found: str, instead: str) -> Verdict:
    """The job runs, but the profile is worse than expected or in an unexpected place."""
    return Verdict("", "warning", found, instead)


def fails(found: str, instead: str, *, certain: object = True) -> Verdict:
    """The job writes no profile, or does not train; a warning unless this is certain."""
    return Verdict("", "fails" if certain else "warning", found, instead)


def unknown(found: str, instead: str = "") -> Verdict:
    """The check could not run; `found` is the reason."""
    return Verdict("", "unknown", found, instead)


def checked(name: str, *, instead: str = "") -> Callable[[Check], Check]:
    """Name the verdicts of a check, and turn its errors into verdicts.

    A setting that the job refuses `fails`; missing information is `unknown`, and `instead` says what to do about that.
    """

    def decorate(check: Check) -> Check:
        @functools.wraps(check)
        def run(*args: Any) -> Iterator[Verdict]:
            try:
                for verdict in check(*args):
                    # A verdict that has a name comes from a check within this one.
                    yield verdict if verdict.check else replace(verdict, check=name)
            except ProfilingConfigError as error:
                yield Verdict(name, "fails", f"{error.what}; {error.why}" if error.why else error.what, error.instead)
            except Unavailable as reason:
                yield Verdict(name, "unknown", str(reason), instead)

        return run

    return decorate
