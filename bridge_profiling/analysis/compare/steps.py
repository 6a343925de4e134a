"""How much longer or shorter an iteration became, how sure that is, and which parts of it make up the change, exactly.

Two kinds of evidence. Iterations outside the profiler's window, which the ranks' manifests time: many, and not slowed down by
a profiler. Iterations in the captures: few, slowed down, but each with its parts. The first is taken for the change where
both sides have it; the split is always of the second.

An iteration's duration is the mean over the ranks compared: ranks wait for each other, so they differ little. Medians of
parts do not add up to the median of the whole, means do: the split is of the mean iteration, and one line more, what the
median changed beyond the mean, makes it add up to the change of the median.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from bridge_profiling.analysis.attribution.parts import BY_ACTIVITY, BY_CAUSE, parts_of_iterations
from bridge_profiling.analysis.compare.statistics import ENOUGH_SAMPLES, Change, change_of_mean, change_of_median
from bridge_profiling.analysis.run import Run

#: What the median changed beyond the mean.
OUTLIERS = "outlying_iterations_us"

#: Runs of their own say more than iterations of one run: two a side have a spread.
_ENOUGH_RUNS = 2


@dataclass(frozen=True, eq=False)  # arrays have no single truth value
class RunSteps:
    """The iterations of one run that are compared.

    Args:
        iterations: their numbers.
        ranks: whose mean each value is.
        parts: by name (`duration_us`, `BY_CAUSE`, `BY_ACTIVITY`) a value for each iteration.
        of_ranks: by rank and name the mean over iterations.
        boundary: how many iterations at the profiler's start, stop or flush were left out.
        with_boundary: all captured iterations are such, and count.
    """

    iterations: list[int]
    ranks: list[int]
    parts: dict[str, NDArray[np.float64]]
    of_ranks: dict[int, dict[str, float]]
    boundary: int = 0
    with_boundary: bool = False

    @property
    def enough(self) -> bool:
        """Whether there are steady iterations enough to say how sure a change is."""
        return len(self.iterations) >= ENOUGH_SAMPLES and not self.with_boundary


@dataclass(frozen=True)
class StepChange:
    """The change of the median iteration.

    Args:
        us: microseconds before and after, and the bounds of the change; none where that cannot be told.
        evidence: `unprofiled` (iterations that the manifests timed) or `profiled` (iterations in the captures).
        method: `median` of iterations of one run a side, or `welch` over several runs' medians.
        samples: how many of each side: iterations, or runs.
        reason: why how sure it is cannot be told; None when it can.
    """

    us: Change
    evidence: str
    method: str
    samples: tuple[int, int]
    reason: str | None = None

    @property
    def verdict(self) -> str:
        """`slower`, `faster`, `unchanged` (as far as can be told apart from chance) or `unknown`."""
        if self.us.significant is None:
            return "unknown"
        if not self.us.significant:
            return "unchanged"
        return "slower" if self.us.change > 0 else "faster"

    def regressed(self, limit: float) -> bool:
        """Whether it is slower for sure, and by more than a share of what it was.

        Args:
            limit: that share: 0.05.
        """
        return self.verdict == "slower" and self.us.relative is not None and self.us.relative > limit


def ranks_in_common(base: Sequence[Run], other: Sequence[Run]) -> list[int]:
    """The ranks that every run of both sides has captured iterations of; all of either where there is none in common.

    Args:
        base: the runs of one side.
        other: the runs of the other.
    """
    captured = [set(run.iterations()["rank"].to_pylist()) for run in (*base, *other)]
    return sorted(set.intersection(*captured) or set.union(*captured))


def run_steps(run: Run, ranks: Sequence[int]) -> RunSteps | None:
    """The iterations of one run to compare; None when its captures mark none.

    Args:
        run: whose captures are read, unless they were.
        ranks: those to look at, of which the run may lack some.
    """
    every = parts_of_iterations(run.iterations(), run.idle_causes(), run.ranks())
    rows = [row for row in every if row["rank"] in set(ranks) and row["source"] == run.main_source]
    if not rows:
        return None
    found = sorted({row["rank"] for row in rows})
    by_iteration: dict[int, list[dict]] = {}
    for row in rows:
        by_iteration.setdefault(row["iteration"], []).append(row)
    # An iteration that a rank's capture lacks would change the mean by that alone.
    whole = {number: each for number, each in sorted(by_iteration.items()) if len(each) == len(found)} or by_iteration
    steady = {number: each for number, each in whole.items() if not any(row["boundary"] for row in each)}
    chosen = steady or whole
    names = dict.fromkeys(("duration_us", *BY_CAUSE, *BY_ACTIVITY))
    of_rank: dict[int, list[dict]] = {}
    for row in itertools.chain.from_iterable(chosen.values()):
        of_rank.setdefault(row["rank"], []).append(row)
    return RunSteps(
        iterations=list(chosen),
        ranks=found,
        parts={name: np.array([fmean(row[name] for row in each) for each in chosen.values()]) for name in names},
        of_ranks={rank: {name: fmean(row[name] for row in mine) for name in names} for rank, mine in sorted(of_rank.items())},
        boundary=len(whole) - len(steady) if steady else 0,
        with_boundary=not steady,
    )


def unprofiled_us(run: Run) -> list[float]:
    """Microseconds of each iteration that no profiler touched, by the manifests: means over the ranks that timed it.

    Args:
        run: a run, whose manifests were read when it was found.
    """
    times: dict[int, list[int]] = {}
    for capture in run.manifests:
        for iteration, duration in capture.durations_by_iteration(profiled=False).items():
            times.setdefault(iteration, []).append(duration)
    most = max((len(each) for each in times.values()), default=0)
    return [fmean(times[iteration]) / 1e3 for iteration in sorted(times) if len(times[iteration]) == most]


def step_change(
    base: Sequence[Run], other: Sequence[Run], base_steps: Sequence[RunSteps | None], other_steps: Sequence[RunSteps | None]
) -> StepChange | None:
    """The change of the median iteration, from the better evidence that both sides have; None without any iteration.

    Args:
        base: the runs of one side.
        other: the runs of the other.
        base_steps: `run_steps` of each.
        other_steps: `run_steps` of each.
    """
    unprofiled = [[unprofiled_us(run) for run in side] for side in (base, other)]
    if all(len(times) >= ENOUGH_SAMPLES for side in unprofiled for times in side):
        return _change(unprofiled, "unprofiled", None)
    profiled = [
        [[] if steps is None else steps.parts["duration_us"].tolist() for steps in side] for side in (base_steps, other_steps)
    ]
    if not all(times for side in profiled for times in side):
        return None
    return _change(profiled, "profiled", _too_few(base_steps, other_steps))


def told_alike(*sides: Sequence[RunSteps]) -> list[list[RunSteps]]:
    """Both sides, with waiting for other ranks as communication where one of them cannot tell the two apart.

    Args:
        sides: the runs of each.
    """
    told = [any(float(steps.parts["waiting_us"].sum()) > 0 for steps in side) for side in sides]
    communicated = all(float(steps.parts["communication_us"].sum()) > 0 for side in sides for steps in side)
    if len(set(told)) == 1 or not communicated:
        return [list(side) for side in sides]
    return [[_waiting_as_communication(steps) for steps in side] for side in sides]


def _waiting_as_communication(steps: RunSteps) -> RunSteps:
    def merged(parts: dict) -> dict:
        return parts | {
            "communication_us": parts["communication_us"] + parts["waiting_us"],
            "waiting_us": parts["waiting_us"] * 0,
        }

    of_ranks = {rank: merged(parts) for rank, parts in steps.of_ranks.items()}
    return replace(steps, parts=merged(steps.parts), of_ranks=of_ranks)


def split(base: Sequence[RunSteps], other: Sequence[RunSteps], names: Sequence[str]) -> dict[str, Change]:
    """The change of each part, then `OUTLIERS`; they add up to the change of the captures' median iteration, to rounding.

    Args:
        base: the runs of one side.
        other: the runs of the other.
        names: `BY_CAUSE` or `BY_ACTIVITY`.
    """
    found = {name: _of_mean(base, other, name) for name in names}
    mean, median = _of_mean(base, other, "duration_us"), median_change(base, other)
    found[OUTLIERS] = Change(median.base - mean.base, median.other - mean.other)
    return found


def median_change(base: Sequence[RunSteps], other: Sequence[RunSteps]) -> Change:
    """From the captures' median iteration of one side to the other's; of several runs the mean of their medians."""
    sides = [[float(np.median(steps.parts["duration_us"])) for steps in side] for side in (base, other)]
    return Change(fmean(sides[0]), fmean(sides[1]))


def split_by_rank(base: Sequence[RunSteps], other: Sequence[RunSteps]) -> list[dict]:
    """A row per rank that both sides have, the largest change first: its mean iteration's parts before and after.

    Args:
        base: the runs of one side.
        other: the runs of the other.
    """
    sides = [_ranks(side) for side in (base, other)]
    rows: list[dict] = []
    for rank in sorted(sides[0].keys() & sides[1].keys()):
        row: dict = {"rank": rank}
        for name in ("duration_us", *BY_CAUSE):
            before, after = (fmean(each[name] for each in side[rank]) for side in sides)
            row |= {f"base_{name}": before, f"other_{name}": after, f"change_{name}": after - before}
        row["largest"] = max(BY_CAUSE, key=lambda name: abs(row[f"change_{name}"]))
        rows.append(row)
    rows.sort(key=lambda row: (-abs(row["change_duration_us"]), row["rank"]))
    return rows


def _ranks(side: Sequence[RunSteps]) -> dict[int, list[dict[str, float]]]:
    found: dict[int, list[dict[str, float]]] = {}
    for steps in side:
        for rank, means in steps.of_ranks.items():
            found.setdefault(rank, []).append(means)
    return found


def _of_mean(base: Sequence[RunSteps], other: Sequence[RunSteps], name: str) -> Change:
    if len(base) > 1 or len(other) > 1:
        means = [[float(steps.parts[name].mean()) for steps in side] for side in (base, other)]
        return change_of_mean(*means, enough=_ENOUGH_RUNS)
    change = change_of_mean(base[0].parts[name].tolist(), other[0].parts[name].tolist())
    return change if base[0].enough and other[0].enough else Change(change.base, change.other)


def _change(times: Sequence[Sequence[Sequence[float]]], evidence: str, reason: str | None) -> StepChange:
    base, other = times
    if len(base) > 1 or len(other) > 1:
        medians = [[float(np.median(each)) for each in side] for side in times]
        change = change_of_mean(*medians, enough=_ENOUGH_RUNS)
        samples, method = (len(base), len(other)), "welch"
    else:
        change = change_of_median(base[0], other[0])
        samples, method = (len(base[0]), len(other[0])), "median"
    if reason is not None:
        change = Change(change.base, change.other)
    return StepChange(change, evidence, method, samples, reason)


def _too_few(*sides: Sequence[RunSteps | None]) -> str | None:
    """Why iterations in captures cannot say how sure a change is."""
    counts = [[0 if steps is None or steps.with_boundary else len(steps.iterations) for steps in side] for side in sides]
    fewest = [min(side) for side in counts]
    if min(fewest) >= ENOUGH_SAMPLES:
        return None
    return (
        f"the captures hold {_steady(fewest[0])} of the base and {_steady(fewest[1])} of the other: how sure the change "
        f"is can be told from {ENOUGH_SAMPLES} a side"
    )


def _steady(count: int) -> str:
    return f"{count or 'no'} steady iteration{'' if count == 1 else 's'}"
