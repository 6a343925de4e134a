"""How much an iteration changed, with which confidence, and which parts of it make up the change.

There are two kinds of evidence. Iterations outside the profiler's window, timed in the manifests: many, and not slowed down by
a profiler. Iterations in the captures: few and slowed down, but with their parts. The change is from the first kind if both
sides have it; the parts are always from the second.

An iteration's duration is the mean over the compared ranks: ranks wait for each other, so they differ little. Parts have means
that add up, but not medians. So the parts are of the mean iteration, and one more part, the change of the median beyond the
mean, makes them add up to the change of the median.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bridge_profiling.facts.intervals import grouped
from bridge_profiling.facts.parts import BY_ACTIVITY, BY_CAUSE, parts_of_iterations, steady_iterations
from bridge_profiling.facts.statistics import ENOUGH_SAMPLES, Change, change_of_mean, change_of_median

if TYPE_CHECKING:
    from bridge_profiling.facts.run import RunFacts
    from bridge_profiling.findings.types import Finding

#: Name of the part that is the change of the median beyond the mean.
OUTLIERS = "outlying_iterations_ns"

#: Two runs per side show a spread.
_ENOUGH_RUNS = 2


class Comparable(Protocol):
    """The facts and the findings of a run."""

    facts: RunFacts

    @property
    def findings(self) -> list[Finding]:
        """Where time is lost or memory is short."""


@dataclass(frozen=True, eq=False)  # arrays have no single truth value
class RunSteps:
    """The iterations of one run that are compared."""

    iterations: list[int]  # their numbers
    ranks: list[int]  # that each value is the mean of
    parts: dict[str, NDArray[np.float64]]  # by name (`duration_ns`, `BY_CAUSE`, `BY_ACTIVITY`), a value per iteration
    of_ranks: dict[int, dict[str, float]]  # by rank and name, the mean over iterations
    with_boundary: bool = False  # whether all captured iterations are boundary ones, and count

    @property
    def enough(self) -> bool:
        """Whether there are enough steady iterations for a confidence interval."""
        return len(self.iterations) >= ENOUGH_SAMPLES and not self.with_boundary


#: The runs of one side, each with its iterations; None if none are marked.
Side = Sequence[tuple[Comparable, RunSteps | None]]


@dataclass(frozen=True)
class StepChange:
    """The change of the median iteration.

    Args:
        ns: nanoseconds before and after, and the confidence interval of the change if known.
        evidence: `unprofiled` (iterations timed in the manifests) or `profiled` (iterations in the captures).
        method: `median` of the iterations of one run per side, or `welch` over the medians of several runs.
        samples: of each side: iterations or runs.
        reason: why the confidence interval is unknown; None if it is known.
    """

    ns: Change
    evidence: str
    method: str
    samples: tuple[int, int]
    reason: str | None = None

    @property
    def verdict(self) -> str:
        """`slower`, `faster`, `unchanged` (within chance) or `unknown`."""
        if self.ns.significant is None:
            return "unknown"
        if not self.ns.significant:
            return "unchanged"
        return "slower" if self.ns.change > 0 else "faster"

    def regressed(self, limit: float) -> bool:
        """Whether iterations are certainly slower, and by more than a share of the base such as 0.05."""
        return self.verdict == "slower" and self.ns.relative is not None and self.ns.relative > limit


def captured_iterations(run: Comparable) -> int:
    """Number of captured iterations, at least 1."""
    return max(len(run.facts.iterations["iteration"].unique()), 1)


def ranks_in_common(runs: Sequence[Comparable]) -> list[int]:
    """The ranks with iterations in every run that has any; if there are none, the ranks with iterations in any run."""
    captured = [set(run.facts.iterations["rank"].to_pylist()) for run in runs if run.facts.iterations.num_rows]
    return sorted(set.intersection(*captured) or set.union(*captured)) if captured else []


def run_steps(run: Comparable, ranks: Sequence[int]) -> RunSteps | None:
    """The iterations of one run on some ranks; None if its captures have none."""
    every = parts_of_iterations(run.facts.iterations, run.facts.idle_causes, run.facts.ranks)
    rows = [row for row in every if row["rank"] in ranks and row["source"] == run.facts.source]
    if not rows:
        return None
    found = sorted({row["rank"] for row in rows})
    by_iteration = grouped(rows, "iteration")
    # An iteration missing in a rank's capture would change the mean.
    whole = {number: each for number, each in sorted(by_iteration.items()) if len(each) == len(found)} or by_iteration
    boundary = {number: any(row["boundary"] for row in each) for number, each in whole.items()}
    chosen = {number: whole[number] for number in steady_iterations(boundary, at_least=1)}
    names = dict.fromkeys(("duration_ns", *BY_CAUSE, *BY_ACTIVITY))
    of_rank = grouped(itertools.chain.from_iterable(chosen.values()), "rank")
    return RunSteps(
        iterations=list(chosen),
        ranks=found,
        parts={name: np.array([fmean(row[name] for row in each) for each in chosen.values()]) for name in names},
        of_ranks={rank: {name: fmean(row[name] for row in mine) for name in names} for rank, mine in sorted(of_rank.items())},
        with_boundary=all(boundary.values()),
    )


def unprofiled_ns(run: Comparable, steps: RunSteps | None) -> list[float]:
    """Nanoseconds of each iteration outside the profiler's window, as means over the compared ranks that timed it.

    Without captured iterations, over all ranks.
    """
    times: dict[int, list[int]] = {}
    for capture in run.facts.manifests:
        if steps is not None and capture.rank not in steps.ranks:
            continue
        for iteration, duration in capture.durations_by_iteration(profiled=False).items():
            times.setdefault(iteration, []).append(duration)
    most = max((len(each) for each in times.values()), default=0)
    return [fmean(times[iteration]) for iteration in sorted(times) if len(times[iteration]) == most]


def best_evidence(runs: Side) -> str:
    """`unprofiled` if each of the runs timed enough iterations outside its window, else `profiled`."""
    return "unprofiled" if all(len(unprofiled_ns(*run)) >= ENOUGH_SAMPLES for run in runs) else "profiled"


def step_times(side: Side, evidence: str) -> list[list[float]] | None:
    """Nanoseconds of each run's iterations, of one kind of evidence; None if a run has none."""
    if evidence == "unprofiled":
        times = [unprofiled_ns(run, steps) for run, steps in side]
    else:
        times = [[] if steps is None else steps.parts["duration_ns"].tolist() for _, steps in side]
    return times if all(times) else None


def step_change(base: Side, other: Side, evidence: str) -> StepChange | None:
    """The change of the median iteration, of one kind of evidence; None without iterations."""
    before, after = (step_times(side, evidence) for side in (base, other))
    if before is None or after is None:
        return None
    change = _change(before, after, np.median, change_of_median)
    several = len(before) > 1 or len(after) > 1
    samples = (len(before), len(after)) if several else (len(before[0]), len(after[0]))
    reason = _too_few(base, other) if evidence == "profiled" else None
    if reason is not None:
        change = Change(change.base, change.other)
    return StepChange(change, evidence, "welch" if several else "median", samples, reason)


def _too_few(*sides: Side) -> str | None:
    """Why captured iterations show no confidence interval; None if they do."""
    fewest = [min(0 if steps is None or steps.with_boundary else len(steps.iterations) for _, steps in side) for side in sides]
    if min(fewest) >= ENOUGH_SAMPLES:
        return None
    counts = [f"{count or 'no'} steady iteration{'' if count == 1 else 's'}" for count in fewest]
    return (
        f"the captures hold {counts[0]} of the base and {counts[1]} of the other; a confidence interval needs "
        f"{ENOUGH_SAMPLES} per side"
    )


def _change(
    base: Sequence[Sequence[float]],
    other: Sequence[Sequence[float]],
    middle: Callable[[Sequence[float]], Any],
    of_one: Callable[[Sequence[float], Sequence[float]], Change],
) -> Change:
    """From the samples of single runs, or, of several runs per side, from a mean or median of each."""
    if len(base) > 1 or len(other) > 1:
        means = [[float(middle(samples)) for samples in side] for side in (base, other)]
        return change_of_mean(*means, enough=_ENOUGH_RUNS)
    return of_one(base[0], other[0])


def with_equal_parts(*sides: Sequence[RunSteps]) -> list[list[RunSteps]]:
    """Both sides; waiting for other ranks counts as communication if one side cannot separate the two."""
    known = [any(float(steps.parts["waiting_ns"].sum()) > 0 for steps in side) for side in sides]
    communicated = all(float(steps.parts["communication_ns"].sum()) > 0 for side in sides for steps in side)
    if len(set(known)) == 1 or not communicated:
        return [list(side) for side in sides]
    return [[_waiting_as_communication(steps) for steps in side] for side in sides]


def _waiting_as_communication(steps: RunSteps) -> RunSteps:
    def merged(parts: dict) -> dict:
        both = parts["communication_ns"] + parts["waiting_ns"]
        return parts | {"communication_ns": both, "waiting_ns": parts["waiting_ns"] * 0}

    of_ranks = {rank: merged(parts) for rank, parts in steps.of_ranks.items()}
    return replace(steps, parts=merged(steps.parts), of_ranks=of_ranks)


def split(base: Sequence[RunSteps], other: Sequence[RunSteps], names: Sequence[str]) -> dict[str, Change]:
    """The change of each part in `names`, then `OUTLIERS`; they add up to the change of the captures' median iteration."""
    found = {name: _of_mean(base, other, name) for name in names}
    mean, median = _of_mean(base, other, "duration_ns"), median_change(base, other)
    found[OUTLIERS] = Change(median.base - mean.base, median.other - mean.other)
    return found


def median_change(base: Sequence[RunSteps], other: Sequence[RunSteps]) -> Change:
    """The change of the captures' median iteration; of several runs, of the mean of their medians."""
    sides = [[float(np.median(steps.parts["duration_ns"])) for steps in side] for side in (base, other)]
    return Change(fmean(sides[0]), fmean(sides[1]))


def split_by_rank(base: Sequence[RunSteps], other: Sequence[RunSteps]) -> list[dict]:
    """A row per rank of both sides, the largest change first: the parts of its mean iteration before and after."""
    common = set.intersection(*({rank for steps in side for rank in steps.of_ranks} for side in (base, other)))
    names = ("duration_ns", *BY_CAUSE)
    rows: list[dict] = []
    for rank in sorted(common):
        means = ({name: fmean(steps.of_ranks[rank][name] for steps in side) for name in names} for side in (base, other))
        row: dict = {"rank": rank} | amounts(names, *means)
        row["largest"] = max(BY_CAUSE, key=lambda name: abs(row[f"change_{name}"]))
        rows.append(row)
    rows.sort(key=lambda row: (-abs(row["change_duration_ns"]), row["rank"]))
    return rows


def amounts(names: Iterable[str], before: Mapping[str, float | None], after: Mapping[str, float | None]) -> dict[str, Any]:
    """Columns of amounts: of the base, of the other side, and the change if both are known."""
    found: dict[str, Any] = {}
    for name in names:
        base, other = before[name], after[name]
        change = None if base is None or other is None else other - base
        found |= {f"base_{name}": base, f"other_{name}": other, f"change_{name}": change}
    return found


def _of_mean(base: Sequence[RunSteps], other: Sequence[RunSteps], name: str) -> Change:
    before, after = ([steps.parts[name].tolist() for steps in side] for side in (base, other))
    change = _change(before, after, np.mean, change_of_mean)
    several = len(base) > 1 or len(other) > 1
    return change if several or (base[0].enough and other[0].enough) else Change(change.base, change.other)
