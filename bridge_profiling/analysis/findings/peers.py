"""Ranks with the same work, and how one differs from the others: in compute, in kernels, in single iterations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bridge_profiling.analysis.findings.evidence import Evidence
from bridge_profiling.analysis.findings.ledger import Grid
from bridge_profiling.analysis.findings.types import Thresholds
from bridge_profiling.analysis.ranks.matching import POINT_TO_POINT

#: A kernel with a smaller share of a rank's excess is noise.
_WORTH_SHOWING = 0.01

#: A process that shares a GPU interrupts whichever kernel runs, for a slice of 1 to 3 ms: the longest execution of a kernel
#: is then this many times as long as on other ranks, and this much longer. So many different kernels are no coincidence.
_SLICED, _SLICE_US, _SLICED_KERNELS = 3.0, 1_000.0, 3

#: Ranks that launch as many kernels, to this share, do the same on data of another size.
_AS_MANY = 0.02

#: A rank that takes turns is the slowest in so many iterations.
_TURNS = 2


@dataclass(frozen=True)
class ExtraKernel:
    """What a rank has of a kernel beyond its peers, per iteration; `of_count_us` is the time of additional executions."""

    name: str
    extra_us: float
    extra_count: float
    of_count_us: float


def peers_of(evidence: Evidence) -> list[list[int]]:
    """Sets of ranks with the same work, as columns of grids: ranks of one pipeline stage; ranks of unknown work are alone."""
    places = {info.rank: (info.coordinates or {}).get("pp") for info in evidence.infos}
    stages: dict[int, int | str] = {rank: place[0] for rank, place in places.items() if place is not None}
    if len(stages) < len(evidence.ranks):
        stages |= {row["rank"]: row["stage"] for row in evidence.pipeline_by_rank.to_pylist()}
    # Sends and receives without a group show that there are stages, but not which.
    unknown = not stages and any(
        row["operation"] in POINT_TO_POINT and row["group_ranks"] is None
        for row in evidence.communication.select(["operation", "group_ranks"]).to_pylist()
    )
    sets: dict[int | str | None, list[int]] = {}
    for place, rank in enumerate(evidence.ranks):
        sets.setdefault(f"rank {rank}" if unknown else stages.get(rank), []).append(place)
    return list(sets.values())


def beyond_peers(grid: Grid, peers: list[list[int]]) -> Grid:
    """The difference to the median of the peers; NaN without a captured peer.

    The lower of two middle values is taken, so that a slow half of the ranks is still found.
    """
    found = np.full(grid.shape, np.nan)
    for places in peers:
        mine = grid[:, places]
        captured = (~np.isnan(mine)).sum(axis=1)
        middle = np.sort(mine, axis=1)[np.arange(len(mine)), np.maximum(captured - 1, 0) // 2]  # NaN is sorted last
        found[:, places] = np.where(captured[:, None] > 1, mine - middle[:, None], np.nan)
    return found


def kernels_beyond_peers(evidence: Evidence, peers: list[list[int]], rank: int) -> list[ExtraKernel]:
    """Kernels that take longer on a rank than on its peers, most first, from whole captures."""
    mine = next(places for places in peers if evidence.ranks.index(rank) in places)
    others = [evidence.ranks[place] for place in mine if evidence.ranks[place] != rank]
    by_name: dict[str, dict[int, tuple[float, float]]] = defaultdict(dict)
    for row in evidence.kernels.to_pylist():
        if row["kind"] == "compute" and (row["rank"] == rank or row["rank"] in others):
            iterations = evidence.captured_iterations.get(row["rank"], 1)
            by_name[row["name"]][row["rank"]] = row["count"] / iterations, row["total_us"] / iterations
    found = []
    for name, ranks in by_name.items():
        count, total = ranks.get(rank, (0.0, 0.0))
        usual_count, usual = (float(np.median([ranks.get(other, (0.0, 0.0))[each] for other in others])) for each in (0, 1))
        each_us = usual / usual_count if usual_count else total / count if count else 0.0
        # Additional executions can have other sizes, so all of the additional time is theirs.
        more_us = total - usual if count > usual_count else (count - usual_count) * each_us
        found.append(ExtraKernel(name, total - usual, count - usual_count, more_us))
    found.sort(key=lambda each: (-each.extra_us, each.name))
    enough = _WORTH_SHOWING * sum(max(each.extra_us, 0.0) for each in found)
    return [each for each in found if each.extra_us > enough]


def take_turns(evidence: Evidence, excess_us: Grid, thresholds: Thresholds) -> dict[int, float]:
    """The share of iterations in which each of several ranks is the slowest; empty unless two or more take turns."""
    if excess_us.size == 0 or evidence.per == "capture":
        return {}
    filled = np.nan_to_num(excess_us, nan=-np.inf)
    struck = filled.max(axis=1) > thresholds.cause * evidence.iteration_us
    slowest = filled.argmax(axis=1)[struck]
    count = {rank: int((slowest == place).sum()) for place, rank in enumerate(evidence.ranks)}
    turns = {rank: times / len(evidence.numbers) for rank, times in count.items() if times >= _TURNS}
    return turns if len(turns) > 1 and struck.mean() > 0.5 else {}


def contended_ranks(evidence: Evidence, peers: Sequence[Sequence[int]]) -> list[int]:
    """Ranks whose kernels are interrupted for slices of time, as another process on the GPU does."""
    longest: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for row in evidence.kernels.to_pylist():
        if row["kind"] == "compute":
            longest[row["name"]][row["rank"]] = row
    found = []
    for places in peers:
        members = [evidence.ranks[place] for place in places]
        for rank in members:
            others = [other for other in members if other != rank]
            sliced = 0
            for rows in longest.values():
                usual = [rows[other]["max_us"] for other in others if other in rows]
                if rank in rows and usual:
                    limit = max(_SLICED * float(np.median(usual)), float(np.median(usual)) + _SLICE_US)
                    # Not a kernel with executions of several sizes: the mean stays below a slice.
                    sliced += rows[rank]["max_us"] > limit and rows[rank]["mean_us"] < rows[rank]["max_us"] / 2
            if sliced >= _SLICED_KERNELS:
                found.append(rank)
    return found


def differ_in_size(evidence: Evidence, peers: Sequence[Sequence[int]], thresholds: Thresholds) -> dict[int, float]:
    """Ranks that take turns in computing longer with as many kernels, with their shares: their data differ in size."""
    turns = take_turns(evidence, beyond_peers(evidence.compute_us, list(map(list, peers))), thresholds)
    if not turns or set(turns) & set(contended_ranks(evidence, peers)):
        return {}
    count = evidence.grid(evidence.launch_statistics, "kernel_count")
    for places in peers:
        mine = count[:, list(places)]
        if np.nanmax(np.nanmax(mine, axis=1) / np.maximum(np.nanmin(mine, axis=1), 1.0)) > 1 + _AS_MANY:
            return {}
    return turns
