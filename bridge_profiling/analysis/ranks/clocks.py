"""How the ranks' clocks differ, from the operations they ended together. Moves no time itself: says by how much to.

All participants of a collective end it nearly together (within 1 to 10 us on NVLink, measured on H200 captures), so the median
difference of two ranks' ends is the difference of their clocks. Differences of groups make a graph; the offsets are its
weighted least-squares solution, one per rank, and what no offset explains is the residual.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from bridge_profiling.analysis.ranks.matching import match, tell
from bridge_profiling.traces.types import RankInfo

if TYPE_CHECKING:
    import duckdb

#: Operations that end together on all participants. A sender or a root can be done before the others are.
_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")

#: Ends of one operation scatter by this at least: differences of few operations that happen to agree are no better known.
_FLOOR_NS = 1_000.0

#: Ranks of one host have one clock; offsets between them beyond this say that something else differs.
_ONE_HOST_NS = 100_000

#: A residual beyond this is no scatter of ends: the clocks drift, or operations were matched that are not the same.
_RESIDUAL_NS = 1_000_000

# A difference per pair of ranks that share operations: everyone's to the lowest captured rank of the operation.
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
select rank, count(*) as operations, median(abs(apart_ns)) as residual_ns, max(abs(apart_ns)) as max_residual_ns
from usable where together or not any_together group by rank
"""


def clock_offsets(connection: duckdb.DuckDBPyConnection, infos: Sequence[RankInfo], *, limitations: list[str]) -> pa.Table:
    """What to add to each rank's times to put all ranks on one clock.

    Args:
        connection: of `session.connect`.
        infos: what is known of the ranks.
        limitations: sentences are appended: clocks that cannot be related, or that do not fit.

    Returns:
        A row per rank: rank; component (its number among the sets of ranks that shared operations relate); reference (the
        component's lowest rank, whose clock is taken); offset_ns, to be added to the rank's times; residual_ns and
        max_residual_ns, the median and the largest deviation of its ends of collectives from the participants' mean after
        that, null without any; operations, how many there were. Where nothing relates two ranks, each keeps its own clock
        (offset 0), and `limitations` says so.
    """
    match(connection, limitations=limitations)
    ranks = np.array(sorted({info.rank for info in infos}), np.int64)
    component, offset = _solve(ranks, connection.sql(_DIFFERENCES).to_arrow_table())
    reference = ranks[component]
    offset_ns = np.rint(offset).astype(np.int64)
    solved = pa.table({"rank": ranks, "offset_ns": offset_ns, "component": component, "reference": reference})
    connection.register("solved", solved)
    connection.execute("create or replace temp table offsets as select rank::integer as rank, offset_ns from solved")
    found = connection.sql(
        f"""select solved.rank::integer as rank, dense_rank() over (order by component)::integer - 1 as component,
            reference::integer as reference, offset_ns, residual_ns, max_residual_ns, coalesce(operations, 0) as operations
        from solved left join ({_RESIDUALS}) using (rank) order by rank"""
    ).to_arrow_table()
    connection.unregister("solved")
    tell(limitations, *_doubts(found, infos))
    return found


def use_offsets(connection: duckdb.DuckDBPyConnection, infos: Sequence[RankInfo], *, limitations: list[str]) -> None:
    """Make the temporary table `offsets` (rank, offset_ns), for questions that compare times of different ranks."""
    clock_offsets(connection, infos, limitations=limitations)


def _solve(ranks: np.ndarray, differences: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """The component of each rank, as its lowest rank's place, and the offset of each in nanoseconds."""
    columns = {name: differences[name].to_numpy() for name in differences.column_names}
    source = np.searchsorted(ranks, columns["reference"])
    target = np.searchsorted(ranks, columns["rank"])
    together = columns["together"].astype(bool)
    component = _components(len(ranks), source[together], target[together])
    # Sends, receives and broadcasts relate what collectives do not; where both do, collectives are trusted.
    used = together | (component[source] != component[target])
    component = _components(len(ranks), source[used], target[used])
    spread = columns["spread_ns"][used].astype(float) + _FLOOR_NS
    weight = np.minimum(columns["operations"][used], 1000) / spread**2
    offset = _least_squares(len(ranks), source[used], target[used], -columns["difference_ns"][used].astype(float), weight)
    return component, offset - offset[component]


def _components(count: int, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The lowest node that each node is connected to."""
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
    """Node values whose differences along edges, target less source, come nearest to those given: conjugate gradients."""
    weight = weight / weight.mean() if len(weight) else weight

    def product(values: np.ndarray) -> np.ndarray:
        flow = weight * (values[target] - values[source])
        return np.bincount(target, flow, count) - np.bincount(source, flow, count)

    value = np.zeros(count)
    flow = weight * difference
    left = np.bincount(target, flow, count) - np.bincount(source, flow, count)
    # Scaled by the diagonal: weights of groups differ by orders of magnitude.
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


def _doubts(found: pa.Table, infos: Sequence[RankInfo]) -> list[str]:
    """What the offsets do not say, or say of the captures."""
    rows = found.to_pylist()
    told = []
    components = {row["component"] for row in rows}
    unknown = [info.rank for info in infos if info.clock != "unix"]
    if len(components) > 1:
        apart = f"no operation relates the clocks of {len(components)} sets of ranks"
        told.append(
            f"{apart}, and those of {len(unknown)} ranks count from an unknown moment: sets cannot be compared in time"
            if unknown
            else f"{apart}: their times are compared as the hosts' clocks give them"
        )
    offsets = {row["rank"]: row["offset_ns"] for row in rows}
    hosts: dict[tuple[str, int], list[int]] = {}
    component = {row["rank"]: row["component"] for row in rows}
    for info in infos:
        if info.host is not None and info.clock == "unix":
            hosts.setdefault((info.host, component[info.rank]), []).append(info.rank)
    for (host, _), ranks in sorted(hosts.items()):
        spread = max(offsets[rank] for rank in ranks) - min(offsets[rank] for rank in ranks)
        if spread > _ONE_HOST_NS:
            told.append(
                f"the ranks of host {host} share a clock, yet their collectives end {spread / 1e3:.0f} us apart: operations "
                "that are not the same may be matched, or a capture's times are off"
            )
    doubtful = [row for row in rows if (row["residual_ns"] or 0) > _RESIDUAL_NS]
    if doubtful:
        worst = max(doubtful, key=lambda row: row["residual_ns"])
        told.append(
            f"the clock offsets of {len(doubtful)} ranks are uncertain: after them the collectives of rank {worst['rank']} "
            f"still end {worst['residual_ns'] / 1e3:.0f} us from the other participants'"
        )
    return told
