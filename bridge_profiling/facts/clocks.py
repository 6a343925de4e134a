"""One clock and one numbering of iterations for all ranks, from what they end together.

All participants of a collective end it nearly together (within 1 to 10 us on NVLink, measured on H200 captures), so the median
difference between two ranks' ends is the difference between their clocks. The differences of all groups form a graph; the
offsets are its weighted least-squares solution, and the rest is the residual.

Iterations that no range numbers are numbered from the first in each capture, and captures of ranks can begin in different ones.
Devices finish the same iteration together, because each one ends with communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bridge_profiling.facts.types import Answer, Connection, caveat, queried, schema
from bridge_profiling.traces.types import Caveat, RankInfo

#: Operations that end together on all participants. A sender or a root can end before the others.
_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")

#: Least scatter of the ends of one operation: differences of a few operations that happen to agree are not more precise.
_FLOOR_NS = 1_000.0

#: Larger offsets between ranks of one host, which share a clock, mean that something else is wrong.
_ONE_HOST_NS = 100_000

#: A larger residual is not scatter: the clocks drift, or different operations were matched.
_RESIDUAL_NS = 1_000_000

# Differences per pair of ranks: from each participant to the lowest captured rank of the operation.
_DIFFERENCES = f"""
with first as (
    select *, min(rank) over (partition by match) as reference,
        arg_min(end_ns, rank) over (partition by match) as reference_end_ns
    from matched
)
select rank, reference, operation in {_TOGETHER} as together, median(end_ns - reference_end_ns) as difference_ns,
    mad(end_ns - reference_end_ns) as spread_ns, count(*) as operations
from first where rank <> reference group by rank, reference, together order by all
"""

_RESIDUALS = f"""
with placed as (
    -- Differences first: a Unix time in nanoseconds has more digits than an average of doubles keeps.
    select rank, match, operation in {_TOGETHER} as together,
        end_ns + offset_ns - min(end_ns + offset_ns) over (partition by match) as later_ns
    from matched join offsets using (rank)
), apart as (
    select rank, together, later_ns - avg(later_ns) over (partition by match) as apart_ns from placed
), usable as (
    select *, bool_or(together) over (partition by rank) as any_together from apart
)
select rank, count(*) as operations, round(median(abs(apart_ns))) as residual_ns, round(max(abs(apart_ns))) as max_residual_ns
from usable where together or not any_together group by rank
"""


_OFFSETS = schema(
    *("rank", "component", "reference", "offset_ns", "residual_ns", "max_residual_ns", "operations"),
    **dict.fromkeys(("component", "reference"), pa.int32()),
)


def clock_offsets(connection: Connection | None, infos: Sequence[RankInfo]) -> Answer:
    """Offsets to add to each rank's times to put all ranks on one clock. Needs `matching.match`, unless no rank communicates.

    Returns:
        A row per rank: rank; component (number of the set of ranks that shared operations relate); reference (the lowest rank
        of the component, whose clock is used); offset_ns; residual_ns and max_residual_ns (median and largest deviation of its
        ends of collectives from the participants' mean, null without any); operations (their number). Ranks of different
        components keep their own clocks.
    """
    ranks = np.array(sorted({info.rank for info in infos}), np.int64)
    if connection is None:
        nothing, unknown = [0] * len(ranks), [None] * len(ranks)
        columns = (ranks, np.arange(len(ranks)), ranks, nothing, unknown, unknown, nothing)
        found = pa.table(dict(zip(_OFFSETS.names, columns, strict=True)), _OFFSETS)
        return Answer(found, tuple(_caveats(found, infos)))
    component, offset = _solve(ranks, connection.sql(_DIFFERENCES).to_arrow_table())
    offset_ns = np.rint(offset).astype(np.int64)
    offsets = pa.table({"rank": ranks, "offset_ns": offset_ns, "component": component, "reference": ranks[component]})
    query = f"""select offsets.rank::integer as rank, dense_rank() over (order by component)::integer - 1 as component,
            reference::integer as reference, offset_ns, residual_ns, max_residual_ns, coalesce(operations, 0) as operations
        from offsets left join ({_RESIDUALS}) using (rank) order by rank"""
    found = queried(connection, query, offsets=offsets)
    return Answer(found, tuple(_caveats(found, infos)))


def _solve(ranks: np.ndarray, differences: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """The component of each rank (the index of its lowest rank), and each rank's offset in nanoseconds."""
    columns = {name: differences[name].to_numpy() for name in differences.column_names}
    source = np.searchsorted(ranks, columns["reference"])
    target = np.searchsorted(ranks, columns["rank"])
    together = columns["together"].astype(bool)
    component = _components(len(ranks), source[together], target[together])
    # Sends, receives and broadcasts count only between ranks that no collective relates.
    used = together | (component[source] != component[target])
    component = _components(len(ranks), source[used], target[used])
    spread = columns["spread_ns"][used].astype(float) + _FLOOR_NS
    weight = np.minimum(columns["operations"][used], 1000) / spread**2
    offset = _least_squares(len(ranks), source[used], target[used], -columns["difference_ns"][used].astype(float), weight)
    return component, offset - offset[component]


def _components(count: int, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The lowest node connected to each node."""
    lowest = np.arange(count)
    while True:
        before = lowest.copy()
        least = np.minimum(lowest[source], lowest[target])
        np.minimum.at(lowest, source, least)
        np.minimum.at(lowest, target, least)
        lowest = lowest[lowest]
        if (lowest == before).all():
            return lowest


def _least_squares(
    count: int, source: np.ndarray, target: np.ndarray, difference: np.ndarray, weight: np.ndarray
) -> np.ndarray:
    """Node values whose differences along edges, target minus source, are nearest to those given: conjugate gradients."""
    weight = weight / weight.mean() if len(weight) else weight

    def product(values: np.ndarray) -> np.ndarray:
        flow = weight * (values[target] - values[source])
        return np.bincount(target, flow, count) - np.bincount(source, flow, count)

    value = np.zeros(count)
    flow = weight * difference
    left = np.bincount(target, flow, count) - np.bincount(source, flow, count)
    # Scaled by the diagonal, since weights of groups differ by orders of magnitude.
    scale = np.bincount(target, weight, count) + np.bincount(source, weight, count)
    scale = np.where(scale > 0, scale, 1.0)
    step = left / scale
    strength = left @ step
    smallest = strength * 1e-24
    for _ in range(4 * count):
        if strength <= smallest:
            break
        pushed = product(step)
        length = strength / (step @ pushed)
        value += length * step
        left -= length * pushed
        previous, strength = strength, left @ (left / scale)
        step = left / scale + (strength / previous) * step
    return value


def _caveats(found: pa.Table, infos: Sequence[RankInfo]) -> Iterator[Caveat]:
    rows = found.to_pylist()
    offsets = {row["rank"]: row["offset_ns"] for row in rows}
    component = {row["rank"]: row["component"] for row in rows}
    sets = len(set(component.values()))
    if sets > 1:
        unknown = sum(1 for info in infos if info.clock != "unix")
        consequence = ": their times are compared by the hosts' clocks"
        if unknown:
            consequence = (
                f", and the clocks of {unknown} ranks have an unknown origin: times of different sets cannot be compared"
            )
        yield caveat("clocks_unrelated", sets=sets, consequence=consequence)
    hosts: dict[tuple[str, int], list[int]] = {}
    for info in infos:
        if info.host is not None and info.clock == "unix":
            hosts.setdefault((info.host, component[info.rank]), []).append(info.rank)
    for (host, _), ranks in sorted(hosts.items()):
        spread = max(offsets[rank] for rank in ranks) - min(offsets[rank] for rank in ranks)
        if spread > _ONE_HOST_NS:
            yield caveat("one_host_apart", host=host, spread_us=spread / 1e3)
    doubtful = [row for row in rows if (row["residual_ns"] or 0) > _RESIDUAL_NS]
    if doubtful:
        worst = max(doubtful, key=lambda row: row["residual_ns"])
        yield caveat("offsets_uncertain", count=len(doubtful), rank=worst["rank"], residual_us=worst["residual_ns"] / 1e3)


Integers = NDArray[np.integer[Any]]

_INFERRED = "iterations_inferred"

#: Iterations are the same if their ends are at most this share of an iteration apart, by clocks that a network may synchronize.
_SAME = 0.25


def offsets(captures: Sequence[tuple[RankInfo, pa.Table]]) -> dict[int, int]:
    """What to add to each rank's numbers; nothing unless all ranks' iterations are inferred, and their ends agree.

    Args:
        captures: of one profiler, with their facts `kernel_times`.
    """
    inferred = [any(caveat.code == _INFERRED for caveat in info.caveats) for info, _ in captures]
    if len(captures) < 2 or not all(inferred):
        return {}
    # The host may run ahead of the device: an iteration ends when what it launched does.
    ends = {}
    for info, times in captures:
        known = times.filter(pc.and_(times["iteration"].is_valid(), times["compute_end_ns"].is_valid()))
        ends[info.rank] = known["iteration"].to_numpy(), known["compute_end_ns"].to_numpy()
    first, *others = sorted(ends)
    found = {first: 0}
    for rank in others:
        offset = _offset(ends[rank], ends[first])
        if offset is None:
            return {}
        found[rank] = offset
    least = min(found.values())
    return {rank: offset - least for rank, offset in found.items()}


def renumbered(table: pa.Table, offset: int) -> pa.Table:
    """A table with other numbers of iterations, if it has any."""
    if not offset or "iteration" not in table.column_names:
        return table
    place = table.column_names.index("iteration")
    column = table["iteration"]
    return table.set_column(place, table.field(place), pc.add(column, pa.scalar(offset, column.type)))


def _offset(ends: tuple[Integers, Integers], others: tuple[Integers, Integers]) -> int | None:
    """By how much a rank's numbers are below another one's; None if no iterations of both end together.

    Args:
        ends: the numbers of the rank's iterations, and when these end.
        others: those of the other rank.
    """
    (number, end_ns), (other_number, other_end_ns) = ends, others
    if not len(end_ns) or len(other_end_ns) < 2:
        return None
    # One by one: a matrix of all pairs would take gigabytes for a long capture.
    nearest = np.array([np.abs(other_end_ns - each).argmin() for each in end_ns.tolist()])
    shift, apart_ns = other_number[nearest] - number, np.abs(other_end_ns[nearest] - end_ns)

    def usual(offset: int) -> float:
        return float(np.median(apart_ns[shift == offset]))

    offset = max(dict.fromkeys(shift.tolist()), key=lambda each: (int((shift == each).sum()), -usual(each)))
    return offset if usual(offset) <= _SAME * np.median(np.diff(np.sort(other_end_ns))) else None
