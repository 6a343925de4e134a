"""Small nsys exports: SQLite files with the tables and columns that a version of nsys writes."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import struct
from pathlib import Path
from typing import Any

#: A process of nsys: its globalPid. Its threads are that plus their number.
PROCESS = 281731315793920
THREAD = PROCESS + 15279

SESSION_START_NS = 1_795_178_407_338_815_942

RUNTIME, KERNEL = "CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_KERNEL"
MEMCPY, MEMSET = "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"
SYNCHRONIZATION, EVENT = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "CUPTI_ACTIVITY_KIND_CUDA_EVENT"


class Report:
    """An export in the making: rows as dictionaries; a table has the columns of its rows, and no others.

    Args:
        process: globalPid of what is added.
    """

    def __init__(self, process: int = PROCESS) -> None:
        self.process, self.thread = process, process + 15279
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.strings: dict[str, int] = {}
        self.add("TARGET_INFO_SESSION_START_TIME", utcEpochNs=SESSION_START_NS)

    def add(self, table: str, **row: Any) -> Report:
        self.rows.setdefault(table, []).append(row)
        return self

    def string(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings) + 1)

    def kernel(self, name: str, start: int, end: int, *, correlation: int = 0, stream: int = 7, **more: Any) -> Report:
        row = {"deviceId": 0, "streamId": stream, "correlationId": correlation, "globalPid": self.process}
        return self.add(KERNEL, start=start, end=end, demangledName=self.string(name), **row | more)

    def call(self, name: str, start: int, end: int, correlation: int, **more: Any) -> Report:
        row = {"globalTid": self.thread, "correlationId": correlation, "nameId": self.string(name)}
        return self.add(RUNTIME, start=start, end=end, **row | more)

    def range(self, text: str, start: int, end: int | None, **more: Any) -> Report:
        row = {"eventType": 59, "text": text, "textId": None, "globalTid": self.thread}
        return self.add("NVTX_EVENTS", start=start, end=end, **row | more)

    def write(self, path: Path) -> Path:
        tables = self.rows | {"StringIds": [{"id": number, "value": text} for text, number in self.strings.items()]}
        with contextlib.closing(sqlite3.connect(path)) as connection, connection:
            for table, rows in tables.items():
                columns = list(dict.fromkeys(column for row in rows for column in row)) or ["unused"]
                names = ", ".join(f'"{column}"' for column in columns)
                connection.execute(f"CREATE TABLE {table} ({names})")
                marks = ", ".join("?" * len(columns))
                connection.executemany(
                    f"INSERT INTO {table} VALUES ({marks})", [[row.get(column) for column in columns] for row in rows]
                )
        return path


def small_report() -> Report:
    """Two iterations on one thread, each with a kernel that is launched in it."""
    report = Report()
    for iteration in (4, 5):
        begin = iteration * 1000
        report.range(f"iteration_{iteration}", begin, begin + 900)
        report.range("aten::mm, seq = 7, op_id = 3", begin + 100, begin + 300)
        report.call("cudaLaunchKernel_v7000", begin + 150, begin + 200, correlation=iteration)
        report.kernel("gemm", begin + 400, begin + 800, correlation=iteration)
    return report


COMMUNICATOR = 0xABC0_0000_0000_0001


def nccl_report(*, blobs: bool) -> Report:
    """An all-gather of 4 ranks, and a send and a receive in a group, as NCCL describes them."""
    report = Report()
    fields = {
        10: {"NCCL communicator ID": None, "No. of ranks": 8, "Rank": 12, "CUDA device": 16},
        11: {"NCCL communicator ID": None, "Message size [bytes]": 8},
        12: {"NCCL communicator ID": None, "Message size [bytes]": 8, "Peer rank": 16},
    }
    if blobs:
        for schema, entries in fields.items():
            for name, offset in entries.items():
                report.add("NVTX_PAYLOAD_SCHEMA_ENTRIES", domainId=1, schemaId=schema, name=name, offset=offset)

    def call(text: str, start: int, end: int, schema: int, payload: bytes, values: dict[str, int]) -> None:
        header = struct.pack("<QQQQ", 1, schema, len(payload), 32 + len(payload))
        more = {"binaryData": header + payload} if blobs else {"jsonText": json.dumps(values)}
        report.add(
            "NVTX_EVENTS", start=start, end=end, eventType=59, textId=report.string(text), globalTid=THREAD, domainId=1, **more
        )

    own = {"NCCL communicator ID": COMMUNICATOR}
    call("ncclCommInitRank", 0, 10, 10, struct.pack("<Qiiii", COMMUNICATOR, 4, 1, 1, 0), own | {"No. of ranks": 4})
    call("ncclAllGather", 100, 200, 11, struct.pack("<QQ", COMMUNICATOR, 1000), own | {"Message size [bytes]": 1000})
    report.call("cuLaunchKernelEx", 150, 160, correlation=1)
    report.kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096>)", 300, 400, correlation=1)
    report.range("ncclGroupStart", 500, 505)
    for text, start, peer, size in (("ncclSend", 510, 2, 64), ("ncclRecv", 520, 2, 32)):
        values = own | {"Message size [bytes]": size, "Peer rank": peer}
        call(text, start, start + 5, 12, struct.pack("<QQii", COMMUNICATOR, size, peer, 0), values)
    report.range("ncclGroupEnd", 530, 600)
    report.call("cuLaunchKernelEx", 540, 550, correlation=2)
    report.kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096>)", 700, 800, correlation=2)
    return report
