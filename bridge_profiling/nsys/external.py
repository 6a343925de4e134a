"""An nsys around this process that a launcher or a user started: its report, as its command line describes it.

Reads /proc; writes nothing but a second name for a report.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from bridge_profiling.errors import CaptureError
from bridge_profiling.nsys.options import reports_with_range, value_of
from bridge_profiling.processes import ancestors, command_of, environment_of, find_by_argument, working_directory_of

#: How long nsys may take before it begins to write; once it writes, it may take any time.
_BEGIN_SECONDS = 120.0
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class ExternalNsys:
    """An nsys above this process.

    `report` is None if its command line doesn't name the file. `stops_with_range`: it writes the report when its capture range
    ends, not when the application does. `wraps_one_rank`: its application is this very process, not a launcher.
    """

    pid: int
    report: Path | None
    stops_with_range: bool
    wraps_one_rank: bool

    @classmethod
    def of_this_process(cls) -> ExternalNsys | None:
        """The nearest one above; None if the processes above are not visible."""
        application = os.getpid()
        below = os.getpid()
        for pid in ancestors(os.getpid()):
            command = command_of(pid)
            program = Path(command[0]).name if command else ""
            # nsys starts its application through this program.
            if program == "nsys-launcher":
                application = below
            if program == "nsys" and command[1:2] == ["profile"]:
                options = _without_application(command[2:], command_of(application))
                report = _report(value_of(options, "--output"), pid, application)
                return cls(pid, report, reports_with_range(options), wraps_one_rank=application == os.getpid())
            below = pid
        return None

    def await_report(self) -> Path:
        """Wait until the report is complete and return its path; raises CaptureError if nsys has left none."""
        assert self.report is not None
        command = command_of(self.pid)
        deadline = time.monotonic() + _BEGIN_SECONDS
        while time.monotonic() < deadline:
            running = command_of(self.pid) == command
            # A process that names the report in its arguments is writing it, except nsys itself and what started that.
            if set(find_by_argument(str(self.report.with_suffix("")))) - {self.pid, *ancestors(self.pid)}:
                deadline = time.monotonic() + _BEGIN_SECONDS
            elif self.report.exists():
                return self.report
            elif not running:
                break
            time.sleep(_POLL_SECONDS)
        raise CaptureError(f"nsys left no report at {self.report}")


def link_report(report: Path, target: Path) -> Path:
    """Give a report its rank's name as well, next to the other captures, if possible; the path it has then."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(report, target)
    except OSError:
        return report
    return target


def _without_application(arguments: list[str], application: list[str]) -> list[str]:
    """nsys' own arguments: those before the application's command line, or before the end of it that they share."""
    for size in range(len(application), 0, -1):
        if arguments[-size:] == application[-size:]:
            return arguments[: len(arguments) - size]
    return arguments


def _report(output: str | None, pid: int, application: int) -> Path | None:
    """The report of the nsys with this pid, as its option --output names it."""
    if output is None:
        return None
    # nsys' placeholders. A variable that is not set stays as it is.
    values = {"%p": str(application), "%h": os.uname().nodename, "%%": "%"}
    values |= {f"%q{{{name}}}": value for name, value in environment_of(pid).items()}
    name = re.sub(r"%p|%h|%%|%q\{\w+\}", lambda match: values.get(match[0], match[0]), output)
    return (working_directory_of(pid) or Path.cwd()) / (name if name.endswith(".nsys-rep") else f"{name}.nsys-rep")
