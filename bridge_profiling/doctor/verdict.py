"""The result of a check: one line and what to do about it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ParamSpec

from bridge_profiling.doctor.machine import Unavailable
from bridge_profiling.errors import ProfilingConfigError

_P = ParamSpec("_P")


class Status(StrEnum):
    """The outcome of a check."""

    ok = "ok"
    warning = "warning"
    fails = "fails"
    unknown = "unknown"


@dataclass(frozen=True)
class Verdict:
    """One line of the diagnosis.

    Attributes:
        check: name of the check, in one or two words.
        status: `fails` for a certain failure; `unknown` for anything that could not be checked, never `ok`.
        found: the finding.
        instead: what to do about it; empty where there is nothing to do.
    """

    check: str
    status: Status
    found: str
    instead: str = ""


def ok(found: str) -> Verdict:
    """Nothing to do."""
    return Verdict("", Status.ok, found)


def warning(found: str, instead: str) -> Verdict:
    """The job runs, but the profile is worse than expected or in an unexpected place."""
    return Verdict("", Status.warning, found, instead)


def fails(found: str, instead: str, *, certain: object = True) -> Verdict:
    """The job writes no profile, or does not train; a warning unless this is certain."""
    return Verdict("", Status.fails if certain else Status.warning, found, instead)


def unknown(found: str, instead: str = "") -> Verdict:
    """The check could not run; `found` is the reason."""
    return Verdict("", Status.unknown, found, instead)


def checked(name: str, *, instead: str = "") -> Callable[[Callable[_P, Iterator[Verdict]]], Callable[_P, Iterator[Verdict]]]:
    """Name the verdicts of a check, and turn its errors into verdicts.

    A setting that the job refuses `fails`; missing information is `unknown`.

    Args:
        name: name of the check.
        instead: what to do where the information is missing.
    """

    def decorate(check: Callable[_P, Iterator[Verdict]]) -> Callable[_P, Iterator[Verdict]]:
        @functools.wraps(check)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> Iterator[Verdict]:
            try:
                for verdict in check(*args, **kwargs):
                    # A verdict that has a name comes from a check within this one.
                    yield verdict if verdict.check else replace(verdict, check=name)
            except ProfilingConfigError as error:
                found = f"{error.what}; {error.why}" if error.why else error.what
                yield Verdict(name, Status.fails, found, error.instead)
            except Unavailable as reason:
                yield Verdict(name, Status.unknown, str(reason), instead)

        return run

    return decorate
