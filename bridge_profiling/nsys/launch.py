"""The nsys around a rank: restarts the rank under one, or finds the one that a launcher or a user has started.

On a restart the process becomes the supervisor (nsys/supervisor.py), which starts nsys, which starts the same command again.
Its pid stays, so torchrun and srun go on watching it. A rank whose nsys can't be started trains without it, and its manifest
holds the reason. An nsys that was started elsewhere is read from /proc.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bridge_profiling.common.atomic import make_directory
from bridge_profiling.common.errors import CaptureError, TrainingLogger, one_line
from bridge_profiling.common.launch_env import LaunchEnv
from bridge_profiling.common.processes import (
    WatchedProcess,
    ancestors,
    command_of,
    environment_of,
    find_by_argument,
    working_directory_of,
)
from bridge_profiling.common.redaction import redact_command
from bridge_profiling.nsys.channel import CHANNEL_VARIABLE, REFUSED_VARIABLE, Channel, Exit, Spec
from bridge_profiling.nsys.command import (
    DIRECTIVES_VARIABLE,
    NsysRequest,
    captures_of,
    directives,
    find_nsys,
    profile_command,
    reports_with_range,
    value_of,
)

logger = TrainingLogger(__name__)


def runs_under_nsys(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether an nsys is attached to this process; its injection shows in the environment."""
    return "NSYS_PROFILING_SESSION_ID" in environ


def restart_under_nsys(request: NsysRequest) -> None:
    """Start this process again under nsys, unless it runs under one or ft_launcher. Returns only if it has nothing to do.

    What the process holds in memory is lost. It runs on without nsys if nsys can't be started.
    """
    channel = Channel.of_this_process()
    if channel is not None:
        _end_with_supervisor(channel)
        return
    if runs_under_nsys() or REFUSED_VARIABLE in os.environ or LaunchEnv.read().fault_tolerant:
        return
    try:
        command = _supervisor_command(request)
    except (CaptureError, OSError) as error:
        reason = str(error) if isinstance(error, CaptureError) else one_line(error)
        os.environ[REFUSED_VARIABLE] = reason
        logger.error("rank %d: training without nsys: %s", request.rank, reason)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)


@contextmanager
def report_exit_code() -> Iterator[None]:
    """Report the exit code of the block to the supervisor, if there is one, which returns it even if nsys is lost."""
    code = 1
    try:
        yield
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        raise
    finally:
        channel = Channel.of_this_process()
        if channel is not None:
            with suppress(OSError):
                channel.write(Exit(code))


def _supervisor_command(request: NsysRequest) -> list[str]:
    """The supervisor's command. Opens the channel and sets the environment of the supervisor and the training."""
    if not sys.orig_argv[1:]:
        raise CaptureError("an interactive interpreter cannot be started again under nsys")
    version = find_nsys()
    make_directory(request.output_dir / "nsys")
    # nsys follows links, so nobody else may write there.
    staging = Path(tempfile.mkdtemp(prefix=f".rank-{request.rank}-", dir=request.output_dir / "nsys"))
    nsys, warnings = profile_command(request, version, report=staging / "report")
    for warning in warnings:
        logger.warning("rank %d: %s", request.rank, warning)
    options = nsys[2:]
    captures = captures_of(options)
    channel = Channel(Path(tempfile.mkdtemp(prefix=f"bridge_profiling-nsys-{request.rank}-")))
    channel.write(
        Spec(
            rank=request.rank,
            supervisor=os.getpid(),
            nsys=nsys,
            notes=[*warnings, f"nsys {version.text}: {' '.join(redact_command(nsys[1:]))}"],
            # The interpreter itself: the name that was typed may resolve differently elsewhere.
            command=[sys.executable, *sys.orig_argv[1:]],
            report=str(staging / "report.nsys-rep"),
            export_sqlite=request.export_sqlite,
            captures=captures,
            # nsys 2024.2 makes the reports of several captures after the last of them, or when the training ends.
            reports_with_range=captures == 1 and reports_with_range(options),
        )
    )
    os.environ[CHANNEL_VARIABLE] = str(channel.directory)
    if request.cuda and (text := directives(version, options)):
        os.environ[DIRECTIVES_VARIABLE] = text
    root = Path(__file__).resolve().parents[2]
    # By its path, not by -m: a training started by its own path need not have this package where -m looks.
    start = f"import sys; sys.path.insert(0, {str(root)!r}); from bridge_profiling.nsys.supervisor import main; main()"
    return [sys.executable, "-c", start]


def _end_with_supervisor(channel: Channel) -> None:
    """Kill this process when its supervisor is killed: without nsys, the kill would have hit this process itself."""
    try:
        supervisor = WatchedProcess(channel.spec.supervisor)
    except (CaptureError, OSError):
        return

    def wait() -> None:
        supervisor.ended(None)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="bridge_profiling supervisor watch", daemon=True).start()


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
        make_directory(target.parent)
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
