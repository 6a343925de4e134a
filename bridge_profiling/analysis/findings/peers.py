"""Ranks that do the same work, and what one of them has beyond the others. Judges nothing.

Pipeline stages do different work: their ranks are compared with those of the same stage only.
"""

from __future__ import annotations

import numpy as np

from bridge_profiling.analysis.findings.books import Grid
from bridge_profiling.analysis.findings.context import Context
from bridge_profiling.analysis.ranks.matching import POINT_TO_POINT


def peers(context: Context) -> list[list[int]]:
    """Sets of ranks that do the same work, as places in `context.ranks`; a rank of which that is unknown is alone.

    The stage is the manifest's or the trace's pipeline coordinate, else what sends and receives show.

    Args:
        context: of one run.
    """
    places = {info.rank: (info.coordinates or {}).get("pp") for info in context.infos}
    stages: dict[int, int | str] = {rank: place[0] for rank, place in places.items() if place is not None}
    if len(stages) < len(context.ranks):
        stages |= {row["rank"]: row["stage"] for row in context.run.pipeline(by_rank=True).to_pylist()}
    # Sends and receives without a group say that there are stages, and not which.
    unknown = not stages and _exchanges_with_unknown(context)
    sets: dict[int | str | None, list[int]] = {}
    for place, rank in enumerate(context.ranks):
        sets.setdefault(f"rank {rank}" if unknown else stages.get(rank), []).append(place)
    return list(sets.values())


def beyond_peers(grid: Grid, sets: list[list[int]]) -> Grid:
    """What each rank has beyond the median of its peers; of an even number the lower of the two in the middle is taken.

    With the lower one, half of the ranks can be slow and are seen. NaN where a rank has no peer in an iteration.

    Args:
        grid: of a context.
        sets: what `peers` gave.
    """
    found = np.full(grid.shape, np.nan)
    for places in sets:
        mine = grid[:, places]
        captured = (~np.isnan(mine)).sum(axis=1)
        middle = np.sort(mine, axis=1)[np.arange(len(mine)), np.maximum(captured - 1, 0) // 2]  # NaN is sorted last
        found[:, places] = np.where(captured[:, None] > 1, mine - middle[:, None], np.nan)
    return found


def _exchanges_with_unknown(context: Context) -> bool:
    rows = context.run.communication().select(["operation", "group_ranks"]).to_pylist()
    return any(row["operation"] in POINT_TO_POINT and row["group_ranks"] is None for row in rows)
