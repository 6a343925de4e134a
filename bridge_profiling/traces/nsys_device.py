"""Work on the device in an nsys report: kernels, whole CUDA graphs, copies and memsets of one process, by start."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bridge_profiling.traces.kinds import COMMUNICATION, COMPUTE, MEMCPY, MEMSET, Copy, Kernel, kernel_kind, memory_kind
from bridge_profiling.traces.nsys_database import Database
from bridge_profiling.traces.nsys_processes import Process
from bridge_profiling.traces.tables import NULL, Integers

KINDS = (COMPUTE, COMMUNICATION, MEMCPY, MEMSET)

_SHARED = ("start", "end", "deviceId", "streamId", "correlationId")
_KERNEL, _COPY = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY"
_SET, _GRAPH = "CUPTI_ACTIVITY_KIND_MEMSET", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"

#: nsys' numbers of memory kinds where a report lists none; they are not CUPTI's.
_MEMORIES = {0: "pageable", 1: "pinned", 2: "device", 3: "array", 4: "managed", 5: "device", 6: "managed"}
_MEMORY_NAME = re.compile(r"CUDA_MEMOPR_MEMORY_KIND_(PAGEABLE|PINNED|DEVICE|ARRAY|MANAGED)")

#: CUPTI's numbers of copies, which nsys keeps. From and to arrays: other.
_DIRECTIONS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP", 11: "HtoD", 12: "DtoH", 13: "DtoD"}

#: CUPTI numbers a graph's node with the graph in the upper half; exports before `graphId` have only that.
_GRAPH_SHIFT = 32


@dataclass
class DeviceWork:
    """Columns of device events by start; NULL for what is unknown. Times are on the report's clock.

    Args:
        kernels: what each name says, by its number; of copies and memsets a plain compute kernel, which nothing looks at.
        copies: what each name says of a copy; None for other names.
        whole_graphs: how many events are executions of a CUDA graph as a whole.
        negative: how many events were left out because they end before they start.
    """

    start_ns: Integers
    end_ns: Integers
    device: Integers
    stream: Integers
    correlation: Integers
    graph: Integers
    bytes: Integers
    name: NDArray[np.int32]
    kind: NDArray[np.int8]
    names: list[str]
    kernels: list[Kernel]
    copies: list[Copy | None]
    whole_graphs: int
    negative: int


def read_device_work(database: Database, process: Process) -> DeviceWork:
    """Everything that the device did for one process.

    Raises:
        TraceError: SQLite cannot read it.
    """
    names = _Names()
    pieces = [
        _kernels(database, process, names),
        _graphs(database, process, names),
        _copies(database, process, names),
        _memsets(database, process, names),
    ]
    columns = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    usable = (columns["start"] != NULL) & (columns["end"] >= columns["start"])
    rows = np.flatnonzero(usable)
    rows = rows[np.argsort(columns["start"][rows], kind="stable")]
    taken = {name: values[rows] for name, values in columns.items()}
    return DeviceWork(
        start_ns=taken["start"],
        end_ns=taken["end"],
        device=taken["deviceId"],
        stream=taken["streamId"],
        correlation=taken["correlationId"],
        graph=taken["graph"],
        bytes=taken["bytes"],
        name=taken["name"].astype(np.int32),
        kind=taken["kind"].astype(np.int8),
        names=names.texts,
        kernels=names.kernels,
        copies=names.copies,
        whole_graphs=len(pieces[1]["start"]),
        negative=int((~usable).sum()),
    )


class _Names:
    """Names and what they say, numbered in the order in which they come."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.kernels: list[Kernel] = []
        self.copies: list[Copy | None] = []

    def add(self, text: str, *, kernel: Kernel | None = None, copy: Copy | None = None) -> int:
        """The new name's number."""
        self.texts.append(text)
        self.kernels.append(kernel or Kernel(COMPUTE))
        self.copies.append(copy)
        return len(self.texts) - 1


def _columns(database: Database, process: Process, table: str, *more: str) -> dict[str, Integers]:
    return database.columns(table, (*_SHARED, *more), process.where(database, table))


def _finished(columns: dict[str, Integers], kind: str | Integers, name: Integers, **more: Integers) -> dict[str, Integers]:
    """The columns that all pieces have."""
    rows = len(columns["start"])
    kinds = np.full(rows, KINDS.index(kind)) if isinstance(kind, str) else kind
    unknown = np.full(rows, NULL)
    shared = {each: columns[each] for each in _SHARED}
    return shared | {"kind": kinds, "name": name, "graph": unknown, "bytes": unknown} | more


def _kernels(database: Database, process: Process, names: _Names) -> dict[str, Integers]:
    columns = _columns(database, process, _KERNEL, "demangledName", "shortName", "graphId", "graphNodeId")
    ids = np.where(columns["demangledName"] != NULL, columns["demangledName"], columns["shortName"])
    used, place = np.unique(ids, return_inverse=True)
    texts = database.strings(used)
    said = [texts.get(number, "unnamed kernel") for number in used.tolist()]
    number = np.array([names.add(text, kernel=kernel_kind(text)) for text in said], np.int64)
    kind = np.array([KINDS.index(kernel_kind(text).kind) for text in said], np.int64)
    graph = np.where((columns["graphId"] != NULL) & (columns["graphId"] != 0), columns["graphId"], _node_graph(columns))
    return _finished(columns, kind[place] if len(ids) else place, number[place] if len(ids) else place, graph=graph)


def _graphs(database: Database, process: Process, names: _Names) -> dict[str, Integers]:
    """Executions of CUDA graphs that were recorded as a whole, without the kernels inside."""
    columns = _columns(database, process, _GRAPH, "graphId")
    used, place = np.unique(columns["graphId"], return_inverse=True)
    number = np.array([names.add(f"CUDA graph {'' if each == NULL else each}".rstrip()) for each in used.tolist()], np.int64)
    return _finished(columns, COMPUTE, number[place] if len(place) else place, graph=columns["graphId"])


def _copies(database: Database, process: Process, names: _Names) -> dict[str, Integers]:
    columns = _columns(database, process, _COPY, "bytes", "copyKind", "srcKind", "dstKind", "graphNodeId")
    memories = _memories(database)
    written = np.stack([columns[name] for name in ("copyKind", "srcKind", "dstKind")], axis=1)
    used, place = np.unique(written, axis=0, return_inverse=True)
    numbers = []
    for direction, source, target in used.tolist():
        copy = Copy(_DIRECTIONS.get(direction, "other"), memories.get(source, "unknown"), memories.get(target, "unknown"))
        memory = f"{copy.from_memory.capitalize()} -> {copy.to_memory.capitalize()}"
        numbers.append(names.add(f"Memcpy {copy.direction} ({memory})", copy=copy))
    number = np.array(numbers, np.int64)[place.reshape(-1)] if len(written) else np.empty(0, np.int64)
    return _finished(columns, MEMCPY, number, bytes=columns["bytes"], graph=_node_graph(columns))


def _memsets(database: Database, process: Process, names: _Names) -> dict[str, Integers]:
    columns = _columns(database, process, _SET, "bytes", "memKind", "graphNodeId")
    memories = _memories(database)
    used, place = np.unique(columns["memKind"], return_inverse=True)
    number = np.array([names.add(f"Memset ({memories.get(each, 'unknown').capitalize()})") for each in used.tolist()], np.int64)
    chosen = number[place] if len(place) else place
    return _finished(columns, MEMSET, chosen, bytes=columns["bytes"], graph=_node_graph(columns))


def _node_graph(columns: dict[str, Integers]) -> Integers:
    node = columns["graphNodeId"]
    return np.where((node != NULL) & (node != 0), node >> _GRAPH_SHIFT, NULL)


def _memories(database: Database) -> dict[int, str]:
    """The tables' words for this report's numbers of memory kinds."""
    listed = database.enumeration("ENUM_CUDA_MEM_KIND")
    found = {number: _MEMORY_NAME.match(name) for number, name in listed.items()}
    return {number: memory_kind(match[1]) for number, match in found.items() if match} if listed else _MEMORIES
