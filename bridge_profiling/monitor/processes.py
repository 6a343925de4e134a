"""CPU and memory readings of processes and of the whole machine, through psutil."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
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


class Processes:
    """Processes by id (None: this one); `unavailable` is the reason why none can be read, or None."""

    def __init__(self, pids: Sequence[int] | None = None) -> None:
        self.unavailable: str | None = None
        try:
            import psutil
        except ModuleNotFoundError:
            self.unavailable, pids = _NO_PSUTIL, ()
        else:
            self._psutil: Any = psutil
        self._pids = [os.getpid()] if pids is None else list(dict.fromkeys(pids))
        # A handle stays that of its process if the system gives the id to another one.
        self._handles: dict[int, Any] = {}
        self._names: dict[int, str] = {}
        self._cpu: defaultdict[int, _Ratio] = defaultdict(_Ratio)

    def watch(self, pids: Sequence[int]) -> None:
        """Watch these processes from now on; those that do not exist are left out."""
        if self.unavailable is None:
            self._pids = [pid for pid in pids if self._psutil.pid_exists(pid)]
            self._handles = {pid: handle for pid, handle in self._handles.items() if handle.is_running()}

    def read(self) -> tuple[Readings, ...]:
        """Readings of the processes, ended ones included."""
        found = []
        for pid in self._pids:
            try:
                answers = self._query(pid)
            except self._psutil.NoSuchProcess:
                answers = dict.fromkeys(PROCESS_METRICS, "the process has ended")
            except self._psutil.AccessDenied:
                answers = dict.fromkeys(PROCESS_METRICS, "this user may not read the process")
            found.append(Readings.of({"pid": pid, "name": self._names.get(pid)}, answers))
        return tuple(found)

    def _query(self, pid: int) -> dict[str, float | str]:
        if pid not in self._handles:
            self._handles[pid] = self._psutil.Process(pid)
        handle = self._handles[pid]
        with handle.oneshot():
            # A process name may be any bytes; the system sets no encoding.
            self._names[pid] = handle.name().encode(errors="replace").decode()
            if handle.status() == self._psutil.STATUS_ZOMBIE:
                raise self._psutil.NoSuchProcess(pid)
            times, memory = handle.cpu_times(), handle.memory_info()
        shared = getattr(memory, "shared", None)
        return {
            "cpu_ratio": self._cpu[pid].read(monotonic(), times.user + times.system),
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
