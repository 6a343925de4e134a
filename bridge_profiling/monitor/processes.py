"""CPU and memory readings of processes, through psutil."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, thread_time
from typing import Any

from bridge_profiling.monitor.metrics import PROCESS_METRICS, Readings

#: Finding children reads every process of the machine, milliseconds on a large one, and a rank may have dozens of children to
#: read. Each is repeated only after this many times the CPU time that it took, which bounds it to 1/5,000 of the time.
_COST_MULTIPLE = 5000

#: Shortest interval in seconds over which CPU time is meaningful: the system counts it in hundredths of a second.
_SHORTEST = 0.1


@dataclass
class _Process:
    """A process as psutil knows it, its name, and its CPU time at the last reading: when, and seconds by then."""

    handle: Any
    name: str | None = None
    cpu: tuple[float, float] | None = None


class Processes:
    """Processes and their children, such as the workers of a data loader.

    Args:
        pids: the processes; None selects this one.

    Attributes:
        pids: the processes, without children.
        unavailable: the reason why none can be read; None if they can.
    """

    def __init__(self, pids: Sequence[int] | None = None) -> None:
        self.pids = list(dict.fromkeys(pids)) if pids is not None else [os.getpid()]
        # None: the process has ended. The system may give its id to another one.
        self._known: dict[int, _Process | None] = {}
        self._parents: dict[int, int] = {}
        self._child_readings: list[Readings | None] = []
        self._next_search = self._next_reading = 0.0
        self.unavailable: str | None = None
        try:
            import psutil
        except ModuleNotFoundError:
            self.unavailable = "psutil is not installed (pip install psutil)"
        else:
            self._psutil: Any = psutil

    def watch(self, pids: Sequence[int]) -> None:
        """Watch these processes from now on; those that do not exist are left out."""
        if self.unavailable is None and list(pids) != self.pids:
            self.pids = [pid for pid in pids if self._psutil.pid_exists(pid)]
            self._known = {pid: process for pid, process in self._known.items() if process is not None}
            self._next_search = 0.0

    def read(self) -> tuple[Readings, ...]:
        """Readings of the processes, ended ones included, and of their running children, which may be seconds old."""
        if self.unavailable is not None:
            return ()
        own = [self._read(pid) for pid in self.pids]
        if monotonic() >= self._next_search:
            self._next_search, self._next_reading = _next_time(self._find_children), 0.0
        if monotonic() >= self._next_reading:
            self._next_reading = _next_time(self._read_children)
        return tuple(readings for readings in own + self._child_readings if readings is not None)

    def _find_children(self) -> None:
        self._parents = {}
        for pid in self.pids:
            process = self._process(pid)
            if process is None or not process.handle.is_running():
                self._known[pid] = None
                continue
            with suppress(self._psutil.Error):
                children = process.handle.children(recursive=True)
                self._parents |= {child.pid: pid for child in children if child.pid not in self.pids}
        for pid in self._known.keys() - set(self.pids):
            process = self._known[pid]
            if pid not in self._parents or process is None or not process.handle.is_running():
                del self._known[pid]

    def _read_children(self) -> None:
        self._child_readings = [self._read(pid, parent) for pid, parent in self._parents.items()]

    def _process(self, pid: int) -> _Process | None:
        if pid not in self._known:
            try:
                self._known[pid] = _Process(self._psutil.Process(pid))
            except self._psutil.NoSuchProcess:
                self._known[pid] = None
        return self._known[pid]

    def _read(self, pid: int, parent: int | None = None) -> Readings | None:
        """Readings of one process; None for a child that has ended."""
        process = self._process(pid)
        answers: dict[str, float | str]
        try:
            if process is None:
                raise self._psutil.NoSuchProcess(pid)
            answers = self._query(process)
        except self._psutil.NoSuchProcess:
            if parent is not None:
                return None
            answers = dict.fromkeys(PROCESS_METRICS, "the process has ended")
        except self._psutil.AccessDenied:
            answers = dict.fromkeys(PROCESS_METRICS, "this user may not read the process")
        identity: dict[str, str | int | None] = {"pid": pid, "name": process.name if process is not None else None}
        return Readings.of(identity if parent is None else identity | {"parent": parent}, answers)

    def _query(self, process: _Process) -> dict[str, float | str]:
        handle = process.handle
        with handle.oneshot():
            # A process name may be any bytes; the system sets no encoding.
            process.name = process.name or handle.name().encode(errors="replace").decode()
            if handle.status() == self._psutil.STATUS_ZOMBIE:
                raise self._psutil.NoSuchProcess(handle.pid)
            times, memory = handle.cpu_times(), handle.memory_info()
        shared = getattr(memory, "shared", None)
        return {
            "cpu_ratio": _cpu_ratio(process, times.user + times.system),
            "resident_memory_bytes": memory.rss,
            "anonymous_memory_bytes": "this system does not report shared memory" if shared is None else memory.rss - shared,
        }


def _cpu_ratio(process: _Process, used: float) -> float | str:
    """CPU time per elapsed time since the last reading, or the reason why it is unknown."""
    now, before = monotonic(), process.cpu
    if before is not None and now - before[0] < _SHORTEST:
        return "too soon after the last sample"
    process.cpu = (now, used)
    return round((used - before[1]) / (now - before[0]), 4) if before is not None else "needs two samples"


def _next_time(work: Callable[[], None]) -> float:
    """Do some work; returns the time at which it may be repeated."""
    before = thread_time()
    work()
    return monotonic() + _COST_MULTIPLE * (thread_time() - before)
