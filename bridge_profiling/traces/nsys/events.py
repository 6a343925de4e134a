"""Events of one process in an nsys report by start, on the report's clock: device work, calls, waits and sampled counters."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge_profiling.common.errors import TraceError
from bridge_profiling.traces.joins import distinct, rows_by_key, rows_by_start, taken
from bridge_profiling.traces.kinds import COMPUTE, MEMCPY, MEMSET, Copy, configuration, kernel_kind, memory_kind
from bridge_profiling.traces.nsys.database import Database, durations
from bridge_profiling.traces.nsys.report import COPY, GRAPH, KERNEL, Process
from bridge_profiling.traces.nsys.report import MEMSET as MEMSETS
from bridge_profiling.traces.tables import NULL, Integers, coded_column
from bridge_profiling.traces.types import Caveat, caveat

#: nsys' numbers of memory kinds where a report lists none; they differ from CUPTI's.
_MEMORIES = {0: "pageable", 1: "pinned", 2: "device", 3: "array", 4: "managed", 5: "device", 6: "managed"}
#: Those of variables in modules, which a kernel's code brings along; an allocation is none.
_STATIC = {5: "device static", 6: "managed static"}
_MEMORY_NAME = re.compile(r"CUDA_MEMOPR_MEMORY_KIND_(PAGEABLE|PINNED|DEVICE|ARRAY|MANAGED)")

#: CUPTI's numbers of copies, which nsys keeps. From and to arrays: other.
_DIRECTIONS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP", 11: "HtoD", 12: "DtoH", 13: "DtoD"}

#: CUPTI numbers a graph's node with the graph in the upper half; exports before `graphId` have only that.
_GRAPH_SHIFT = 32

#: "cudaLaunchKernel_v7000", "cuMemcpyAsync_ptsz": the version and the kind of default stream are left out of names.
_VERSION = re.compile(r"(?:_v\d{4,})?(?:_ptsz|_ptds)?$")

_UNNAMED = "unnamed kernel"

#: Columns of a kernel's launch.
_SIZES = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "registersPerThread")
_SHARED_MEMORY = ("staticSharedMemory", "dynamicSharedMemory")

MEMORY_USAGE = "CUDA_GPU_MEMORY_USAGE_EVENTS"

_WAITS, _RECORDS = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "CUPTI_ACTIVITY_KIND_CUDA_EVENT"
_WAIT_KINDS = ("stream_wait_event", "event", "stream", "context")

#: Times beyond are not nanoseconds of a session, and would overflow 64 bits together with the session's start.
MAX_TIME_NS = 1 << 60

#: CUPTI's numbers for no stream and no event, in 32 bits and in 64.
_NONE = ((1 << 32) - 1, -1, NULL)


@dataclass(frozen=True)
class DeviceName:
    """A name of device events, and what it says."""

    text: str
    kind: str
    backend: str | None = None
    operation: str | None = None
    copy: Copy | None = None


@dataclass(frozen=True)
class DeviceWork:
    """Columns of device events; NULL for unknown values."""

    start_ns: Integers
    duration_ns: Integers
    device: Integers
    stream: Integers
    correlation: Integers
    graph: Integers
    bytes: Integers
    name: NDArray[np.int32]  # index of `names`
    names: list[DeviceName]
    configuration: NDArray[np.int32]  # index of `configurations`; -1 for other work than kernels
    configurations: list[str | None]  # as in `device_events`
    whole_graphs: int  # events that are executions of a CUDA graph as a whole
    negative: int  # events left out because they end before they start
    unnamed: int  # kernels whose name is missing or damaged: they can be communication
    unowned: int  # events of no process, left out

    def of_kind(self, *kinds: str) -> NDArray[np.bool_]:
        """Which events are of some kinds."""
        return np.array([name.kind in kinds for name in self.names], bool)[self.name]


def read_device_work(process: Process) -> DeviceWork:
    """Kernels, executions of whole CUDA graphs, copies and memsets."""
    names: list[DeviceName] = []
    configurations: list[str | None] = []
    kernels = partial(_kernels, configurations=configurations)
    pieces, unowned = zip(*(kind(process, names) for kind in (kernels, _graphs, _copies, _memsets)), strict=True)
    whole_graphs = len(pieces[1]["start"])
    # The last are not UTF-8.
    unnamed = np.array([name.text == _UNNAMED or "\N{REPLACEMENT CHARACTER}" in name.text for name in names], bool)
    # One after another, so that not all columns are in memory twice.
    columns = {name: np.concatenate([piece.pop(name) for piece in pieces]) for name in list(pieces[0])}
    start, duration = columns.pop("start"), columns.pop("duration")
    rows = np.flatnonzero(duration >= 0)
    rows = rows[np.argsort(start[rows], kind="stable")]
    chosen = {name: columns.pop(name)[rows] for name in list(columns)}
    return DeviceWork(
        **chosen,
        start_ns=start[rows],
        duration_ns=duration[rows],
        names=names,
        configurations=configurations,
        whole_graphs=whole_graphs,
        negative=len(start) - len(rows),
        unnamed=int(unnamed[chosen["name"]].sum()),
        unowned=sum(unowned),
    )


def _columns(process: Process, table: str, *more: str) -> tuple[dict[str, Any], int]:
    """Columns of a table of device work, and how many of its events are of no process."""
    if missing := [name for name in ("start", "end") if process.database.has(table) and not process.database.has(table, name)]:
        raise TraceError(f"{process.database.name} cannot be read: {table} has no column {missing[0]}")
    names = ("start", "end", "deviceId", "streamId", "correlationId", "bytes", "graphNodeId", *more)
    return process.columns(table, *names, owner="globalPid")


def _piece(
    columns: dict[str, Any],
    names: list[DeviceName],
    keys: Integers,
    name: Callable[[Any], DeviceName],
    graph: Integers,
    configuration: NDArray[np.int32] | None = None,
) -> dict[str, Any]:
    """The columns that all kinds of device work have. A name is made once for each distinct key."""
    used, place = distinct(keys) if keys.ndim == 1 else np.unique(keys, axis=0, return_inverse=True)
    codes = (len(names) + place.reshape(-1)).astype(np.int32)
    names += [name(key) for key in used.tolist()]
    shared = {each.removesuffix("Id"): columns[each] for each in ("start", "deviceId", "streamId", "correlationId", "bytes")}
    found = {"duration": durations(columns["start"], columns["end"]), "name": codes, "graph": graph}
    return shared | found | {"configuration": np.full(len(keys), -1, np.int32) if configuration is None else configuration}


def _kernels(process: Process, names: list[DeviceName], configurations: list[str | None]) -> tuple[dict[str, Any], int]:
    columns, unowned = _columns(process, KERNEL, "demangledName", "shortName", "graphId", *_SIZES, *_SHARED_MEMORY)
    if len(columns["start"]) and not any(process.database.has(KERNEL, name) for name in ("demangledName", "shortName")):
        raise TraceError(f"{process.database.name} cannot be read: {KERNEL} has neither demangledName nor shortName")
    ids = _known(columns["demangledName"], columns["shortName"])
    texts = process.database.strings(distinct(ids)[0])

    def name(number: int) -> DeviceName:
        text = texts.get(number, _UNNAMED)
        kernel = kernel_kind(text)
        return DeviceName(text, kernel.kind, kernel.backend, kernel.operation)

    graph = _known(columns["graphId"], _node_graph(columns), none=0)
    return _piece(columns, names, ids, name, graph, _configuration(columns, configurations)), unowned


def _configuration(columns: dict[str, Any], configurations: list[str | None]) -> NDArray[np.int32]:
    """Indexes of the kernels' launch configurations, which are appended."""
    # One number for each combination that a GPU can launch, a column after another: rows of nine columns are not compared.
    code: NDArray[np.integer[Any]] = np.zeros(len(columns["start"]), np.int64)
    values: list[tuple[int, ...]] = [()]
    for name in (*_SIZES, *_SHARED_MEMORY):
        known, place = distinct(columns.pop(name))
        used, code = distinct(code.astype(np.int64) * len(known) + place)
        values = [(*values[pair // len(known)], int(known[pair % len(known)])) for pair in used.tolist()]
    for *sizes, registers, static, dynamic in values if len(code) else ():
        shared = None if NULL in (static, dynamic) else static + dynamic
        configurations.append(configuration(sizes[:3], sizes[3:], None if registers == NULL else registers, shared))
    return code.astype(np.int32)


def _graphs(process: Process, names: list[DeviceName]) -> tuple[dict[str, Any], int]:
    """Executions of CUDA graphs that were recorded as a whole, without the kernels inside."""
    columns, unowned = _columns(process, GRAPH, "graphId")

    def name(graph: int) -> DeviceName:
        return DeviceName("CUDA graph" if graph == NULL else f"CUDA graph {graph}", COMPUTE)

    return _piece(columns, names, columns["graphId"], name, columns["graphId"]), unowned


def _copies(process: Process, names: list[DeviceName]) -> tuple[dict[str, Any], int]:
    of_kind = ("copyKind", "srcKind", "dstKind")
    columns, unowned = _columns(process, COPY, *of_kind)
    memories = _memories(process.database)

    def name(key: tuple[int, int, int]) -> DeviceName:
        direction, source, target = key
        copy = Copy(_DIRECTIONS.get(direction, "other"), memories.get(source, "unknown"), memories.get(target, "unknown"))
        memory = f"{copy.from_memory.capitalize()} -> {copy.to_memory.capitalize()}"
        return DeviceName(f"Memcpy {copy.direction} ({memory})", MEMCPY, copy=copy)

    keys = np.stack([columns[each] for each in of_kind], axis=1)
    return _piece(columns, names, keys, name, _node_graph(columns)), unowned


def _memsets(process: Process, names: list[DeviceName]) -> tuple[dict[str, Any], int]:
    columns, unowned = _columns(process, MEMSETS, "memKind")
    memories = _memories(process.database)

    def name(memory: int) -> DeviceName:
        return DeviceName(f"Memset ({memories.get(memory, 'unknown').capitalize()})", MEMSET)

    return _piece(columns, names, columns["memKind"], name, _node_graph(columns)), unowned


def _known(first: Integers, second: Integers, *, none: int = NULL) -> Integers:
    """The first value of each row, or the second one where that is unknown."""
    return np.where((first != NULL) & (first != none), first, second)


def _node_graph(columns: dict[str, Any]) -> Integers:
    node = columns["graphNodeId"]
    return np.where((node != NULL) & (node != 0), node >> _GRAPH_SHIFT, NULL)


def _memories(database: Database) -> dict[int, str]:
    """Our words for this report's numbers of memory kinds."""
    rows = database.select("ENUM_CUDA_MEM_KIND", "id", "name")
    found = {number: match for number, name in rows if (match := _MEMORY_NAME.match(str(name)))}
    return {int(number): memory_kind(match[1]) for number, match in found.items()} if rows else _MEMORIES


@dataclass(frozen=True)
class Calls:
    """CUDA runtime and driver calls, or nsys' own work, by start; `name` is an index of `names`."""

    start_ns: Integers
    duration_ns: Integers
    thread: Integers
    correlation: Integers
    name: NDArray[np.int32]
    names: list[str]
    negative: int
    unowned: int  # of no process, left out

    def named(self, wanted: Callable[[str], bool]) -> NDArray[np.bool_]:
        """Which calls have a wanted name."""
        return np.array(list(map(wanted, self.names)), bool)[self.name]


def read_calls(process: Process, table: str, unnamed: str) -> Calls:
    """The events of one host table; those without a name are called `unnamed`."""
    columns, unowned = process.columns(table, "start", "end", "globalTid", "correlationId", "nameId", owner="globalTid")
    start = columns["start"]
    duration = durations(start, columns.pop("end"))
    usable = duration >= 0
    rows = rows_by_start(start, duration, usable)
    ids, place = distinct(columns["nameId"][rows])
    texts = process.database.strings(ids)
    return Calls(
        start_ns=start[rows],
        duration_ns=duration[rows],
        thread=columns["globalTid"][rows],
        correlation=columns["correlationId"][rows],
        name=place,
        names=[_VERSION.sub("", texts.get(number, unnamed)) for number in ids.tolist()],
        negative=int((~usable).sum()),
        unowned=unowned,
    )


def read_waits(process: Process, calls: Calls) -> tuple[dict[str, Any], list[Caveat]]:
    """Columns of `synchronizations`, joined with the event records that they wait for."""
    columns, _ = process.columns(_WAITS, "start", "end", "deviceId", "streamId", "correlationId", "eventId", "eventSyncId")
    # cudaEventQuery and cudaStreamQuery have such records too, and do not wait.
    queries = calls.correlation[np.flatnonzero(calls.named(lambda name: "Query" in name))]
    rows = np.flatnonzero((columns["start"] != NULL) & (columns["end"] >= columns["start"]))
    rows = rows[~np.isin(columns["correlationId"][rows], queries)]
    rows = rows[np.argsort(columns["start"][rows], kind="stable")]
    columns = {name: values[rows] for name, values in columns.items()}
    stream = np.where(np.isin(columns["streamId"], _NONE), NULL, columns["streamId"])
    event = np.where(np.isin(columns["eventId"], _NONE), NULL, columns["eventId"])
    # CUPTI documents which ids each kind has. `syncType` is unreliable: nsys 2024.2 gives a wait for an event the number 3,
    # which its own list calls a wait for a stream.
    kind = np.select([(stream != NULL) & (event != NULL), event != NULL, stream != NULL], [0, 1, 2], 3)
    records, _ = process.columns(_RECORDS, "streamId", "correlationId", "eventId", "eventSyncId")
    record = _records_of(columns, event, records)
    waiting, caveats = event != NULL, []
    if unresolved := int((waiting & (record < 0)).sum()):
        caveats.append(caveat("event_records_missing", unresolved=unresolved, waits=int(waiting.sum())))
    waits = {
        "kind": coded_column(kind, _WAIT_KINDS),
        "device": columns["deviceId"],
        "stream": stream,
        "start_ns": columns["start"],
        "end_ns": columns["end"],
        "correlation": columns["correlationId"],
        "producer_stream": taken(records["streamId"], record),
        "producer_correlation": taken(records["correlationId"], record),
    }
    return waits, caveats


def _records_of(waits: dict[str, Integers], event: Integers, records: dict[str, Integers]) -> Integers:
    """The row of the event record that each wait is for; -1 where there is none."""
    # An event is recorded repeatedly under one `eventId`; `eventSyncId` numbers each record. Without it, a wait is for the
    # latest record before it, by correlation: times of records can be 0.
    row = rows_by_key(records["eventSyncId"], np.where(event != NULL, waits["eventSyncId"], NULL))
    unnumbered = (row < 0) & (event != NULL) & (waits["eventSyncId"] == NULL)
    if unnumbered.any() and len(records["eventId"]):
        row[unnumbered] = _latest_before(records, event[unnumbered], waits["correlationId"][unnumbered])
    return row


def _latest_before(records: dict[str, Integers], event: Integers, correlation: Integers) -> Integers:
    rows_of: defaultdict[int, list[int]] = defaultdict(list)
    for row in np.argsort(records["correlationId"], kind="stable").tolist():
        rows_of[int(records["eventId"][row])].append(row)
    found = np.full(len(event), -1)
    for place, (one, before) in enumerate(zip(event.tolist(), correlation.tolist(), strict=True)):
        rows = rows_of.get(one, [])
        count = bisect_left(rows, before, key=records["correlationId"].__getitem__)
        found[place] = rows[count - 1] if count else -1
    return found


def memory_columns(process: Process) -> dict[str, Any]:
    """Columns of `cuda_memory`: what CUDA allocated and freed, by time."""
    columns, _ = process.columns(MEMORY_USAGE, "start", "deviceId", "bytes", "memKind", "memoryOperationType")
    usable = (columns["start"] > -MAX_TIME_NS) & (columns["start"] < MAX_TIME_NS) & (columns["bytes"] >= 0)
    rows = np.flatnonzero(usable & np.isin(columns["memoryOperationType"], (0, 1)))
    rows = rows[np.argsort(columns["start"][rows], kind="stable")]
    columns = {name: values[rows] for name, values in columns.items()}
    memories = _memories(process.database) | _STATIC
    kinds, place = np.unique(columns["memKind"], return_inverse=True)
    return {
        "time_ns": columns["start"],
        "device": columns["deviceId"],
        "memory": coded_column(place, [memories.get(kind, "unknown") for kind in kinds.tolist()]),
        # The second of nsys' two operations frees.
        "bytes": np.where(columns["memoryOperationType"] == 1, -columns["bytes"], columns["bytes"]),
    }


def metric_columns(process: Process) -> dict[str, Any]:
    """Columns of `gpu_metrics`: counters sampled with `--gpu-metrics-devices`; none when nothing was sampled.

    They are of the process' GPUs, by its own numbers. Where the report does not say which these are, they are of every GPU that
    nsys watched, by nsys' numbers.
    """
    database = process.database
    if not database.has("GPU_METRICS", "timestamp", "typeId", "metricId", "value"):
        return {}
    columns, _ = database.columns("GPU_METRICS", ("timestamp", "typeId", "metricId", "value"))
    own = {gpu: cuda for cuda, gpu in process.gpus.items()}
    # The lowest byte of a type is the GPU that it was sampled on.
    gpus, place = np.unique(columns["typeId"] & 0xFF, return_inverse=True)
    columns["device"] = np.array([own.get(gpu, NULL) if own else gpu for gpu in gpus.tolist()], np.int64)[place]
    known = (columns["timestamp"] != NULL) & (columns["device"] != NULL)
    columns = {name: values[known] for name, values in columns.items()}
    rows = database.select("TARGET_INFO_GPU_METRICS", "typeId", "metricId", "metricName")
    names = {(kind, metric): str(name) for kind, metric, name in rows}
    pairs = np.stack((columns["typeId"], columns["metricId"]), axis=1)
    used, place = np.unique(pairs, axis=0, return_inverse=True)
    texts = [names.get((kind, metric), f"metric {metric}") for kind, metric in used.tolist()]
    order = np.argsort(columns["timestamp"], kind="stable")
    return {
        "time_ns": columns["timestamp"][order],
        "device": columns["device"][order],
        "metric": coded_column(place.reshape(-1)[order], texts),
        "value": columns["value"][order],
    }
