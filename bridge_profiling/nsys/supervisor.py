"""Runs nsys around one rank and stands in for it: the training goes on if nsys fails, and the report reaches its place.

A process of its own between the launcher and nsys, without torch. It forwards signals to the training, starts nsys again if
nsys is lost before the training runs, waits for the training if nsys is lost later, and amends the manifest where the training
could not. It relies on facts seen with nsys 2024.2: nsys passes the training's exit code on, forwards SIGTERM, and exits with 0
when it has lost its own agent, while the training still runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, NoReturn

from bridge_profiling.common.atomic import make_directory
from bridge_profiling.common.errors import CaptureError, TraceError
from bridge_profiling.common.printable import printable
from bridge_profiling.common.processes import (
    InactivityTimer,
    WatchedProcess,
    command_of,
    find_by_argument,
    find_by_variable,
    run_owned,
)
from bridge_profiling.manifest import amend_manifest
from bridge_profiling.nsys.channel import CHANNEL_VARIABLE, REFUSED_VARIABLE, Capture, Channel, Delivery, Exit, Training
from bridge_profiling.nsys.command import export_command

#: Signals that a launcher or a user may send to a rank.
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

#: Those that end a process which has not said otherwise.
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_POLL_SECONDS = 0.1
_STARTS = 3
#: nsys' agents that start at the same moment lose each other: 1 report in 10 with four at once, none of 56 at this distance.
_SECONDS_BETWEEN_STARTS = 0.3
_START_SECONDS = 60.0
#: A start that hangs holds the lock for _START_SECONDS, and more than one may come first.
_LOCK_SECONDS = 180.0
_EXPORT_SECONDS = 3600.0
#: How long nsys may take before it begins to write its report; once it writes, it may take any time.
_REPORT_SECONDS = 600.0
#: How long it may be idle before that: an nsys that has failed inside prints nothing and never begins.
_IDLE_SECONDS = 120.0
#: How long an agent of nsys may take to end by itself after the training and nsys.
_AGENT_SECONDS = 5.0


def main() -> NoReturn:
    """Run the task in the channel, and exit with the training's code."""
    sys.exit(Supervisor(Channel(Path(os.environ[CHANNEL_VARIABLE]))).run())


class Supervisor:
    """One training under one nsys. The `spec` of the channel is the task."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._spec = channel.spec
        self._report = Path(self._spec.report)
        self._child: subprocess.Popen | None = None
        self._training: WatchedProcess | None = None
        self._told_to_end: int | None = None

    def run(self) -> int:
        """The training's exit code."""
        for number in _FORWARDED:
            signal.signal(number, self._forward)
        refusal = self._start()
        if refusal is not None:
            self._train_without(refusal)
        code = self._wait()
        self._settle()
        self._clean_up()
        return code

    # -- starting ------------------------------------------------------------------------------------------------

    def _start(self) -> str | None:
        """Start nsys until the training runs; the reason if that fails, else None."""
        command = [*self._spec.nsys, *self._spec.command]
        for attempt in range(1, _STARTS + 1):
            with one_start_at_a_time():
                self._exit_if_told_to()
                # A session of its own: a signal to the launcher's process group reaches the training once, through us.
                self._child = subprocess.Popen(command, start_new_session=True)
                if self._training_runs(self._child):
                    return None
            # No part of the failed nsys may start the training after all, next to the one that follows.
            _kill(self._processes())
            self._exit_if_told_to()
            self._log(f"nsys ended with code {self._child.returncode} before the training ran (start {attempt} of {_STARTS})")
            # nsys' own message, if it refuses these options.
            trial = subprocess.run([*self._spec.nsys, "true"], capture_output=True, text=True, check=False)
            if trial.returncode != 0:
                return f"nsys refuses to start: {' '.join((trial.stderr or trial.stdout).split())[:500]}"
        return f"nsys lost the training {_STARTS} times before it ran"

    def _training_runs(self, nsys: subprocess.Popen) -> bool:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            ended = nsys.poll() is not None
            pid = next((pid for pid in self._processes() if command_of(pid) == self._spec.command), None)
            if pid is not None:
                with contextlib.suppress(OSError):  # it has ended, or no file descriptor is left
                    self._training = WatchedProcess(pid)
                    self._channel.write(Training(pid))
                    return True
            if ended:
                # A training shorter than our polling has ended with nsys; an nsys that failed has started none.
                return nsys.returncode == 0 and any(self._report.parent.glob("*.nsys-rep"))
            time.sleep(_POLL_SECONDS)
        return True  # it hangs, with or without a training: the launcher decides what to do

    def _exit_if_told_to(self) -> None:
        if self._told_to_end is not None:
            self._log(f"{signal.Signals(self._told_to_end).name} came before the training ran; it does not start")
            self._clean_up()
            sys.exit(128 + self._told_to_end)

    def _train_without(self, reason: str) -> NoReturn:
        self._exit_if_told_to()
        self._log(f"{reason}; the training runs without nsys")
        self._clean_up()
        del os.environ[CHANNEL_VARIABLE]
        os.environ[REFUSED_VARIABLE] = reason
        for number in _FORWARDED:
            signal.signal(number, signal.SIG_DFL)
        os.execv(self._spec.command[0], self._spec.command)

    # -- running -------------------------------------------------------------------------------------------------

    def _wait(self) -> int:
        """Wait for the training, and deliver its report once the window has closed; the training's exit code."""
        assert self._child is not None
        if self._child.poll() is None:
            # Not Popen.wait: with a timeout it polls again and again, and this process lives as long as the training.
            with contextlib.suppress(OSError), contextlib.closing(WatchedProcess(self._child.pid)) as nsys:
                while not nsys.ended(_POLL_SECONDS if self._must_deliver() else None):
                    self._deliver_if_stopped()
        code = self._child.wait()
        if self._training is not None and not self._training.ended(1.0):
            self._log(f"nsys ended with code {code}, and the training goes on without it")
            if self._must_deliver() and not self._report.exists():
                # At once: the training may be waiting for the report.
                self._channel.write(Delivery(error=f"nsys ended with code {code} before it had written a report"), 1)
            while not self._training.ended(_POLL_SECONDS):
                self._deliver_if_stopped()
            reported = self._channel.read(Exit)
            code = 1 if reported is None else reported.code
        return code if code >= 0 else 128 - code

    def _must_deliver(self) -> bool:
        """Whether the training waits, or will wait, for its one report."""
        return self._spec.reports_with_range and self._channel.read(Delivery, 1) is None

    def _deliver_if_stopped(self) -> None:
        capture = self._channel.read(Capture, 1)
        if capture is not None and capture.stopped and self._must_deliver():
            self._deliver(1, capture)

    def _forward(self, number: int, frame: object) -> None:
        """Forward a signal to the training alone; to nsys, which forwards it, until the training is known."""
        if self._training is None and number in _ENDING:
            self._told_to_end = number
        if self._child is None:
            self._exit_if_told_to()
        elif self._training is None or not self._training.ended():
            with contextlib.suppress(OSError):
                os.kill(self._child.pid if self._training is None else self._training.pid, number)

    # -- the reports ---------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """After the training: deliver the reports that nsys wrote at its end, and correct manifests that contradict them."""
        for number in range(1, self._spec.captures + 1):
            capture = self._channel.read(Capture, number)
            if capture is None or self._channel.read(Delivery, number) is not None:
                continue
            delivery = self._deliver(number, capture)
            reason = delivery.error
            if delivery.artifacts and not capture.stopped:
                reason = "the process ended inside the window; the report holds what nsys had recorded"
            with contextlib.suppress(OSError, TraceError):
                amend_manifest(Path(capture.manifest), "nsys", artifacts=list(map(Path, delivery.artifacts)), reason=reason)

    def _deliver(self, number: int, capture: Capture) -> Delivery:
        """Move a capture's report to its place, export it, and announce both."""
        # nsys numbers the reports if it makes several.
        written = self._report if self._spec.captures == 1 else self._report.with_suffix(f".{number}{self._report.suffix}")
        target, artifacts, error = Path(capture.report), [], None
        try:
            self._await_whole_report()
            make_directory(target.parent)
            os.replace(written, target)
            artifacts.append(str(target))
            if self._spec.export_sqlite:
                artifacts.append(self._export(target))
        except (OSError, CaptureError, subprocess.SubprocessError) as failure:
            error = f"no SQLite file: {failure}" if artifacts else f"nsys left no report: {failure}"
        delivery = Delivery(artifacts, error)
        self._channel.write(delivery, number)
        return delivery

    def _await_whole_report(self) -> None:
        """Wait until no part of nsys is writing the report; OSError if none begins to."""
        assert self._child is not None
        training = None if self._training is None else self._training.pid
        deadline = time.monotonic() + _REPORT_SECONDS
        # Processes that the training has started count as parts of nsys.
        idle = InactivityTimer(lambda: (pid for pid in self._processes() if pid != training), _IDLE_SECONDS)
        while self._child.poll() is None:
            # A process that names the report in its arguments writes it, except nsys itself, which ends with the training.
            if set(find_by_argument(str(self._report.parent))) - {self._child.pid}:
                deadline = time.monotonic() + _REPORT_SECONDS
                idle.reset()
            elif self._report.exists():
                return
            if time.monotonic() > deadline:
                raise OSError(f"nothing was written within {_REPORT_SECONDS:.0f} s of the window's end")
            if idle.expired():
                raise OSError(f"nsys was idle for {_IDLE_SECONDS:.0f} s after the window's end, and had written nothing")
            time.sleep(_POLL_SECONDS)

    def _export(self, report: Path) -> str:
        """Export a report to an SQLite file: here, so that the training does not wait for it."""
        target, partial = report.with_suffix(".sqlite"), self._report.with_suffix(".sqlite")
        command = ["nice", *export_command(self._spec.nsys[0], report, partial)]
        done = run_owned(command, seconds=_EXPORT_SECONDS)
        if not partial.exists():
            raise OSError(" ".join((done.stderr or done.stdout).split())[:500] or f"nsys export ended with {done.returncode}")
        os.replace(partial, target)
        return str(target)

    def _processes(self) -> Iterator[int]:
        """The processes of nsys and the training."""
        return find_by_variable(CHANNEL_VARIABLE, str(self._channel.directory))

    def _agents(self) -> list[int]:
        return [pid for pid in self._processes() if "--start-agent" in command_of(pid)]

    def _clean_up(self) -> None:
        # An nsys that is terminated while it starts leaves its agent, which waits for it forever.
        deadline = time.monotonic() + _AGENT_SECONDS
        while (agents := self._agents()) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        _kill(agents)
        shutil.rmtree(self._report.parent, ignore_errors=True)
        shutil.rmtree(self._channel.directory, ignore_errors=True)

    def _log(self, message: str) -> None:
        print(printable(f"rank {self._spec.rank}: {message}"), file=sys.stderr, flush=True)


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def one_start_at_a_time() -> Iterator[None]:
    """Keep the starts of this user's ranks on this machine apart; without a lock, or when one does not come, start anyway."""
    with contextlib.ExitStack() as held:
        try:
            _lock(held.enter_context(open(_lock_descriptor(), "r+b")), time.monotonic() + _LOCK_SECONDS)
        except OSError as error:
            print(f"bridge_profiling: nsys starts without waiting for other ranks: {error}", file=sys.stderr, flush=True)
        yield
        time.sleep(_SECONDS_BETWEEN_STARTS)


def _lock_descriptor() -> int:
    """Open the lock, in a folder of this user's alone: everyone can hold a lock on a file that they can open."""
    folder = Path(tempfile.gettempdir()) / f"bridge_profiling-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise OSError(f"{folder} is not a folder that only this user can enter")
    return os.open(folder / "nsys.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _lock(file: IO[bytes], deadline: float) -> None:
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise OSError(f"{file.name} was locked for {_LOCK_SECONDS:.0f} s") from None
        time.sleep(_POLL_SECONDS)
