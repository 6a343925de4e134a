"""What a check has to say: one line, and what to do about it. Prints nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from bridge_profiling.errors import ProfilingConfigError


class Status(StrEnum):
    """How a check ended."""

    ok = "ok"
    warning = "warning"
    fails = "fails"
    unknown = "unknown"


@dataclass(frozen=True)
class Verdict:
    """One line of the diagnosis.

    Attributes:
        check: what was looked at, in one or two words.
        status: `fails` for what will go wrong; `unknown` for what could not be looked at, never `ok`.
        found: what is the case.
        instead: what to do about it; empty where nothing is to be done.
    """

    check: str
    status: Status
    found: str
    instead: str = ""


def ok(check: str, found: str) -> Verdict:
    """Nothing to do."""
    return Verdict(check, Status.ok, found)


def warning(check: str, found: str, instead: str) -> Verdict:
    """It will run, and the profile will be worse or lie elsewhere than one expects."""
    return Verdict(check, Status.warning, found, instead)


def fails(check: str, found: str, instead: str) -> Verdict:
    """There will be no profile, or no training."""
    return Verdict(check, Status.fails, found, instead)


def unknown(check: str, found: str, instead: str = "") -> Verdict:
    """It could not be looked at; `found` says why."""
    return Verdict(check, Status.unknown, found, instead)


def refused(check: str, error: ProfilingConfigError) -> Verdict:
    """What the job itself would refuse, in the same words."""
    return fails(check, f"{error.what}; {error.why}" if error.why else error.what, error.instead)
