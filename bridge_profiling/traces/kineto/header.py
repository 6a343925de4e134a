"""The keys of a Kineto file other than its events: the rank, its job, devices, process groups and versions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge_profiling.traces.joins import MAX_RANKS
from bridge_profiling.traces.kineto.columns import integer
from bridge_profiling.traces.tables import MAX_SIZE
from bridge_profiling.traces.types import ProcessGroup, RankInfo, RankSource

#: Larger ones would overflow 64 bits together with the file's own times.
_MAX_BASE_NS = 4 * 10**18


def rank_info(path: Path, keys: Mapping[str, Any], rank: int, rank_source: RankSource) -> RankInfo:
    """What the header says of the rank.

    Args:
        path: the file.
        keys: of the document, without its events.
        rank: used when the header names none.
        rank_source: where that rank comes from.
    """
    distributed, ours = _section(keys, "distributedInfo"), _section(keys, "bridge_profiling")
    named = (integer(section.get("rank")) for section in (distributed, ours))
    known = next((number for number in named if 0 <= number < MAX_RANKS), None)
    devices = {number: each for each in _sections(keys, "deviceProperties") if (number := integer(each.get("id"))) >= 0}
    memory = {number: integer(device.get("totalGlobalMem")) for number, device in devices.items()}
    world_size = integer(distributed.get("world_size"))
    info = RankInfo(
        rank=rank if known is None else known,
        rank_source=rank_source if known is None else "trace",
        source="kineto",
        files=[str(path.absolute())],
        world_size=world_size if 0 < world_size <= MAX_RANKS else None,
        coordinates=_coordinates(ours.get("coordinates")),
        versions=_versions(keys, distributed),
        devices={number: str(device.get("name", "")) for number, device in devices.items()},
        device_bytes={number: size for number, size in memory.items() if 0 < size <= MAX_SIZE},
        groups=[_group(group) for group in _sections(distributed, "pg_config") if "pg_name" in group],
    )
    base_ns = integer(keys.get("baseTimeNanoseconds", 0))
    if 0 <= base_ns <= _MAX_BASE_NS:
        info.clock_base_ns = base_ns
    else:
        info.add_caveat("clock_base_invalid", "baseTimeNanoseconds is not a time: times are used as written")
    return info


def _section(keys: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = keys.get(name)
    return found if isinstance(found, dict) else {}


def _sections(keys: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    found = keys.get(name)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _coordinates(written: Any) -> dict[str, tuple[int, int]] | None:
    """Parallel coordinates, which our own hook writes into a trace."""
    found = {}
    for name, place in written.items() if isinstance(written, dict) else ():
        if isinstance(place, list) and len(place) == 2 and all(0 <= integer(each) <= MAX_RANKS for each in place):
            found[name] = (integer(place[0]), integer(place[1]))
    return found or None


def _versions(keys: Mapping[str, Any], distributed: Mapping[str, Any]) -> dict[str, str]:
    versions = {}
    for key, value in keys.items():
        if key.endswith("_version") and isinstance(value, int | str):
            number = integer(value)
            cuda = key in ("cuda_driver_version", "cuda_runtime_version") and number >= 1000
            versions[key.removesuffix("_version")] = f"{number // 1000}.{number % 1000 // 10}" if cuda else str(value)
    if "schemaVersion" in keys:
        versions["kineto_schema"] = str(keys["schemaVersion"])
    if nccl := distributed.get("nccl_version"):
        versions["nccl"] = str(nccl)
    return versions


def _group(group: Mapping[str, Any]) -> ProcessGroup:
    ranks = group.get("ranks")
    known = isinstance(ranks, list) and all(type(rank) is int and 0 <= rank < MAX_RANKS for rank in ranks)
    return ProcessGroup(
        name=str(group["pg_name"]),
        description=str(group.get("pg_desc") or ""),
        backend=str(group.get("backend_config") or ""),
        ranks=tuple(ranks) if known and ranks else (),
    )
