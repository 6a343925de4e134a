"""The interface of checks: each takes a request and this machine, and yields verdicts.

Reads the machine's files, programs and processes and changes nothing; tests pass a Machine made of recorded text.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from bridge_profiling.common.errors import ProfilingConfigError
from bridge_profiling.common.processes import run_owned


class Unavailable(Exception):
    """Information that cannot be read; the message is the reason."""


@dataclass(frozen=True)
class Process:
    """A running process; the kernel cuts `name` off at 15 characters."""

    pid: int
    name: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Machine:
    """This machine. Methods raise Unavailable if information cannot be read; a job started here would inherit `environ`."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def read(self, path: str) -> str:
        """The text of a file."""
        with _reading(path):
            return Path(path).read_text(encoding="utf-8", errors="replace")

    def link(self, path: str) -> str:
        """The target of a symbolic link."""
        with _reading(path):
            return os.readlink(path)

    def processes(self) -> list[Process]:
        """The processes visible from here."""
        with _reading("/proc"):
            pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        seen = []
        for pid in pids:
            with suppress(Unavailable):  # A process may end in between.
                arguments = self.read(f"/proc/{pid}/cmdline").rstrip("\0").split("\0")
                seen.append(Process(pid, self.read(f"/proc/{pid}/comm").strip(), tuple(arguments)))
        return seen

    def which(self, program: str) -> str | None:
        """The path of a program on PATH; None where it is not there."""
        return shutil.which(program, path=self.environ.get("PATH"))

    def run(self, *command: str, seconds: float = 30.0) -> str:
        """The output of a command, standard error last. A GPU's driver takes seconds to answer its first query after boot."""
        program = self.which(command[0])
        if program is None:
            raise Unavailable(f"{command[0]} is not on this machine's PATH")
        shown = f"`{' '.join(command[:3])}{' …' if len(command) > 3 else ''}`"
        try:
            done = run_owned([program, *command[1:]], seconds=seconds)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{shown} did not end within {seconds:.0f} s") from None
        except OSError as error:
            raise Unavailable(f"{program} does not run: {error.strerror}") from error
        printed = "\n".join(filter(None, (done.stdout.strip("\n"), done.stderr.strip("\n"))))
        if done.returncode:
            raise Unavailable(f"{shown} exited with {done.returncode}: {(printed.splitlines() or ['no output'])[-1]}")
        return printed

    def package_version(self, name: str) -> str:
        """The version of a package installed in this Python."""
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError as error:
            raise Unavailable(f"{name} is not installed") from error


@contextmanager
def _reading(path: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unavailable(f"{path} cannot be read: {error.strerror}") from error


def parse_settings(text: str, separator: str) -> dict[str, str]:
    """The values of `name: value` or `name=value` lines; comments and other lines are ignored."""
    lines = [line.partition(separator) for line in text.splitlines() if not line.lstrip().startswith("#")]
    return {name.strip(): value.strip() for name, found, value in lines if found}


def join(words: Sequence[object], limit: int = 8) -> str:
    """Words separated by commas, cut off after `limit`."""
    shown = ", ".join(map(str, words[:limit]))
    return shown + (f" and {len(words) - limit} more" if len(words) > limit else "")


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
