"""What communication costs: per group and operation, how much of it moved data, how much waited, and what nothing hid.

Bandwidths are those of NCCL's own benchmark, of the transfer alone:
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md. Algorithm bandwidth is message size over time, where the
size is the larger of one rank's input and output: what all_gather gathers, what reduce_scatter scatters. Bus bandwidth is that
times a factor that makes operations comparable with the link's speed: 2(n-1)/n for all_reduce, (n-1)/n for all_gather,
reduce_scatter, all_to_all, gather and scatter, 1 for broadcast, reduce, send and receive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from bridge_profiling.analysis.intervals import rows_of, union
from bridge_profiling.analysis.ranks.matching import tell
from bridge_profiling.analysis.ranks.waiting import measure_waiting, rank_by_rank
from bridge_profiling.traces.types import RankInfo

if TYPE_CHECKING:
    import duckdb

_BUS_FACTOR = """case
    when operation = 'all_reduce' then 2.0 * (size - 1) / size
    when operation in ('all_gather', 'reduce_scatter', 'all_to_all', 'gather', 'scatter') then (size - 1.0) / size
    when operation in ('broadcast', 'reduce', 'send', 'recv', 'send_recv') then 1.0
end"""

# Sends and receives are an operation each; of the others every participant has a row. A send_recv has two.
_BY_GROUP = f"""
with per_rank as (
    select group_id, operation, rank, count(*) as operations, sum(message_bytes) as bytes,
        min(message_bytes) as smallest, max(message_bytes) as largest, max(group_size) as size,
        sum(end_ns - start_ns) / 1e3 as duration_us
    from operations group by all
), named as (
    select group_id, any_value("group") as "group", any_value(group_name) as group_name,
        any_value(group_ranks) as group_ranks from operations group by all
), seen as (
    select group_id, operation, max(size) as size, count(*) as ranks, min(smallest) as smallest, max(largest) as largest,
        case when operation in ('send', 'recv') then sum(operations)
            when operation = 'send_recv' then (sum(operations) + 1) // 2 else max(operations) end as operations,
        case when operation in ('send', 'recv') then sum(bytes)
            when operation = 'send_recv' then sum(bytes) // 2 else max(bytes) end as bytes,
        avg(duration_us / operations) as mean_duration_us
    from per_rank group by group_id, operation
), per_match as (
    select group_id, operation, match, max(message_bytes) as bytes, any_value(transfer_ns) as transfer_ns,
        sum(wait_ns) as wait_ns
    from waiting group by all
), matched_groups as (
    select group_id, operation, count(*) as matched, sum(bytes) as matched_bytes, sum(transfer_ns) / 1e3 as transfer_us,
        sum(wait_ns) / 1e3 as wait_us
    from per_match group by all
)
select operation, "group", group_name, group_ranks, size::integer as group_size, ranks::integer as captured_ranks,
    operations::bigint as count, coalesce(matched, 0)::bigint as matched_count, smallest::bigint as smallest_message_bytes,
    largest::bigint as largest_message_bytes, bytes::bigint as bytes, mean_duration_us, transfer_us, wait_us,
    matched_bytes / nullif(transfer_us, 0) / 1e3 as algorithm_bandwidth_gbs,
    matched_bytes / nullif(transfer_us, 0) / 1e3 * {_BUS_FACTOR} as bus_bandwidth_gbs
from seen join named using (group_id) left join matched_groups using (group_id, operation)
order by "group", group_name, group_ranks, operation
"""

#: Of fewer operations of one size, the shortest can have waited as the others did.
_ENOUGH_OF_A_SIZE = 8

_BY_RANK = f"""
with of_size as (
    select group_id, operation, rank, min(end_ns - start_ns) * count(*) / 1e3 as shortest_us from operations
    where message_bytes is not null group by group_id, operation, rank, message_bytes having count(*) >= {_ENOUGH_OF_A_SIZE}
), shortest as (
    select group_id, operation, rank, sum(shortest_us) as shortest_us from of_size group by all
), rows as (
    select group_id, operation, rank, count(*) as count, sum(message_bytes)::bigint as bytes,
        sum(end_ns - start_ns) / 1e3 as duration_us, any_value("group") as "group", any_value(group_name) as group_name,
        any_value(group_ranks) as group_ranks
    from operations group by all
), waits as (
    select group_id, operation, rank, count(*) as matched_count, sum(transfer_ns) / 1e3 as transfer_us,
        sum(wait_ns) / 1e3 as wait_us
    from waiting group by all
)
select operation, "group", group_name, group_ranks, rank, count, coalesce(matched_count, 0)::bigint as matched_count, bytes,
    duration_us, shortest_us, transfer_us, wait_us, exposed_us, overlapped_us
from rows left join shortest using (group_id, operation, rank) left join waits using (group_id, operation, rank)
left join exposure using (group_id, operation, rank)
order by "group", group_name, group_ranks, operation, rank
"""


def communication(connection: duckdb.DuckDBPyConnection, infos: Sequence[RankInfo], *, limitations: list[str]) -> pa.Table:
    """Operations of every group.

    Args:
        connection: of `session.connect`.
        infos: what is known of the ranks.
        limitations: what the captures cannot tell is appended.

    Returns:
        A row per operation and group: operation, group, group_name, group_ranks, group_size, captured_ranks (with a row of
        it), count, matched_count (compared with another rank's), smallest_message_bytes, largest_message_bytes, bytes
        (messages of one rank added up), mean_duration_us (of a rank's kernel, waiting included), transfer_us, wait_us (all
        ranks' added up), algorithm_bandwidth_gbs and bus_bandwidth_gbs (1e9 bytes/s, of matched operations' transfers). Null
        where nothing was matched: of one rank alone, transfer cannot be told from waiting.
    """
    measure_waiting(connection, infos, limitations=limitations)
    found = connection.sql(_BY_GROUP).to_arrow_table()
    unmatched = sum(1 for count in found["matched_count"].to_pylist() if not count)
    if unmatched:
        tell(
            limitations,
            f"transfer cannot be told from waiting for {unmatched} of {len(found)} kinds of communication: only one "
            "participant of each is captured, or what it belongs to is not known",
        )
    return found


def communication_by_rank(
    connection: duckdb.DuckDBPyConnection, infos: Sequence[RankInfo], *, limitations: list[str]
) -> pa.Table:
    """What each rank spent in each group's operations.

    Args:
        connection: of `session.connect`.
        infos: what is known of the ranks.
        limitations: what the captures cannot tell is appended.

    Returns:
        A row per operation, group and rank: operation, group, group_name, group_ranks, rank, count, matched_count, bytes,
        duration_us (kernels added up), shortest_us (the same, were each as short as the shortest of its size on that rank, of
        sizes that occur often, null without any: what transfers take where nothing is matched, if some wait not), transfer_us
        and wait_us (of matched operations, null without any), exposed_us (time in which nothing but communication ran) and
        overlapped_us (time beside compute). Exposed times of groups that communicate at once overlap: they add up to more than
        the rank's exposed communication.
    """
    measure_waiting(connection, infos, limitations=limitations)
    connection.register("exposure", exposure(connection))
    found = connection.sql(_BY_RANK).to_arrow_table()
    connection.unregister("exposure")
    return found


def exposure(connection: duckdb.DuckDBPyConnection) -> pa.Table:
    """How much of each group's communication nothing hid: group_id, operation, rank, exposed_us, overlapped_us.

    Args:
        connection: of `session.connect`.
    """
    operations = rank_by_rank(connection.cursor(), "select rank, collective, group_id, operation from operations")
    work = rank_by_rank(connection.cursor(), "select rank, kind, start_ns, end_ns, collective from device_events")
    rows: list[tuple[int, str, int, float, float]] = []
    current = next(operations, None)
    for rank, events in work:
        while current is not None and current[0] != rank:
            current = next(operations, None)
        if current is None:
            break
        rows += _exposed(rank, events, current[1])
    names = ("group_id", "operation", "rank", "exposed_us", "overlapped_us")
    kinds = (pa.uint64(), pa.string(), pa.int32(), pa.float64(), pa.float64())
    columns = list(zip(*rows, strict=True)) or [()] * len(names)
    return pa.table({name: pa.array(column, kind) for name, column, kind in zip(names, columns, kinds, strict=True)})


def _exposed(rank: int, events: pa.Table, operations: pa.Table) -> list[tuple[int, str, int, float, float]]:
    start, end = events["start_ns"].to_numpy(), events["end_ns"].to_numpy()
    communicates = rows_of(events["kind"], "communication")
    computes = rows_of(events["kind"], "compute")
    compute = union(start[computes], end[computes])
    other = union(start[~communicates], end[~communicates])
    collective = events["collective"].fill_null(-1).to_numpy()
    keys = list(zip(operations["group_id"].to_pylist(), operations["operation"].to_pylist(), strict=True))
    codes: dict[tuple[int, str], int] = {}
    code = np.array([codes.setdefault(key, len(codes)) for key in keys], np.int64)
    of_collective = np.full(max(int(collective.max(initial=-1)), max(operations["collective"].to_pylist(), default=-1)) + 2, -1)
    of_collective[operations["collective"].to_numpy()] = code
    mine = of_collective[collective]
    found = []
    for (group, operation), number in codes.items():
        rows = mine == number
        time = union(start[rows], end[rows])
        found.append((group, operation, rank, (time - other).total_ns / 1e3, (time & compute).total_ns / 1e3))
    return found
