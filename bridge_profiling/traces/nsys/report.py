"""A report as a whole: its processes and which rank each is, its clock, host, versions and devices. Reads no events.

One nsys around torchrun records all of its ranks in one report.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bridge_profiling.common.errors import CaptureError, TraceError
from bridge_profiling.common.processes import run_owned
from bridge_profiling.nsys.command import export_command, find_nsys, without_injection
from bridge_profiling.traces.bounds import MAX_BASE_NS, NSYS, open_regular, unpack
from bridge_profiling.traces.joins import MAX_RANKS
from bridge_profiling.traces.nsys.database import Among, Database, quoted
from bridge_profiling.traces.tables import Integers
from bridge_profiling.traces.types import RankInfo

#: A globalTid has the process in its upper bits and the thread in its lower 24; a globalPid is one with thread 0.
THREAD_BITS = 24
THREAD_MASK = (1 << THREAD_BITS) - 1

KERNEL, COPY, MEMSET, GRAPH, CALL = (
    f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE", "RUNTIME")
)
NVTX = "NVTX_EVENTS"
SYSTEM = "OSRT_API"

_VARIABLE = re.compile(r'(RANK|WORLD_SIZE)="(\d{1,7})"$')

_EXPORT_SECONDS = 3600

Value = TypeVar("Value")


@contextlib.contextmanager
def open_report(path: Path) -> Iterator[Database]:
    """The database of a report: an SQLite export, or an `.nsys-rep` that is exported first; either may be packed as `.xz`."""
    open_regular(path).close()
    with tempfile.TemporaryDirectory(prefix="bridge_profiling-", ignore_cleanup_errors=True) as temporary:
        plain = path
        if path.suffix == ".xz":
            plain = Path(temporary, path.name.removesuffix(".xz"))
            with plain.open("wb") as target:
                target.writelines(unpack(path, NSYS))
        if plain.suffix == ".nsys-rep":
            plain = _export(path, plain, Path(temporary, "report.sqlite"))
        with contextlib.closing(Database(plain, path)) as database:
            yield database


def _export(path: Path, report: Path, to: Path) -> Path:
    """Export a report with the nsys of this machine."""
    try:
        nsys = find_nsys().executable
    except CaptureError as error:
        raise TraceError(
            f"{path} is an nsys report, which only nsys can read, and nsys was not found here ({error}); install Nsight"
            " Systems, or record with NsysPlugin(export_sqlite=True)"
        ) from error
    # nsys names its export after the report and looks for one next to it: a link leaves the report's folder alone.
    link = to.with_suffix(".nsys-rep")
    if not link.exists():
        try:
            os.symlink(report.absolute(), link)
        except OSError:
            shutil.copyfile(report, link)
    try:
        done = run_owned(export_command(nsys, link, to), seconds=_EXPORT_SECONDS, environment=without_injection(os.environ))
    except (OSError, CaptureError, subprocess.TimeoutExpired) as error:
        raise TraceError(f"{path} cannot be exported: {error}") from error
    if done.returncode or not to.exists():
        lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip() and "[" not in line]
        reason = " ".join(lines)[:500] or f"exit code {done.returncode}, no message"
        raise TraceError(f"{path} cannot be exported by nsys: {reason}")
    return to


@dataclass(frozen=True)
class Process:
    """A process with events in the report."""

    database: Database
    global_pid: int | None  # nsys' number for it; None when the report does not separate processes
    devices: tuple[int, ...]  # that it used, in its own numbering
    rank: int | None = None  # as recorded; None when unknown

    @property
    def pid(self) -> int | None:
        """The operating system's process id."""
        return None if self.global_pid is None else (self.global_pid >> THREAD_BITS) & THREAD_MASK

    @property
    def gpus(self) -> dict[int, int]:
        """nsys' numbers of the machine's GPUs by the process' own device numbers; empty when the report does not say."""
        rows = self.database.select("TARGET_INFO_CUDA_DEVICE", "cudaId", "gpuId", "pid")
        return {cuda: gpu for cuda, gpu, pid in rows if pid == self.pid and isinstance(cuda, int) and isinstance(gpu, int)}

    def where(self, table: str) -> tuple[Among, ...]:
        """Condition for the process' rows of a table."""
        if self.global_pid is not None and self.database.has(table, "globalPid"):
            return (Among("globalPid", ((self.global_pid, self.global_pid),)),)
        if self.global_pid is not None and self.database.has(table, "globalTid"):
            return (Among("globalTid", ((self.global_pid, self.global_pid | THREAD_MASK),)),)
        return ()

    def columns(self, table: str, *names: str, owner: str | None = None) -> tuple[dict[str, Integers], int]:
        """Columns of integers of the process' rows, see `Database.columns`.

        With how many of the table's rows are of no process, whose number is in `owner`.
        """
        return self.database.columns(table, names, self.where(table), {} if owner is None else {owner: ()})


def processes(database: Database) -> list[Process]:
    """The processes with work on a device, by device; without any, those with ranges or CUDA calls.

    A report that has neither holds calls of every process, a launcher and its helpers included: those whose rank is recorded
    count, else all of them together.
    """
    used: dict[int | None, set[int]] = {}
    for table in (KERNEL, COPY, MEMSET, GRAPH):
        if database.has(table, "globalPid", "deviceId"):
            for global_pid, device in database.rows(f"SELECT DISTINCT globalPid, deviceId FROM {quoted(table)}"):
                if isinstance(global_pid, int) and isinstance(device, int):
                    used.setdefault(global_pid, set()).add(device)
    for table in (CALL, NVTX) if not used else ():
        if database.has(table, "globalTid"):
            query = f"SELECT DISTINCT globalTid & ~{THREAD_MASK} FROM {quoted(table)} WHERE globalTid IS NOT NULL"
            for (global_pid,) in database.rows(query):
                used.setdefault(global_pid, set())
    ranks = _recorded_ranks(database)
    if not used and database.has(SYSTEM, "globalTid"):
        callers = {pid for (pid,) in database.rows(f"SELECT DISTINCT globalTid & ~{THREAD_MASK} FROM {quoted(SYSTEM)}")}
        used = {pid: set() for pid in callers & ranks.keys()}
    if not used:
        return [Process(database, None, ())]
    found = [Process(database, pid, tuple(sorted(devices)), ranks.get(pid)) for pid, devices in used.items()]
    return sorted(found, key=lambda process: (process.devices, process.global_pid or 0))


def process_ranks(found: list[Process]) -> list[int]:
    """Each process' rank: as recorded, else its place by device, which is torchrun's order on one host."""
    known = [process.rank for process in found if process.rank is not None]
    return known if len(known) == len(found) == len(set(known)) else list(range(len(found)))


def ranks_in_report(path: Path) -> list[int]:
    """The ranks that can be read from a report, one per process; exports an `.nsys-rep`."""
    with open_report(path) as database:
        return process_ranks(processes(database))


def _recorded_ranks(database: Database) -> dict[int | None, int]:
    """Ranks by globalPid, from MPI or from RANK in the environment of the process that nsys started."""
    ranks: dict[int | None, int] = {}
    for global_tid, rank in database.select("MPI_RANKS", "globalTid", "rank"):
        if isinstance(global_tid, int) and isinstance(rank, int) and 0 <= rank <= MAX_RANKS:
            ranks[global_tid & ~THREAD_MASK] = rank
    launched, rank = _launched(database), _environment(database).get("RANK")
    # Its children inherit RANK only when it is a launcher, whose RANK is the node's.
    if launched is not None and rank is not None:
        ranks.setdefault(launched, rank)
    return ranks


def _environment(database: Database) -> dict[str, int]:
    """RANK and WORLD_SIZE of the process that nsys started; reads no other variable."""
    if not database.has("META_DATA_CAPTURE", "name", "value"):
        return {}
    query = "SELECT value FROM META_DATA_CAPTURE WHERE name = 'PROCESS_0:ENVIRONMENT_VARIABLE' AND value LIKE '%RANK=%'"
    rows = database.rows(f"{query} UNION ALL {query.replace('RANK', 'WORLD_SIZE')}")
    matches = [match for (value,) in rows if (match := _VARIABLE.match(str(value)))]
    return {match[1]: int(match[2]) for match in matches}


def _launched(database: Database) -> int | None:
    """globalPid of the process that nsys itself started; None when it is unknown, or there are several."""
    rows = database.select("DIAGNOSTIC_EVENT", "text", "globalPid")
    found = {pid for text, pid in rows if isinstance(pid, int) and str(text).startswith("Process was launched by the profiler")}
    return found.pop() if len(found) == 1 else None


def describe_capture(process: Process, info: RankInfo) -> None:
    """Fill in clock, host, versions, devices and the job's size."""
    database = process.database
    ((start,),) = database.select("TARGET_INFO_SESSION_START_TIME", "utcEpochNs")[:1] or [(None,)]
    if isinstance(start, int) and 0 < start < MAX_BASE_NS:
        info.clock, info.clock_base_ns = "unix", start
    system = {str(name): str(value) for name, value in database.select("TARGET_INFO_SYSTEM_ENV", "name", "value")}
    info.host = system.get("Hostname") or None
    cuda = system.get("CudaDriverVersion", "")
    if cuda.isdigit() and int(cuda) >= 1000:
        info.versions["cuda_driver"] = f"{int(cuda) // 1000}.{int(cuda) % 1000 // 10}"
    if "NvDriverVersion" in system:
        info.versions["driver"] = system["NvDriverVersion"]
    for name, value in database.select("META_DATA_EXPORT", "name", "value"):
        if name == "EXPORT_PRODUCT_VERSION":
            info.versions["nsys"] = str(value)
    if process.global_pid is not None and process.global_pid == _launched(database):
        info.world_size = _environment(database).get("WORLD_SIZE") or None
    names = {number: str(name) for number, name in database.select("TARGET_INFO_GPU", "id", "name")}
    rows = database.select("TARGET_INFO_GPU", "id", "totalMemory")
    sizes = {number: size for number, size in rows if isinstance(size, int) and size > 0}
    gpus = process.gpus
    info.devices, info.device_bytes = _by_device(process, gpus, names), _by_device(process, gpus, sizes)


def _by_device(process: Process, gpus: dict[Any, Any], values: dict[Any, Value]) -> dict[int, Value]:
    """Values by the process' own device numbers; the common value of all GPUs where these are unknown."""
    only = next(iter(values.values())) if len(set(values.values())) == 1 else None
    found = {device: values.get(gpus.get(device)) or only for device in process.devices}
    return {device: value for device, value in found.items() if value}
