"""Runs a rank under nsys and answers for it: the training goes on if nsys fails, and the report goes where it belongs.

A process of its own between the launcher and nsys, without torch. It forwards signals to the training, starts nsys again
when it is lost before the training runs, waits for the training when nsys is lost later, and amends the manifest when the
training could not. Facts it relies on, seen with nsys 2024.2: nsys passes the training's exit code on, forwards SIGTERM, and
exits with 0 when it has lost its own agent, with the training still running.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from bridge_profiling.errors import TraceError
from bridge_profiling.manifest import amend_manifest
from bridge_profiling.nsys.channel import HANDOVER_VARIABLE, REFUSED_VARIABLE, Handover
from bridge_profiling.processes import Stillness, Watch, mentioning, running, with_variable

#: What a launcher or a user may send to a rank.
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_POLL_SECONDS = 0.1
_STARTS = 3
#: nsys' agents that start at the same moment lose each other: 1 report in 10 with four at once, none of 56 at this distance.
_SECONDS_BETWEEN_STARTS = 0.3
_START_SECONDS = 60.0
_EXPORT_SECONDS = 3600.0
#: How long nsys may take before it begins to write its report; while it writes, it may take any time.
_REPORT_SECONDS = 600.0
#: How long it may do nothing before that: one that has failed inside says nothing and never begins.
_STILL_SECONDS = 120.0


def main() -> NoReturn:
    """Run what the handover directory asks for, and exit as the training did."""
    sys.exit(Supervisor(Handover(Path(os.environ[HANDOVER_VARIABLE]))).run())


class Supervisor:
    """One training under one nsys.

    Args:
        handover: its `spec` says what to run.
    """

    def __init__(self, handover: Handover) -> None:
        self._handover = handover
        spec = handover.read("spec")
        self._rank: int = spec["rank"]
        self._nsys: list[str] = spec["nsys"]
        self._command: list[str] = spec["command"]
        self._report = Path(spec["report"])
        self._export = bool(spec["export_sqlite"])
        self._with_range = bool(spec["reports_with_range"])
        self._captures: int = spec.get("captures", 1)
        self._child: subprocess.Popen | None = None
        self._training: Watch | None = None

    def run(self) -> int:
        """The training's exit code."""
        for number in _FORWARDED:
            signal.signal(number, self._forward)
        refusal = self._start()
        if refusal is not None:
            self._train_without(refusal)
        code = self._wait()
        self._settle()
        shutil.rmtree(self._report.parent, ignore_errors=True)
        shutil.rmtree(self._handover.directory, ignore_errors=True)
        return code

    # -- starting ------------------------------------------------------------------------------------------------

    def _start(self) -> str | None:
        """Start nsys until the training runs; why it cannot be done, or None."""
        for attempt in range(1, _STARTS + 1):
            with _one_start_at_a_time():
                # A session of its own: a signal to the launcher's process group reaches the training once, through us.
                self._child = subprocess.Popen([*self._nsys, *self._command], start_new_session=True)
                if self._training_runs():
                    return None
            self._say(f"nsys ended with code {self._child.returncode} before the training ran (start {attempt} of {_STARTS})")
            self._kill_leftovers()
            refusal = self._diagnose()
            if refusal is not None:
                return refusal
        return f"nsys lost the training {_STARTS} times before it ran"

    def _training_runs(self) -> bool:
        assert self._child is not None
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            ended = self._child.poll() is not None
            pid = running(self._command, HANDOVER_VARIABLE, str(self._handover.directory))
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    self._training = Watch(pid)
                    self._handover.write("training", pid=pid)
                    return True
            if ended:
                # A training shorter than our look at it has ended with nsys; an nsys that failed has started none.
                return self._child.returncode == 0 and any(self._report.parent.glob("*.nsys-rep"))
            time.sleep(_POLL_SECONDS)
        return True  # it hangs, with or without a training: that is the launcher's to decide

    def _kill_leftovers(self) -> None:
        """Make sure that no part of an nsys that failed starts the training after all, beside the next one."""
        for pid in with_variable(HANDOVER_VARIABLE, str(self._handover.directory)):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def _diagnose(self) -> str | None:
        """Why nsys refuses these options, in its own words; None when it runs with them."""
        done = subprocess.run([*self._nsys, "true"], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return None
        said = " ".join(line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip())
        return f"nsys refuses to start: {said[:500]}"

    def _train_without(self, reason: str) -> NoReturn:
        self._say(f"{reason}; the training runs without nsys")
        shutil.rmtree(self._report.parent, ignore_errors=True)
        shutil.rmtree(self._handover.directory, ignore_errors=True)
        del os.environ[HANDOVER_VARIABLE]
        os.environ[REFUSED_VARIABLE] = reason
        for number in _FORWARDED:
            signal.signal(number, signal.SIG_DFL)
        os.execv(self._command[0], self._command)

    # -- running -------------------------------------------------------------------------------------------------

    def _wait(self) -> int:
        """Wait for the training, deliver the report when the window has closed; the training's exit code."""
        assert self._child is not None
        if self._child.poll() is None:
            # Not Popen.wait: with a timeout it asks again and again, and this process lives as long as the training.
            nsys = Watch(self._child.pid)
            while not nsys.ended(_POLL_SECONDS if self._to_deliver else None):
                self._deliver_if_due()
            nsys.close()
        code = self._child.wait()
        if self._training is not None and not self._training.ended(1.0):
            self._say(f"nsys ended with code {code}, and the training goes on without it")
            if not self._report.exists() and not self._handover.has("delivered"):
                # At once: the training may be waiting for the report.
                self._tell_delivered(error=f"nsys ended with code {code} before it had written a report")
            while not self._training.ended(_POLL_SECONDS):
                self._deliver_if_due()
            code = self._handover.read("exit").get("code", 1)
        return code if code >= 0 else 128 - code

    @property
    def _to_deliver(self) -> bool:
        """Whether a report is still to come that the training waits for."""
        return self._with_range and not self._handover.has("delivered")

    def _deliver_if_due(self) -> None:
        if self._to_deliver and self._handover.has("stopped"):
            self._deliver()

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on to the training alone; to nsys, which passes it on, while the training is not known."""
        if self._child is None:
            sys.exit(128 + number)
        target = self._training.pid if self._training is not None else self._child.pid
        if self._training is None or not self._training.ended():
            with contextlib.suppress(OSError):
                os.kill(target, number)

    # -- the report ----------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """After the training: deliver what nsys wrote at its end, and correct a manifest that says otherwise."""
        if self._captures > 1:
            self._settle_each()
            return
        capture = self._handover.read("capture")
        if not capture or self._handover.has("delivered"):
            return
        self._deliver()
        delivered = self._handover.read("delivered")
        artifacts = [Path(delivered[kind]) for kind in ("report", "sqlite") if delivered.get(kind)]
        reason = delivered.get("error")
        if artifacts and not self._handover.has("stopped"):
            reason = "the process ended inside the window; the report holds what nsys had recorded"
        with contextlib.suppress(OSError, TraceError):
            amend_manifest(Path(capture["manifest"]), "nsys", artifacts=artifacts, reason=reason)

    def _settle_each(self) -> None:
        """The same for an nsys that makes several captures: by now it has written report.1, report.2, …"""
        for number in range(1, self._captures + 1):
            capture = self._handover.read(f"capture-{number}")
            if not capture:
                return
            written = self._report.with_name(f"{self._report.stem}.{number}{self._report.suffix}")
            report, sqlite, reason = self._put(written, capture)
            if report is not None and not self._handover.has(f"stopped-{number}"):
                reason = "the process ended inside the window; the report holds what nsys had recorded"
            artifacts = [path for path in (report, sqlite) if path is not None]
            with contextlib.suppress(OSError, TraceError):
                amend_manifest(Path(capture["manifest"]), "nsys", artifacts=artifacts, reason=reason)

    def _deliver(self) -> None:
        """Move the report to its place, beside the manifest's other captures, and export it."""
        self._tell_delivered(*self._put(self._report, self._handover.read("capture")))

    def _put(self, written: Path, capture: Mapping[str, Any]) -> tuple[Path | None, Path | None, str | None]:
        """Move a report to where a capture's belongs, and export it: the report, the SQLite file, and what went wrong."""
        report, sqlite, error = None, None, None
        try:
            self._await_whole_report()
            target = Path(capture["report"])
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(written, target)
            report = target
            if self._export:
                sqlite = self._exported(target)
        except (OSError, KeyError, subprocess.SubprocessError) as failure:
            error = f"nsys left no report: {failure}" if report is None else f"no SQLite file: {failure}"
        return report, sqlite, error

    def _tell_delivered(self, report: Path | None = None, sqlite: Path | None = None, error: str | None = None) -> None:
        self._handover.write("delivered", report=report and str(report), sqlite=sqlite and str(sqlite), error=error)

    def _await_whole_report(self) -> None:
        """Wait until no part of nsys writes the report any more.

        Raises:
            OSError: none begins to.
        """
        assert self._child is not None
        deadline = time.monotonic() + _REPORT_SECONDS
        stillness = Stillness(self._parts_of_nsys, _STILL_SECONDS)
        while self._child.poll() is None:
            # Whoever names the report in its arguments writes it, but for nsys itself, which ends with the training.
            if set(mentioning(str(self._report.parent))) - {self._child.pid}:
                deadline = time.monotonic() + _REPORT_SECONDS
                stillness.interrupt()
            elif self._report.exists():
                return
            if time.monotonic() > deadline:
                raise OSError(f"nothing was written within {_REPORT_SECONDS:.0f} s of the window's end")
            if stillness.lasts():
                raise OSError(f"nsys did nothing for {_STILL_SECONDS:.0f} s after the window's end, and had written nothing")
            time.sleep(_POLL_SECONDS)

    def _parts_of_nsys(self) -> Iterator[int]:
        """The processes of nsys; those that the training has started itself are taken for such."""
        training = None if self._training is None else self._training.pid
        return (pid for pid in with_variable(HANDOVER_VARIABLE, str(self._handover.directory)) if pid != training)

    def _exported(self, report: Path) -> Path:
        """The report as an SQLite file: made here, so that the training does not wait for it."""
        target = report.with_suffix(".sqlite")
        partial = self._report.with_suffix(".sqlite")
        done = subprocess.run(
            ["nice", self._nsys[0], "export", "--type=sqlite", "--quiet=true", f"--output={partial}", str(report)],
            capture_output=True, text=True, timeout=_EXPORT_SECONDS, check=False,
        )  # fmt: skip
        if not partial.exists():
            raise OSError(" ".join((done.stderr or done.stdout).split())[:500] or f"nsys export ended with {done.returncode}")
        os.replace(partial, target)
        return target

    def _say(self, message: str) -> None:
        print(f"rank {self._rank}: {message}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _one_start_at_a_time() -> Iterator[None]:
    """Keep the starts of this user's ranks on this machine apart."""
    path = Path(tempfile.gettempdir()) / f"bridge_profiling-nsys-{os.getuid()}.lock"
    try:
        lock = open(path, "a")  # noqa: SIM115 - held until the block is left
    except OSError:
        yield
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        time.sleep(_SECONDS_BETWEEN_STARTS)
