"""Makes captures small: leaves out what this project's readers do not read, and changes nothing that they do.

A capture that loses more is refused: `check` compares every table that the readers make of the whole capture and of the lean
one. What is read is asked of the readers where they can be asked (`kineto.decode.Args`), and listed here where not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import lzma
import pickle
import re
import sqlite3
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from bridge_profiling.traces.cache import load
from bridge_profiling.traces.discover import Capture
from bridge_profiling.traces.kineto.decode import Args
from bridge_profiling.traces.types import RankTables, Source

Rename = Callable[[str], str]

#: A capture's file, by how its name ends, and the profiler that wrote it.
SOURCES: dict[str, Source] = {".json": "kineto", ".sqlite": "nsys", ".pickle": "memory"}

#: Text and numbers as text: what follows depends on the byte before, and not on the place among four.
_XZ = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "lp": 0, "pb": 0}]

_KINETO_KEYS = (
    "schemaVersion", "deviceProperties", "distributedInfo", "bridge_profiling", "cuda_driver_version", "cuda_runtime_version",
    "cupti_version", "displayTimeUnit", "baseTimeNanoseconds",
)  # fmt: skip
_DEVICE_KEYS = ("id", "name", "totalGlobalMem", "computeMajor", "computeMinor", "numSms")
_KINETO_ARGUMENTS = frozenset(field.encode_name for field in msgspec.structs.fields(Args))

#: The same work on the device as another category says.
_SAID_TWICE = "gpu_user_annotation"
_INSTANTS = ("[memory]", "Iteration Start", "Record Window End")

#: In the order that compresses best: what is the same from event to event first.
_EVENT_KEYS = ("ph", "cat", "name", "pid", "tid", "args", "ts", "dur", "s")

#: What is kept of an nsys export: tables, their columns, and which rows.
_EVENT_COLUMNS = "start, end, deviceId, streamId, correlationId, globalPid"
_NSYS: dict[str, tuple[str, str]] = {
    "CUPTI_ACTIVITY_KIND_KERNEL": (f"{_EVENT_COLUMNS}, demangledName, graphId, graphNodeId", "1"),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (f"{_EVENT_COLUMNS}, bytes, copyKind, srcKind, dstKind, graphNodeId", "1"),
    "CUPTI_ACTIVITY_KIND_MEMSET": (f"{_EVENT_COLUMNS}, bytes, memKind, graphNodeId", "1"),
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": (f"{_EVENT_COLUMNS}, graphId", "1"),
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": (f"{_EVENT_COLUMNS}, eventId, eventSyncId", "1"),
    "CUPTI_ACTIVITY_KIND_CUDA_EVENT": ("streamId, correlationId, globalPid, eventId, eventSyncId", "1"),
    "CUPTI_ACTIVITY_KIND_RUNTIME": ("start, end, globalTid, correlationId, nameId", "1"),
    "PROFILER_OVERHEAD": ("start, end, globalTid, nameId", "1"),
    "NVTX_EVENTS": ("start, end, eventType, text, globalTid, textId, binaryData, jsonText", "eventType IN (59, 60, 70, 71)"),
    "NVTX_PAYLOAD_SCHEMA_ENTRIES": ("schemaId, name, offset", "1"),
    "ENUM_CUDA_MEM_KIND": ("id, name", "1"),
    "DIAGNOSTIC_EVENT": ("severity, text, globalPid", "severity = 3 OR text LIKE 'Process was launched by the profiler%'"),
    "META_DATA_CAPTURE": ("name, value", "value LIKE 'RANK=%' OR value LIKE 'WORLD_SIZE=%'"),
    "META_DATA_EXPORT": ("name, value", "name LIKE 'EXPORT_PRODUCT%' OR name LIKE 'EXPORT_SCHEMA_VERSION%'"),
    "TARGET_INFO_SESSION_START_TIME": ("utcEpochNs", "1"),
    "TARGET_INFO_SYSTEM_ENV": ("name, value", "name IN ('CudaDriverVersion', 'NvDriverVersion')"),
    "TARGET_INFO_GPU": ("id, name, totalMemory", "1"),
    "TARGET_INFO_CUDA_DEVICE": ("gpuId, cudaId, pid", "1"),
    "MPI_RANKS": ("globalTid, rank", "1"),
}
_NAMED_IN = {
    "CUPTI_ACTIVITY_KIND_KERNEL": "demangledName",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "nameId",
    "PROFILER_OVERHEAD": "nameId",
    "NVTX_EVENTS": "textId",
}

#: What torch appends to an operator's name besides sequence number and dimensions: numbers of operators, which nothing reads.
_INPUT_IDS = re.compile(r", input_op_ids = .*$", re.DOTALL)
_OPERATOR_IDS = re.compile(r", op_id = \d+")

#: Where nsys kept what the process printed.
_PRINTED = re.compile(r", see .*$", re.DOTALL)

_SNAPSHOT_KEYS = ("segments", "device_traces", "external_annotations")
_SEGMENT_KEYS = ("device", "address", "total_size", "stream", "segment_type", "blocks")
_BLOCK_KEYS = ("address", "size", "requested_size", "state", "frames")
_ENTRY_KEYS = ("action", "addr", "size", "stream", "time_us", "frames", "device_free")
_FRAME_KEYS = ("name", "filename", "line")


def lean(raw: bytes, ending: str, rename: Rename) -> bytes:
    """A capture without what is not read, and with other names in its texts.

    Args:
        raw: the capture, not compressed.
        ending: of its file's name, a key of SOURCES.
        rename: makes a neutral text of one that may name a machine or a user.
    """
    return {".json": _kineto, ".sqlite": _nsys, ".pickle": _snapshot}[ending](raw, rename)


def packed(raw: bytes) -> bytes:
    """As xz, as small as it gets."""
    return lzma.compress(raw, format=lzma.FORMAT_XZ, filters=_XZ)


def check(whole: Path, small: Path, source: Source, rename: Rename) -> None:
    """Compare what the readers make of a capture before and after.

    Args:
        whole: the capture as it was.
        small: the lean one.
        source: who wrote it.
        rename: what was used to make it.

    Raises:
        ValueError: a table differs, or what is known of the capture as a whole does. Says which.
    """
    before, after = (load(Capture(path, source, 0, "order"), cached=False) for path in (whole, small))
    for name in sorted({*before.tables, *after.tables}):
        for column in before[name].column_names:
            expected, found = (_values(tables, name, column) for tables in (before, after))
            if pa.types.is_string(expected.type):
                texts = [None if text is None else rename(text) for text in expected.to_pylist()]
                expected = pa.chunked_array([pa.array(texts, pa.string())])
            if not expected.equals(found):
                raise ValueError(f"{small}: {name}.{column} is not what it was")
    infos = [dataclasses.replace(tables.info, files=[], host=None) for tables in (before, after)]
    if infos[0] != infos[1]:
        raise ValueError(f"{small}: what is known of it was {infos[0]} and is {infos[1]}")


def _values(tables: RankTables, name: str, column: str) -> pa.ChunkedArray:
    values = tables[name][column]
    return values.cast(pa.string()) if pa.types.is_dictionary(values.type) else values


def _kineto(raw: bytes, rename: Rename) -> bytes:
    trace = json.loads(rename(raw.decode("utf-8", "surrogateescape")))
    keys = {name: trace[name] for name in _KINETO_KEYS if name in trace}
    keys["deviceProperties"] = [_of(device, _DEVICE_KEYS) for device in keys.get("deviceProperties", [])]
    events = (event for event in map(_read_of, trace["traceEvents"]) if event is not None)
    lines = ",\n".join(_text(_of(event, _EVENT_KEYS)) for event in events)
    return f'{_text(keys)[:-1]},"traceEvents":[\n{lines}\n]}}\n'.encode("utf-8", "surrogateescape")


def _read_of(event: dict[str, Any]) -> dict[str, Any] | None:
    """An event with the arguments that are read; None when nothing of it is."""
    duration = event.get("ph") == "X" and event.get("cat") != _SAID_TWICE
    if not duration and not str(event.get("name", "")).startswith(_INSTANTS):
        return None
    arguments = _of(event.get("args", {}), _KINETO_ARGUMENTS)
    return {name: value for name, value in event.items() if name != "args"} | ({"args": arguments} if arguments else {})


def _of(found: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Those of a dictionary's entries, in the names' order where they have one."""
    ordered = names if isinstance(names, tuple) else found
    return {name: found[name] for name in ordered if name in found and name in names}


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _nsys(raw: bytes, rename: Rename) -> bytes:
    with contextlib.closing(sqlite3.connect(":memory:")) as whole, contextlib.closing(sqlite3.connect(":memory:")) as small:
        whole.deserialize(raw)
        whole.create_function("lean", 1, lambda value: _lean_text(value, rename), deterministic=True)
        has = {name for (name,) in whole.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        for table, (columns, where) in _NSYS.items():
            if table in has:
                _copy(whole, small, table, columns.split(", "), where)
        used: set[int] = set()
        for table, column in _NAMED_IN.items():
            with contextlib.suppress(sqlite3.OperationalError):  # a version without it
                used |= {number for (number,) in small.execute(f"SELECT DISTINCT {column} FROM {table}") if number is not None}
        numbers = ",".join(map(str, sorted(used)))
        _copy(whole, small, "StringIds", ["id", "value"], f"id IN ({numbers})")
        small.commit()
        small.execute("VACUUM")
        return small.serialize()


def _copy(whole: sqlite3.Connection, small: sqlite3.Connection, table: str, wanted: list[str], where: str) -> None:
    types = {row[1]: row[2] for row in whole.execute(f"PRAGMA table_info({table})")}
    columns = [name for name in wanted if name in types]
    chosen = ", ".join(f'lean("{name}")' if "TEXT" in types[name].upper() else f'"{name}"' for name in columns)
    rows = whole.execute(f"SELECT {chosen} FROM {table} WHERE {where} ORDER BY rowid").fetchall()
    declared = ", ".join(f'"{name}" {types[name]}' for name in columns)
    small.execute(f"CREATE TABLE {table} ({declared})")
    small.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))})", rows)


def _lean_text(text: Any, rename: Rename) -> Any:
    if not isinstance(text, str):
        return text
    if text.startswith("Process was launched by the profiler"):
        return _PRINTED.sub("", text)
    return rename(_OPERATOR_IDS.sub(", op_id = 0", _INPUT_IDS.sub("", text)))


def _snapshot(raw: bytes, rename: Rename) -> bytes:
    """A memory snapshot; lists and dictionaries that it holds once, however often it refers to them, stay one."""
    seen: dict[int, Any] = {}

    def frames(found: list[dict[str, Any]] | None) -> list[Any] | None:
        if found is None:
            return None
        if id(found) not in seen:
            seen[id(found)] = [frame(one) for one in found]
        return seen[id(found)]

    def frame(found: dict[str, Any]) -> dict[str, Any]:
        if id(found) not in seen:
            text = {name: sys.intern(rename(value)) if isinstance(value, str) else value for name, value in found.items()}
            seen[id(found)] = _of(text, _FRAME_KEYS)
        return seen[id(found)]

    def of(found: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
        kept = _of(found, names)
        return kept | {"frames": frames(kept["frames"])} if "frames" in kept else kept

    # It was written by a run of this program.
    snapshot = pickle.loads(raw)
    small = _of(snapshot, _SNAPSHOT_KEYS)
    small["segments"] = [
        of(segment, _SEGMENT_KEYS) | {"blocks": [of(block, _BLOCK_KEYS) for block in segment["blocks"]]}
        for segment in snapshot["segments"]
    ]
    small["device_traces"] = [[of(entry, _ENTRY_KEYS) for entry in entries] for entries in snapshot["device_traces"]]
    packed = io.BytesIO()
    pickle.dump(small, packed)
    return packed.getvalue()
