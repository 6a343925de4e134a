"""Reads a torch profiler (Kineto) trace into the tables: any version since torch 1.8, CUDA or ROCm, in bounded memory.

Times are exact to the nanosecond. What cannot be read is said: in an error that names the file, or in the caveats.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa

from bridge_profiling.errors import TraceError
from bridge_profiling.traces.kineto_collect import Collector
from bridge_profiling.traces.kineto_columns import InexactTimes, integer
from bridge_profiling.traces.kineto_events import EventReader
from bridge_profiling.traces.kineto_stream import Document, read_pieces
from bridge_profiling.traces.kineto_tables import tables_of
from bridge_profiling.traces.types import ProcessGroup, RankInfo, RankSource, RankTables

#: Times without a base are taken for Unix time when they lie after 2001.
_UNIX_SINCE_NS = 10**18

#: Larger ones would overflow 64 bits together with the file's own times.
_MAX_BASE_NS = 4 * 10**18

_MAX_RANK = 10**7

#: Categories that the caveats name one by one; what an event is left out for beyond them is one sum.
_NAMED = 3

_CUDA_VERSIONS = ("cuda_driver_version", "cuda_runtime_version")


def read(path: Path, *, rank: int = 0, rank_source: RankSource = "order", operators: bool = True) -> RankTables:
    """The tables of one trace.

    Args:
        path: gzipped or plain.
        rank: the rank to give it when the trace names none.
        rank_source: where that rank comes from.
        operators: read operators and Python frames too. Without them all other tables are the same, in two thirds of the time,
            but for the groups of point-to-point operations that were issued as a batch.

    Returns:
        Its tables. When `info.error` is set, the file is damaged, and they hold what could be read.

    Raises:
        TraceError: nothing could be read. The message names the file.
    """
    try:
        return _read(path, rank, rank_source, operators=operators, exact=False)
    except InexactTimes:
        return _read(path, rank, rank_source, operators=operators, exact=True)


def _read(path: Path, rank: int, rank_source: RankSource, *, operators: bool, exact: bool) -> RankTables:
    document = Document({})
    reader = EventReader(exact=exact)
    collected = _collect(path, reader, document, Collector(exact=exact, operators=operators))
    if not len(collected.host) and not len(collected.device) and not len(collected.memory):
        raise TraceError(document.error or _nothing_in(path, collected, reader))
    keys = document.keys
    named = _rank_of(keys)
    devices, device_bytes = _devices(keys)
    info = RankInfo(
        rank=rank if named is None else named,
        rank_source=rank_source if named is None else "trace",
        source="kineto",
        files=[str(path.absolute())],
        world_size=_world_size(keys),
        coordinates=_coordinates(keys),
        versions=_versions(keys),
        devices=devices,
        device_bytes=device_bytes,
        groups=_groups(keys),
    )
    info.clock_base_ns = _base_ns(keys, info)
    try:
        tables = tables_of(collected, info.rank, info.groups, info.clock_base_ns, info.caveats)
    except ValueError as error:
        raise TraceError(f"{path} cannot be read: {error}") from error
    info.clock = "unix" if _first_ns(tables) > _UNIX_SINCE_NS else "unknown"
    _say_what_is_missing(info, collected, reader, tables)
    info.error = _error(path, document, collected)
    info.partial = info.error is not None
    return RankTables(info, tables)


def _collect(path: Path, reader: EventReader, document: Document, collected: Collector) -> Collector:
    """Take all events. No event lives on: those of one piece are as large as a fifth of the tables."""
    for events in read_pieces(path, reader.decoders, document):
        collected.add(events)
    return collected


def _nothing_in(path: Path, collected: Collector, reader: EventReader) -> str:
    if collected.negative or collected.untimed:
        return f"{path} cannot be read: none of its events has a usable time"
    if reader.left_out:
        return f"{path} is no Kineto trace: none of its {reader.left_out} events can be decoded"
    return f"{path} is no Kineto trace: none of its {collected.events} entries is an event that Kineto writes"


def _error(path: Path, document: Document, collected: Collector) -> str | None:
    if document.error is not None:
        return f"{document.error}; what comes before was read"
    if collected.negative:
        return f"{path} holds {collected.negative} events that end before they start; the others were read"
    return None


def _say_what_is_missing(info: RankInfo, collected: Collector, reader: EventReader, tables: dict[str, pa.Table]) -> None:
    say = info.add_caveat
    if reader.left_out or collected.untimed:
        say("events_undecodable", f"{reader.left_out + collected.untimed} events could not be decoded and are left out")
    unknown, others = _by_count(collected.unknown), _by_count(collected.left_out)
    for category, count in unknown[:_NAMED]:
        say("category_unknown", f"{count} events of the unknown category {category!r} are left out")
    for (kind, category), count in others[:_NAMED]:
        say("events_not_read", f"{count} {kind}{f' of the category {category!r}' if category else ''} are left out")
    if more := sum(count for _, count in [*unknown[_NAMED:], *others[_NAMED:]]):
        say("events_not_read", f"{more} events of further categories are left out")
    if info.clock == "unknown":
        say(
            "clock_unknown",
            "times are not on the host's clock: this rank can be compared with others by matched collectives only",
        )
    if not len(collected.device):
        say("no_device_work", "no work on a device was recorded")
    if not tables["iterations"].num_rows:
        say("no_iterations", "no iterations are marked (ProfilerStep#N): figures are of the whole capture")
    device = tables["device_events"]
    if unlaunched := device["launch_start_ns"].null_count:
        say(
            "launches_missing",
            f"{unlaunched} of {device.num_rows} device events have no recorded launch; their start decides their iteration",
        )


def _by_count(counts: Counter[Any]) -> list[tuple[Any, int]]:
    """The largest first, in an order that does not depend on the file's."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _first_ns(tables: dict[str, pa.Table]) -> int:
    columns = [table[name] for table in tables.values() for name in ("start_ns", "time_ns") if name in table.column_names]
    return min((column[0].as_py() for column in columns if len(column)), default=0)


def _base_ns(keys: dict[str, Any], info: RankInfo) -> int:
    base = integer(keys.get("baseTimeNanoseconds", 0))
    if 0 <= base <= _MAX_BASE_NS:
        return base
    info.add_caveat("clock_base_invalid", "baseTimeNanoseconds is not a time: times are taken as written")
    return 0


def _section(keys: dict[str, Any], name: str) -> dict[str, Any]:
    found = keys.get(name)
    return found if isinstance(found, dict) else {}


def _rank_of(keys: dict[str, Any]) -> int | None:
    for section in ("distributedInfo", "bridge_profiling"):
        rank = integer(_section(keys, section).get("rank"))
        if 0 <= rank <= _MAX_RANK:
            return rank
    return None


def _world_size(keys: dict[str, Any]) -> int | None:
    size = integer(_section(keys, "distributedInfo").get("world_size"))
    return size if size > 0 else None


def _coordinates(keys: dict[str, Any]) -> dict[str, tuple[int, int]] | None:
    """What our own hook writes into a trace."""
    found = _section(keys, "bridge_profiling").get("coordinates")
    if not isinstance(found, dict):
        return None
    places = {name: tuple(map(integer, place)) for name, place in found.items() if isinstance(place, list) and len(place) == 2}
    return {name: (place[0], place[1]) for name, place in places.items() if min(place) >= 0} or None


def _versions(keys: dict[str, Any]) -> dict[str, str]:
    versions = {}
    for key, value in keys.items():
        if key.endswith("_version") and isinstance(value, int | str):
            number = integer(value)
            cuda = key in _CUDA_VERSIONS and number >= 1000
            versions[key.removesuffix("_version")] = f"{number // 1000}.{number % 1000 // 10}" if cuda else str(value)
    if "schemaVersion" in keys:
        versions["kineto_schema"] = str(keys["schemaVersion"])
    if nccl := _section(keys, "distributedInfo").get("nccl_version"):
        versions["nccl"] = str(nccl)
    return versions


def _devices(keys: dict[str, Any]) -> tuple[dict[int, str], dict[int, int]]:
    """Names of the devices, and their memory in bytes, by number."""
    found = keys.get("deviceProperties")
    devices = [device for device in found if isinstance(device, dict)] if isinstance(found, list) else []
    by_number = {number: device for device in devices if (number := integer(device.get("id"))) >= 0}
    names = {number: str(device.get("name", "")) for number, device in by_number.items()}
    memory = {number: size for number, device in by_number.items() if (size := integer(device.get("totalGlobalMem"))) > 0}
    return names, memory


def _groups(keys: dict[str, Any]) -> list[ProcessGroup]:
    found = _section(keys, "distributedInfo").get("pg_config")
    groups = []
    for group in found if isinstance(found, list) else []:
        if isinstance(group, dict) and "pg_name" in group:
            ranks = group.get("ranks")
            known = isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks)
            groups.append(
                ProcessGroup(
                    str(group["pg_name"]),
                    str(group.get("pg_desc") or ""),
                    str(group.get("backend_config") or ""),
                    tuple(ranks) if known and ranks else (),
                )
            )
    return groups
