"""CPU and memory readings of processes and of the whole machine, through psutil."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from bridge_profiling.monitor.metrics import MACHINE_METRICS, PROCESS_METRICS, Readings

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
    name: str | None = None
    cpu: _Ratio = field(default_factory=_Ratio)


class Processes:
    """Processes by id (None: this one); `unavailable` is the reason why none can be read, or None."""

    def __init__(self, pids: Sequence[int] | None = None) -> None:
        self._processes: list[_Process] = []
        self.unavailable: str | None = None
        try:
            import psutil
        except ModuleNotFoundError:
            self.unavailable = _NO_PSUTIL
        else:
            self._psutil: Any = psutil
            self._processes = [self._open(pid) for pid in (dict.fromkeys(pids) if pids is not None else [os.getpid()])]

    def _open(self, pid: int) -> _Process:
        try:
            return _Process(pid, self._psutil.Process(pid))
        except self._psutil.NoSuchProcess:
            return _Process(pid, None)

    def watch(self, pids: Sequence[int]) -> None:
        """Watch these processes from now on; those that do not exist are left out."""
        if self.unavailable is None and list(pids) != [process.pid for process in self._processes]:
            running = {process.pid: process for process in self._processes if process.handle is not None}
            self._processes = [running.get(pid) or self._open(pid) for pid in pids if self._psutil.pid_exists(pid)]

    def read(self) -> tuple[Readings, ...]:
        """Readings of the processes, ended ones included."""
        return tuple(self._read(process) for process in self._processes)

    def _read(self, process: _Process) -> Readings:
        answers = self._ask(process, self._query)
        if isinstance(answers, str):
            answers = dict.fromkeys(PROCESS_METRICS, answers)
        return Readings.of({"pid": process.pid, "name": process.name}, answers)

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
