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
from bridge_profiling.findings.unprofiled import total_ns

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


def at_most_ns(grids: Grids, evidence: Evidence) -> float | None:
    """The upper bound of a saving, which is at least the estimate; None without one.

    It is at most an iteration without the profiler, except for slow iterations and causes in iterations that do not count.
    """
    bound, names_iterations = evidence.bound, evidence.bound is slow_iterations
    # The saving of a device that is not busy is the sum of many causes, and only its limit is known.
    whole = evidence.id == "low_device_busy"
    if isinstance(bound, str) or not grids.numbers or (evidence.saving_ns is None and not whole):
        return None
    outside_ns = 0.0 if names_iterations or whole or bound is kernels else _longer_outside_ns(grids)
    most_ns = max(bound(grids, evidence), evidence.saving_ns or 0.0)
    most_ns += max(_MARGIN * most_ns, outside_ns)
    struck = evidence.occurrence.iterations if evidence.occurrence else ()
    if not names_iterations and set(struck).issubset(grids.numbers):
        most_ns = min(most_ns, grids.iteration_ns + outside_ns)
    return most_ns


# The bounds.


def launching(grids: Grids, evidence: Evidence) -> float:
    """A host that launches late for whatever reason: compute stays."""
    return _beyond(grids, evidence, lambda cost: _most(grids.compute_ns))


def calls(grids: Grids, evidence: Evidence) -> float:
    """Calls and waits of a host: compute stays, and what the host does besides them."""
    cause = Cause(evidence.id)
    # Waiting is not among what a host does. An operator goes with each call, and takes as long as others.
    in_calls_ns = 0.0 if cause is Cause.host_sync else np.nan_to_num(grids.in_ranges_ns(cause))
    calls = np.nan_to_num(grids.of_cause(cause, "calls"))
    if cause is Cause.host_sync and calls.mean(axis=0).max(initial=0.0) >= OFTEN:
        return launching(grids, evidence)  # a loop that waits so often goes as a whole, with what it launches
    launches = np.nan_to_num(grids.grid("launch_statistics", "kernel_count"))
    stays = launches / np.maximum(calls + launches, 1.0)

    def floor(cost: float) -> _Times:
        return np.maximum(_most(grids.compute_ns), _most(stays * _host_ns(grids, cost) - in_calls_ns))

    return _beyond(grids, evidence, floor)


def ranges(grids: Grids, evidence: Evidence) -> float:
    """Ranges of a host: the same, and no more than their time goes, on all ranks together."""
    within = np.inf if evidence.occurrence else _limit(np.nan_to_num(grids.in_ranges_ns(Cause(evidence.id))).sum(axis=1))
    return min(calls(grids, evidence), within)


def kernels(grids: Grids, evidence: Evidence) -> float:
    """Kernels that others replace: all of their time goes, and the idle time that launching them can cost."""
    kernels_ns, count = np.zeros_like(grids.duration_ns), np.zeros_like(grids.duration_ns)
    for role, goes in _REPLACED[evidence.id].items():
        rows = grids.role(role)
        kernels_ns += goes * np.nan_to_num(grids.grid(rows, "device_ns"))
        count += np.nan_to_num(grids.grid(rows, "count"))
    if evidence.id == "layout_conversion":
        kernels_ns += _strided_ns(grids)
    kernels_ns = np.minimum(kernels_ns, np.nan_to_num(grids.compute_ns))
    as_many_launches = evidence.id == "full_precision_matmul"
    few_waits = max(grids.mean_ns(grids.of_cause(Cause.host_sync, "calls")).values(), default=0.0) < SEVERAL
    causes = (*_LAUNCHES, Cause.host_sync) if evidence.id == "unfused_optimizer" and few_waits else _LAUNCHES
    idle_ns = np.zeros_like(kernels_ns) if as_many_launches else _launch_gaps_ns(grids, count, causes)
    stays_ns = _most(grids.compute_ns - kernels_ns)

    def floor(cost: float) -> _Times:
        return np.maximum(stays_ns, _most(_host_ns(grids, cost))) if as_many_launches else stays_ns

    return min(_limit(_most(kernels_ns + idle_ns)), _beyond(grids, evidence, floor))


def slow_ranks(grids: Grids, evidence: Evidence) -> float:
    """Ranks that others wait for: what the others need stays, without waiting and without what that slows."""
    slowed_ns = _slowed_ns(grids)

    def floor(cost: float) -> _Times:
        # Manifests measure what the profiler costs the job, not how much of that is in each rank's own time.
        waits_ns = np.nan_to_num(grids.waiting_ns) + cost * total_ns(grids.profiler.explained_ns)
        needs_ns = np.maximum(grids.duration_ns - waits_ns, grids.compute_ns) - slowed_ns
        return _of_others(grids, needs_ns, evidence.ranks)

    return _beyond(grids, evidence, floor)


def device(grids: Grids, evidence: Evidence) -> float:
    """A device that is shared: the compute of the others stays, and what hosts need.

    What it takes longer than its peers for kernels, between them and in transfers goes.
    """
    compute_ns = grids.compute_ns - _slowed_ns(grids)

    def floor(cost: float) -> _Times:
        return np.maximum(_of_others(grids, compute_ns, evidence.ranks), _most(_host_ns(grids, cost)))

    idle_ns = grids.duration_ns - grids.compute_ns - grids.communicating_ns
    slower_ns, idler_ns = (np.maximum(grids.beyond_peers(times_ns), 0.0) for times_ns in (compute_ns, idle_ns))
    longer_ns = slower_ns + idler_ns + grids.communicating_ns - grids.waiting_ns
    goes_ns = np.where(np.isin(grids.ranks, evidence.ranks), longer_ns, 0.0)
    return min(_limit(_most(goes_ns)), _beyond(grids, evidence, floor))


def stages(grids: Grids, evidence: Evidence) -> float:
    """Work of stages that can be moved to others: the mean of their compute stays."""
    return _beyond(grids, evidence, lambda cost: np.nanmean(grids.compute_ns, axis=1))


def uneven(grids: Grids, evidence: Evidence) -> float:
    """Work that some ranks have more of: spread over all, a part of it stays; if nobody needs it, the least compute does."""
    return _beyond(grids, evidence, lambda cost: np.nanmin(grids.compute_ns, axis=1))


def communication(grids: Grids, evidence: Evidence) -> float:
    """Communication: all that nothing hides goes, with the waiting in it, and compute stays."""
    return min(_limit(_most(grids.communicating_ns)), launching(grids, evidence))


def collectives(grids: Grids, evidence: Evidence) -> float:
    """Collectives that are needless: compute stays, less the slowdown by overlapping communication."""
    slowed_ns = CONTENTION * np.nan_to_num(grids.overlapped_ns)
    return _beyond(grids, evidence, lambda cost: _most(grids.compute_ns - slowed_ns))


def slow_iterations(grids: Grids, evidence: Evidence) -> float:
    """Iterations that manifests time: without slow ones, none is shorter than usual. Captured ones: the usual compute stays."""
    if evidence.occurrence:
        compute_ns = _most(grids.compute_ns)
        return _beyond(grids, evidence, lambda cost: np.minimum(compute_ns, np.median(compute_ns)))
    return max((float(np.mean(np.maximum(each - np.median(each), 0.0))) for each in grids.facts.unprofiled_ns), default=0.0)


# Times that bounds are made of.


def _beyond(grids: Grids, evidence: Evidence, floor: _Floor) -> float:
    """What an iteration takes beyond its floor, for the least favorable cost of the profiler."""
    return max(_beyond_at(grids, evidence, floor(cost), cost) for cost in (1 - DOUBT, 1.0, 1 + DOUBT))


def _beyond_at(grids: Grids, evidence: Evidence, floor_ns: _Times, cost: float) -> float:
    cost_ns = _middle(_factor(grids, cost) * grids.profiler.cost_ns)
    if evidence.occurrence is None:
        return _limit(_middle(grids.captured_iterations_ns) - cost_ns - floor_ns)
    # A host that pauses records nothing meanwhile, so that the profiler costs no more than in other iterations. What struck
    # iterations compute beyond the others belongs to the cause.
    numbers = evidence.occurrence.iterations
    struck = np.isin(np.array(grids.numbers, float), numbers)
    counted_ns = _most(grids.captured_iterations_ns)[struck] - cost_ns.min()
    left_out_ns = [time_ns for number, time_ns in grids.left_out_ns.items() if number in numbers]
    longest_ns = max(map(max, grids.facts.unprofiled_ns), default=0.0)
    lasting_ns = np.maximum([*counted_ns, *left_out_ns], longest_ns) - np.median(floor_ns)
    causes = _CAUSES.get(evidence.id, tuple(cause for cause in Cause if cause == evidence.id))
    between = [grids.of_cause(cause, "lost_ns", between=True) for cause in causes]
    others_ns = _most(sum(between, grids.idle_ns(*causes)))[~struck]
    return float(np.maximum(lasting_ns, 0.0).sum() + others_ns.sum()) / evidence.occurrence.of


def _longer_outside_ns(grids: Grids) -> float:
    """By how much the mean unprofiled iteration exceeds the captured ones without the profiler, on the median rank.

    What makes one longer than every captured iteration is another cause.
    """
    longest_ns = np.nan_to_num(grids.captured_iterations_ns).max(initial=0.0)
    means_ns = [float(np.minimum(each, longest_ns).mean()) for each in grids.facts.unprofiled_ns]
    return max(float(np.median(means_ns)) - grids.iteration_ns, 0.0) if means_ns else 0.0


def _limit(times_ns: _Times) -> float:
    """The upper limit of the mean of all iterations, from those that are captured; no more than the largest of them."""
    count, spread_ns = len(times_ns), float(np.std(times_ns, ddof=1)) if len(times_ns) > 1 else 0.0
    error_ns = t_quantile(_LEVEL, count - 1) * spread_ns / count**0.5 if spread_ns else 0.0
    return min(float(np.mean(times_ns)) + error_ns, float(np.max(times_ns)))


def _factor(grids: Grids, cost: float) -> float:
    """The profiler's cost to the job's iteration as a multiple of what is known: no doubt if manifests measure it."""
    return cost if grids.profiler.source == "estimate" else 1.0


def _host_ns(grids: Grids, cost: float) -> Grid:
    """What each host needs without the profiler, and without waiting for its device.

    Its cost is an estimate, even where manifests measure what of it the job's iteration shows.
    """
    own_ns, cost_ns = (grids.grid("profiler_cost", name) for name in ("host_own_ns", "host_cost_ns"))
    return own_ns + (1 - cost) * cost_ns


def _launch_gaps_ns(grids: Grids, count: Grid, causes: Sequence[Cause]) -> Grid:
    """Idle time that launching so many kernels can cost, and copies within the device.

    Launching them takes the host as long as others on average. An excess over the median iteration has other reasons.
    """
    copies_ns = grids.idle_ns(Cause.blocked_by_device_copy)
    explained_ns = sum((grids.profiler.explained_ns[cause] for cause in causes), np.zeros_like(copies_ns))
    idle_ns = grids.idle_ns(*causes) + (1 - _factor(grids, 1 - DOUBT)) * explained_ns
    launches = np.maximum(np.nan_to_num(grids.grid("launch_statistics", "kernel_count")), 1.0)
    own_ns = _host_ns(grids, 1 - DOUBT)
    host_ns = np.where(np.isnan(own_ns), grids.duration_ns, own_ns) * np.minimum(count / launches, 1.0)
    usual_ns = grids.captured_row(grids.typical_ns(idle_ns + copies_ns))
    return np.minimum(np.minimum(idle_ns, host_ns) + copies_ns, usual_ns)


def _strided_ns(grids: Grids) -> NDArray[np.float64]:
    """Time of each rank in element-wise kernels that index by strides, per captured iteration."""
    strided = (row for row in grids.compute_kernels if _STRIDED.search(row["name"]))
    found = summed((row["rank"], row["total_ns"] / grids.captured_iterations.get(row["rank"], 1)) for row in strided)
    return np.array([found.get(rank, 0.0) for rank in grids.ranks])


def _slowed_ns(grids: Grids) -> Grid:
    """Compute of ranks that wait for peers next to it: communication that runs meanwhile slows it."""
    overlapped_ns = np.nan_to_num(grids.overlapped_ns)
    for places in grids.peers:
        overlapped_ns[:, places] -= overlapped_ns[:, places].min(axis=1)[:, None]
    return CONTENTION * overlapped_ns


def _of_others(grids: Grids, times_ns: Grid, ranks: Sequence[int]) -> _Times:
    """The longest of the other ranks; of ranks that take turns, the shortest one."""
    others = ~np.isin(grids.ranks, ranks)
    return _most(times_ns[:, others]) if others.any() else np.nanmin(times_ns, axis=1)


def _most(times_ns: Grid) -> _Times:
    """Of the rank with most."""
    return np.max(np.nan_to_num(times_ns), axis=1)


def _middle(times_ns: Grid) -> _Times:
    # Of few values, nanmedian makes a masked array, which takes ten times as long.
    return (np.nanmedian if np.isnan(times_ns).any() else np.median)(times_ns, axis=1)
