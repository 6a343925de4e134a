"""The iteration without the profiler: what findings about hosts are judged on.

Where manifests record iterations outside the window, the median profiled iteration minus the median unprofiled one is the cost.
Else it is estimated from the recorded events (`attribution.profiler_cost`), which also says which idle time the cost explains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from bridge_profiling.facts.idle import Cause
from bridge_profiling.findings.types import Grid
from bridge_profiling.manifest import RankCapture

#: Causes that profiling inflates, most inflated first: a profiler slows operators and launches, hardly waits for storage.
_INFLATED = (Cause.host_launch, Cause.small_kernels, Cause.host_sync, Cause.pageable_copy, Cause.data_loading)

#: Causes of gaps in which the host launches on, one after the other.
LAUNCHING = (Cause.host_sync, Cause.small_kernels, Cause.host_launch)

#: With fewer iterations, the first one is not known to differ from the others.
_ENOUGH_TO_START = 3

#: Hosts pay at most so many times the estimate for the same records.
_MOST_SCALE = 2.5

#: The median of fewer unprofiled iterations is not reliable, and fewer do not show how long an iteration can be.
_ENOUGH_UNPROFILED, _ENOUGH_TO_COMPARE = 2, 10

#: Of the unprofiled iterations, those that may take as long as profiled ones: slow iterations.
_MOST_ALIKE = 0.1

#: A profiled iteration is longer than any other if it takes so many times what the longest one and the profiler do.
_LONGER = 1.5


@dataclass(frozen=True)
class TimedIterations:
    """A rank's iterations in its windows and outside, as the manifest times them on the host."""

    profiled_ns: float
    unprofiled_ns: float
    counts: tuple[int, int]  # of both
    overlap: bool  # see `_overlap`

    @property
    def cost_ns(self) -> float:
        """Time that the profiler adds to an iteration; negative if the unprofiled ones took longer."""
        return self.profiled_ns - self.unprofiled_ns


def timed_iterations(
    manifests: Sequence[RankCapture],
    least_ns: Mapping[int, float] | None = None,
    captured_ns: Mapping[int, float] | None = None,
) -> dict[int, TimedIterations]:
    """By rank; ranks whose manifests do not show both kinds are left out.

    Args:
        manifests: of the ranks.
        least_ns: by rank, the device's compute in an iteration. A host that launches several iterations ahead takes less in
            most of them, and catches up in one: then the mean counts.
        captured_ns: by rank, the usual iteration of the capture, which the mean of profiled ones exceeds where one of them is
            longer for another reason.
    """
    found = {}
    for manifest in manifests:
        profiled = manifest.durations_ns(profiled=True)
        outside = manifest.durations_by_iteration(profiled=False)
        unprofiled = list(outside.values())
        if not profiled or len(unprofiled) < _ENOUGH_UNPROFILED:
            continue
        shortest_ns = (least_ns or {}).get(manifest.rank, 0.0)
        most_ns = max((captured_ns or {}).get(manifest.rank, np.inf), shortest_ns)
        both = []
        for durations_ns, mean_up_to_ns in ((profiled, most_ns), (unprofiled, np.inf)):
            median_ns, mean_ns = float(np.median(durations_ns)), float(np.mean(durations_ns))
            both.append(median_ns if median_ns >= shortest_ns else min(mean_ns, mean_up_to_ns))
        if min(both) >= shortest_ns:
            before = [duration for iteration, duration in outside.items() if iteration < min(manifest.captured)]
            overlap = _overlap(profiled, unprofiled, before)
            found[manifest.rank] = TimedIterations(both[0], both[1], (len(profiled), len(unprofiled)), overlap)
    return found


def _overlap(profiled: Sequence[int], unprofiled: Sequence[int], before: Sequence[int]) -> bool:
    """Whether unprofiled iterations take as long as the shortest profiled one, so that the profiler explains no difference.

    One before the window is enough: then the training was still warming up, as it may have been in the window. Of all of them
    it takes more than one in ten: the others can be slow iterations.
    """
    shortest = min(profiled)
    alike = sum(duration >= shortest for duration in unprofiled)
    return max(before, default=0) >= shortest or alike > len(unprofiled) * _MOST_ALIKE


def longer_than_any_ns(manifests: Sequence[RankCapture]) -> dict[int, float]:
    """Profiled iterations that are far longer than every unprofiled one, and by how much, on the rank that shows it most."""
    found: dict[int, float] = {}
    for manifest in manifests:
        profiled = manifest.durations_by_iteration(profiled=True)
        unprofiled = list(manifest.durations_by_iteration(profiled=False).values())
        if not profiled or len(unprofiled) < _ENOUGH_TO_COMPARE:
            continue
        usual_ns = float(np.median(list(profiled.values())))
        above_ns = _LONGER * max(max(unprofiled) + usual_ns - float(np.median(unprofiled)), usual_ns)
        for number, time_ns in profiled.items():
            if time_ns > above_ns:
                found[number] = max(found.get(number, 0.0), time_ns - usual_ns)
    return found


def usual_cost_ns(timed: Mapping[int, TimedIterations]) -> float | None:
    """The profiler's cost on the median rank; None if it is unknown."""
    return float(np.median([each.cost_ns for each in timed.values()])) if timed else None


Source = Literal["manifest", "estimate"]


@dataclass(frozen=True)
class Unprofiled:
    """An iteration of the job without the profiler.

    Args:
        iteration_ns: the mean; the slow iterations that a finding names are included.
        source: of the profiler's cost.
        measured_cost_ns: the cost according to the manifests, on the median rank; None if they do not show it.
        estimated_cost_ns: the cost as estimated from the recorded events alone, a mean per iteration.
    """

    iteration_ns: float
    source: Source
    measured_cost_ns: float | None
    estimated_cost_ns: float


@dataclass(frozen=True)
class ProfilerTime:
    """The profiler's part of captured iterations.

    Args:
        source: of the cost: iterations outside the window, else the recorded events.
        cost_ns: by how much the job's iterations are longer, by iteration and rank.
        estimated_ns: the same by the estimate alone, a mean iteration of the job.
        explained_ns: the part of each idle cause's time.
    """

    source: Source
    cost_ns: Grid
    estimated_ns: float
    explained_ns: Mapping[Cause, Grid]

    @classmethod
    def of(
        cls,
        captured_ns: Mapping[Cause, Grid],
        explained_ns: Mapping[Cause, Grid],
        waiting_ns: Grid,
        ranks: Sequence[int],
        measured_ns: Mapping[int, float],
    ) -> Self:
        """The profiler's part of captured iterations.

        Args:
            captured_ns: idle time by cause.
            explained_ns: what the cost of recorded events explains of it, on each rank alone.
            waiting_ns: for other ranks.
            ranks: columns of the grids.
            measured_ns: the cost by rank, as far as manifests show it.
        """
        # The profiler's recorded own work is gone without it, whether it delayed a launch or not.
        explained = _with_start(captured_ns, explained_ns) | {Cause.profiler: captured_ns[Cause.profiler]}
        estimated = shorter_by_ns(total_ns(explained), waiting_ns)
        estimated_ns = float(estimated.mean()) if len(estimated) else 0.0
        zero = np.where(np.isnan(waiting_ns), np.nan, 0.0)
        if not measured_ns:
            return cls("estimate", zero + estimated[:, None], estimated_ns, explained)
        # The manifest says how much a usual iteration costs, the events in which iterations more is spent, and where.
        usual_ns = float(np.median(list(measured_ns.values())))
        typical_ns = float(np.median(estimated)) if len(estimated) else 0.0
        scale = min(max(usual_ns, 0.0) / typical_ns, _MOST_SCALE) if typical_ns > 0 else 0.0
        own = np.array([measured_ns.get(rank, usual_ns) - usual_ns for rank in ranks])
        cost_ns = np.maximum(zero + usual_ns + scale * (estimated - typical_ns)[:, None] + own, 0.0)
        explained = {cause: np.minimum(time_ns * scale, captured_ns[cause]) for cause, time_ns in explained.items()}
        # What the recorded events do not explain. Profiling does not prolong saving.
        left = np.maximum(cost_ns - total_ns(explained) - captured_ns[Cause.checkpoint_stall], 0.0)
        for cause in _INFLATED:
            taken = np.minimum(captured_ns[cause] - explained[cause], left)
            explained[cause], left = explained[cause] + taken, left - taken
        return cls("manifest", cost_ns, estimated_ns, explained)


def _with_start(captured_ns: Mapping[Cause, Grid], explained_ns: Mapping[Cause, Grid]) -> dict[Cause, Grid]:
    """Explained time with that of the profiler's start: launching is slower while its buffers are new.

    In the first iteration that is what launching takes beyond the most that it takes in any other one.
    """
    explained = dict(explained_ns)
    for cause in LAUNCHING:
        left = captured_ns[cause] - explained[cause]
        if len(left) >= _ENOUGH_TO_START:
            others = np.nan_to_num(left[1:]).max(axis=0)
            explained[cause] = explained[cause].copy()
            explained[cause][0] += np.maximum(left[0] - others, 0.0)
    return explained


def total_ns(by_cause: Mapping[Cause, Grid]) -> Grid:
    """The sum over causes."""
    return np.sum(list(by_cause.values()), axis=0)


def shorter_by_ns(lost_ns: Grid, waiting_ns: Grid) -> NDArray[np.float64]:
    """By how much the job's iteration is shorter without time that ranks lose; see `ledger`."""
    captured = ~np.isnan(waiting_ns)
    shortening = np.zeros(len(waiting_ns))
    counted = captured.any(axis=1)
    if counted.any():
        most = np.nanmax(lost_ns[counted], axis=1)
        path = np.where(captured, lost_ns + waiting_ns, np.inf)[counted].min(axis=1)
        shortening[counted] = np.minimum(most, path)
    return shortening
