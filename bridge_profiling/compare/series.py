"""Three or more runs in order, such as nightly ones: each compared with the first and with the previous one, and their trend.

from bridge_profiling.compare.series import compare_series
series = compare_series([Run("monday"), Run("tuesday"), Run("wednesday")])
[run.against_previous.step.verdict for run in series.runs[1:]], series.trend
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge_profiling.compare import Comparable, Comparison, compare_answers
from bridge_profiling.compare import steps as of_steps
from bridge_profiling.compare.events import Noise
from bridge_profiling.compare.steps import ComparedRun, RunSteps, Side
from bridge_profiling.errors import require
from bridge_profiling.facts.statistics import LEVEL, Estimate, Spread, median_of, slope_of, spread_of

SCHEMA_VERSION = 1

#: Fewer runs that rise in order do so by chance in more than 5% of cases.
ENOUGH_FOR_TREND = 5


@dataclass(frozen=True)
class SeriesRun:
    """One run of a series.

    Args:
        name: path of the run.
        captured_ns: when its manifests were written, by their clock, nanoseconds since 1970; None without one.
        step_us: median iteration in microseconds; None without iterations.
        samples: number of iterations that the median is of.
        spread_us: how much these iterations differ, in microseconds; None without iterations.
        parts: microseconds of each part (`BY_CAUSE`, `BY_ACTIVITY`) of the mean captured iteration, and its `duration_us`;
            empty without captured iterations.
        peak_bytes: highest peak of allocated memory of its devices; None if no memory was recorded.
        against_first: comparison with the first run; None for the first.
        against_previous: comparison with the previous run; None for the first.
    """

    name: str
    captured_ns: int | None
    step_us: Estimate | None
    samples: int
    spread_us: Spread | None
    parts: dict[str, float]
    peak_bytes: int | None
    against_first: Comparison | None
    against_previous: Comparison | None


@dataclass(frozen=True)
class Series:
    """Runs in order.

    Args:
        runs: at least three.
        over_runs_us: how much the runs' median iterations differ, in microseconds; None without iterations.
        evidence: iterations that all medians are of: `unprofiled` if every run timed enough of them, else `profiled`.
        trend: change of the median iteration from one run to the next, in microseconds; None if it is not supported.
        no_trend: why no trend is supported; None otherwise.
        limitations: caveats as sentences.
    """

    runs: list[SeriesRun]
    over_runs_us: Spread | None
    evidence: str
    trend: Estimate | None
    no_trend: str | None
    limitations: list[str]

    def document(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "schema_version": SCHEMA_VERSION,
            "evidence": self.evidence,
            "level": LEVEL,
            "runs": [_run_document(run) for run in self.runs],
            "over_runs_us": None if self.over_runs_us is None else asdict(self.over_runs_us),
            "trend_us_per_run": None if self.trend is None else asdict(self.trend),
            "no_trend": self.no_trend,
            "limitations": self.limitations,
        }

    def to_json(self) -> str:
        """`document` as text: the output of `bridge-profiling compare --json` for three or more runs."""
        return json.dumps(self.document(), indent=1, allow_nan=False)


def compare_series(runs: Sequence[Comparable], *, noise: Noise | None = None) -> Series:
    """Compare each run with the first and with the previous one.

    All medians are of the same ranks and the same kind of iterations, so that they are comparable throughout.

    Args:
        runs: at least three, in order.
        noise: limits above which a difference of an event is a change.

    Raises:
        TraceError: a run has no capture.
        ProfilingConfigError: there are fewer than three runs.
    """
    require(len(runs) >= 3, f"a series of {len(runs)} runs", why="a series needs three", instead="Use compare() for two runs")
    answers = [run.compared() for run in runs]
    ranks = of_steps.ranks_in_common(answers)
    sides = [(run, of_steps.run_steps(run, ranks)) for run in answers]
    timed = [(run, steps) for run, steps in sides if steps is not None or of_steps.unprofiled_us(run, None)]
    evidence = of_steps.best_evidence(timed)
    known = [steps for _, steps in sides if steps is not None]
    parts = iter(of_steps.with_equal_parts(*([steps] for steps in known)))

    def against(place: int, number: int) -> Comparison | None:
        pair = [[answers[place]], [answers[number]]]
        return compare_answers(pair, noise or Noise(), ranks=ranks, evidence=evidence) if number else None

    found = []
    for number, (run, steps) in enumerate(sides):
        times = of_steps.step_times([(run, steps)], evidence)
        first = against(0, number)
        found.append(
            SeriesRun(
                name=run.name,
                captured_ns=_captured_ns(run),
                step_us=_median(times[0], evidence, steps) if times else None,
                samples=len(times[0]) if times else 0,
                spread_us=spread_of(times[0]) if times else None,
                parts=_means(next(parts)[0]) if steps is not None else {},
                peak_bytes=max(
                    (row["peak_bytes"] for row in run.memory.to_pylist() if row["peak_bytes"] is not None), default=None
                ),
                against_first=first,
                against_previous=first if number == 1 else against(number - 1, number),
            )
        )
    medians = [each.step_us.value for each in found if each.step_us is not None]
    trend, no_trend = _trend(medians)
    return Series(
        found, spread_of(medians) if medians else None, evidence, trend, no_trend, _limitations(found, sides, evidence)
    )


def _median(times: Sequence[float], evidence: str, steps: RunSteps | None) -> Estimate:
    """The median; without an interval if only iterations at the profiler's start, stop or flush were captured."""
    estimate = median_of(times)
    known = evidence == "unprofiled" or (steps is not None and steps.enough)
    return estimate if known else Estimate(estimate.value)


def _means(steps: RunSteps) -> dict[str, float]:
    return {name: float(values.mean()) for name, values in steps.parts.items()}


def _captured_ns(run: ComparedRun) -> int | None:
    clocks = [capture.manifest.clock for capture in run.manifests]
    return min((clock.unix_ns for clock in clocks if clock is not None), default=None)


def _trend(medians: Sequence[float]) -> tuple[Estimate | None, str | None]:
    """The slope of the medians, or why none is supported."""
    if len(medians) < ENOUGH_FOR_TREND:
        return None, f"a trend needs {ENOUGH_FOR_TREND} runs with known iteration times"
    slope = slope_of(medians)
    if slope.low is None or slope.high is None or slope.low <= 0 <= slope.high:
        return None, f"the {LEVEL:.0%} interval of the slope contains zero"
    values = np.asarray(medians)
    places = np.arange(len(values))
    line = _squares(values - slope.value * places)
    jump = min(_squares(values[:place]) + _squares(values[place:]) for place in range(1, len(values)))
    if jump <= line:
        return None, "one jump fits the medians at least as well as a slope"
    return slope, None


def _squares(values: NDArray[np.float64]) -> float:
    """Sum of squared differences from the mean."""
    return float(((values - values.mean()) ** 2).sum())


def _limitations(runs: Sequence[SeriesRun], sides: Side, evidence: str) -> list[str]:
    found = []
    answers = [run for run, _ in sides]
    unprofiled = [bool(of_steps.unprofiled_us(*side)) for side in sides]
    if evidence == "profiled" and any(unprofiled):
        missing = [run.name for run, known in zip(answers, unprofiled, strict=True) if not known]
        have = "have" if len(missing) > 1 else "has"
        lacking = f"{', '.join(missing)} {have} no iterations" if missing else "not every run has enough iterations"
        found.append(f"{lacking} without profiling: all runs are compared by the iterations in their captures")
    captured = [run.captured_ns for run in runs if run.captured_ns is not None]
    if captured != sorted(captured):
        found.append("the runs are not in the order in which they were captured")
    shared = [sentence for sentence in answers[0].limitations if all(sentence in run.limitations for run in answers)]
    found += [f"all runs: {sentence}" for sentence in shared]
    found += [f"{run.name}: {sentence}" for run in answers for sentence in run.limitations if sentence not in shared]
    return found


def _run_document(run: SeriesRun) -> dict[str, Any]:
    return {
        "name": run.name,
        "captured_unix_ns": run.captured_ns,
        "step_us": None if run.step_us is None else asdict(run.step_us),
        "samples": run.samples,
        "spread_us": None if run.spread_us is None else asdict(run.spread_us),
        "parts": run.parts,
        "peak_bytes": run.peak_bytes,
        "against_first": _against_document(run.against_first),
        "against_previous": _against_document(run.against_previous),
    }


def _against_document(comparison: Comparison | None) -> dict[str, Any] | None:
    """The change of the iteration, and what explains it; `compare` of the two runs gives the rest."""
    if comparison is None:
        return None
    explains = comparison.explains_most
    return {
        "step": comparison.step_document(),
        "same_work": comparison.same_work,
        "differences": [asdict(each) for each in comparison.differences],
        "explains_most": None
        if explains is None
        else {"part": explains[0], "change_us": explains[1].change, "significant": explains[1].significant},
        "undecided": comparison.undecided,
    }
