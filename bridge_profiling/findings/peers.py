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
_SLICED, _SLICE_NS, _SLICED_KERNELS, _STALLED = 3.0, 1_000_000, 3, 0.03

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
    """What a rank has of a kernel beyond its peers, per iteration; `of_count_ns` is the time of additional executions."""

    name: str
    extra_ns: float
    extra_count: float
    of_count_ns: float


def kernels_beyond_peers(grids: Grids, rank: int) -> list[ExtraKernel]:
    """Kernels that take longer on a rank than on its peers, most first, from whole captures."""
    names, count, total_ns = _executions(grids)
    mine, others = _mine_and_others(grids, rank)
    usual, usual_ns = (np.median(grid[:, others], axis=1) for grid in (count, total_ns))
    more, extra_ns = count[:, mine] - usual, total_ns[:, mine] - usual_ns
    # Additional executions can have other sizes, so all of the additional time is theirs.
    more_ns = np.where(more > 0, extra_ns, more * (usual_ns / np.maximum(usual, 1e-9)))
    columns = (extra_ns.tolist(), more.tolist(), more_ns.tolist())
    found = [ExtraKernel(*each) for each in zip(names, *columns, strict=True)]
    found.sort(key=lambda each: (-each.extra_ns, each.name))
    enough = _WORTH_SHOWING * sum(max(each.extra_ns, 0.0) for each in found)
    return [each for each in found if each.extra_ns > enough]


def _mine_and_others(grids: Grids, rank: int) -> tuple[int, list[int]]:
    """The places of a rank and of its peers."""
    mine = grids.ranks.index(rank)
    return mine, [place for places in grids.peers if mine in places for place in places if place != mine]


def unlike_peers(grids: Grids, excess: Grid) -> list[int]:
    """Ranks with more than their peers have, beyond the changes between iterations and the differences among the peers."""
    typical = grids.typical_ns(excess)
    found = []
    for places in grids.peers:
        ranks = [grids.ranks[place] for place in places if grids.ranks[place] in typical]
        differences = sorted(abs(typical[rank]) for rank in ranks)
        usual_ns = differences[(len(differences) - 1) // 2] if differences else 0.0
        for rank in ranks:
            by_iteration = excess[:, grids.ranks.index(rank)]
            change_ns = float(np.nanmedian(np.abs(by_iteration - typical[rank])))
            if typical[rank] > _NOISE * max(change_ns, usual_ns):
                found.append(rank)
    return sorted(found)


def excess_compute_ns(grids: Grids) -> Grid:
    """Compute beyond the peers'.

    Communication of a rank that waits slows its compute: half of that overlap is not its own. Executions of kernels beyond the
    peers' are, even where the peers compute as long because they are slowed.
    """
    excess = grids.beyond_peers(grids.compute_ns)
    if grids.has_device:
        overlapped = grids.overlapped_ns
        mine, theirs = (CONTENTION * np.maximum(np.nan_to_num(grids.beyond_peers(sign * overlapped)), 0.0) for sign in (1, -1))
        more = grids.beyond_peers(grids.grid("launch_statistics", "kernel_count")) > 0
        own = np.where(more, np.minimum(_of_more_executions_ns(grids), excess + theirs), -np.inf)
        excess = np.maximum(excess - np.minimum(mine, np.maximum(excess, 0.0)), own)
    return excess


def _executions(grids: Grids) -> tuple[list[str], Grid, Grid]:
    """Names of kernels; of each one (rows) on each rank (columns), per iteration, executions and their time in nanoseconds."""
    places = {rank: place for place, rank in enumerate(grids.ranks)}
    lines = {name: line for line, name in enumerate(dict.fromkeys(row["name"] for row in grids.compute_kernels))}
    count, total_ns = (np.zeros((len(lines), len(places))) for _ in range(2))
    for row in grids.compute_kernels:
        if row["rank"] in places:
            at = lines[row["name"]], places[row["rank"]]
            iterations = grids.captured_iterations.get(row["rank"], 1)
            count[at] = row["count"] / iterations
            total_ns[at] = row["total_ns"] / iterations
    return list(lines), count, total_ns


def _of_more_executions_ns(grids: Grids) -> NDArray[np.float64]:
    """Time per iteration of each rank's executions of kernels beyond its peers', less that of those that it lacks."""
    _, count, total_ns = _executions(grids)
    more, more_ns = (np.nan_to_num(grids.beyond_peers(grid)) for grid in (count, total_ns))
    fewer = more < 0
    more_ns[fewer] = (more * (total_ns - more_ns) / np.maximum(count - more, 1e-9))[fewer]
    more_ns[more == 0] = 0.0
    return more_ns.sum(axis=0)


def take_turns(grids: Grids, excess_ns: Grid, least_ns: float, *, often: float = 0.5) -> dict[int, float]:
    """The share of iterations in which each of two or more ranks is the slowest; empty unless two or more take turns.

    Args:
        least_ns: a smaller excess does not make a rank slow.
        often: in a larger share of iterations one must be.
    """
    if excess_ns.size == 0 or grids.per == "capture":
        return {}
    filled = np.nan_to_num(excess_ns)
    following, most = np.sort(filled, axis=1)[:, -2:].T
    struck = most > least_ns
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
    stalled = grids.beyond_peers(grids.idle_ns(Cause.dependency_stalled))
    usual = grids.typical_ns(stalled)
    stalling = [rank for rank in unlike_peers(grids, stalled) if grids.share(usual[rank]) > _STALLED]
    sliced = dict.fromkeys(grids.ranks, 0)
    for places, rows in itertools.product(grids.peers, longest.values()):
        present = [rank for place in places if (rank := grids.ranks[place]) in rows]
        if len(present) > 1:
            most, mean = (np.array([rows[rank][name] for rank in present]) for name in ("max_ns", "mean_ns"))
            others = _median_of_others(most)
            # Not a kernel with executions of several sizes: the mean stays below a slice.
            hit = (most > np.maximum(_SLICED * others, others + _SLICE_NS)) & (mean < most / 2)
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
    turns = take_turns(grids, excess_compute_ns(grids), thresholds.cause * grids.iteration_ns)
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
    stalled = ledger.left_ns(Cause.dependency_stalled)
    stalled = np.minimum(stalled, np.maximum(np.nan_to_num(grids.beyond_peers(stalled)), 0.0))
    slower = np.maximum(np.nan_to_num(grids.beyond_peers(grids.compute_ns)), 0.0)
    here = np.isin(grids.ranks, ranks)
    excess = grids.mean_ns(np.where(here, slower + stalled, grids.zero))
    if not ranks or grids.share(max(excess.values())) < thresholds.cause:
        return
    of_stalls = ledger.attribute(np.where(here, stalled, 0.0), (Cause.dependency_stalled,))
    of_compute = ledger.attribute(np.where(here, slower, 0.0))
    worst = max(ranks, key=lambda rank: excess[rank])
    mine = [row for row in grids.compute_kernels if row["rank"] == worst]
    longest = sorted(mine, key=lambda row: row["mean_ns"] - row["max_ns"])[:KERNELS]
    yield Evidence(
        ranks=ranks,
        measures={
            "excess_ns": by_rank({rank: excess[rank] for rank in ranks}),
            "compute_ns": by_rank(grids.mean_ns(grids.compute_ns)),
            "longest_ns": {row["name"]: round(row["max_ns"], 3) for row in longest},
            "usual_ns": {row["name"]: round(row["mean_ns"], 3) for row in longest},
        },
        saving_ns=of_stalls + min(of_compute, grids.room_ns),
        events=[Event(worst, row["name"], duration_ns=row["max_ns"]) for row in longest],
    )


def uneven_work(grids: Grids, thresholds: Thresholds, ledger: Ledger) -> Iterator[Evidence]:
    """Ranks run the same kernels on data of different sizes, in each iteration another one has more, and the others wait."""
    turns = differ_in_size(grids, thresholds) if len(grids.ranks) > 1 else {}
    if not turns:
        return
    # Evened out, each rank has the mean.
    mean = np.zeros_like(grids.compute_ns)
    for places in grids.peers:
        mean[:, places] = np.nanmean(grids.compute_ns[:, places], axis=1)[:, None]
    excess = np.where(excess_compute_ns(grids) > 0, np.maximum(grids.compute_ns - mean, 0.0), 0.0)
    ranks = sorted(turns)
    sizes: dict[str, list[int]] = defaultdict(list)
    for row in grids.facts.communication_by_rank.to_pylist():
        if row["rank"] in ranks and row["operation"] == "all_to_all":
            sizes[str(row["rank"])].append(row["bytes"])
    yield Evidence(
        ranks=ranks,
        measures={
            "rotating": True,
            "slowest_share": by_rank(turns, 3),
            "excess_compute_ns_by_iteration": {str(rank): grids.column(excess, rank) for rank in ranks},
            "all_to_all_bytes": {rank: sizes[rank] for rank in map(str, ranks) if rank in sizes},
        },
        saving_ns=min(ledger.attribute(excess), grids.room_ns),
        sure=(Confidence.medium, "inferred_sizes"),
        events=[
            Event(rank, each.name, duration_ns=each.extra_ns)
            for rank in ranks
            for each in kernels_beyond_peers(grids, rank)[:2]
        ],
    )
