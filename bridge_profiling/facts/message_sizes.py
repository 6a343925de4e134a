"""Communication by operation, group and size of message: how often, how fast, and how much of it compute hides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from bridge_profiling.facts.communication import bus_bandwidth
from bridge_profiling.facts.groups import with_dimensions
from bridge_profiling.traces.types import RankInfo

if TYPE_CHECKING:
    import duckdb

# Sums of fractions are in the order of ranks: threads would add them in any order, and the last digit would differ.
# Of a group, each rank has a row for an operation. Sends and receipts are operations of their own.
_BY_SIZE = """
with per_rank as (
    select group_id, operation, message_bytes, rank, count(*) as operations, max(group_size) as size,
        sum(end_ns - start_ns) / 1e3 as duration_us, any_value("group") as "group", any_value(group_name) as group_name,
        any_value(group_ranks) as group_ranks
    from operations group by group_id, operation, message_bytes, rank
), of_exposure as (
    select group_id, operation, message_bytes, sum(exposed_us order by rank) as exposed_us,
        sum(overlapped_us order by rank) as overlapped_us
    from exposure group by all
), seen as (
    select group_id, operation, message_bytes, any_value("group") as "group", any_value(group_name) as group_name,
        any_value(group_ranks) as group_ranks, max(size)::integer as group_size, count(*)::integer as captured_ranks,
        case when operation in ('send', 'recv') then sum(operations)
            when operation = 'send_recv' then (sum(operations) + 1) // 2 else max(operations) end as count,
        sum(duration_us order by rank) / sum(operations) as mean_us, sum(duration_us order by rank) as duration_us
    from per_rank group by group_id, operation, message_bytes
), per_match as (
    select group_id, operation, match, max(message_bytes) as message_bytes, any_value(transfer_ns) as transfer_ns,
        sum(wait_ns) as wait_ns
    from waiting group by all
), matched as (
    select group_id, operation, message_bytes, count(*) as matched_count, sum(transfer_ns) / 1e3 as transfer_us,
        sum(wait_ns) / 1e3 as wait_us
    from per_match group by all
)
select operation, "group", group_name, group_ranks, group_size, captured_ranks, message_bytes::bigint as message_bytes,
    count::bigint as count, coalesce(matched_count, 0)::bigint as matched_count, mean_us, duration_us, transfer_us, wait_us,
    exposed_us, overlapped_us, matched_count * message_bytes / nullif(transfer_us, 0) / 1e3 as algorithm_bandwidth_gbs
from seen left join matched using (group_id, operation, message_bytes)
left join of_exposure on seen.group_id = of_exposure.group_id and seen.operation = of_exposure.operation
    and seen.message_bytes is not distinct from of_exposure.message_bytes
order by duration_us desc, "group", group_name, group_ranks, operation, message_bytes, seen.group_id
"""


def communication_by_size(connection: duckdb.DuckDBPyConnection, infos: Sequence[RankInfo]) -> pa.Table:
    """Operations of every group by size of message, most time first. Needs `measure_waiting` and `measure_exposure`.

    Returns:
        A row per operation, group and message size (null where it is unknown): count, matched_count, mean_us (of a rank's
        kernel, with waiting); sums over the captured ranks: duration_us, wait_us, exposed_us (nothing else ran) and
        overlapped_us (compute ran too); transfer_us of the matched ones, and their algorithm_bandwidth_gbs and
        bus_bandwidth_gbs. Waiting, transfer and bandwidths are null where nothing is matched. dimension and link_gbs: see
        `with_dimensions`.
    """
    found = connection.sql(_BY_SIZE).to_arrow_table()
    columns = (found[name].to_pylist() for name in ("operation", "group_size", "algorithm_bandwidth_gbs"))
    bus_gbs = [bus_bandwidth(*row) for row in zip(*columns, strict=True)]
    return with_dimensions(found.append_column("bus_bandwidth_gbs", pa.array(bus_gbs, pa.float64())), infos)
