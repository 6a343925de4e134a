"""Kernel statistics: how often each ran and for how long, on every rank, by one query over the ranks' Parquet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    import duckdb

_QUERY = """
    select {rank} kind, backend, name, count(*) as count,
        sum(end_ns - start_ns)::bigint / 1000 as total_us,
        sum(end_ns - start_ns)::bigint / count(*) / 1000 as mean_us,
        min(end_ns - start_ns) / 1000 as min_us,
        max(end_ns - start_ns) / 1000 as max_us
    from device_events
    where kind in ('compute', 'communication')
    group by all
    order by {rank} total_us desc, name
"""


def kernels(connection: duckdb.DuckDBPyConnection, *, by_rank: bool = True) -> pa.Table:
    """One row per rank, kind, backend and name, most time first. All of them: nothing is summed up as "other".

    Args:
        connection: what `parquet_views.connect` gave.
        by_rank: False counts all ranks' kernels of one name together; the column `rank` is missing then.
    """
    return connection.sql(_QUERY.format(rank="rank," if by_rank else "")).to_arrow_table()
