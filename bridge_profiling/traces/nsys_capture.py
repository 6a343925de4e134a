"""What an nsys report says of its capture as a whole: clock, host, versions, devices, the job's size. Reads no events."""

from __future__ import annotations

from typing import Any, TypeVar

from bridge_profiling.traces.nsys_database import Database, quoted
from bridge_profiling.traces.nsys_processes import Process, environment, launched
from bridge_profiling.traces.types import RankInfo

#: Later ones would overflow 64 bits together with the session's own times.
_MAX_BASE_NS = 4 * 10**18

Value = TypeVar("Value")


def describe_capture(database: Database, process: Process, info: RankInfo) -> None:
    """Fill in clock, host, versions, devices and the job's size."""
    start = _first(database, "TARGET_INFO_SESSION_START_TIME", "utcEpochNs")
    if isinstance(start, int) and 0 < start < _MAX_BASE_NS:
        info.clock, info.clock_base_ns = "unix", start
    system: dict[str, str] = {}
    if database.has("TARGET_INFO_SYSTEM_ENV", "name", "value"):
        wanted = "('Hostname', 'CudaDriverVersion', 'NvDriverVersion')"
        rows = database.rows(f"SELECT name, value FROM TARGET_INFO_SYSTEM_ENV WHERE name IN {wanted}")
        system = {str(name): str(value) for name, value in rows}
    info.host = system.get("Hostname") or None
    cuda = system.get("CudaDriverVersion", "")
    if cuda.isdigit() and int(cuda) >= 1000:
        info.versions["cuda_driver"] = f"{int(cuda) // 1000}.{int(cuda) % 1000 // 10}"
    if "NvDriverVersion" in system:
        info.versions["driver"] = system["NvDriverVersion"]
    if database.has("META_DATA_EXPORT", "name", "value"):
        rows = database.rows("SELECT value FROM META_DATA_EXPORT WHERE name = 'EXPORT_PRODUCT_VERSION'")
        info.versions |= {"nsys": str(rows[0][0])} if rows else {}
    if process.global_pid is not None and process.global_pid == launched(database):
        info.world_size = environment(database).get("WORLD_SIZE") or None
    info.devices, info.device_bytes = _devices(database, process)


def _first(database: Database, table: str, column: str) -> Any:
    rows = database.rows(f"SELECT {quoted(column)} FROM {quoted(table)} LIMIT 1") if database.has(table, column) else []
    return rows[0][0] if rows else None


def _devices(database: Database, process: Process) -> tuple[dict[int, str], dict[int, int]]:
    """Names of the devices that the process used, and their memory in bytes, by its own numbers of them."""
    if not database.has("TARGET_INFO_GPU", "id", "name"):
        return {}, {}
    names = {number: str(name) for number, name in database.rows("SELECT id, name FROM TARGET_INFO_GPU")}
    memory: dict[Any, int] = {}
    if database.has("TARGET_INFO_GPU", "totalMemory"):
        rows = database.rows("SELECT id, totalMemory FROM TARGET_INFO_GPU")
        memory = {number: size for number, size in rows if isinstance(size, int) and size > 0}
    gpus: dict[Any, Any] = {}
    if database.has("TARGET_INFO_CUDA_DEVICE", "gpuId", "cudaId", "pid"):
        rows = database.rows("SELECT cudaId, gpuId, pid FROM TARGET_INFO_CUDA_DEVICE")
        gpus = {cuda: gpu for cuda, gpu, pid in rows if pid == process.pid}
    return _by_device(process, gpus, names), _by_device(process, gpus, memory)


def _by_device(process: Process, gpus: dict[Any, Any], values: dict[Any, Value]) -> dict[int, Value]:
    """What is known of the devices by the process's numbers; what all devices have in common where these are unknown."""
    only = next(iter(set(values.values()))) if len(set(values.values())) == 1 else None
    found = {device: values.get(gpus.get(device)) or only for device in process.devices}
    return {device: value for device, value in found.items() if value}
