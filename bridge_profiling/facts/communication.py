"""Waiting for other ranks, and the cost of communication: transfer, waiting, and the part that no compute hides.

The transfer time of a matched operation is the shortest duration among its participants, since the last to arrive does not
wait. Each rank's excess over it is waiting for the rank that began last on the common clock. So a rank whose communication
takes long because it waits is not the slow one.

Bandwidths are those of NCCL's own benchmark, of the transfer alone:
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md. Algorithm bandwidth is message size over time; the size is
the larger of one rank's input and output. Bus bandwidth is that times `bus_factor`, comparable with the link's speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pyarrow as pa

from bridge_profiling.bench.results import BUS_OPERATIONS, bus_factor
from bridge_profiling.common.peaks import link_gbs
from bridge_profiling.facts.types import Answer, Connection, caveat, queried, schema
from bridge_profiling.traces.joins import ranks_of
from bridge_profiling.traces.types import RankInfo

_GROUP = ("operation", "group", "group_name", "group_ranks")
_SIZES = ("group_size", "captured_ranks")
_OF_LINK = ("algorithm_bandwidth_gbs", "bus_bandwidth_gbs", "dimension", "link_gbs")

#: Columns of `communication`, `communication_by_rank`, `communication_by_size` and the table `waiting`.
BY_GROUP = schema(
    *(*_GROUP, *_SIZES, "count", "matched_count", "smallest_message_bytes", "largest_message_bytes", "bytes"),
    *("mean_duration_ns", "transfer_ns", "wait_ns", *_OF_LINK),
)
BY_RANK = schema(
    *(*_GROUP, "rank", "count", "matched_count", "bytes", "duration_ns", "shortest_ns", "transfer_ns", "wait_ns"),
    *("exposed_ns", "overlapped_ns"),
)
BY_SIZE = schema(
    *(*_GROUP, *_SIZES, "message_bytes", "count", "matched_count", "mean_ns", "duration_ns", "transfer_ns", "wait_ns"),
    *("exposed_ns", "overlapped_ns", *_OF_LINK),
)
WAITING = schema(
    *("rank", "collective", "match", "group_id", "point_to_point", "operation", "message_bytes", "iteration", "start_ns"),
    *("end_ns", "participants", "transfer_ns", "wait_ns", "waits_for", "late_ns"),
)

_WAITING = """
create or replace temp table waiting as
with placed as (
    select matched.*, start_ns + offset_ns as placed_ns from matched join offsets using (rank)
), latest as (
    -- Of ranks that begin at the same time, the highest: any of them would depend on the order of the rows.
    select match, arg_max(rank, (placed_ns, rank)) as waits_for, max(placed_ns) as latest_ns, min(placed_ns) as earliest_ns
    from placed group by match
)
select rank, collective, match, group_id, point_to_point, operation, message_bytes, iteration, start_ns, end_ns, participants,
    transfer_ns, end_ns - start_ns - transfer_ns as wait_ns, waits_for, placed_ns - earliest_ns as late_ns
from placed join latest using (match)
-- A kernel that sends and receives is matched twice; it lasts until the later of both partners arrives.
qualify row_number() over (partition by rank, collective order by latest_ns desc, match) = 1
order by rank
"""

_NAMED = 'any_value("group") as "group", any_value(group_name) as group_name, any_value(group_ranks) as group_ranks'

# Each send or receive is an operation; of the others, every participant has a row. A send_recv has two.
_OF_GROUP = """case when operation in ('send', 'recv') then sum({0})
    when operation = 'send_recv' then (sum({0}) + {1}) // 2 else max({0}) end"""

#: Among fewer operations of one size, the shortest can contain waiting as well.
_ENOUGH_OF_A_SIZE = 8

# Means of fractions are in the order of ranks: threads would add them in any order, and the last digit would differ.
_PER_RANK = f"""
select {{keys}}, rank, {_NAMED}, sum(operations)::bigint as operations, sum(message_bytes * operations)::bigint as bytes,
    min(message_bytes) as smallest, max(message_bytes) as largest, max(size) as size, sum(duration_ns) as duration_ns,
    sum(exposed_ns) as exposed_ns, sum(overlapped_ns) as overlapped_ns,
    sum(shortest_ns * operations) filter (operations >= {_ENOUGH_OF_A_SIZE} and message_bytes is not null) as shortest_ns
from sized group by {{keys}}, rank
"""

_BY_RANK = f"""
with rows as ({_PER_RANK.format(keys="group_id, operation")}), waits as (
    select group_id, operation, rank, count(*) as matched_count, sum(transfer_ns) as transfer_ns,
        sum(wait_ns) as wait_ns
    from waiting group by all
)
select operation, "group", group_name, group_ranks, rank, operations as count,
    coalesce(matched_count, 0)::bigint as matched_count, bytes, duration_ns, shortest_ns, transfer_ns, wait_ns, exposed_ns,
    overlapped_ns
from rows left join waits using (group_id, operation, rank)
order by "group", group_name, group_ranks, operation, rank
"""

# Of a group, each rank has a row for an operation. Sends and receipts are operations of their own.
_OF_RANKS = f"""
with per_rank as ({_PER_RANK}), seen as (
    select {{keys}}, {_NAMED}, max(size)::integer as group_size, count(*)::integer as captured_ranks,
        min(smallest)::bigint as smallest_message_bytes, max(largest)::bigint as largest_message_bytes,
        ({_OF_GROUP.format("operations", 1)})::bigint as count, ({_OF_GROUP.format("bytes", 0)})::bigint as bytes,
        round(avg(duration_ns / operations order by rank)) as mean_duration_ns, sum(duration_ns) as duration_ns,
        round(sum(duration_ns) / sum(operations)) as mean_ns, sum(exposed_ns) as exposed_ns,
        sum(overlapped_ns) as overlapped_ns
    from per_rank group by {{keys}}
), matches as (
    select group_id, operation, match, max(message_bytes) as message_bytes, any_value(transfer_ns) as transfer_ns,
        sum(wait_ns) as wait_ns
    from waiting group by all
), matched as (
    select {{keys}}, count(*) as matches, sum(message_bytes) as matched_bytes, sum(transfer_ns) as transfer_ns,
        sum(wait_ns) as wait_ns
    from matches group by {{keys}}
)
select {{columns}}, matched_bytes / nullif(transfer_ns, 0) as algorithm_bandwidth_gbs
from (select *, coalesce(matches, 0)::bigint as matched_count from seen left join matched using ({{keys}})) order by {{order}}
"""


def measure_waiting(connection: Connection, clock_offsets: pa.Table) -> None:
    """Create the table `waiting`, with a row per matched operation of a rank. Needs `matching.match`.

    Columns: rank, collective, match, group_id, point_to_point, operation, message_bytes, iteration, start_ns, end_ns (on the
    rank's own clock), participants, transfer_ns, wait_ns, waits_for (the rank that began last, possibly the rank itself),
    late_ns (time from the first participant's start to this one's, on the common clock).
    """
    connection.register("offsets", clock_offsets)
    connection.execute(_WAITING)
    connection.unregister("offsets")


def communication(connection: Connection, infos: Sequence[RankInfo]) -> Answer:
    """Operations of every group, from the tables `waiting` and `sized`.

    Returns:
        A row per operation and group: operation, group, group_name, group_ranks, group_size, captured_ranks, count,
        matched_count (compared with another rank's), smallest_message_bytes, largest_message_bytes, bytes (sum of one rank's
        messages), mean_duration_ns (of a rank's kernel, with waiting), transfer_ns, wait_ns (sum over ranks),
        algorithm_bandwidth_gbs and bus_bandwidth_gbs (1e9 bytes/s, of matched operations' transfers). The last four are null
        where nothing is matched: one rank alone does not show which part is waiting. dimension and link_gbs: the
        group's parallel dimensions, and the stated bandwidth of its link.
    """
    order = '"group", group_name, group_ranks, operation'
    found = _of_ranks(connection, infos, BY_GROUP, keys="group_id, operation", order=order)
    unmatched = found["matched_count"].to_pylist().count(0)
    return Answer(found, (caveat("waiting_unknown", unmatched=unmatched, total=len(found)),) if unmatched else ())


def bus_bandwidth(operation: str, size: int | None, algorithm_gbs: float | None) -> float | None:
    """Bus bandwidth of an operation among `size` ranks, from its algorithm bandwidth; None where it is not defined."""
    if algorithm_gbs is None or operation not in BUS_OPERATIONS or (size is None and BUS_OPERATIONS[operation]):
        return None
    return algorithm_gbs * bus_factor(operation, size or 1)


def communication_by_rank(connection: Connection) -> pa.Table:
    """Time of each rank in each group's operations, from the tables `waiting` and `sized`.

    Returns:
        A row per operation, group and rank: operation, group, group_name, group_ranks, rank, count, matched_count, bytes,
        duration_ns (sum of the kernels), shortest_ns (the same if each took as long as the shortest of its size on that rank,
        over sizes that occur often; null without any: an estimate of the transfers if nothing is matched), transfer_ns and
        wait_ns (of matched operations, null without any), exposed_ns (only communication ran) and overlapped_ns (compute ran
        too). If groups communicate at the same time, their exposed times overlap and add up to more than the rank's.
    """
    return queried(connection, _BY_RANK)


def measure_exposure(connection: Connection, exposure: pa.Table) -> None:
    """Create the table `sized`, with a row per group, operation, size of message and rank, from the fact of that name.

    Columns: group_id (as of `matching.match`), operation, message_bytes, rank, group, group_name, group_ranks, size (of the
    group), operations (number of them), duration_ns (of all), shortest_ns, exposed_ns, overlapped_ns.
    """
    connection.register("exposure", exposure)
    connection.execute(
        f"""create or replace temp table sized as
        with sizes as (
            select group_id, operation, message_bytes, rank, count(*) as operations, max(group_size) as size,
                sum(end_ns - start_ns)::bigint as duration_ns, min(end_ns - start_ns) as shortest_ns, {_NAMED}
            from operations group by all
        )
        select sizes.*, exposed_ns, overlapped_ns
        from sizes left join exposure on group_id = hash(exposure.group_name, exposure.group_ranks)
            and sizes.operation = exposure.operation and sizes.rank = exposure.rank
            and sizes.message_bytes is not distinct from exposure.message_bytes"""
    )
    connection.unregister("exposure")


def communication_by_size(connection: Connection, infos: Sequence[RankInfo]) -> pa.Table:
    """Operations of every group by size of message, most time first, from the tables `waiting` and `sized`.

    Returns:
        A row per operation, group and message size (null where it is unknown): count, matched_count, mean_ns (of a rank's
        kernel, with waiting); sums over the captured ranks: duration_ns, wait_ns, exposed_ns (nothing else ran) and
        overlapped_ns (compute ran too); transfer_ns of the matched ones, and their algorithm_bandwidth_gbs and
        bus_bandwidth_gbs. Waiting, transfer and bandwidths are null where nothing is matched. dimension and link_gbs: the
        group's parallel dimensions, and the stated bandwidth of its link.
    """
    order = 'duration_ns desc, "group", group_name, group_ranks, operation, message_bytes, group_id'
    return _of_ranks(connection, infos, BY_SIZE, keys="group_id, operation, message_bytes", order=order)


def _of_ranks(connection: Connection, infos: Sequence[RankInfo], columns: pa.Schema, *, keys: str, order: str) -> pa.Table:
    named = ", ".join(f'"{name}"' for name in columns.names if name not in _OF_LINK)
    found = queried(connection, _OF_RANKS.format(keys=keys, columns=named, order=order))
    measured = (found[name].to_pylist() for name in ("operation", "group_size", "algorithm_bandwidth_gbs"))
    bus_gbs = [bus_bandwidth(*row) for row in zip(*measured, strict=True)]
    return with_dimensions(found.append_column("bus_bandwidth_gbs", pa.array(bus_gbs, pa.float64())), infos)


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
    known = {kind: _dimension_and_link(*kind, by_rank) for kind in set(kinds)}
    found = table.append_column("dimension", pa.array([known[kind][0] for kind in kinds], pa.string()))
    return found.append_column("link_gbs", pa.array([known[kind][1] for kind in kinds], pa.float64()))


def _dimension_and_link(
    group: str | None, group_ranks: str | None, by_rank: dict[int, RankInfo]
) -> tuple[str | None, float | None]:
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
