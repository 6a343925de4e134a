"""Which processes an nsys report holds, and which rank each is: one nsys around torchrun records all of its ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bridge_profiling.traces.nsys_database import Database, quoted

#: A globalTid is the process in its upper bits and 24 bits of thread; a globalPid is one with thread 0.
THREAD_BITS = 24
THREAD_MASK = (1 << THREAD_BITS) - 1

_DEVICE_TABLES = (
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_MEMCPY",
    "CUPTI_ACTIVITY_KIND_MEMSET",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
)
_HOST_TABLES = ("CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS")

_VARIABLE = re.compile(r'(RANK|WORLD_SIZE)="(\d{1,7})"$')
_MAX_RANK = 10**7


@dataclass(frozen=True)
class Process:
    """A process that did something in the report.

    Args:
        global_pid: nsys' number of it; None when the report tells no processes apart.
        devices: devices it used, in its own numbering.
        rank: its global rank, from the report itself; None when that does not say.
    """

    global_pid: int | None
    devices: tuple[int, ...]
    rank: int | None = None

    @property
    def pid(self) -> int | None:
        """The operating system's process id."""
        return None if self.global_pid is None else (self.global_pid >> THREAD_BITS) & THREAD_MASK

    def where(self, database: Database, table: str) -> str:
        """SQL condition for the process' rows of a table."""
        if self.global_pid is None:
            return "1"
        if database.has(table, "globalPid"):
            return f"globalPid = {self.global_pid}"
        if database.has(table, "globalTid"):
            return f"globalTid BETWEEN {self.global_pid} AND {self.global_pid | THREAD_MASK}"
        return "1"


def processes(database: Database) -> list[Process]:
    """The processes with work on a device, by device; without any, those with ranges or CUDA calls.

    A process' rank is known when nsys itself started it, with RANK in its environment, and when MPI told nsys.

    Raises:
        TraceError: SQLite cannot read them.
    """
    used: dict[int | None, set[int]] = {}
    for table in _DEVICE_TABLES:
        if database.has(table, "globalPid", "deviceId"):
            for global_pid, device in database.rows(f"SELECT DISTINCT globalPid, deviceId FROM {quoted(table)}"):
                if isinstance(global_pid, int) and isinstance(device, int):
                    used.setdefault(global_pid, set()).add(device)
    for table in _HOST_TABLES if not used else ():
        if database.has(table, "globalTid"):
            query = f"SELECT DISTINCT globalTid & ~{THREAD_MASK} FROM {quoted(table)} WHERE globalTid IS NOT NULL"
            for (global_pid,) in database.rows(query):
                used.setdefault(global_pid, set())
    if not used:
        return [Process(None, ())]
    ranks = _ranks(database)
    found = [Process(global_pid, tuple(sorted(devices)), ranks.get(global_pid)) for global_pid, devices in used.items()]
    return sorted(found, key=lambda process: (process.devices, process.global_pid or 0))


def environment(database: Database) -> dict[str, int]:
    """RANK and WORLD_SIZE of the process that nsys started; looks at no other variable."""
    if not database.has("META_DATA_CAPTURE", "name", "value"):
        return {}
    query = "SELECT value FROM META_DATA_CAPTURE WHERE name = 'PROCESS_0:ENVIRONMENT_VARIABLE' AND value LIKE '%RANK=%'"
    rows = database.rows(f"{query} UNION ALL {query.replace('RANK', 'WORLD_SIZE')}")
    matches = [match for (value,) in rows if (match := _VARIABLE.match(str(value)))]
    return {match[1]: int(match[2]) for match in matches}


def launched(database: Database) -> int | None:
    """globalPid of the process that nsys itself started; None when the report does not say, or there are several."""
    if not database.has("DIAGNOSTIC_EVENT", "text", "globalPid"):
        return None
    query = "SELECT DISTINCT globalPid FROM DIAGNOSTIC_EVENT WHERE text LIKE 'Process was launched by the profiler%'"
    found = [global_pid for (global_pid,) in database.rows(query) if isinstance(global_pid, int)]
    return found[0] if len(found) == 1 else None


def _ranks(database: Database) -> dict[int | None, int]:
    ranks: dict[int | None, int] = {}
    if database.has("MPI_RANKS", "globalTid", "rank"):
        for global_tid, rank in database.rows("SELECT globalTid, rank FROM MPI_RANKS"):
            if isinstance(global_tid, int) and isinstance(rank, int) and 0 <= rank <= _MAX_RANK:
                ranks[global_tid & ~THREAD_MASK] = rank
    own = launched(database)
    # Its children inherit RANK only when it is no launcher, and then they are no ranks.
    rank = environment(database).get("RANK")
    if own is not None and rank is not None:
        ranks.setdefault(own, rank)
    return ranks
