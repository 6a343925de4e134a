"""Which rows of `collectives` are one and the same operation, seen by its participants. Says nothing about who was late.

Operations of a group are matched by their position in the iteration, where all of the group's captures hold the same
operations of that iteration; else, as when a capture begins in the middle, by the offset at which the captures fit together
(`alignment`). Sends and receives are matched pair by pair: the n-th from one rank to another with the n-th receipt. A kernel
that both sends and receives is matched in both directions.

Everything happens in the database: `matched` is a temporary table of it, made once.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from bridge_profiling.analysis.ranks.alignment import Sequence, align

if TYPE_CHECKING:
    import duckdb

#: Operations between two ranks.
POINT_TO_POINT = ("send", "recv", "send_recv")

#: Operations whose message is not of one size on all ranks: sizes tell nothing about whether two rows match.
_UNEVEN = ("all_to_all", "gather", "scatter", "reduce", "dispatch", "combine", "barrier")

# Not temporary: cursors of the connection, which stream a table each, see it too.
_OPERATIONS = """
create or replace view operations as
select * replace (coalesce(operation, 'unknown') as operation),
    hash(coalesce(group_name, ''), coalesce(group_ranks, '')) as group_id
from collectives
"""

# A row for each direction of each operation: what is matched is a channel, either a group or two of its ranks in one direction.
_CALLS = f"""
create or replace temp table calls as
with grouped as (
    select *, operation in {POINT_TO_POINT} as point_to_point,
        cast(string_split(trim(group_ranks, '[] '), ',') as integer[]) as members
    from operations
    where (group_name is not null or group_ranks is not null) and coalesce(group_size, 2) > 1
), peered as (
    select * exclude (peer), case
        when peer is null and len(members) = 2 then if(members[1] = rank, members[2], members[1]) else peer
    end as peer
    from grouped
), directed as (
    select *, group_id as channel,
        hash(operation, if(operation in {_UNEVEN}, 0, coalesce(message_bytes, 0))) as signature
    from peered where not point_to_point
    union all
    select *, hash(group_id, rank, peer) as channel, hash(coalesce(message_bytes, 0)) as signature
    from peered where operation in ('send', 'send_recv') and peer <> rank
    union all
    select *, hash(group_id, peer, rank) as channel, hash(coalesce(message_bytes, 0)) as signature
    from peered where operation in ('recv', 'send_recv') and peer <> rank
)
select rank, collective, channel, group_id, point_to_point, operation, message_bytes, iteration, sequence, signature,
    start_ns, end_ns, row_number() over (partition by channel, rank, iteration order by sequence, collective) as position
from directed
"""

# Channels in which some iteration is not the same sequence on every rank that captured the channel.
_UNEQUAL = """
create or replace temp table unequal as
with sequences as (
    select channel, iteration, rank, count(*) as operations, bit_xor(hash(signature, position)) as content
    from calls group by all
)
select distinct channel from sequences
group by channel, iteration
having iteration is null or min(operations) < max(operations) or min(content) < max(content)
"""

_MATCHED = """
create or replace temp table matched as
with numbered as (
    select *, hash(channel, iteration, position) as match from calls anti join unequal using (channel)
    union all
    select calls.*, hash(channel, 'aligned', aligned.place) as match from calls join aligned using (channel, rank, collective)
), counted as (
    select *, count(*) over (partition by match) as participants from numbered
)
select * exclude (signature, position, sequence), min(end_ns - start_ns) over (partition by match) as transfer_ns
from counted where participants > 1
"""


def match(connection: duckdb.DuckDBPyConnection, *, limitations: list[str]) -> None:
    """Make the temporary table `matched`, unless the connection has it: a row per participant of each matched operation.

    Columns: match (the same number for all participants), rank, collective, channel, group_id (joins `groups`),
    point_to_point, operation, message_bytes, iteration, start_ns and end_ns on the rank's own clock, participants (how many
    are captured), transfer_ns: the shortest duration among the participants. Makes `groups` too: group_id, group, group_name,
    group_ranks, group_size, captured (how many of its ranks are); and the view `operations`: `collectives` with a group_id.

    Args:
        connection: of `session.connect`.
        limitations: what could not be matched is appended.
    """
    if not has_table(connection, "matching_limitations"):
        connection.execute(_OPERATIONS)
        connection.execute(_CALLS)
        connection.execute(_UNEQUAL)
        connection.register("aligned_rows", _aligned(connection))
        connection.execute("create or replace temp table aligned as select * from aligned_rows")
        connection.unregister("aligned_rows")
        connection.execute(_MATCHED)
        connection.execute(_GROUPS)
        told = pa.table({"sentence": pa.array(_limitations(connection), pa.string())})
        connection.register("told", told)
        connection.execute("create temp table matching_limitations as select * from told")
        connection.unregister("told")
        connection.execute("drop table calls; drop table unequal; drop table aligned")
    tell(limitations, *(row[0] for row in connection.execute("select sentence from matching_limitations").fetchall()))


def tell(limitations: list[str], *sentences: str) -> None:
    """Append sentences that are not there yet."""
    limitations += [sentence for sentence in dict.fromkeys(sentences) if sentence not in limitations]


def has_table(connection: duckdb.DuckDBPyConnection, table: str) -> bool:
    """Whether the connection has a temporary table of that name."""
    return bool(connection.execute("select 1 from duckdb_tables() where temporary and table_name = ?", [table]).fetchall())


def _aligned(connection: duckdb.DuckDBPyConnection) -> pa.Table:
    """Places in the channel of each row of the unequal channels; rows of captures that fit nowhere are left out."""
    rows = connection.sql(
        """select channel, rank, collective, signature, coalesce(iteration, -1) as iteration, end_ns
        from calls semi join unequal using (channel) order by channel, rank, sequence, collective"""
    ).to_arrow_table()
    channel, rank, collective, signature, iteration, end_ns = (column.to_numpy() for column in rows.columns)
    captures = [
        [slice(mine.start + each.start, mine.start + each.stop) for each in _runs(rank[mine])] for mine in _runs(channel)
    ]
    sequences = [
        [Sequence(int(rank[each.start]), signature[each], iteration[each], end_ns[each]) for each in mine] for mine in captures
    ]
    places = np.full(len(channel), -1, np.int64)
    known = np.zeros(len(channel), bool)
    for mine, offsets in zip(captures, align(sequences), strict=True):
        for each, later in zip(mine, offsets, strict=True):
            if later is not None:
                places[each] = np.arange(later, later + each.stop - each.start)
                known[each] = True
    return pa.table({"channel": channel[known], "rank": rank[known], "collective": collective[known], "place": places[known]})


def _runs(values: np.ndarray) -> list[slice]:
    """Where equal values stand together."""
    if not len(values):
        return []
    bounds = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
    return [slice(begin, end) for begin, end in itertools.pairwise(bounds)]


def _limitations(connection: duckdb.DuckDBPyConnection) -> list[str]:
    """What the matching leaves open."""
    told = []
    unnamed, alone, total = connection.execute(
        f"""select count(*) filter (group_name is null and group_ranks is null),
            count(*) filter (operation in {POINT_TO_POINT} and (group_name is not null or group_ranks is not null)
                and (rank, collective) not in (select (rank, collective) from calls)), count(*)
        from collectives"""
    ).fetchall()[0]
    if unnamed:
        told.append(f"{unnamed} of {total} communication operations name no process group: they match no other rank's")
    if alone:
        told.append(f"{alone} sends and receives name no single peer: they match no other rank's")
    lacking, examples = connection.execute(
        """select count(*), list(coalesce("group", group_name, group_ranks) || coalesce(' ' || group_ranks, '')
            order by group_ranks)[1:3] from groups where captured < group_size"""
    ).fetchall()[0]
    if lacking:
        told.append(
            f"of {lacking} process groups not all ranks are captured ({_some(examples, lacking)}): waiting for a rank that is "
            "not captured cannot be told from the transfer itself"
        )
    lost = connection.execute(
        """with seen as (select channel from calls group by channel having count(distinct rank) > 1)
        select count(*), count(distinct rank) from calls semi join seen using (channel)
        anti join matched using (channel, rank, collective)"""
    ).fetchall()[0]
    if lost[0]:
        told.append(
            f"{lost[0]} communication operations of {lost[1]} ranks have no counterpart on another captured rank, as at the "
            "edges of captures that begin or end at different points"
        )
    shifted = connection.execute("select count(distinct channel) from matched semi join unequal using (channel)").fetchall()
    if shifted[0][0]:
        told.append(
            f"in {shifted[0][0]} process groups or pairs the captures do not hold the same operations of the same iterations: "
            "they are matched by the order of the operations and the moments at which they end"
        )
    return told


def _some(examples: list[str], total: int) -> str:
    return ", ".join(examples[:3]) + (", …" if total > 3 else "")


_GROUPS = """
create or replace temp table groups as
select group_id, any_value("group") as "group", any_value(group_name) as group_name,
    any_value(group_ranks) as group_ranks, max(group_size) as group_size, count(distinct rank) as captured
from operations where group_name is not null or group_ranks is not null
group by group_id
"""
