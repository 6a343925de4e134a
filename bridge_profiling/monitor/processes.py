"""CPU and memory of processes, through psutil."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic, thread_time
from typing import Any

from bridge_profiling.monitor.readings import PROCESS_METRICS, Readings, nothing

#: Looking for children reads every process of the machine, milliseconds on a large one, and a rank may have dozens of them.
#: Either is done again only after so many times the CPU time that it took: a five-thousandth of the time at most.
_RARELY = 5000

#: Seconds over which CPU time, which the system counts in hundredths, can be told.
_SHORTEST = 0.1


class Processes:
    """Processes and what they have started, such as a data loader's workers.

    Args:
        pids: the processes; None is this one.
        children: whether their children count.

    Attributes:
        pids: the processes, without children.
        unavailable: why none can be read; None where they can.
    """

    def __init__(self, pids: Sequence[int] | None = None, *, children: bool = True) -> None:
        self.pids = list(dict.fromkeys(pids)) if pids is not None else [os.getpid()]
        self._children = children
        self._known: dict[int, Any] = {}
        self._names: dict[int, str] = {}
        self._asked: dict[int, tuple[float, float]] = {}
        self._parents: dict[int, int] = {}
        self._of_children: list[Readings | None] = []
        self._ended: set[int] = set()
        self._next_look = self._next_reading = 0.0
        self.unavailable: str | None = None
        try:
            import psutil
        except ModuleNotFoundError:
            self.unavailable = "psutil is not installed (pip install psutil)"
        else:
            self._psutil: Any = psutil

    def watch(self, pids: Sequence[int]) -> None:
        """Watch these processes from now on, those of them that there are."""
        if self.unavailable is None and list(pids) != self.pids:
            self.pids = [pid for pid in pids if self._psutil.pid_exists(pid)]
            self._ended.clear()
            self._next_look = 0.0

    def read(self) -> tuple[Readings, ...]:
        """Those asked for, also when they have ended, and their children that run, whose readings may be seconds old."""
        if self.unavailable is not None:
            return ()
        own = [self._read(pid, None) for pid in self.pids]
        if self._children:
            if monotonic() >= self._next_look:
                self._next_look = _after(self._look_for_children)
                self._next_reading = 0.0
            if monotonic() >= self._next_reading:
                self._next_reading = _after(self._read_children)
        return tuple(readings for readings in own + self._of_children if readings is not None)

    def _look_for_children(self) -> None:
        self._parents = {}
        for pid in self.pids:
            process = self._process(pid)
            # Its number may have gone to another process meanwhile.
            if process is None or not process.is_running():
                self._ended.add(pid)
                continue
            with suppress(self._psutil.Error):
                self._parents |= {child.pid: pid for child in process.children(recursive=True) if child.pid not in self.pids}
        kept = {*self.pids, *(pid for pid in self._parents if pid in self._known and self._known[pid].is_running())}
        for by_pid in (self._known, self._asked, self._names):
            for pid in by_pid.keys() - kept:
                del by_pid[pid]

    def _read_children(self) -> None:
        self._of_children = [self._read(pid, parent) for pid, parent in self._parents.items()]

    def _process(self, pid: int) -> Any:
        if pid in self._ended:
            return None
        if pid not in self._known:
            try:
                self._known[pid] = self._psutil.Process(pid)
            except self._psutil.NoSuchProcess:
                return None
        return self._known[pid]

    def _read(self, pid: int, parent: int | None) -> Readings | None:
        """Readings of one process; None for a child that has ended."""
        process = self._process(pid)
        name = None
        try:
            if process is None:
                raise self._psutil.NoSuchProcess(pid)
            with process.oneshot():
                name = self._names.get(pid) or self._names.setdefault(pid, _readable(process.name()))
                if process.status() == self._psutil.STATUS_ZOMBIE:
                    raise self._psutil.NoSuchProcess(pid)
                cpu, memory = self._cpu(pid, process), process.memory_info()
        except self._psutil.NoSuchProcess:
            return nothing({"pid": pid, "name": name}, PROCESS_METRICS, "the process has ended") if parent is None else None
        except self._psutil.AccessDenied:
            return nothing({"pid": pid, "name": name}, PROCESS_METRICS, "this user may not read the process")
        values: dict[str, float] = {"resident_memory_bytes": memory.rss}
        unavailable = {}
        if isinstance(cpu, str):
            unavailable["cpu_ratio"] = cpu
        else:
            values["cpu_ratio"] = cpu
        if hasattr(memory, "shared"):
            values["anonymous_memory_bytes"] = memory.rss - memory.shared
        else:
            unavailable["anonymous_memory_bytes"] = "this system does not tell shared memory"
        identity: dict[str, str | int | None] = {"pid": pid, "name": name}
        return Readings(identity if parent is None else identity | {"parent": parent}, values, unavailable)

    def _cpu(self, pid: int, process: Any) -> float | str:
        """CPU time per time since it was asked before, or why that is not known."""
        times = process.cpu_times()
        now, used, before = monotonic(), times.user + times.system, self._asked.get(pid)
        if before is not None and now - before[0] < _SHORTEST:
            return "it is too soon after the sample before"
        self._asked[pid] = (now, used)
        return round((used - before[1]) / (now - before[0]), 4) if before is not None else "it takes two samples"


def _readable(name: str) -> str:
    """A process' name without what no text may hold: the system lets it be any bytes."""
    return name.encode(errors="replace").decode()


def _after(work: Callable[[], None]) -> float:
    """Do some work, and say when it may be done again."""
    before = thread_time()
    work()
    return monotonic() + _RARELY * (thread_time() - before)
