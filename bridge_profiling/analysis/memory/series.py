"""What each device held over time, from whichever table recorded it, and where iterations end in it. Asks no questions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bridge_profiling.analysis.memory.recurrence import iteration_ends
from bridge_profiling.analysis.ranks.matching import tell
from bridge_profiling.analysis.ranks.waiting import rank_by_rank

if TYPE_CHECKING:
    import duckdb

Integers = NDArray[np.int64]

NOTHING = np.empty(0, np.int64)

# A stack is kilobytes long and there are few of them: rows carry its number. Cursors see the table.
_STACKS = """
create or replace table allocation_stacks as
select row_number() over (order by stack) - 1 as code, stack from (select distinct stack from allocations)
"""

# As torch counts it: memory is allocated until its tensor is gone, even while another stream may still use the block.
_ALLOCATIONS = """
select rank, coalesce(device, 0) as device, bytes, allocated_ns, coalesce(free_requested_ns, freed_ns) as freed_ns, code
from allocations join allocation_stacks on allocations.stack is not distinct from allocation_stacks.stack order by rank
"""

_SEGMENTS = "select rank, coalesce(device, 0) as device, bytes, allocated_ns, freed_ns from segments order by rank"

_TOTALS = """
select rank, coalesce(device, 0) as device, time_ns, total_allocated_bytes as allocated, total_reserved_bytes as reserved
from memory_events where lower(device_type) <> 'cpu' and total_allocated_bytes is not null order by rank, device, time_ns
"""


@dataclass(frozen=True)
class Series:
    """What one device of one rank held over time.

    Args:
        rank: global rank.
        device: its number in the process.
        source: `snapshot` or `kineto`.
        base: bytes allocated before the first change.
        time_ns: when the amount changed, ascending.
        allocated: bytes allocated from each time on.
        reserved_base: bytes reserved before the first change of that; None when unknown.
        reserved_ns: when the reserved amount changed, ascending.
        reserved: bytes reserved from each time on.
        allocations: rank, device, bytes, allocated_ns, freed_ns, code (of the stack); None without a snapshot.
    """

    rank: int
    device: int
    source: str
    base: int
    time_ns: Integers
    allocated: Integers
    reserved_base: int | None
    reserved_ns: Integers
    reserved: Integers
    allocations: pa.Table | None

    def at(self, time_ns: Integers) -> Integers:
        """Bytes allocated at some times."""
        return np.concatenate(([self.base], self.allocated))[np.searchsorted(self.time_ns, time_ns, side="right")]

    def reserved_at(self, time_ns: Integers) -> Integers | None:
        """Bytes reserved at some times; None when that is unknown."""
        if self.reserved_base is None:
            return None
        amounts = np.concatenate(([self.reserved_base], self.reserved))
        return amounts[np.searchsorted(self.reserved_ns, time_ns, side="right")]

    @property
    def peak(self) -> tuple[int, int | None]:
        """The most that was allocated, and since when, first; None when it was there before the recording began."""
        if not len(self.allocated) or self.allocated.max() < self.base:
            return self.base, None
        return int(self.allocated.max()), int(self.time_ns[self.allocated.argmax()])

    @property
    def needlessly_reserved(self) -> int | None:
        """Bytes reserved while as many of those reserved before were free, as far as they were never needed at once.

        None when what was reserved is unknown. A request that no hole is large enough for is served so; that what was
        allocated never came near to it says that holes were the reason, and not that all was in use a moment later.
        """
        if self.reserved_base is None:
            return None
        amounts = np.concatenate(([self.reserved_base], self.reserved))
        more = np.diff(amounts)
        free = amounts[:-1] - self.at(self.reserved_ns - 1)
        needless = int(more[(more > 0) & (free >= more)].sum())
        return min(needless, max(int(amounts.max()) - self.peak[0], 0))

    @property
    def end(self) -> int:
        """Bytes allocated when the recording ended."""
        return int(self.allocated[-1]) if len(self.allocated) else self.base


def device_series(connection: duckdb.DuckDBPyConnection, limitations: list[str]) -> Iterator[Series]:
    """Every device that a snapshot or a trace recorded memory of; a rank's snapshot is taken before its trace.

    Args:
        connection: of `session.connect`.
        limitations: what the recordings cannot tell is appended.
    """
    connection.execute(_STACKS)
    segments: dict[int, pa.Table] = dict(rank_by_rank(connection, _SEGMENTS))
    seen = set()
    for rank, table in rank_by_rank(connection.cursor(), _ALLOCATIONS):
        seen.add(rank)
        for device in np.unique(table["device"].to_numpy()).tolist():
            yield _of_snapshot(rank, device, _of_device(table, device), _of_device(segments.get(rank), device))
    for rank, table in rank_by_rank(connection.cursor(), _TOTALS):
        if rank in seen:
            continue
        for device in np.unique(table["device"].to_numpy()).tolist():
            yield _of_trace(rank, device, _of_device(table, device))
        tell(
            limitations,
            "a trace's memory events carry no call stacks and no allocations from before it began: allocation sites, what was "
            "live at the peak and fragmentation need a memory snapshot",
        )


def stacks(connection: duckdb.DuckDBPyConnection) -> list[str | None]:
    """The stacks by their code, once `device_series` has begun."""
    return [row[0] for row in connection.execute("select stack from allocation_stacks order by code").fetchall()]


def running(allocations: pa.Table) -> tuple[int, Integers, Integers]:
    """Bytes held before the first change, when the amount changed, and the amounts from then on.

    Args:
        allocations: bytes, allocated_ns (null: there from the beginning), freed_ns (null: still there).
    """
    size = allocations["bytes"].to_numpy()
    begun, gone = _known(allocations["allocated_ns"]), _known(allocations["freed_ns"])
    began, went = begun != _UNKNOWN, gone != _UNKNOWN
    time_ns = np.concatenate((gone[went], begun[began]))
    change = np.concatenate((-size[went], size[began]))
    # Of what happens at once, frees come first: a block that is freed and taken again counts once.
    order = np.argsort(time_ns, kind="stable")
    base = int(size[~began].sum())
    return base, time_ns[order], base + np.cumsum(change[order])


def live(allocations: pa.Table, time_ns: int | None) -> NDArray[np.bool_]:
    """Which allocations were live from a time on; None for before the recording began."""
    begun, gone = _known(allocations["allocated_ns"]), _known(allocations["freed_ns"])
    if time_ns is None:
        return begun == _UNKNOWN
    return (begun <= time_ns) & ((gone == _UNKNOWN) | (gone > time_ns))


def ends_of_iterations(
    connection: duckdb.DuckDBPyConnection, series: Series, limitations: list[str]
) -> tuple[Integers, list[int]]:
    """When iterations end in a series, and their numbers; no numbers where they are inferred from what repeats.

    Args:
        connection: of `session.connect`.
        series: one that `device_series` gave.
        limitations: a sentence is appended when nothing marks iterations.
    """
    first, last = (int(series.time_ns[0]), int(series.time_ns[-1])) if len(series.time_ns) else (0, -1)
    marked = connection.execute(
        """select distinct iteration, end_ns from iterations where rank = ? and end_ns >= ? and start_ns <= ?
        order by end_ns""",
        [series.rank, first, last],
    ).fetchall()
    if marked:
        return np.array([end for _, end in marked], np.int64), [number for number, _ in marked]
    found = NOTHING
    if series.allocations is not None:
        begun = _known(series.allocations["allocated_ns"])
        known = begun != _UNKNOWN
        kinds = series.allocations["code"].to_numpy() * (1 << 40) + series.allocations["bytes"].to_numpy()
        found = iteration_ends(kinds[known], begun[known])
    if len(found):
        tell(
            limitations,
            "nothing marks iterations in the memory recordings: they are inferred from the allocations that recur, which of a "
            "recording of a single iteration finds its microbatches",
        )
    else:
        tell(
            limitations,
            "nothing marks iterations in the memory recordings, and no allocations recur regularly: growth is unknown",
        )
    return found, []


#: Stands for null in arrays of times.
_UNKNOWN = np.iinfo(np.int64).min


def _known(column: pa.ChunkedArray) -> Integers:
    return column.fill_null(_UNKNOWN).to_numpy()


def _of_device(table: pa.Table | None, device: int) -> pa.Table | None:
    return None if table is None else table.filter(pa.array(table["device"].to_numpy() == device))


def _of_snapshot(rank: int, device: int, allocations: pa.Table, segments: pa.Table | None) -> Series:
    base, time_ns, allocated = running(allocations)
    if segments is None or not len(segments):
        return Series(rank, device, "snapshot", base, time_ns, allocated, None, NOTHING, NOTHING, allocations)
    return Series(rank, device, "snapshot", base, time_ns, allocated, *running(segments), allocations)


def _of_trace(rank: int, device: int, totals: pa.Table) -> Series:
    time_ns, allocated = totals["time_ns"].to_numpy(), totals["allocated"].to_numpy()
    reserved = totals["reserved"].fill_null(0).to_numpy()
    known = len(totals) > totals["reserved"].null_count
    # What was there before the first event is not written; after it, the total is.
    return Series(
        rank,
        device,
        "kineto",
        int(allocated[0]),
        time_ns,
        allocated,
        int(reserved[0]) if known else None,
        time_ns if known else NOTHING,
        reserved if known else NOTHING,
        None,
    )
