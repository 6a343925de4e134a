"""Each rank's communication operations, and which of them are the same operation on several ranks.

Operations of a group are matched by their position in the iteration if all of the group's captures hold the same operations of
that iteration. Otherwise, for example if a capture begins in the middle, they are matched by the offset at which the captures
fit together (`align`). Sends and receives are matched pair by pair: the n-th from one rank to another with the n-th receipt.

Captures without operators, such as those of `nsys profile -t cuda`, name no groups. Then collectives are taken for those of one
group of all captured ranks, unless some operations may be of pairs, or what is matched does not end together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.facts.device import DeviceWork
from bridge_profiling.facts.intervals import EMPTY, plain, rows_of, runs, union
from bridge_profiling.facts.types import Connection, caveat
from bridge_profiling.traces.tables import to_int64
from bridge_profiling.traces.types import Caveat

Integers = NDArray[np.int64]

#: Operations between two ranks.
POINT_TO_POINT = ("send", "recv", "send_recv")

#: Columns of the table `collectives` that facts across ranks read.
COLUMNS = (
    *("iteration", "collective", "operation", "group", "group_name", "group_ranks", "group_size"),
    *("sequence", "message_bytes", "peer", "start_ns", "end_ns"),
)

#: Ends of the same operations scatter by less: 1 to 10 us on NVLink (measured on H200), more between hosts.
_SAME_NS = 50_000

#: Spreads that differ by less are equal.
_SCATTER_NS = 10_000

#: Ends that scatter by more are of different operations: iterations differ from each other by as much.
_STEADY_NS = 500_000

#: The ends of this few operations can agree by chance, since they do so in another iteration too.
_FEW = 4

#: Largest clock difference between hosts that synchronize over the network.
_HOSTS_NS = 50_000_000

#: All offsets are tried up to this many comparisons, if the likely ones do not fit.
_SEARCHED = 1 << 24

#: Operations whose message size differs between ranks, so that sizes do not show whether two rows match.
_UNEVEN = ("all_to_all", "gather", "scatter", "reduce", "dispatch", "combine", "barrier")

_OPERATIONS = """
create or replace temp table operations as
select *, hash(coalesce(group_name, ''), coalesce(group_ranks, '')) as group_id from recorded_operations
"""

# The group_id stays that of operations without a group.
_OF_ONE_GROUP = "update operations set group_ranks = $ranks, group_size = $size"

# A row for each direction of each operation. A channel is a group, or two of its ranks in one direction.
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

# Channels in which ranks captured different sequences of some iteration. The hash of a pair is linear in both: without another
# one, exclusive or would cancel positions, and what occurs twice.
_UNEQUAL = """
create or replace temp table unequal as
with sequences as (
    select channel, iteration, rank, count(*) as operations, bit_xor(hash(hash(signature, position))) as content
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

_GROUPS = """
create or replace temp table groups as
select group_id, any_value("group") as "group", any_value(group_name) as group_name,
    any_value(group_ranks) as group_ranks, max(group_size) as group_size, count(distinct rank) as captured
from operations where group_name is not null or group_ranks is not null
group by group_id
"""


def operations(collectives: pa.Table) -> pa.Table:
    """One row per communication operation, in the columns of `COLUMNS`; `operation` is `unknown` where it is."""
    found = plain(collectives)  # text in dictionaries would be of another type to DuckDB
    place = found.column_names.index("operation")
    return found.set_column(place, "operation", found["operation"].fill_null("unknown"))


def activity(device_events: pa.Table, operations: pa.Table, work: DeviceWork) -> pa.Table:
    """When the device worked, as far as other ranks' facts depend on it: start_ns, end_ns, computes, in merged intervals.

    A rank that sends or receives may be a stage of a pipeline: all of its compute, and in intervals of their own all other work
    except its sends and receipts. Of other ranks, compute during communication.
    """
    exchanges = rows_of(operations["operation"], *POINT_TO_POINT)
    computing, other = work.compute & work.communication, EMPTY
    if exchanges.any():
        start, end = (device_events[name].to_numpy() for name in ("start_ns", "end_ns"))
        exchanging = np.isin(to_int64(device_events["collective"], -1), operations["collective"].to_numpy()[exchanges])
        rest = ~exchanging & ~rows_of(device_events["kind"], "compute")
        computing, other = work.compute, union(start[rest], end[rest])
    return pa.table(
        {
            "start_ns": np.concatenate([computing.start_ns, other.start_ns]),
            "end_ns": np.concatenate([computing.end_ns, other.end_ns]),
            "computes": np.repeat([True, False], [len(computing), len(other)]),
        }
    )


def match(connection: Connection, operations: pa.Table) -> list[Caveat]:
    """Create the tables `matched`, `groups`, and `operations`: those given, of all ranks, with a group_id.

    `matched` has a row per participant of each matched operation and direction: match (one number for all participants), rank,
    collective, channel, group_id, point_to_point, operation, message_bytes, iteration, start_ns and end_ns on the rank's own
    clock, participants (captured ones), and transfer_ns: the shortest duration among the participants. `groups`: group_id,
    group, group_name, group_ranks, group_size, captured (number of its ranks that are).
    """
    connection.register("recorded_operations", operations)
    connection.execute(_OPERATIONS)
    inferred = _ranks_of_one_group(connection)
    if inferred:
        connection.execute(_OF_ONE_GROUP, {"ranks": f"[{','.join(map(str, inferred))}]", "size": len(inferred)})
    _match(connection)
    if inferred and not _end_together(connection):
        connection.execute(_OPERATIONS)
        inferred = []
        _match(connection)
    connection.execute(_GROUPS)
    found = [*([caveat("group_inferred")] if inferred else []), *_caveats(connection)]
    connection.execute("drop table calls; drop table unequal")
    connection.unregister("recorded_operations")
    return found


def _match(connection: Connection) -> None:
    connection.execute(_CALLS)
    connection.execute(_UNEQUAL)
    aligned = _aligned(connection)
    connection.register("aligned", aligned)
    connection.execute(_MATCHED)
    connection.unregister("aligned")


def _ranks_of_one_group(connection: Connection) -> list[int]:
    """The ranks that communicate, if there are several and no operation has a group or can be one of a pair."""
    others, ranks = connection.execute(
        f"""select count(*) filter (coalesce(group_name, group_ranks) is not null or operation in {POINT_TO_POINT}),
            list(distinct rank order by rank) from operations"""
    ).fetchall()[0]
    return ranks if not others and len(ranks or ()) > 1 else []


def _end_together(connection: Connection) -> bool:
    """Whether what is matched ends at the same times, up to a constant difference of the ranks' clocks."""
    apart_ns, scatter_ns = connection.execute(
        """with apart as (
            select rank, end_ns - first(end_ns) over (partition by match order by rank) as apart_ns from matched
        ), usual as (select rank, median(apart_ns) as usual_ns from apart group by rank), scattered as (
            select rank, any_value(usual_ns) as usual_ns, median(abs(apart_ns - usual_ns)) as scatter_ns
            from apart join usual using (rank) group by rank
        ) select max(abs(usual_ns)), max(scatter_ns) from scattered"""
    ).fetchall()[0]
    return scatter_ns is not None and scatter_ns <= _SAME_NS and apart_ns <= _HOSTS_NS


def _aligned(connection: Connection) -> pa.Table:
    """Place in the channel of each row of the unequal channels, without rows of captures that fit nowhere."""
    rows = connection.sql(
        """select channel, rank, collective, signature, coalesce(iteration, -1) as iteration, end_ns
        from calls semi join unequal using (channel) order by channel, rank, sequence, collective"""
    ).to_arrow_table()
    channel, rank, collective, signature, iteration, end_ns = (column.to_numpy() for column in rows.columns)
    captures = [[slice(mine.start + each.start, mine.start + each.stop) for each in runs(rank[mine])] for mine in runs(channel)]
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


def _caveats(connection: Connection) -> Iterator[Caveat]:
    unnamed, alone, total = connection.execute(
        f"""select count(*) filter (group_name is null and group_ranks is null),
            count(*) filter (operation in {POINT_TO_POINT} and (group_name is not null or group_ranks is not null)
                and (rank, collective) not in (select (rank, collective) from calls)), count(*)
        from operations"""
    ).fetchall()[0]
    if unnamed:
        yield caveat("operations_without_group", unnamed=unnamed, total=total)
    if alone:
        yield caveat("operations_without_peer", alone=alone)
    lacking, examples = connection.execute(
        """select count(*), list(coalesce("group", group_name, group_ranks) || coalesce(' ' || group_ranks, '')
            order by group_ranks)[1:3] from groups where captured < group_size"""
    ).fetchall()[0]
    if lacking:
        named = ", ".join(examples) + (", …" if lacking > len(examples) else "")
        yield caveat("groups_partly_captured", lacking=lacking, named=named)
    lost, ranks = connection.execute(
        """with seen as (select channel from calls group by channel having count(distinct rank) > 1)
        select count(*), count(distinct rank) from calls semi join seen using (channel)
        anti join matched using (channel, rank, collective)"""
    ).fetchall()[0]
    if lost:
        yield caveat("operations_unmatched", lost=lost, of_ranks=ranks)
    shifted = connection.sql("select count(distinct channel) from matched semi join unequal using (channel)").fetchall()[0][0]
    if shifted:
        yield caveat("captures_aligned", shifted=shifted)


@dataclass(frozen=True)
class Sequence:
    """One rank's operations in one channel, in order."""

    rank: int  # global rank
    signature: Integers  # hash of each operation and its size
    iteration: Integers  # of each operation; negative if unknown
    end_ns: Integers  # end of each operation on the rank's own clock

    def __len__(self) -> int:
        return len(self.signature)


class Fit(NamedTuple):
    """One way in which two sequences fit."""

    offset: int  # operation i of the other sequence is operation i + offset of the reference
    overlap: int  # operations in common
    spread_ns: float  # mean deviation of the differences between the ends from their median
    apart_ns: float  # that median: the reference's clock minus the other's
    marked: bool  # whether every operation in common has the same, known iteration in both


class RankClocks:
    """Differences between ranks' clocks, chained from pairs of ranks."""

    def __init__(self) -> None:
        self._above: dict[int, tuple[int, float]] = {}

    def learn(self, one: int, other: int, apart_ns: float) -> None:
        """Record by how much one rank's clock is ahead of the other's."""
        (top, ahead), (bottom, behind) = self._top(one), self._top(other)
        if top != bottom:
            self._above[bottom] = (top, apart_ns + behind - ahead)

    def apart_ns(self, one: int, other: int) -> float | None:
        """By how much one rank's clock is ahead of the other's; None if nothing relates them."""
        (top, ahead), (bottom, behind) = self._top(one), self._top(other)
        return ahead - behind if top == bottom else None

    def _top(self, rank: int) -> tuple[int, float]:
        """The root of the rank's tree, and by how much this rank's clock is ahead of the root's."""
        ahead = 0.0
        while rank in self._above:
            rank, behind = self._above[rank]
            ahead -= behind
        return rank, ahead


def align(channels: Iterable[list[Sequence]]) -> list[list[int | None]]:
    """Each sequence's offset to the longest one of its channel; None for those that fit nowhere.

    Two captures fit if all operations of their overlap have the same kind, size and, where known, iteration. Training repeats
    itself, so several offsets can fit. The participants of an operation end it together: at the right offset, the ends differ
    by the difference of the clocks; at a wrong one, also by differences between iterations. Where that leaves a choice, for
    example in a channel with two operations per iteration, the clocks decide, as other channels of the same ranks show them.
    """
    every = list(channels)
    fits = [_against_longest(sequences) for sequences in every]
    clocks = RankClocks()
    # Sequences that fit in one way only show the clocks, which decide about the others.
    plain = [
        (ways[0].overlap, reference.rank, sequence.rank, ways[0].apart_ns)
        for sequences, (reference, found) in zip(every, fits, strict=True)
        for sequence, ways in zip(sequences, found, strict=True)
        if sequence.rank != reference.rank
        # So many more operations than those of the next one make the first fit the right one.
        and (ways and ways[0].overlap > _FEW and (len(ways) == 1 or ways[0].overlap >= 2 * ways[1].overlap))
    ]
    for _, one, other, apart_ns in sorted(plain, reverse=True):
        clocks.learn(one, other, apart_ns)
    return [
        [_chosen(ways, clocks.apart_ns(reference.rank, each.rank)) for each, ways in zip(sequences, found, strict=True)]
        for sequences, (reference, found) in zip(every, fits, strict=True)
    ]


def _against_longest(sequences: list[Sequence]) -> tuple[Sequence, list[list[Fit]]]:
    longest = max(sequences, key=len)
    return longest, [[Fit(0, len(each), 0.0, 0.0, True)] if each is longest else fitting(longest, each) for each in sequences]


def _chosen(ways: list[Fit], apart_ns: float | None) -> int | None:
    """The offset of the fit that agrees with the clocks; without clocks, of the one with the most operations."""
    if apart_ns is not None:
        near = [way for way in ways if abs(way.apart_ns - apart_ns) <= _STEADY_NS]
        return min(near, key=lambda way: abs(way.apart_ns - apart_ns)).offset if near else None
    # A few operations fit in several places, so their iterations or the hosts' clocks must agree.
    trusted = [way for way in ways if way.overlap > _FEW or way.marked or abs(way.apart_ns) <= _HOSTS_NS]
    if not trusted:
        return None
    return min(trusted, key=lambda way: (-way.overlap, way.spread_ns // _SCATTER_NS, abs(way.apart_ns))).offset


def fitting(reference: Sequence, other: Sequence) -> list[Fit]:
    """The ways in which two sequences fit and end together, with the most operations first."""
    if not len(reference) or not len(other):
        return []
    found = _fits(reference, other, _likely(reference, other))
    searchable = len(reference) * len(other) <= _SEARCHED
    sure = any(fit.overlap >= _FEW and fit.spread_ns <= _SAME_NS for fit in found)
    marked = (other.iteration >= 0).all() and (reference.iteration >= 0).all()
    if searchable and not (sure and marked):
        found = _fits(reference, other, np.arange(1 - len(other), len(reference)))
    return sorted(_steadiest(found), key=lambda fit: (-fit.overlap, fit.spread_ns))


def _steadiest(found: list[Fit]) -> list[Fit]:
    """The fits whose ends agree as well as those of the best one."""
    # One or two operations in common always agree, so they do not count.
    meaningful = [fit.spread_ns for fit in found if fit.overlap >= _FEW and fit.spread_ns <= _STEADY_NS]
    limit = max(3 * min(meaningful), _SAME_NS / 2) if meaningful else _STEADY_NS
    return [fit for fit in found if fit.spread_ns <= limit]


def _likely(reference: Sequence, other: Sequence) -> Integers:
    """Offsets at which iterations or captures begin or end together, or the clocks agree."""
    candidates = [0, len(reference) - len(other)]
    for number in np.intersect1d(reference.iteration, other.iteration):
        if number >= 0:
            mine, theirs = np.flatnonzero(reference.iteration == number), np.flatnonzero(other.iteration == number)
            candidates += [mine[0] - theirs[0], mine[-1] - theirs[-1]]
    place = np.clip(np.searchsorted(reference.end_ns, other.end_ns), 1, max(len(reference) - 1, 1))
    before, after = reference.end_ns[place - 1], reference.end_ns[np.minimum(place, len(reference) - 1)]
    nearest = np.where(other.end_ns - before < after - other.end_ns, place - 1, place)
    candidates.append(int(np.median(nearest - np.arange(len(other)))))
    return np.unique(np.array(candidates, np.int64))


def _fits(reference: Sequence, other: Sequence, candidates: Integers) -> list[Fit]:
    found = []
    for place in candidates.tolist():
        mine = slice(max(0, place), min(len(reference), place + len(other)))
        theirs = slice(mine.start - place, mine.stop - place)
        if mine.stop <= mine.start or (reference.signature[mine] != other.signature[theirs]).any():
            continue
        one, two = reference.iteration[mine], other.iteration[theirs]
        if ((one != two) & (one >= 0) & (two >= 0)).any():
            continue
        apart = reference.end_ns[mine] - other.end_ns[theirs]
        middle = int(np.sort(apart)[len(apart) // 2])
        # Mean, not median: a wrong offset is right within an iteration.
        spread = float(np.abs(apart - middle).mean())
        found.append(Fit(place, len(apart), spread, float(middle), bool(((one >= 0) & (two >= 0)).all())))
    return found
