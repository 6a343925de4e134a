"""Process groups by what they are for: the parallel dimension that their ranks span, and the link between their devices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pyarrow as pa

from bridge_profiling.peaks import link_gbs
from bridge_profiling.traces.joins import ranks_of
from bridge_profiling.traces.types import RankInfo

#: Dimensions of the dense layout, in the order that names have. Expert parallelism is a second layout of the same ranks.
_DENSE = ("tp", "cp", "dp", "pp")

#: Words for expert parallelism in a program's name of a group.
_EXPERT = ("expert", "ep")


def with_dimensions(table: pa.Table, infos: Sequence[RankInfo]) -> pa.Table:
    """Rows of groups, with columns `dimension` and `link_gbs` from the columns `group` and `group_ranks`.

    `dimension`: `tp`, `cp`, `dp`, `pp` or `ep`; several joined, as in `cp-dp`; `all` for every rank. Null unless the
    coordinates of all of the group's ranks are known. `link_gbs`: the stated bandwidth of NVLink, one direction of one device,
    in 1e9 bytes/s; null unless all ranks of the group are known to be on one host with such a link.
    """
    by_rank = {info.rank: info for info in infos}
    kinds = list(zip(table["group"].to_pylist(), table["group_ranks"].to_pylist(), strict=True))
    known = {kind: _found(*kind, by_rank) for kind in set(kinds)}
    found = table.append_column("dimension", pa.array([known[kind][0] for kind in kinds], pa.string()))
    return found.append_column("link_gbs", pa.array([known[kind][1] for kind in kinds], pa.float64()))


def _found(group: str | None, group_ranks: str | None, by_rank: dict[int, RankInfo]) -> tuple[str | None, float | None]:
    members = ranks_of(group_ranks) or ()
    infos = [by_rank[rank] for rank in members if rank in by_rank]
    if len(infos) < len(members) or len(members) < 2:
        return None, None
    places = [info.coordinates or {} for info in infos]
    return _dimension(group or "", places), _link(infos)


def _dimension(group: str, places: Sequence[dict[str, tuple[int, int]]]) -> str | None:
    """The dimensions in which the ranks differ, if the group holds every combination of them."""
    sizes = {name: size for name, (_, size) in places[0].items()}
    differing = [name for name in sizes if len({place.get(name) for place in places}) > 1]
    expert = "ep" in differing and sizes["ep"] == len(places)
    named = any(word in group.lower().split("_") for word in _EXPERT)
    dense = [name for name in _DENSE if name in differing]
    complete = math.prod(sizes[name] for name in dense) == len(places)
    if expert and (named or not complete):
        return "ep"
    if not dense or not complete:
        return None
    used = [name for name in _DENSE if sizes.get(name, 1) > 1]
    return "all" if dense == used and len(used) > 1 else "-".join(dense)


def _link(infos: Sequence[RankInfo]) -> float | None:
    hosts = {info.host for info in infos}
    if len(hosts) > 1 or None in hosts:
        return None
    links = {link_gbs(name) for info in infos for name in info.devices.values()}
    return links.pop() if len(links) == 1 else None
