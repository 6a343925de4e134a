"""CPU and memory readings of processes and of the whole machine, through psutil."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic, thread_time
from typing import Any

from bridge_profiling.monitor.metrics import MACHINE_METRICS, PROCESS_METRICS, Readings

#: Finding children reads every process of the machine, milliseconds on a large one, and a rank may have dozens of children to
#: read. Each is repeated only after this many times the CPU time that it took, which bounds it to 1/5,000 of the time.
_COST_MULTIPLE = 5000

_NO_PSUTIL = "psutil is not installed (pip install psutil)"

#: Shortest interval in seconds over which CPU time is meaningful: the system counts it in hundredths of a second.
_SHORTEST = 0.1


class _Ratio:
    """The growth of CPU time per elapsed time between two readings, or the reason why it is unknown."""

    def __init__(self) -> None:
        self._before: tuple[float, float] | None = None

    def read(self, elapsed: float, used: float) -> float | str:
        """Seconds since some time, and those of them that were used."""
        before = self._before
        if before is not None and elapsed - before[0] < _SHORTEST:
            return "too soon after the last sample"
        self._before = (elapsed, used)
        return "needs two samples" if before is None else round(max(used - before[1], 0.0) / (elapsed - before[0]), 4)


@dataclass
class _Process:
    """A process, psutil's handle of it (None if it has ended), and its use of the CPU."""

    pid: int
    handle: Any
    parent: int | None = None
    name: str | None = None
    cpu: _Ratio = field(default_factory=_Ratio)


class Processes:
    """Processes (None: this one) and their children; `unavailable` is the reason why none can be read, or None."""

    def __init__(self, pids: Sequence[int] | None = None) -> None:
        self._own: list[_Process] = []
        self._children: dict[int, _Process] = {}
        self._child_readings: list[Readings] = []
        self._next_search = self._next_reading = 0.0
        self.unavailable: str | None = None
        try:
            import psutil
        except ModuleNotFoundError:
            self.unavailable = _NO_PSUTIL
        else:
            self._psutil: Any = psutil
            self._own = [self._open(pid) for pid in (dict.fromkeys(pids) if pids is not None else [os.getpid()])]

    def _open(self, pid: int) -> _Process:
        try:
            return _Process(pid, self._psutil.Process(pid))
        except self._psutil.NoSuchProcess:
            return _Process(pid, None)

    def watch(self, pids: Sequence[int]) -> None:
        """Watch these processes from now on; those that do not exist are left out."""
        if self.unavailable is None and list(pids) != [process.pid for process in self._own]:
            running = {process.pid: process for process in self._own if process.handle is not None}
            self._own = [running.get(pid) or self._open(pid) for pid in pids if self._psutil.pid_exists(pid)]
            self._next_search = 0.0

    def read(self) -> tuple[Readings, ...]:
        """Readings of the processes, ended ones included, and of their running children, which may be seconds old."""
        own = [self._read(process) for process in self._own]
        if monotonic() >= self._next_search:
            self._next_search, self._next_reading = _next_time(self._find_children), 0.0
        if monotonic() >= self._next_reading:
            self._next_reading = _next_time(self._read_children)
        return (*own, *self._child_readings)

    def _find_children(self) -> None:
        found: dict[int, _Process] = {}
        for process in self._own:
            handles = self._ask(process, lambda process: process.handle.children(recursive=True))
            for handle in () if isinstance(handles, str) else handles:
                known = self._children.get(handle.pid)
                if known is None or known.handle != handle:
                    known = _Process(handle.pid, handle, process.pid)
                found[handle.pid] = known
        own = {process.pid for process in self._own}
        self._children = {pid: child for pid, child in found.items() if pid not in own}

    def _read_children(self) -> None:
        readings = [(child, self._read(child)) for child in self._children.values()]
        self._child_readings = [each for child, each in readings if child.handle is not None]

    def _read(self, process: _Process) -> Readings:
        answers = self._ask(process, self._query)
        if isinstance(answers, str):
            answers = dict.fromkeys(PROCESS_METRICS, answers)
        parent = {} if process.parent is None else {"parent": process.parent}
        return Readings.of({"pid": process.pid, "name": process.name, **parent}, answers)

    def _ask(self, process: _Process, query: Callable[[_Process], Any]) -> Any:
        """The answer to a query, or the reason why there is none as text."""
        try:
            if process.handle is not None:
                return query(process)
        except self._psutil.NoSuchProcess:
            # Also raised if the system has given its id to another process.
            process.handle = None
        except self._psutil.AccessDenied:
            return "this user may not read the process"
        return "the process has ended"

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
            "cpu_ratio": process.cpu.read(monotonic(), times.user + times.system),
            "resident_memory_bytes": memory.rss,
            "anonymous_memory_bytes": "this system does not report shared memory" if shared is None else memory.rss - shared,
        }


class Machine:
    """The CPU and the memory of the machine."""

    def __init__(self) -> None:
        # Not psutil.cpu_percent: it measures since its last call, which may be the training's.
        self._ratio = _Ratio()

    def read(self) -> Readings:
        """Read both once."""
        try:
            import psutil
        except ModuleNotFoundError:
            return Readings.of({}, dict.fromkeys(MACHINE_METRICS, _NO_PSUTIL))
        memory = psutil.virtual_memory()
        answers = {"memory_used_bytes": memory.total - memory.available, "memory_total_bytes": memory.total}
        return Readings.of({}, {"cpu_ratio": self._cpu_ratio(psutil.cpu_times()), **answers})

    def _cpu_ratio(self, times: Any) -> float | str:
        # Time of virtual machines is part of the time of their processes.
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        busy = total - times.idle - getattr(times, "iowait", 0.0)
        return self._ratio.read(total, busy)


def _next_time(work: Callable[[], None]) -> float:
    """Do some work; returns the time at which it may be repeated."""
    before = thread_time()
    work()
    return monotonic() + _COST_MULTIPLE * (thread_time() - before)
