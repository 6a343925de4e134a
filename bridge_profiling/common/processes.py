"""Processes: those that end with this one, and others seen through /proc (ancestors, command lines, environments, CPU time)."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

_PROC = Path("/proc")

#: Fields of /proc/PID/stat, counted from the one after the name.
_PARENT, _USER_TICKS, _SYSTEM_TICKS = 1, 11, 12

#: How long a process may take to end after SIGKILL. One that hangs in a file system ends later, without anyone waiting.
_KILLED_SECONDS = 5.0


class OwnedProcess(subprocess.Popen[Any]):
    """A process that ends with this one, even if this one is killed, together with all that it has started.

    It leads a session of its own, so that a terminal's signals do not reach it. Its standard input is a pipe that nobody writes
    to: when this process is gone, the pipe closes, and the kernel kills the session. (A "parent death signal" would come when
    the thread that started the process ends, and would spare what the process has started.)
    """

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        theirs, self._ours = os.pipe()
        try:
            super().__init__(command, stdin=theirs, start_new_session=True, **options)
            if sys.platform == "linux":  # macOS can't choose the signal
                fcntl.fcntl(theirs, fcntl.F_SETOWN, -self.pid)
                fcntl.fcntl(theirs, fcntl.F_SETSIG, signal.SIGKILL)
                fcntl.fcntl(theirs, fcntl.F_SETFL, os.O_ASYNC)
        except BaseException:
            os.close(self._ours)
            raise
        finally:
            os.close(theirs)

    def end(self) -> None:
        """End the process and what it has started, at once; a second call does nothing."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
        ours, self._ours = self._ours, -1
        if ours >= 0:
            os.close(ours)
        with suppress(subprocess.TimeoutExpired):
            self.wait(_KILLED_SECONDS)


def run_owned(
    command: Sequence[str], *, seconds: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The output of a command, whose processes are ended if this call does not return.

    Raises:
        OSError: it cannot be started.
        subprocess.TimeoutExpired: it takes longer than `seconds`.
    """
    process = OwnedProcess(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    try:
        output, error = process.communicate(timeout=seconds)
    finally:
        process.end()
        for pipe in filter(None, (process.stdout, process.stderr)):
            pipe.close()
    return subprocess.CompletedProcess(command, process.returncode, output, error)


def pid_space() -> str | None:
    """An identifier of the scope in which a pid is unique: this boot of the machine and this container. None without /proc.

    Host names don't identify it: a container may share its machine's name, and several machines may be called `localhost`.
    """
    with suppress(OSError):
        return f"{(_PROC / 'sys/kernel/random/boot_id').read_text().strip()}/{os.readlink(_PROC / 'self/ns/pid')}"
    return None


def command_of(pid: int) -> list[str]:
    """The command line of a process; empty if it has ended or belongs to another user."""
    return [os.fsdecode(part) for part in _read(pid, "cmdline").split(b"\0")[:-1]]


def environment_of(pid: int) -> dict[str, str]:
    """The environment a process was started with; empty if it has ended or belongs to another user."""
    entries = _read(pid, "environ").split(b"\0")
    return dict(os.fsdecode(entry).split("=", 1) for entry in entries if b"=" in entry)


def working_directory_of(pid: int) -> Path | None:
    """The working directory of a process; None if it has ended or belongs to another user."""
    with suppress(OSError):
        return Path(os.readlink(_PROC / str(pid) / "cwd"))
    return None


def ancestors(pid: int) -> Iterator[int]:
    """The process' parent, then that one's parent, up to but without pid 1."""
    while (fields := _stat(pid)) and (pid := int(fields[_PARENT])) > 1:
        yield pid


def find_by_variable(name: str, value: str) -> Iterator[int]:
    """This user's other processes that were started with this environment variable."""
    return (pid for pid in _others() if environment_of(pid).get(name) == value)


def find_by_argument(text: str) -> Iterator[int]:
    """Other processes that have this text in one of their arguments."""
    return (pid for pid in _others() if any(text in argument for argument in command_of(pid)))


def cpu_seconds(pid: int) -> float:
    """Processor time used by all threads of a process; 0 if it has ended."""
    fields = _stat(pid)
    return (int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def is_running(pid: int) -> bool:
    """Whether a process runs; a zombie does not. True if that cannot be determined."""
    try:
        with closing(WatchedProcess(pid)) as process:
            return not process.ended()
    except ProcessLookupError:
        return False
    except OSError:
        return True


class InactivityTimer:
    """Expires when a group of processes has been idle for `seconds`: no second of processor time, no start, no end."""

    def __init__(self, pids: Callable[[], Iterable[int]], seconds: float) -> None:
        self._pids, self._seconds = pids, seconds
        self._sampled, self._used = 0.0, 0.0
        self.reset()

    def reset(self) -> None:
        """Start again: the caller knows of activity from another source."""
        self._since = time.monotonic()

    def expired(self) -> bool:
        """Whether the group has been idle for that long. Samples the processes at most 20 times in that period."""
        now = time.monotonic()
        if now - self._sampled >= self._seconds / 20:
            self._sampled, used = now, sum(map(cpu_seconds, self._pids()))
            if abs(used - self._used) >= 1.0:
                self._used, self._since = used, now
        return now - self._since > self._seconds


class WatchedProcess:
    """A process started by someone else, watched until it ends; no later process with its pid is mistaken for it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    def ended(self, seconds: float | None = 0.0) -> bool:
        """Whether it ends within this time; None waits without limit."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(None if seconds is None else 1000 * seconds))

    def close(self) -> None:
        """Stop watching."""
        os.close(self._descriptor)


def _others() -> Iterator[int]:
    names: list[str] = []
    with suppress(OSError):  # no file descriptor is left
        names = os.listdir(_PROC)
    return (int(name) for name in names if name.isdigit() and int(name) != os.getpid())


def _stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat after the name, which may itself hold spaces and parentheses; empty if it has ended."""
    return _read(pid, "stat").rpartition(b")")[2].split()


def _read(pid: int, name: str) -> bytes:
    """A file of a process in /proc; empty if the process has ended or belongs to another user."""
    with suppress(OSError):
        return (_PROC / str(pid) / name).read_bytes()
    return b""
