"""One rank's tables written by hand, times in nanoseconds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from bridge_profiling.analysis.session import RankQuestions
from bridge_profiling.traces import cache
from bridge_profiling.traces.tables import SCHEMAS, build
from bridge_profiling.traces.types import RankInfo, RankTables

_DEFAULTS = {"device_events": {"stream": 7, "device": 0}, "host_events": {"process": 1, "thread": 1}}


def table(name: str, rows: Sequence[dict[str, Any]], rank: int = 0) -> pa.Table:
    """A table of a schema from rows that name what they know; the rest is null."""
    if not rows:
        return SCHEMAS[name].empty_table()
    filled = [{**_DEFAULTS.get(name, {}), **row} for row in rows]
    columns = {}
    for column in SCHEMAS[name]:
        if any(column.name in row for row in filled):
            kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
            columns[column.name] = pa.array([row.get(column.name) for row in filled], kind)
    return build(name, rank, columns)


def write_rank(folder: Path, rank: int, rows: dict[str, list[dict[str, Any]]], source: Any = "kineto", **info: Any) -> Path:
    """Write a rank's capture as the cache keeps it, in a folder that `Run` opens; gives its entry."""
    known = RankInfo(rank=rank, rank_source="trace", source=source, files=[f"{source}-{rank}.json"], **info)
    entry = folder / f"{source}{rank:05d}"
    cache.write(RankTables(known, {name: table(name, each, rank) for name, each in rows.items()}), entry)
    return entry


def rank(*, source: str = "kineto", **tables: list[dict[str, Any]]) -> RankTables:
    """One rank's tables, from rows."""
    info = RankInfo(rank=0, rank_source="trace", source=source, files=["rank-0.json"])
    return RankTables(info, {name: table(name, rows) for name, rows in tables.items()})


def answer(tables: RankTables, question: str, **options: Any) -> pa.Table:
    """The answer to a question about one rank."""
    return RankQuestions(tables).answer(question, **options).table


def values(found: pa.Table, *names: str) -> list[tuple[Any, ...]]:
    """Some columns of an answer, row by row."""
    return list(zip(*(found[name].to_pylist() for name in names), strict=True))


def span(name: str, start_ns: int, end_ns: int, category: str = "annotation", **known: Any) -> dict[str, Any]:
    """A range or a call of the host."""
    return {"category": category, "name": name, "start_ns": start_ns, "end_ns": end_ns, **known}


def work(kind: str, start_ns: int, end_ns: int, launched_ns: int | None = None, **known: Any) -> dict[str, Any]:
    """A device event; its launching call takes one nanosecond and returns when it is launched."""
    launch = (
        {} if launched_ns is None else {"launch_start_ns": launched_ns - 1, "launch_end_ns": launched_ns, "launch_thread": 1}
    )
    return {"kind": kind, "name": kind, "start_ns": start_ns, "end_ns": end_ns, **launch, **known}
