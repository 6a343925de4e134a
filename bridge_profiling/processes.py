"""Looks at processes through /proc: who started this one, which one a command became, whether it still runs.

Reads only; signals nobody.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

_PROC = Path("/proc")


def pid_space() -> str | None:
    """What a process number means something in: this machine since it was booted, and this container; None without /proc.

    Names of machines do not tell: a container may be called as the machine is, and several machines `localhost`.
    """
    try:
        return f"{(_PROC / 'sys/kernel/random/boot_id').read_text().strip()}/{os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return None


def command_of(pid: int) -> list[str]:
    """The command line of a process; empty when it has ended or belongs to somebody else."""
    try:
        return [os.fsdecode(part) for part in (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")[:-1]]
    except OSError:
        return []


def environment_of(pid: int) -> dict[str, str]:
    """The environment a process was started with; empty when it has ended or belongs to somebody else."""
    try:
        entries = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(os.fsdecode(entry).split("=", 1) for entry in entries if b"=" in entry)


def ancestors(pid: int) -> Iterator[int]:
    """The processes above this one, its parent first."""
    while True:
        try:
            # The name in parentheses may hold anything; what follows the last one is the state, then the parent.
            pid = int((_PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, ValueError, IndexError):
            return
        if pid <= 1:
            return
        yield pid


def with_variable(name: str, value: str) -> Iterator[int]:
    """Processes of this user whose environment holds this variable with this value."""
    for entry in _PROC.iterdir():
        pid = int(entry.name) if entry.name.isdigit() else os.getpid()
        if pid != os.getpid() and environment_of(pid).get(name) == value:
            yield pid


def mentioning(text: str) -> Iterator[int]:
    """Other processes with this text in one of their arguments."""
    for entry in _PROC.iterdir():
        pid = int(entry.name) if entry.name.isdigit() else os.getpid()
        if pid != os.getpid() and any(text in argument for argument in command_of(pid)):
            yield pid


def running(command: Sequence[str], name: str, value: str) -> int | None:
    """The process that this command became, among those with this variable; None while there is none."""
    return next((pid for pid in with_variable(name, value) if command_of(pid) == list(command)), None)


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used, its threads' included; 0 when it has ended."""
    try:
        user, system = (_PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[11:13]
    except (OSError, ValueError):
        return 0.0
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def is_running(pid: int) -> bool:
    """Whether a process runs; a zombie does not. True if that cannot be determined."""
    try:
        process = Watch(pid)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    has_ended = process.ended()
    process.close()
    return not has_ended


class Stillness:
    """Tells when processes have done nothing for a while, by the processor time that they use.

    Args:
        pids: gives those that run, at each look.
        seconds: what counts as a while. In it they do something if they use a second of a processor, come or go.
    """

    def __init__(self, pids: Callable[[], Iterable[int]], seconds: float) -> None:
        self._pids, self._seconds = pids, seconds
        self._looked, self._used = 0.0, 0.0
        self.interrupt()

    def interrupt(self) -> None:
        """They do something, as is known from elsewhere."""
        self._since = time.monotonic()

    def lasts(self) -> bool:
        """Whether they have done nothing for that long."""
        now = time.monotonic()
        if now - self._looked >= self._seconds / 20:
            self._looked, used = now, sum(map(cpu_seconds, self._pids()))
            if abs(used - self._used) >= 1.0:
                self._used, self._since = used, now
        return now - self._since > self._seconds


class Watch:
    """A process that somebody else started, watched until it ends; its number cannot be taken for another's meanwhile.

    Raises:
        ProcessLookupError: it has ended already.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    def ended(self, seconds: float | None = 0.0) -> bool:
        """Whether it ends within this time; None waits for it."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(None if seconds is None else 1000 * seconds))

    def close(self) -> None:
        """Stop watching."""
        os.close(self._descriptor)
