"""An nsys that a launcher or a user started around this process: what its command line tells of the report to come.

Reads /proc; changes nothing but the name of a report.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bridge_profiling.errors import CaptureError
from bridge_profiling.nsys.options import reports_with_range, value_of
from bridge_profiling.processes import ancestors, command_of, environment_of, mentioning

#: How long nsys may take before it begins to write; while it writes, it may take any time.
_BEGIN_SECONDS = 120.0
_POLL_SECONDS = 0.2

#: nsys starts its application through this program.
_LAUNCHER = "nsys-launcher"


@dataclass(frozen=True)
class NsysAround:
    """An nsys above this process.

    Attributes:
        pid: its process.
        report: the file it will write; None where its command line does not tell.
        stops_with_range: whether it writes the report when its capture range ends, not when the application does.
        wraps_one_rank: whether its application is this very process, and not a launcher of several ranks.
    """

    pid: int
    report: Path | None
    stops_with_range: bool
    wraps_one_rank: bool

    @classmethod
    def of_this_process(cls) -> NsysAround | None:
        """The nearest one above; None where the processes above cannot be seen."""
        application = os.getpid()
        chain = list(ancestors(application))
        for below, pid in zip([application, *chain], chain, strict=False):
            if Path((command_of(pid) or [""])[0]).name == _LAUNCHER:
                application = below
            command = command_of(pid)
            if _is_nsys_profile(command):
                return cls(pid, *_described(pid, command, application), wraps_one_rank=application == os.getpid())
        return None

    def await_report(self) -> Path:
        """The report, once it is whole.

        Raises:
            CaptureError: nsys has left none.
        """
        assert self.report is not None
        ours = command_of(self.pid)
        deadline = time.monotonic() + _BEGIN_SECONDS
        while time.monotonic() < deadline:
            running = command_of(self.pid) == ours
            # Whoever names the report in its arguments is writing it, but for nsys itself and what started that.
            if set(mentioning(str(self.report.with_suffix("")))) - {self.pid, *ancestors(self.pid)}:
                deadline = time.monotonic() + _BEGIN_SECONDS
            elif self.report.exists():
                return self.report
            elif not running:
                break
            time.sleep(_POLL_SECONDS)
        raise CaptureError(f"nsys left no report at {self.report}")

    def link(self, report: Path, target: Path) -> Path:
        """Give the report its rank's name as well, beside the other captures; where that cannot be, it keeps its own alone."""
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(report, target)
        except OSError:
            return report
        return target


def _is_nsys_profile(command: list[str]) -> bool:
    return len(command) > 1 and Path(command[0]).name == "nsys" and command[1] == "profile"


def _described(pid: int, command: list[str], application: int) -> tuple[Path | None, bool]:
    """Where that nsys writes its report, and whether it does so when the capture range ends."""
    options = _own_options(command[2:], application)
    stops, output = reports_with_range(options), value_of(options, "--output")
    if output is None:
        return None, stops
    name = _expanded(output, environment_of(pid), application)
    path = Path(name if name.endswith(".nsys-rep") else f"{name}.nsys-rep")
    return _working_directory(pid) / path, stops


def _own_options(arguments: list[str], application: int) -> list[str]:
    """The arguments before the application's command line."""
    command = command_of(application)
    for size in range(len(command), 0, -1):
        if arguments[-size:] == command[-size:]:
            return arguments[: len(arguments) - size]
    return arguments


def _expanded(name: str, environment: Mapping[str, str], application: int) -> str:
    """A file name with nsys' placeholders filled in: %p, %h, %q{VARIABLE}, %%."""
    values = {"%p": str(application), "%h": os.uname().nodename, "%%": "%"}

    def fill(match: re.Match[str]) -> str:
        variable = match.group(1)
        return values[match.group(0)] if variable is None else environment.get(variable, match.group(0))

    return re.sub(r"%p|%h|%%|%q\{(\w+)\}", fill, name)


def _working_directory(pid: int) -> Path:
    try:
        return Path(os.readlink(f"/proc/{pid}/cwd"))
    except OSError:
        return Path.cwd()
