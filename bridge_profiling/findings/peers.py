"""Ranks with the same work, and how one differs from the others: a shared GPU, data of another size, more or slower kernels."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge_profiling.facts.idle import Cause
from bridge_profiling.findings.grids import Grids
from bridge_profiling.findings.ledger import Ledger
from bridge_profiling.findings.rule import Evidence
from bridge_profiling.findings.types import Confidence, Event, Grid, Thresholds, by_rank

#: A finding shows so many kernels.
KERNELS = 5

#: A kernel with a smaller share of a rank's excess is noise.
_WORTH_SHOWING = 0.01

#: A difference between ranks must exceed the usual change from iteration to iteration, and that between peers, this many times.
_NOISE = 2.0

#: A process that shares a GPU interrupts whichever kernel runs, for a slice of 1 to 3 ms: the longest execution of a kernel
#: is then this many times as long as on other ranks, and this much longer. So many different kernels rule out coincidence.
#: One is enough on a rank whose device also idles between launched kernels for this share of an iteration more than its peers':
#: slices begin there too. Without another process the difference is below 0.01.
_SLICED, _SLICE_US, _SLICED_KERNELS, _STALLED = 3.0, 1_000.0, 3, 0.03

#: Ranks that launch as many kernels, to this share, do the same on data of another size.
_AS_MANY = 0.02

#: Communication slows compute that it overlaps by at most this share of the overlap.
CONTENTION = 0.5

#: A rank takes turns if it is the slowest in at least this many iterations.
_TURNS = 2

#: One is enough if in each of more iterations one rank alone is slow, and costs as much as in the others up to this share:
#: neither chance nor a rank that is always slow does that. A rank is slow alone if the next one costs less than this share.
_EQUAL, _ALONE = 0.25, 0.5


@dataclass(frozen=True)
class ExtraKernel:
    """What a rank has of a kernel beyond its peers, per iteration; `of_count_us` is the time of additional executions."""

    name: str
    extra_us: float
    extra_count: float
    of_count_us: float


def kernels_beyond_peers(grids: Grids, rank: int) -> list[ExtraKernel]:
    """Kernels that take longer on a rank than on its peers, most first, from whole captures."""
    names, count, total_us = _executions(grids)
    mine, others = _mine_and_others(grids, rank)
    usual, usual_us = (np.median(grid[:, others], axis=1) for grid in (count, total_us))
    more, extra_us = count[:, mine] - usual, total_us[:, mine] - usual_us
    # Additional executions can have other sizes, so all of the additional time is theirs.
    more_us = np.where(more > 0, extra_us, more * (usual_us / np.maximum(usual, 1e-9)))
    columns = (extra_us.tolist(), more.tolist(), more_us.tolist())
    found = [ExtraKernel(*each) for each in zip(names, *columns, strict=True)]
    found.sort(key=lambda each: (-each.extra_us, each.name))
    enough = _WORTH_SHOWING * sum(max(each.extra_us, 0.0) for each in found)
    return [each for each in found if each.extra_us > enough]


def _mine_and_others(grids: Grids, rank: int) -> tuple[int, list[int]]:
    """The places of a rank and of its peers."""
    mine = grids.ranks.index(rank)
    return mine, [place for places in grids.peers if mine in places for place in places if place != mine]


def unlike_peers(grids: Grids, excess: Grid) -> list[int]:
    """Ranks with more than their peers have, beyond the changes between iterations and the differences among the peers."""
    typical = grids.typical_us(excess)
    found = []
    for places in grids.peers:
        ranks = [grids.ranks[place] for place in places if grids.ranks[place] in typical]
        differences = sorted(abs(typical[rank]) for rank in ranks)
        usual_us = differences[(len(differences) - 1) // 2] if differences else 0.0
        for rank in ranks:
            by_iteration = excess[:, grids.ranks.index(rank)]
            change_us = float(np.nanmedian(np.abs(by_iteration - typical[rank])))
            if typical[rank] > _NOISE * max(change_us, usual_us):
                found.append(rank)
    return sorted(found)


def excess_compute_us(grids: Grids) -> Grid:
    """Compute beyond the peers'.

    Communication of a rank that waits slows its compute: half of that overlap is not its own. Executions of kernels beyond the
    peers' are, even where the peers compute as long because they are slowed.
    """
    excess = grids.beyond_peers(grids.compute_us)
    if grids.has_device:
        overlapped = grids.overlapped_us
        mine, theirs = (CONTENTION * np.maximum(np.nan_to_num(grids.beyond_peers(sign * overlapped)), 0.0) for sign in (1, -1))
        more = grids.beyond_peers(grids.grid("launch_statistics", "kernel_count")) > 0
        own = np.where(more, np.minimum(_of_more_executions_us(grids), excess + theirs), -np.inf)
        excess = np.maximum(excess - np.minimum(mine, np.maximum(excess, 0.0)), own)
    return excess


def _executions(grids: Grids) -> tuple[list[str], Grid, Grid]:
    """Names of kernels; of each one (rows) on each rank (columns), per iteration, executions and their time in microseconds."""
    places = {rank: place for place, rank in enumerate(grids.ranks)}
    lines = {name: line for line, name in enumerate(dict.fromkeys(row["name"] for row in grids.compute_kernels))}
    count, total_us = (np.zeros((len(lines), len(places))) for _ in range(2))
    for row in grids.compute_kernels:
        if row["rank"] in places:
            at = lines[row["name"]], places[row["rank"]]
            iterations = grids.captured_iterations.get(row["rank"], 1)
            count[at] = row["count"] / iterations
            total_us[at] = row["total_us"] / iterations
    return list(lines), count, total_us


def _of_more_executions_us(grids: Grids) -> NDArray[np.float64]:
    """Time per iteration of each rank's executions of kernels beyond its peers', less that of those that it lacks."""
    _, count, total_us = _executions(grids)
    more, more_us = (np.nan_to_num(grids.beyond_peers(grid)) for grid in (count, total_us))
    fewer = more < 0
    more_us[fewer] = (more * (total_us - more_us) / np.maximum(count - more, 1e-9))[fewer]
    more_us[more == 0] = 0.0
    return more_us.sum(axis=0)


def take_turns(grids: Grids, excess_us: Grid, least_us: float, *, often: float = 0.5) -> dict[int, float]:
    """The share of iterations in which each of two or more ranks is the slowest; empty unless two or more take turns.

    Args:
        least_us: a smaller excess does not make a rank slow.
        often: in a larger share of iterations one must be.
    """
    if excess_us.size == 0 or grids.per == "capture":
        return {}
    filled = np.nan_to_num(excess_us)
    following, most = np.sort(filled, axis=1)[:, -2:].T
    struck = most > least_us
    slowest = filled.argmax(axis=1)[struck]
    count = {rank: int((slowest == place).sum()) for place, rank in enumerate(grids.ranks)}
    equal = (np.abs(most - np.median(most)) < _EQUAL * np.median(most)) & (following < _ALONE * most) & struck
    least = 1 if len(equal) > _TURNS and equal.all() else _TURNS
    turns = {rank: times / len(grids.numbers) for rank, times in count.items() if times >= least}
    return turns if len(turns) > 1 and struck.mean() > often else {}


def contended_ranks(grids: Grids) -> list[int]:
    """Ranks whose kernels are interrupted for slices of time, as another process on the GPU does."""
    longest: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for row in grids.compute_kernels:
        longest[row["name"]][row["rank"]] = row
    stalled = grids.beyond_peers(grids.idle_us(Cause.dependency_stalled))
    usual = grids.typical_us(stalled)
    stalling = [rank for rank in unlike_peers(grids, stalled) if grids.share(usual[rank]) > _STALLED]
    sliced = dict.fromkeys(grids.ranks, 0)
    for places, rows in itertools.product(grids.peers, longest.values()):
        present = [rank for place in places if (rank := grids.ranks[place]) in rows]
        if len(present) > 1:
            most, mean = (np.array([rows[rank][name] for rank in present]) for name in ("max_us", "mean_us"))
            others = _median_of_others(most)
            # Not a kernel with executions of several sizes: the mean stays below a slice.
            hit = (most > np.maximum(_SLICED * others, others + _SLICE_US)) & (mean < most / 2)
            for place in np.flatnonzero(hit):
                sliced[present[place]] += 1
    members = (grids.ranks[place] for places in grids.peers for place in places)
    return [rank for rank in members if sliced[rank] >= (1 if rank in stalling else _SLICED_KERNELS)]


def _median_of_others(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each of two or more values the median of all the others."""
    order = np.argsort(values)
    ascending, place = values[order], np.argsort(order)
    others = len(values) - 1

    def kth(k: int) -> NDArray[np.float64]:
        return ascending[k + (k >= place)]

    return (kth((others - 1) // 2) + kth(others // 2)) / 2


def differ_in_size(grids: Grids, thresholds: Thresholds) -> dict[int, float]:
    """Ranks that take turns in computing longer with as many kernels, with their shares: their data differ in size."""
    turns = take_turns(grids, excess_compute_us(grids), thresholds.cause * grids.iteration_us)
    if not turns or set(turns) & set(contended_ranks(grids)):
        return {}
    count = grids.grid("launch_statistics", "kernel_count")
    for places in grids.peers:
        mine = count[:, places]
        if np.nanmax(np.nanmax(mine, axis=1) / np.maximum(np.nanmin(mine, axis=1), 1.0)) > 1 + _AS_MANY:
            return {}
    return turns


# The findings that these show.


def contended_device(grids: Grids, thresholds: Thresholds, ledger: Ledger) -> Iterator[Evidence]:
    """Another process uses a rank's GPU: the same kernels are sometimes interrupted there, and the other ranks wait."""
    ranks = contended_ranks(grids) if len(grids.ranks) > 1 else []
    # Between kernels, the other process has the device too.
    stalled = ledger.left_us(Cause.dependency_stalled)
    stalled = np.minimum(stalled, np.maximum(np.nan_to_num(grids.beyond_peers(stalled)), 0.0))
    slower = np.maximum(np.nan_to_num(grids.beyond_peers(grids.compute_us)), 0.0)
    here = np.isin(grids.ranks, ranks)
    excess = grids.mean_us(np.where(here, slower + stalled, grids.zero))
    if not ranks or grids.share(max(excess.values())) < thresholds.cause:
        return
    of_stalls = ledger.attribute(np.where(here, stalled, 0.0), (Cause.dependency_stalled,))
    of_compute = ledger.attribute(np.where(here, slower, 0.0))
    worst = max(ranks, key=lambda rank: excess[rank])
    mine = [row for row in grids.compute_kernels if row["rank"] == worst]
    longest = sorted(mine, key=lambda row: row["mean_us"] - row["max_us"])[:KERNELS]
    yield Evidence(
        ranks=ranks,
        measures={
            "excess_us": by_rank({rank: excess[rank] for rank in ranks}),
            "compute_us": by_rank(grids.mean_us(grids.compute_us)),
            "longest_us": {row["name"]: round(row["max_us"], 3) for row in longest},
            "usual_us": {row["name"]: round(row["mean_us"], 3) for row in longest},
        },
        saving_us=of_stalls + min(of_compute, grids.room_us),
        events=[Event(worst, row["name"], duration_us=row["max_us"]) for row in longest],
    )


def uneven_work(grids: Grids, thresholds: Thresholds, ledger: Ledger) -> Iterator[Evidence]:
    """Ranks run the same kernels on data of different sizes, in each iteration another one has more, and the others wait."""
    turns = differ_in_size(grids, thresholds) if len(grids.ranks) > 1 else {}
    if not turns:
        return
    # Evened out, each rank has the mean.
    mean = np.zeros_like(grids.compute_us)
    for places in grids.peers:
        mean[:, places] = np.nanmean(grids.compute_us[:, places], axis=1)[:, None]
    excess = np.where(excess_compute_us(grids) > 0, np.maximum(grids.compute_us - mean, 0.0), 0.0)
    ranks = sorted(turns)
    sizes: dict[str, list[int]] = defaultdict(list)
    for row in grids.facts.communication_by_rank.to_pylist():
        if row["rank"] in ranks and row["operation"] == "all_to_all":
            sizes[str(row["rank"])].append(row["bytes"])
    yield Evidence(
        ranks=ranks,
        measures={
            "rotating": True,
            "slowest_share": by_rank(turns),
            "excess_compute_us_by_iteration": {str(rank): grids.column(excess, rank) for rank in ranks},
            "all_to_all_bytes": {rank: sizes[rank] for rank in map(str, ranks) if rank in sizes},
        },
        saving_us=min(ledger.attribute(excess), grids.room_us),
        sure=(Confidence.medium, "inferred_sizes"),
        events=[
            Event(rank, each.name, duration_us=each.extra_us)
            for rank in ranks
            for each in kernels_beyond_peers(grids, rank)[:2]
        ],
    )
