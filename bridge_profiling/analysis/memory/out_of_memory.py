"""Which request an out-of-memory error was about, and who made it. Answers from memory snapshots; reads no file itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from bridge_profiling.analysis.memory.sites import site
from bridge_profiling.traces.types import RankInfo

if TYPE_CHECKING:
    import duckdb

_SCHEMA = pa.schema(
    [
        ("rank", pa.int32()),
        ("device", pa.int32()),
        ("time_ns", pa.int64()),
        ("requested_bytes", pa.int64()),
        ("free_bytes", pa.int64()),
        ("site", pa.string()),
        ("stack", pa.string()),
    ]
)


def out_of_memory(connection: duckdb.DuckDBPyConnection, infos: Sequence[RankInfo], *, limitations: list[str]) -> pa.Table:
    """Every request that the allocator could not serve, by rank and time. What was live then: `memory.live_at_peak`.

    Args:
        connection: of `session.connect`.
        infos: what is known of the ranks.
        limitations: what the captures cannot tell is appended.

    Returns:
        rank, device, time_ns (null when not recorded), requested_bytes, free_bytes (of the device, outside what the allocator
        held), site (`allocation_sites.site`), stack (null when not recorded). Empty without an error, and without a snapshot.
    """
    columns = ", ".join(name for name in _SCHEMA.names if name != "site")
    rows = connection.sql(f"select {columns} from out_of_memory order by rank, device, time_ns").to_arrow_table().to_pylist()
    return pa.Table.from_pylist([row | {"site": site(row["stack"])} for row in rows], schema=_SCHEMA)
