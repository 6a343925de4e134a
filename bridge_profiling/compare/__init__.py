"""Two sides compared: whether they did the same work, how much an iteration changed and with which confidence, and where.

Three or more runs in order, such as nightly ones, are each compared with the first and with the previous one.

from bridge_profiling.run import Run
comparison = Run("before").compare(Run("after"))
comparison.step.verdict, comparison.kernels.to_pandas()
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa

from bridge_profiling.common.errors import ProfilingConfigError, require
from bridge_profiling.compare import events
from bridge_profiling.compare import steps as of_steps
from bridge_profiling.compare.comparability import WORK, Difference, differences, limitations, limitations_of_series
from bridge_profiling.compare.events import KEYS, Noise
from bridge_profiling.compare.steps import Comparable, Side, StepChange, amounts
from bridge_profiling.facts.intervals import grouped, totals
from bridge_profiling.facts.memory import difference
from bridge_profiling.facts.parts import BY_ACTIVITY, BY_CAUSE
from bridge_profiling.facts.statistics import LEVEL, Change, Estimate, Spread, median_of, spread_of, trend_of
from bridge_profiling.facts.types import document_key, documented
from bridge_profiling.findings import Finding
from bridge_profiling.traces.tables import fields

SCHEMA_VERSION = 1

#: Smaller changes of memory are rounding of the allocator.
_LEAST_BYTES = 1 << 20

_MEMORY = ("peak_bytes", "peak_reserved_bytes", "growth_bytes_per_iteration")


@dataclass(frozen=True)
class Comparison:
    """Differences between two sides.

    Args:
        base: paths of the runs compared with.
        other: paths of the runs compared.
        differences: of the work and its conditions, the most serious first.
        step: change of the median iteration; None without iterations.
        profiled: change of the captures' median iteration, which has `by_cause` and `by_activity`; None without iterations.
        by_cause: change of each part of an iteration by idle cause. The parts, with a last one for outliers, add up to
            `profiled`.
        by_activity: the same by activity.
        ranks: `steps.split_by_rank`.
        kernels: `events.changes` of kernels; their `change` is null within noise.
        copies: of copies and memsets.
        communication: of communication per operation and group; times are of transfers.
        operators: of host operators; times are their own.
        memory: per rank and device: base_, other_ and change_ of peak_bytes, peak_reserved_bytes and
            growth_bytes_per_iteration.
        memory_sites: `facts.memory.difference` if both sides have snapshots.
        findings_came: findings on the other side only.
        findings_went: findings of the base only.
        limitations: caveats as sentences.
    """

    base: list[str]
    other: list[str]
    differences: list[Difference]
    step: StepChange | None
    profiled: Change | None
    by_cause: dict[str, Change]
    by_activity: dict[str, Change]
    ranks: pa.Table
    kernels: pa.Table
    copies: pa.Table
    communication: pa.Table
    operators: pa.Table
    memory: pa.Table
    memory_sites: pa.Table
    findings_came: list[Any]
    findings_went: list[Any]
    limitations: list[str]

    @property
    def same_work(self) -> bool:
        """Whether no difference concerns the work of an iteration."""
        return not any(each.concerns == WORK for each in self.differences)

    @property
    def explains_most(self) -> tuple[str, Change] | None:
        """The part of `by_cause` with the largest change in the direction of the whole; None without a change."""
        if self.profiled is None or not self.profiled.change:
            return None
        sign = 1 if self.profiled.change > 0 else -1
        name = max(BY_CAUSE, key=lambda each: sign * self.by_cause[each].change)
        return (name, self.by_cause[name]) if sign * self.by_cause[name].change > 0 else None

    @property
    def empty(self) -> bool:
        """Whether nothing differs, as between a run and itself."""
        quiet = not any(changed(getattr(self, name)) for name in KEYS) and not changed_memory(self.memory)
        still = self.step is None or self.step.verdict == "unchanged" or not self.step.ns.change
        return quiet and still and not self.differences and not self.findings_came and not self.findings_went

    @property
    def changed_sites(self) -> list[dict[str, Any]]:
        """Rows of `memory_sites` with a change beyond rounding."""
        return [row for row in self.memory_sites.to_pylist() if abs(row["change_bytes_at_peak"]) >= _LEAST_BYTES]

    def regressed(self, limit: float) -> bool:
        """Whether iterations are certainly slower by more than a share of the base."""
        return self.step is not None and self.step.regressed(limit)

    @property
    def different_work(self) -> list[str]:
        """Topics of the differences that make iteration times incomparable: of the work, and other device models."""
        return [each.topic for each in self.differences if each.concerns == WORK or each.topic == "devices"]

    @property
    def undecided(self) -> str | None:
        """Why no limit on the change of the iteration time can be judged; None if one can."""
        if self.step is None:
            return "the iteration times are unknown, because iterations are not marked on both sides"
        if self.step.verdict == "unknown":
            return self.step.reason or "there is too little data"
        if self.different_work:
            return f"the runs are not comparable ({'; '.join(self.different_work)})"
        return None

    def document(self) -> dict[str, Any]:
        """All of it as plain data, with events that changed."""
        found = {
            "schema_version": SCHEMA_VERSION,
            **{name: _data(getattr(self, name)) for name in ("base", "other", "same_work", "differences", "step")},
            "profiled_step": _data(self.profiled),
            **{name: _data(getattr(self, name)) for name in ("by_cause", "by_activity")},
            "ranks": [row | {"largest": document_key(row["largest"])} for row in self.ranks.to_pylist()],
            **{name: changed(getattr(self, name)) for name in KEYS},
            "memory": self.memory,
            "memory_sites": self.changed_sites,
            **{name: _data(getattr(self, name)) for name in ("findings_came", "findings_went", "limitations")},
        }
        return documented(found)

    def to_json(self) -> str:
        """`document` as text: the output of `bridge-profiling compare BASE OTHER --json`."""
        return json.dumps(self.document(), indent=1, allow_nan=False)


@dataclass(frozen=True)
class SeriesRun:
    """One run of a series.

    Args:
        name: path of the run.
        captured_unix_ns: when its manifests were written, by their clock, nanoseconds since 1970; None without one.
        step_ns: median iteration in nanoseconds; None without iterations.
        samples: number of iterations that the median is of.
        spread_ns: how much these iterations differ, in nanoseconds; None without iterations.
        parts: nanoseconds of each part (`BY_CAUSE`, `BY_ACTIVITY`) of the mean captured iteration, and its `duration_ns`;
            empty without captured iterations.
        peak_bytes: highest peak of allocated memory of its devices; None if no memory was recorded.
        against_first: comparison with the first run; None for the first.
        against_previous: comparison with the previous run; None for the first.
    """

    name: str
    captured_unix_ns: int | None
    step_ns: Estimate | None
    samples: int
    spread_ns: Spread | None
    parts: dict[str, float]
    peak_bytes: int | None
    against_first: Comparison | None
    against_previous: Comparison | None


@dataclass(frozen=True)
class Series:
    """Runs in order.

    Args:
        runs: at least three.
        over_runs_ns: how much the runs' median iterations differ, in nanoseconds; None without iterations.
        evidence: iterations that all medians are of: `unprofiled` if every run timed enough of them, else `profiled`.
        trend: change of the median iteration from one run to the next, in nanoseconds; None if it is not supported.
        no_trend: why no trend is supported; None otherwise.
        limitations: caveats as sentences.
    """

    runs: list[SeriesRun]
    over_runs_ns: Spread | None
    evidence: str
    trend: Estimate | None
    no_trend: str | None
    limitations: list[str]

    def document(self) -> dict[str, Any]:
        """All of it as plain data."""
        found = {
            "schema_version": SCHEMA_VERSION,
            "evidence": self.evidence,
            "level": LEVEL,
            "runs": [_data(vars(run)) for run in self.runs],
            "over_runs_ns": _data(self.over_runs_ns),
            "trend_ns_per_run": _data(self.trend),
            "no_trend": self.no_trend,
            "limitations": self.limitations,
        }
        return documented(found)

    def to_json(self) -> str:
        """`document` as text: the output of `bridge-profiling compare --json` for three or more runs."""
        return json.dumps(self.document(), indent=1, allow_nan=False)


def compare(
    base: Comparable | Sequence[Comparable], other: Comparable | Sequence[Comparable], *, noise: Noise | None = None
) -> Comparison:
    """Compare two runs, or several per side.

    Args:
        base: runs to compare with. Of several runs, each counts as one sample.
        other: runs to compare.
        noise: limits above which a difference of an event is a change.

    Raises:
        TraceError: a run has no capture.
        ProfilingConfigError: one side has several runs, the other a single one.
    """
    runs = [list(side) if isinstance(side, Sequence) else [side] for side in (base, other)]
    counts = [len(side) for side in runs]
    if min(counts) == 1 and max(counts) > 1:
        raise ProfilingConfigError(
            f"{counts[0]} base run{'s' if counts[0] > 1 else ''} against {counts[1]}",
            why="the spread between runs of one kind needs at least two runs per side",
            instead="Give several runs of both sides, or one of each",
        )
    before, after = _with_steps(runs)
    return _compare(before, after, noise or Noise())


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
    sides = _with_steps([[run] for run in runs])
    every = [measured for side in sides for measured in side]
    evidence = of_steps.best_evidence([each for each in every if each[1] is not None or of_steps.unprofiled_ns(*each)])
    known = [[steps] for _, steps in every if steps is not None]
    equal_parts = iter(of_steps.with_equal_parts(*known))
    found: list[SeriesRun] = []
    for number, (run, steps) in enumerate(every):
        earlier = {0, number - 1} if number else ()
        against = {place: _compare(sides[place], sides[number], noise or Noise(), evidence) for place in earlier}
        (times,) = of_steps.step_times(sides[number], evidence) or [[]]
        median = median_of(times) if times else None
        if median is not None and evidence == "profiled" and not (steps is not None and steps.enough):
            median = Estimate(median.value)
        clocks = [capture.manifest.clock for capture in run.facts.manifests]
        found.append(
            SeriesRun(
                name=str(run.facts.path),
                captured_unix_ns=min((clock.unix_ns for clock in clocks if clock is not None), default=None),
                step_ns=median,
                samples=len(times),
                spread_ns=spread_of(times) if times else None,
                parts={} if steps is None else {name: float(of.mean()) for name, of in next(equal_parts)[0].parts.items()},
                peak_bytes=max((peak for peak in run.facts.memory["peak_bytes"].to_pylist() if peak is not None), default=None),
                against_first=against.get(0),
                against_previous=against.get(number - 1),
            )
        )
    medians = [run.step_ns.value for run in found if run.step_ns is not None]
    trend, no_trend = trend_of(medians)
    return Series(
        runs=found,
        over_runs_ns=spread_of(medians) if medians else None,
        evidence=evidence,
        trend=trend,
        no_trend=no_trend,
        limitations=limitations_of_series(every, [run.captured_unix_ns for run in found], evidence),
    )


def _with_steps(runs: Sequence[Sequence[Comparable]]) -> list[Side]:
    """Runs with their iterations on the ranks that all of them captured."""
    ranks = of_steps.ranks_in_common([run for side in runs for run in side])
    return [[(run, of_steps.run_steps(run, ranks)) for run in side] for side in runs]


def _compare(before: Side, after: Side, noise: Noise, evidence: str | None = None) -> Comparison:
    """Compare both sides' runs, by iterations of one kind: by default the better one that both sides have."""
    marked = all(steps is not None for _, steps in (*before, *after))
    if not marked:  # amounts per iteration and amounts of whole captures are not comparable
        before, after = ([(run, None) for run, _ in side] for side in (before, after))
    sides = (before, after)
    runs = [[run for run, _ in side] for side in sides]
    known = [[steps for _, steps in side if steps is not None] for side in sides]
    base, other = of_steps.with_equal_parts(*known)
    several_profilers = len({run.facts.source for side in runs for run in side if run.facts.infos}) > 1
    rekey = {"kernels": events.without_arguments} if several_profilers else {}
    found = {of: (events.events_of(before, of, rekey.get(of)), events.events_of(after, of, rekey.get(of))) for of in KEYS}
    communication = found["communication"]
    found["communication"] = events.comparable(*communication)
    means = [float(each.parts["duration_ns"].mean()) for each in base]
    # Without iterations, every change of an event counts.
    step_ns = sum(means) / len(means) if means else 0.0
    evidence = evidence or of_steps.best_evidence([*before, *after])
    return Comparison(
        base=[str(run.facts.path) for run in runs[0]],
        other=[str(run.facts.path) for run in runs[1]],
        differences=differences(before, after, communication),
        step=of_steps.step_change(before, after, evidence),
        profiled=of_steps.median_change(base, other) if marked else None,
        by_cause=of_steps.split(base, other, BY_CAUSE) if marked else {},
        by_activity=of_steps.split(base, other, BY_ACTIVITY) if marked else {},
        ranks=_table(of_steps.split_by_rank(base, other), "rank"),
        **{
            of: _table(events.changes(before, after, of, step_ns=step_ns, noise=noise), "change", *KEYS[of])
            for of, (before, after) in found.items()
        },
        memory=_memory(runs),
        memory_sites=_sites(runs),
        findings_came=_only(runs[1], runs[0]),
        findings_went=_only(runs[0], runs[1]),
        limitations=limitations(sides, marked=marked, merged=[base, other] != known),
    )


def changed(table: pa.Table) -> list[dict[str, Any]]:
    """Rows of events that changed beyond noise."""
    return [row for row in table.to_pylist() if row["change"] is not None]


def changed_memory(table: pa.Table) -> list[dict[str, Any]]:
    """Rows of devices with a change of the peak or the growth beyond rounding."""
    names = ("change_peak_bytes", "change_growth_bytes_per_iteration")
    return [row for row in table.to_pylist() if any(abs(row[name] or 0) >= _LEAST_BYTES for name in names)]


def _table(rows: list[dict[str, Any]], *names: str) -> pa.Table:
    """Rows as a table; without rows, it has only the columns `names`."""
    return pa.Table.from_pylist(rows) if rows else pa.table({name: pa.array([], pa.string()) for name in names})


def _memory(sides: Sequence[Sequence[Comparable]]) -> pa.Table:
    """Peak and growth of each device recorded on both sides; means of several runs."""
    means = {name: (name, "mean") for name in _MEMORY}
    every = (pa.concat_tables([run.facts.memory for run in side]) for side in sides)
    base, other = (grouped(totals(each, ("rank", "device"), **means).to_pylist(), "rank", "device") for each in every)
    rows = [
        {"rank": rank, "device": device} | amounts(_MEMORY, *base[rank, device], *other[rank, device])
        for rank, device in sorted(base.keys() & other.keys())
    ]
    columns = fields(pa.float64(), *amounts(_MEMORY, dict.fromkeys(_MEMORY), dict.fromkeys(_MEMORY)))
    return pa.Table.from_pylist(rows, schema=pa.schema([*fields(pa.int32(), "rank", "device"), *columns]))


def _sites(sides: Sequence[Sequence[Comparable]]) -> pa.Table:
    """The difference by allocation site; no rows unless both sides recorded sites."""
    before, after = (pa.concat_tables([run.facts.memory_sites for run in side]) for side in sides)
    found = difference(before, after)
    return found if before.num_rows and after.num_rows else found.slice(0, 0)


def _only(side: Sequence[Comparable], than: Sequence[Comparable]) -> list[Any]:
    """Findings of one side only, by id: ranks may differ, and titles contain numbers."""
    known = {finding.id for run in than for finding in run.findings}
    found: dict[str, Any] = {}
    for finding in (finding for run in side for finding in run.findings if finding.id not in known):
        found.setdefault(finding.id, finding)
    return list(found.values())


def _data(value: Any) -> Any:
    """Plain data; of a comparison in a series, the change of the iteration and what explains it."""
    match value:
        case Change():
            times = {f"{name}_ns": getattr(value, name) for name in ("base", "other", "change", "low", "high")}
            return times | {name: getattr(value, name) for name in ("relative", "speedup", "significant")}
        case StepChange():
            known = {name: getattr(value, name) for name in ("verdict", "evidence", "method", "reason")}
            return _data(value.ns) | known | {"samples": list(value.samples), "level": LEVEL}
        case Comparison():
            found: dict[str, Any] = {name: _data(getattr(value, name)) for name in ("step", "same_work", "differences")}
            found |= {"explains_most": None, "undecided": value.undecided}
            if value.explains_most is not None:
                part, change = value.explains_most
                explains = {"part": document_key(part), "change_ns": change.change, "significant": change.significant}
                found["explains_most"] = explains
            return found
        case Finding():
            return {name: _data(getattr(value, name)) for name in ("id", "title", "ranks", "confidence")}
        case dict():
            return {name: _data(each) for name, each in value.items()}
        case list():
            return [_data(each) for each in value]
    return msgspec.to_builtins(value, enc_hook=float)  # also dataclasses, and NumPy's numbers
