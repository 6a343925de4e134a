"""One rank's tables written by hand, times in nanoseconds."""

import pyarrow as pa

from bridge_profiling.facts.rank import operators_by, rank_facts, stacks_of
from bridge_profiling.facts.store import FactOptions
from bridge_profiling.traces import cache
from bridge_profiling.traces.tables import SCHEMAS, build
from bridge_profiling.traces.types import RankInfo, RankTables

_DEFAULTS = {"device_events": {"stream": 7, "device": 0}, "host_events": {"process": 1, "thread": 1}}


def table(name, rows, rank=0):
    """A table of a schema from rows that name what they know; the rest is null."""
    if not rows:
        return SCHEMAS[name].empty_table()
    filled = [{**_DEFAULTS.get(name, {}), **row} for row in rows]
    known = set().union(*filled)
    columns = {}
    for column in SCHEMAS[name]:
        if column.name in known:
            kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
            columns[column.name] = pa.array([row.get(column.name) for row in filled], kind)
    return build(name, rank, columns)


def write_rank(folder, rank, rows, source="kineto", **info):
    """Write a rank's capture as the cache keeps it, in a folder that `Run` opens; gives its entry."""
    known = RankInfo(rank=rank, rank_source="trace", source=source, files=[f"{source}-{rank}.json"], **info)
    entry = folder / f"{source}{rank:05d}"
    cache.write(RankTables(known, {name: table(name, each, rank) for name, each in rows.items()}), entry)
    return entry


def rank(*, source="kineto", **tables):
    """One rank's tables, from rows."""
    info = RankInfo(rank=0, rank_source="trace", source=source, files=["rank-0.json"])
    return RankTables(info, {name: table(name, rows) for name, rows in tables.items()})


def facts(tables, **options):
    """All facts about one rank, with their caveats."""
    return rank_facts(tables, FactOptions(**options))


def answer(tables, name, **options):
    """A fact about one rank."""
    if name == "flame_graph":
        return stacks_of(tables, **options)[name].table
    return (operators_by if name == "operators" else facts)(tables, **options)[name].table


def values(found, *names):
    """Some columns of an answer, row by row."""
    return list(zip(*(found[name].to_pylist() for name in names), strict=True))


def span(name, start_ns, end_ns, category="annotation", **known):
    """A range or a call of the host."""
    return {"category": category, "name": name, "start_ns": start_ns, "end_ns": end_ns, **known}


def work(kind, start_ns, end_ns, launched_ns=None, **known):
    """A device event; its launching call takes one nanosecond and returns when it is launched."""
    launch = (
        {} if launched_ns is None else {"launch_start_ns": launched_ns - 1, "launch_end_ns": launched_ns, "launch_thread": 1}
    )
    return {"kind": kind, "name": kind, "start_ns": start_ns, "end_ns": end_ns, **launch, **known}
