"""The largest saving that removing the cause of a finding can bring: the upper bound of the estimated saving.

An iteration is a graph of host calls, kernels and transfers, and takes as long as the longest path through it. Whatever else is
on that path, two bounds hold:

- Without some work, the iteration is shorter by at most the time of that work.
- It is never shorter than work that stays, such as the compute of the rank that computes most: the *floor*.

Each kind of cause has the lower one of those that apply to it; `findings.RULES` names it. A bound includes what is uncertain:

- The captured iterations are a sample: the upper limit of the mean counts, by Student's t, or the largest of them if that
  is less. Of a cause that strikes some iterations, each can last as long as the longest one that a manifest times. Where the
  unprofiled iterations that manifests time are longer on average than the captured ones without the profiler, what
  is not about kernels can cost that much more outside the capture.
- The profiler's cost can be more or less than estimated by `DOUBT`.
- What an iteration takes changes with clocks, temperatures and other jobs: each bound has a margin of `_MARGIN`, or that
  difference if it is larger.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from bridge_profiling.facts.idle import OFTEN, SEVERAL, Cause
from bridge_profiling.facts.intervals import summed
from bridge_profiling.facts.statistics import t_quantile
from bridge_profiling.findings.grids import DOUBT, Grids
from bridge_profiling.findings.peers import CONTENTION
from bridge_profiling.findings.rule import Evidence
from bridge_profiling.findings.types import Grid
from bridge_profiling.findings.unprofiled import total_us

#: A time in each iteration that counts.
_Times = NDArray[np.float64]

#: The part of each iteration that stays, if the profiler costs so many times the estimate.
_Floor = Callable[[float], _Times]

#: Of everyday trainings, measured without a profiler before the capture, a tenth more covers two of three excesses.
_MARGIN = 0.1

#: Probability that the mean of all iterations is below the limit.
_LEVEL = 0.95

#: Roles of the kernels that a change replaces, and the part of their time that goes at most: half of the bytes take half of it.
_REPLACED: Mapping[str, Mapping[str, float]] = {
    "full_precision_matmul": {"fp64": 1.0, "fp32": 1.0, "tf32": 1.0, "fp64_elementwise": 1.0, "fp32_elementwise": 0.5},
    "unfused_attention": {"attention_other": 1.0, "attention_product": 1.0},
    "unfused_optimizer": {"optimizer_sweep": 1.0},
    "layout_conversion": {"layout": 1.0, "layout_norm": 1.0},
    "recomputation": {"recomputation": 1.0},
}

#: Element-wise kernels of torch that index by strides, as they do where memory formats meet.
_STRIDED = re.compile("::elementwise_kernel<")

#: Causes whose time the estimate of a finding can contain, where they are not just the one that the finding is named after.
_CAUSES: Mapping[str, tuple[Cause, ...]] = {
    "copy_bound": (Cause.blocked_by_copy,),
    "host_launch_bound": (Cause.host_launch,),
    "host_sync": (Cause.host_sync, Cause.host_launch),
}

#: Idle time between kernels that the host launches one by one.
_LAUNCHES = (Cause.small_kernels, Cause.host_launch, Cause.dependency_stalled)


def at_most_us(grids: Grids, evidence: Evidence) -> float | None:
    """The upper bound of a saving, which is at least the estimate; None without one.

    It is at most an iteration without the profiler, except for slow iterations and causes in iterations that do not count.
    """
    bound, names_iterations = evidence.bound, evidence.bound is slow_iterations
    # The saving of a device that is not busy is the sum of many causes, and only its limit is known.
    whole = evidence.id == "low_device_busy"
    if isinstance(bound, str) or not grids.numbers or (evidence.saving_us is None and not whole):
        return None
    outside_us = 0.0 if names_iterations or whole or bound is kernels else _longer_outside_us(grids)
    most_us = max(bound(grids, evidence), evidence.saving_us or 0.0)
    most_us += max(_MARGIN * most_us, outside_us)
    struck = evidence.occurrence.iterations if evidence.occurrence else ()
    if not names_iterations and set(struck).issubset(grids.numbers):
        most_us = min(most_us, grids.iteration_us + outside_us)
    return most_us


# The bounds.


def launching(grids: Grids, evidence: Evidence) -> float:
    """A host that launches late for whatever reason: compute stays."""
    return _beyond(grids, evidence, lambda cost: _most(grids.compute_us))


def calls(grids: Grids, evidence: Evidence) -> float:
    """Calls and waits of a host: compute stays, and what the host does besides them."""
    cause = Cause(evidence.id)
    # Waiting is not among what a host does. An operator goes with each call, and takes as long as others.
    in_calls_us = 0.0 if cause is Cause.host_sync else np.nan_to_num(grids.in_ranges_us(cause))
    calls = np.nan_to_num(grids.of_cause(cause, "calls"))
    if cause is Cause.host_sync and calls.mean(axis=0).max(initial=0.0) >= OFTEN:
        return launching(grids, evidence)  # a loop that waits so often goes as a whole, with what it launches
    launches = np.nan_to_num(grids.grid("launch_statistics", "kernel_count"))
    stays = launches / np.maximum(calls + launches, 1.0)

    def floor(cost: float) -> _Times:
        return np.maximum(_most(grids.compute_us), _most(stays * _host_us(grids, cost) - in_calls_us))

    return _beyond(grids, evidence, floor)


def ranges(grids: Grids, evidence: Evidence) -> float:
    """Ranges of a host: the same, and no more than their time goes, on all ranks together."""
    within = np.inf if evidence.occurrence else _limit(np.nan_to_num(grids.in_ranges_us(Cause(evidence.id))).sum(axis=1))
    return min(calls(grids, evidence), within)


def kernels(grids: Grids, evidence: Evidence) -> float:
    """Kernels that others replace: all of their time goes, and the idle time that launching them can cost."""
    kernels_us, count = np.zeros_like(grids.duration_us), np.zeros_like(grids.duration_us)
    for role, goes in _REPLACED[evidence.id].items():
        rows = grids.role(role)
        kernels_us += goes * np.nan_to_num(grids.grid(rows, "device_us"))
        count += np.nan_to_num(grids.grid(rows, "count"))
    if evidence.id == "layout_conversion":
        kernels_us += _strided_us(grids)
    kernels_us = np.minimum(kernels_us, np.nan_to_num(grids.compute_us))
    as_many_launches = evidence.id == "full_precision_matmul"
    few_waits = max(grids.mean_us(grids.of_cause(Cause.host_sync, "calls")).values(), default=0.0) < SEVERAL
    causes = (*_LAUNCHES, Cause.host_sync) if evidence.id == "unfused_optimizer" and few_waits else _LAUNCHES
    idle_us = np.zeros_like(kernels_us) if as_many_launches else _launch_gaps_us(grids, count, causes)
    stays_us = _most(grids.compute_us - kernels_us)

    def floor(cost: float) -> _Times:
        return np.maximum(stays_us, _most(_host_us(grids, cost))) if as_many_launches else stays_us

    return min(_limit(_most(kernels_us + idle_us)), _beyond(grids, evidence, floor))


def slow_ranks(grids: Grids, evidence: Evidence) -> float:
    """Ranks that others wait for: what the others need stays, without waiting and without what that slows."""
    slowed_us = _slowed_us(grids)

    def floor(cost: float) -> _Times:
        # Manifests measure what the profiler costs the job, not how much of that is in each rank's own time.
        waits_us = np.nan_to_num(grids.waiting_us) + cost * total_us(grids.profiler.explained_us)
        needs_us = np.maximum(grids.duration_us - waits_us, grids.compute_us) - slowed_us
        return _of_others(grids, needs_us, evidence.ranks)

    return _beyond(grids, evidence, floor)


def device(grids: Grids, evidence: Evidence) -> float:
    """A device that is shared: the compute of the others stays, and what hosts need.

    What it takes longer than its peers for kernels, between them and in transfers goes.
    """
    compute_us = grids.compute_us - _slowed_us(grids)

    def floor(cost: float) -> _Times:
        return np.maximum(_of_others(grids, compute_us, evidence.ranks), _most(_host_us(grids, cost)))

    idle_us = grids.duration_us - grids.compute_us - grids.communicating_us
    slower_us, idler_us = (np.maximum(grids.beyond_peers(times_us), 0.0) for times_us in (compute_us, idle_us))
    longer_us = slower_us + idler_us + grids.communicating_us - grids.waiting_us
    goes_us = np.where(np.isin(grids.ranks, evidence.ranks), longer_us, 0.0)
    return min(_limit(_most(goes_us)), _beyond(grids, evidence, floor))


def stages(grids: Grids, evidence: Evidence) -> float:
    """Work of stages that can be moved to others: the mean of their compute stays."""
    return _beyond(grids, evidence, lambda cost: np.nanmean(grids.compute_us, axis=1))


def uneven(grids: Grids, evidence: Evidence) -> float:
    """Work that some ranks have more of: spread over all, a part of it stays; if nobody needs it, the least compute does."""
    return _beyond(grids, evidence, lambda cost: np.nanmin(grids.compute_us, axis=1))


def communication(grids: Grids, evidence: Evidence) -> float:
    """Communication: all that nothing hides goes, with the waiting in it, and compute stays."""
    return min(_limit(_most(grids.communicating_us)), launching(grids, evidence))


def collectives(grids: Grids, evidence: Evidence) -> float:
    """Collectives that are needless: compute stays, less the slowdown by overlapping communication."""
    slowed_us = CONTENTION * np.nan_to_num(grids.overlapped_us)
    return _beyond(grids, evidence, lambda cost: _most(grids.compute_us - slowed_us))


def slow_iterations(grids: Grids, evidence: Evidence) -> float:
    """Iterations that manifests time: without slow ones, none is shorter than usual. Captured ones: the usual compute stays."""
    if evidence.occurrence:
        compute_us = _most(grids.compute_us)
        return _beyond(grids, evidence, lambda cost: np.minimum(compute_us, np.median(compute_us)))
    timed = [np.array(manifest.durations_ns(profiled=False)) / 1e3 for manifest in grids.facts.manifests]
    return max((float(np.mean(np.maximum(each - np.median(each), 0.0))) for each in timed if len(each)), default=0.0)


# Times that bounds are made of.


def _beyond(grids: Grids, evidence: Evidence, floor: _Floor) -> float:
    """What an iteration takes beyond its floor, for the least favorable cost of the profiler."""
    return max(_beyond_at(grids, evidence, floor(cost), cost) for cost in (1 - DOUBT, 1.0, 1 + DOUBT))


def _beyond_at(grids: Grids, evidence: Evidence, floor_us: _Times, cost: float) -> float:
    cost_us = _middle(_factor(grids, cost) * grids.profiler.cost_us)
    if evidence.occurrence is None:
        return _limit(_middle(grids.captured_iterations_us) - cost_us - floor_us)
    # A host that pauses records nothing meanwhile, so that the profiler costs no more than in other iterations. What struck
    # iterations compute beyond the others belongs to the cause.
    numbers = evidence.occurrence.iterations
    struck = np.isin(np.array(grids.numbers, float), numbers)
    counted_us = _most(grids.captured_iterations_us)[struck] - cost_us.min()
    left_out_us = [time_us for number, time_us in grids.left_out_us.items() if number in numbers]
    timed_us = [max(manifest.durations_ns(profiled=False), default=0) / 1e3 for manifest in grids.facts.manifests]
    lasting_us = np.maximum([*counted_us, *left_out_us], max(timed_us, default=0.0)) - np.median(floor_us)
    causes = _CAUSES.get(evidence.id, tuple(cause for cause in Cause if cause == evidence.id))
    between = [grids.of_cause(cause, "lost_us", between=True) for cause in causes]
    others_us = _most(sum(between, grids.idle_us(*causes)))[~struck]
    return float(np.maximum(lasting_us, 0.0).sum() + others_us.sum()) / evidence.occurrence.of


def _longer_outside_us(grids: Grids) -> float:
    """By how much the mean unprofiled iteration exceeds the captured ones without the profiler, on the median rank.

    What makes one longer than every captured iteration is another cause.
    """
    longest_us = np.nan_to_num(grids.captured_iterations_us).max(initial=0.0)
    timed_us = [np.array(manifest.durations_ns(profiled=False)) / 1e3 for manifest in grids.facts.manifests]
    means_us = [float(np.minimum(each, longest_us).mean()) for each in timed_us if len(each)]
    return max(float(np.median(means_us)) - grids.iteration_us, 0.0) if means_us else 0.0


def _limit(times_us: _Times) -> float:
    """The upper limit of the mean of all iterations, from those that are captured; no more than the largest of them."""
    count, spread_us = len(times_us), float(np.std(times_us, ddof=1)) if len(times_us) > 1 else 0.0
    error_us = t_quantile(_LEVEL, count - 1) * spread_us / count**0.5 if spread_us else 0.0
    return min(float(np.mean(times_us)) + error_us, float(np.max(times_us)))


def _factor(grids: Grids, cost: float) -> float:
    """The profiler's cost to the job's iteration as a multiple of what is known: no doubt if manifests measure it."""
    return cost if grids.profiler.source == "estimate" else 1.0


def _host_us(grids: Grids, cost: float) -> Grid:
    """What each host needs without the profiler, and without waiting for its device.

    Its cost is an estimate, even where manifests measure what of it the job's iteration shows.
    """
    own_us, cost_us = (grids.grid("profiler_cost", name) for name in ("host_own_us", "host_cost_us"))
    return own_us + (1 - cost) * cost_us


def _launch_gaps_us(grids: Grids, count: Grid, causes: Sequence[Cause]) -> Grid:
    """Idle time that launching so many kernels can cost, and copies within the device.

    Launching them takes the host as long as others on average. An excess over the median iteration has other reasons.
    """
    copies_us = grids.idle_us(Cause.blocked_by_device_copy)
    explained_us = sum((grids.profiler.explained_us[cause] for cause in causes), np.zeros_like(copies_us))
    idle_us = grids.idle_us(*causes) + (1 - _factor(grids, 1 - DOUBT)) * explained_us
    launches = np.maximum(np.nan_to_num(grids.grid("launch_statistics", "kernel_count")), 1.0)
    own_us = _host_us(grids, 1 - DOUBT)
    host_us = np.where(np.isnan(own_us), grids.duration_us, own_us) * np.minimum(count / launches, 1.0)
    usual_us = grids.captured_row(grids.typical_us(idle_us + copies_us))
    return np.minimum(np.minimum(idle_us, host_us) + copies_us, usual_us)


def _strided_us(grids: Grids) -> NDArray[np.float64]:
    """Time of each rank in element-wise kernels that index by strides, per captured iteration."""
    strided = (row for row in grids.compute_kernels if _STRIDED.search(row["name"]))
    found = summed((row["rank"], row["total_us"] / grids.captured_iterations.get(row["rank"], 1)) for row in strided)
    return np.array([found.get(rank, 0.0) for rank in grids.ranks])


def _slowed_us(grids: Grids) -> Grid:
    """Compute of ranks that wait for peers next to it: communication that runs meanwhile slows it."""
    overlapped_us = np.nan_to_num(grids.overlapped_us)
    for places in grids.peers:
        overlapped_us[:, places] -= overlapped_us[:, places].min(axis=1)[:, None]
    return CONTENTION * overlapped_us


def _of_others(grids: Grids, times_us: Grid, ranks: Sequence[int]) -> _Times:
    """The longest of the other ranks; of ranks that take turns, the shortest one."""
    others = ~np.isin(grids.ranks, ranks)
    return _most(times_us[:, others]) if others.any() else np.nanmin(times_us, axis=1)


def _most(times_us: Grid) -> _Times:
    """Of the rank with most."""
    return np.max(np.nan_to_num(times_us), axis=1)


def _middle(times_us: Grid) -> _Times:
    # Of few values, nanmedian makes a masked array, which takes ten times as long.
    return (np.nanmedian if np.isnan(times_us).any() else np.median)(times_us, axis=1)
