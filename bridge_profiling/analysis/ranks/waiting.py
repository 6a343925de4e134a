"""How long each operation waited, and for which rank: the table that the other questions across ranks ask.

The transfer time of a matched operation is the shortest duration among its participants: the last to arrive waits for
nobody. Each rank's excess over it is waiting, for the rank that began last on the common clock. A rank whose communication
takes long because it waits is therefore not the slow one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from bridge_profiling.analysis.ranks.clocks import use_offsets
from bridge_profiling.analysis.ranks.matching import has_table, tell
from bridge_profiling.traces.types import RankInfo

if TYPE_CHECKING:
    import duckdb

#: Rows a streamed query hands over at a time.
_BATCH_ROWS = 1 << 17

_WAITING = """
create or replace temp table waiting as
with placed as (
    select matched.*, start_ns + offset_ns as placed_ns from matched join offsets using (rank)
), latest as (
    select match, arg_max(rank, placed_ns) as waits_for, max(placed_ns) as latest_ns, min(placed_ns) as earliest_ns
    from placed group by match
)
select rank, collective, match, group_id, point_to_point, operation, message_bytes, iteration, start_ns, end_ns, participants,
    transfer_ns, end_ns - start_ns - transfer_ns as wait_ns, waits_for, placed_ns - earliest_ns as late_ns
from placed join latest using (match)
-- A kernel that sends and receives is matched twice; it lasts until the later of both partners has come.
qualify row_number() over (partition by rank, collective order by latest_ns desc, match) = 1
order by rank
"""


def measure_waiting(connection: duckdb.DuckDBPyConnection, infos: Sequence[RankInfo], *, limitations: list[str]) -> None:
    """Make the temporary table `waiting`, unless the connection has it: a row per matched operation of a rank.

    Columns: rank, collective, match, group_id, point_to_point, operation, message_bytes, iteration, start_ns, end_ns (on the
    rank's own clock), participants, transfer_ns, wait_ns, waits_for (the rank that began last; the rank itself when it was),
    late_ns (how long after the first participant it began, on the common clock).

    Args:
        connection: of `session.connect`.
        infos: what is known of the ranks.
        limitations: what could not be matched, and clocks that do not fit, are appended.
    """
    if not has_table(connection, "waiting"):
        told: list[str] = []
        use_offsets(connection, infos, limitations=told)
        connection.execute(_WAITING)
        connection.register("told", pa.table({"sentence": pa.array(told, pa.string())}))
        connection.execute("create or replace temp table waiting_limitations as select * from told")
        connection.unregister("told")
    tell(limitations, *(row[0] for row in connection.execute("select sentence from waiting_limitations").fetchall()))


def rank_by_rank(connection: duckdb.DuckDBPyConnection, query: str) -> Iterator[tuple[int, pa.Table]]:
    """The rows of a query one rank at a time, as they come: memory holds one rank's.

    Args:
        connection: one that runs nothing else until the rows are read; a cursor of it, when another question is open.
        query: gives `rank` as its first column, the rows of each rank together.
    """
    kept: list[pa.RecordBatch] = []
    rank: int | None = None
    for batch in connection.sql(query).fetch_record_batch(_BATCH_ROWS):
        begin = 0
        ranks = batch.column(0).to_numpy()
        while begin < len(ranks):
            if rank is not None and ranks[begin] != rank:
                yield rank, pa.Table.from_batches(kept)
                kept = []
            rank = int(ranks[begin])
            same = ranks[begin:] == rank
            length = len(same) if same.all() else int(same.argmin())
            kept.append(batch.slice(begin, length))
            begin += length
    if rank is not None and kept:
        yield rank, pa.Table.from_batches(kept)
