"""Two sides compared: whether they did the same work, how much an iteration changed and with which confidence, and where.

from bridge_profiling import Run
comparison = Run("before").compare(Run("after"))
comparison.step.verdict, comparison.kernels.to_pandas()
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from bridge_profiling.compare import events
from bridge_profiling.compare import steps as of_steps
from bridge_profiling.compare.comparability import WORK, Difference, differences
from bridge_profiling.compare.events import KEYS, Noise
from bridge_profiling.compare.steps import ComparedRun, Side, StepChange
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.facts.intervals import grouped
from bridge_profiling.facts.memory import difference
from bridge_profiling.facts.parts import BY_ACTIVITY, BY_CAUSE
from bridge_profiling.facts.statistics import LEVEL, Change
from bridge_profiling.traces.tables import fields

SCHEMA_VERSION = 1

#: Smaller changes of memory are rounding of the allocator.
_LEAST_BYTES = 1 << 20


class Comparable(Protocol):
    """A run."""

    def compared(self) -> ComparedRun:
        """Its answers."""


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
        memory_sites: `Run.memory_difference` if both sides have snapshots.
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
    findings_came: list[Any] = field(default_factory=list)
    findings_went: list[Any] = field(default_factory=list)
    limitations: list[str] = field(default_factory=list)

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
        still = self.step is None or self.step.verdict == "unchanged" or not self.step.us.change
        return quiet and still and not self.differences and not self.findings_came and not self.findings_went

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
        return {
            "schema_version": SCHEMA_VERSION,
            "base": self.base,
            "other": self.other,
            "same_work": self.same_work,
            "differences": [asdict(each) for each in self.differences],
            "step": self.step_document(),
            "profiled_step": None if self.profiled is None else _change(self.profiled),
            "by_cause": {name: _change(each) for name, each in self.by_cause.items()},
            "by_activity": {name: _change(each) for name, each in self.by_activity.items()},
            "ranks": self.ranks.to_pylist(),
            **{name: changed(getattr(self, name)) for name in KEYS},
            "memory": self.memory.to_pylist(),
            "memory_sites": [row for row in self.memory_sites.to_pylist() if abs(row["change_bytes_at_peak"]) >= _LEAST_BYTES],
            "findings_came": [_finding(each) for each in self.findings_came],
            "findings_went": [_finding(each) for each in self.findings_went],
            "limitations": self.limitations,
        }

    def step_document(self) -> dict[str, Any] | None:
        """The change of the median iteration as plain data."""
        if self.step is None:
            return None
        known = {name: getattr(self.step, name) for name in ("verdict", "evidence", "method", "reason")}
        return _change(self.step.us) | known | {"samples": list(self.step.samples), "level": LEVEL}

    def to_json(self) -> str:
        """`document` as text: the output of `bridge-profiling compare BASE OTHER --json`."""
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
    return compare_answers([[run.compared() for run in side] for side in runs], noise or Noise())


def compare_answers(
    runs: Sequence[Sequence[ComparedRun]], noise: Noise, *, ranks: Sequence[int] | None = None, evidence: str | None = None
) -> Comparison:
    """Compare the answers of both sides' runs.

    Args:
        runs: those of the base, and those of the other side.
        noise: limits above which a difference of an event is a change.
        ranks: whose iterations are compared; None for those in common.
        evidence: iterations to use, see `steps.step_change`.
    """
    every = [run for side in runs for run in side]
    ranks = of_steps.ranks_in_common(every) if ranks is None else ranks
    sides: list[Side] = [[(run, of_steps.run_steps(run, ranks)) for run in side] for side in runs]
    marked = all(steps is not None for side in sides for _, steps in side)
    if not marked:  # amounts per iteration and amounts of whole captures are not comparable
        sides = [[(run, None) for run in side] for side in runs]
    known = [[steps for _, steps in side if steps is not None] for side in sides]
    base, other = of_steps.with_equal_parts(*known)
    several_profilers = len({run.main_source for run in every if run.infos}) > 1
    rekey = {"rekey": events.without_arguments} if several_profilers else {}
    communication = [events.events_of(side, "communication") for side in sides]
    found = {
        "communication": events.comparable(communication[0], communication[1]),
        "kernels": [events.events_of(side, "kernels", **rekey) for side in sides],
        "copies": [events.events_of(side, "copies") for side in sides],
        "operators": [events.events_of(side, "operators") for side in sides],
    }
    means = [float(each.parts["duration_us"].mean()) for each in base]
    # Without iterations, every change of an event counts.
    step_us = sum(means) / len(means) if means else 0.0
    came, went = _findings(runs)
    return Comparison(
        base=[run.name for run in runs[0]],
        other=[run.name for run in runs[1]],
        differences=differences(sides[0], sides[1], (communication[0], communication[1])),
        step=of_steps.step_change(sides[0], sides[1], evidence),
        profiled=of_steps.median_change(base, other) if marked else None,
        by_cause=of_steps.split(base, other, BY_CAUSE) if marked else {},
        by_activity=of_steps.split(base, other, BY_ACTIVITY) if marked else {},
        ranks=_table(of_steps.split_by_rank(base, other), "rank"),
        **{
            of: _table(events.changes(before, after, of, step_us=step_us, noise=noise), "change", *KEYS[of])
            for of, (before, after) in found.items()
        },
        memory=_memory(runs),
        memory_sites=_sites(runs),
        findings_came=came,
        findings_went=went,
        limitations=_limitations(sides, marked=marked, merged=[base, other] != known),
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


_MEMORY = ("peak_bytes", "peak_reserved_bytes", "growth_bytes_per_iteration")


def _memory(sides: Sequence[Sequence[ComparedRun]]) -> pa.Table:
    """Peak and growth of each device recorded on both sides; means of several runs."""
    known = [grouped((row for run in side for row in run.memory.to_pylist()), "rank", "device") for side in sides]
    rows = []
    for rank, device in sorted(known[0].keys() & known[1].keys()):
        row: dict[str, Any] = {"rank": rank, "device": device}
        for name in _MEMORY:
            before, after = (_mean([each[name] for each in found[rank, device]]) for found in known)
            row |= {f"base_{name}": before, f"other_{name}": after}
            row[f"change_{name}"] = None if before is None or after is None else after - before
        rows.append(row)
    amounts = fields(pa.float64(), *(f"{side}_{name}" for name in _MEMORY for side in ("base", "other", "change")))
    return pa.Table.from_pylist(rows, schema=pa.schema([*fields(pa.int32(), "rank", "device"), *amounts]))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _sites(sides: Sequence[Sequence[ComparedRun]]) -> pa.Table:
    """The difference by allocation site; no rows unless both sides recorded sites."""
    before, after = (pa.concat_tables([run.memory_sites for run in side]) for side in sides)
    found = difference(before, after)
    return found if before.num_rows and after.num_rows else found.slice(0, 0)


def _findings(runs: Sequence[Sequence[ComparedRun]]) -> tuple[list[Any], list[Any]]:
    """Findings on one side only, by id: ranks may differ, and titles contain numbers."""
    base: dict[str, Any] = {}
    other: dict[str, Any] = {}
    for found, side in zip((base, other), runs, strict=True):
        for run in side:
            for finding in run.findings:
                found.setdefault(finding.id, finding)
    return [other[each] for each in other if each not in base], [base[each] for each in base if each not in other]


def _finding(finding: Any) -> dict[str, Any]:
    return {"id": finding.id, "title": finding.title, "ranks": list(finding.ranks), "confidence": str(finding.confidence)}


def _change(change: Change) -> dict[str, Any]:
    us = {f"{name}_us": getattr(change, name) for name in ("base", "other", "change", "low", "high")}
    return us | {"relative": change.relative, "speedup": change.speedup, "significant": change.significant}


def _limitations(sides: Sequence[Side], *, marked: bool, merged: bool) -> list[str]:
    found: list[str] = []
    if merged:
        found.append("one side cannot separate waiting for other ranks from communication: they are one part on both sides")
    if not marked:
        found.append(
            "one side has no marked iterations: whole captures are compared, and the change of an iteration is unknown"
        )
    for word, side in zip(("base", "other"), sides, strict=True):
        for run, steps in side:
            if steps is not None and steps.with_boundary:
                found.append(f"{word}: all iterations of {run.name} are at the profiler's start, stop or flush, and count")
            found += [f"{word}: {sentence}" for sentence in run.limitations]
    return list(dict.fromkeys(found))
