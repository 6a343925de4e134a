"""Two sides compared: same work? how much did an iteration change, how sure is that, which part of it explains the change?

    from bridge_profiling.analysis import Run
    comparison = Run("before").compare(Run("after"))
    comparison.step.verdict, comparison.kernels.to_pandas()

Asks `compare_steps`, `compare_events` and `same_work`, and adds nothing to what they say.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa

from bridge_profiling.analysis.attribution.parts import BY_ACTIVITY, BY_CAUSE
from bridge_profiling.analysis.compare import events
from bridge_profiling.analysis.compare import steps as of_steps
from bridge_profiling.analysis.compare.comparability import WORK, Difference, differences
from bridge_profiling.analysis.compare.events import Noise, Sides
from bridge_profiling.analysis.compare.statistics import LEVEL, Change
from bridge_profiling.analysis.compare.steps import RunSteps, StepChange
from bridge_profiling.analysis.memory.tables import difference
from bridge_profiling.analysis.run import Run
from bridge_profiling.errors import ProfilingConfigError

SCHEMA_VERSION = 1

#: Memory that changed by less is rounding of the allocator.
_LEAST_BYTES = 1 << 20

_AMOUNTS = ("count", "us", "mean_us")


@dataclass(frozen=True)
class Comparison:
    """What is not the same on two sides.

    Args:
        base: what is compared with: a name for each run.
        other: what is compared.
        differences: what is not the same besides the times, the gravest first.
        step: the change of the median iteration; None when no iterations are known.
        profiled: that of the captures' iterations, which `by_cause` and `by_activity` split; None likewise.
        by_cause: the change of each part of an iteration, by what kept the device from computing; the parts, the last one of
            which is for outliers, add up to `profiled`.
        by_activity: likewise by what ran.
        ranks: `compare_steps.split_by_rank`.
        kernels: `compare_events.changes` of kernels, whose `change` is null for those within noise.
        copies: of copies and memsets.
        communication: of communication per operation and group; times are of transfers.
        operators: of host operators; times are their own.
        memory: per rank and device: base_, other_ and change_ of peak_bytes, peak_reserved_bytes and
            growth_bytes_per_iteration.
        memory_sites: `Run.memory_difference` where both sides have snapshots.
        findings_came: findings of the other side that the base lacks.
        findings_went: findings of the base that the other side lacks.
        limitations: sentences: what these captures cannot tell.
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
        """Whether nothing says that an iteration of one side is other work than one of the other side."""
        return not any(each.concerns == WORK for each in self.differences)

    @property
    def explains_most(self) -> tuple[str, Change] | None:
        """The part of `by_cause` that changed most in the direction of the whole; None where nothing changed."""
        if self.profiled is None or not self.profiled.change:
            return None
        sign = 1 if self.profiled.change > 0 else -1
        name = max(BY_CAUSE, key=lambda each: sign * self.by_cause[each].change)
        return (name, self.by_cause[name]) if sign * self.by_cause[name].change > 0 else None

    @property
    def empty(self) -> bool:
        """Whether nothing is different: what a run compared with itself gives."""
        tables = (self.kernels, self.copies, self.communication, self.operators)
        quiet = all(not changed(table) for table in tables) and not changed_memory(self.memory)
        still = self.step is None or self.step.verdict == "unchanged" or not self.step.us.change
        return quiet and still and not self.differences and not self.findings_came and not self.findings_went

    def regressed(self, limit: float) -> bool:
        """Whether an iteration is slower for sure, and by more than a share of what it was: see `StepChange.regressed`."""
        return self.step is not None and self.step.regressed(limit)

    def document(self) -> dict[str, Any]:
        """All of it as plain data; of events those that changed."""
        return {
            "schema_version": SCHEMA_VERSION,
            "base": self.base,
            "other": self.other,
            "same_work": self.same_work,
            "differences": [asdict(each) for each in self.differences],
            "step": None
            if self.step is None
            else _change(self.step.us)
            | {
                "verdict": self.step.verdict,
                "evidence": self.step.evidence,
                "method": self.step.method,
                "samples": list(self.step.samples),
                "level": LEVEL,
                "reason": self.step.reason,
            },
            "profiled_step": None if self.profiled is None else _change(self.profiled),
            "by_cause": {name: _change(each) for name, each in self.by_cause.items()},
            "by_activity": {name: _change(each) for name, each in self.by_activity.items()},
            "ranks": self.ranks.to_pylist(),
            "kernels": changed(self.kernels),
            "copies": changed(self.copies),
            "communication": changed(self.communication),
            "operators": changed(self.operators),
            "memory": self.memory.to_pylist(),
            "memory_sites": [row for row in self.memory_sites.to_pylist() if abs(row["change_bytes_at_peak"]) >= _LEAST_BYTES],
            "findings_came": [_finding(each) for each in self.findings_came],
            "findings_went": [_finding(each) for each in self.findings_went],
            "limitations": self.limitations,
        }

    def to_json(self) -> str:
        """`document` as text: what `bridge-profiling compare --json` prints."""
        return json.dumps(self.document(), indent=1, allow_nan=False)


def compare(base: Run | Sequence[Run], other: Run | Sequence[Run], *, noise: Noise | None = None) -> Comparison:
    """Compare two runs, or several of each side.

    Args:
        base: what is compared with. Of several runs, each counts as one sample.
        other: what is compared.
        noise: above what a difference of an event is a change.

    Raises:
        TraceError: a run holds no capture.
        ProfilingConfigError: several runs on one side and a single one on the other.
    """
    sides = [[side] if isinstance(side, Run) else list(side) for side in (base, other)]
    _check(sides)
    noise = noise or Noise()
    ranks = of_steps.ranks_in_common(*sides)
    steps = [[of_steps.run_steps(run, ranks) for run in side] for side in sides]
    # Amounts per iteration of one side against those of whole captures of the other would mean nothing.
    if not all(each for side in steps for each in side):
        compared: list[list[RunSteps | None]] = [[None] * len(side) for side in sides]
    else:
        compared = [list(side) for side in steps]
    told = [[each for each in side if each is not None] for side in compared]
    whole = of_steps.told_alike(*told)
    split = bool(whole[0] and whole[1])
    communication = [events.communication_sides(side, mine) for side, mine in zip(sides, compared, strict=True)]
    spelled_apart = len({run.main_source for side in sides for run in side if run.infos}) > 1
    came, went = _findings(sides)
    return Comparison(
        base=[str(run.path) for run in sides[0]],
        other=[str(run.path) for run in sides[1]],
        differences=differences(sides[0], sides[1], (compared[0], compared[1]), (communication[0], communication[1])),
        step=of_steps.step_change(sides[0], sides[1], compared[0], compared[1]),
        profiled=of_steps.median_change(whole[0], whole[1]) if split else None,
        by_cause=of_steps.split(whole[0], whole[1], BY_CAUSE) if split else {},
        by_activity=of_steps.split(whole[0], whole[1], BY_ACTIVITY) if split else {},
        ranks=_table(of_steps.split_by_rank(whole[0], whole[1]) if split else [], "rank"),
        **_events(
            sides, compared, events.comparable(communication[0], communication[1]), _step_us(whole[0]), noise, spelled_apart
        ),
        memory=_memory(sides),
        memory_sites=_sites(sides),
        findings_came=came,
        findings_went=went,
        # Last: questions add to the limitations.
        limitations=_limitations(sides, compared, folded=whole != told),
    )


def changed(table: pa.Table) -> list[dict[str, Any]]:
    """Rows of events that changed beyond noise."""
    return [row for row in table.to_pylist() if row["change"] is not None]


def changed_memory(table: pa.Table) -> list[dict[str, Any]]:
    """Rows of devices of which the peak changed, or the growth, by more than rounding."""
    return [
        row
        for row in table.to_pylist()
        if abs(row["change_peak_bytes"] or 0) >= _LEAST_BYTES
        or abs(row["change_growth_bytes_per_iteration"] or 0) >= _LEAST_BYTES
    ]


def _check(sides: Sequence[Sequence[Run]]) -> None:
    counts = [len(side) for side in sides]
    if min(counts) == 1 and max(counts) > 1:
        raise ProfilingConfigError(
            f"{counts[0]} base run{'s' if counts[0] > 1 else ''} against {counts[1]}",
            why="how much runs of one kind differ among themselves is known from two of a side or more",
            instead="Give several runs of both sides, or one of each",
        )


def _events(
    sides: Sequence[Sequence[Run]],
    steps: Sequence[Sequence[RunSteps | None]],
    communication: Sequence[Sides],
    step_us: float,
    noise: Noise,
    spelled_apart: bool,
) -> dict[str, pa.Table]:
    pairs = list(zip(sides, steps, strict=True))
    kernels = [events.kernel_sides(*pair, spelled_apart=spelled_apart) for pair in pairs]
    copies, operators = ([side(*pair) for pair in pairs] for side in (events.copy_sides, events.operator_sides))
    changes = partial(events.changes, step_us=step_us, noise=noise)
    names = {
        "kernels": ("kind", "name"),
        "copies": ("kind", "direction", "from_memory", "to_memory"),
        "communication": ("operation", "group", "group_size"),
        "operators": ("name",),
    }
    rows = {
        "kernels": changes(kernels[0], kernels[1], names["kernels"], timed=lambda key: key[0] == "compute"),
        "copies": changes(copies[0], copies[1], names["copies"]),
        "communication": changes(communication[0], communication[1], names["communication"]),
        "operators": changes(operators[0], operators[1], names["operators"], on_host=True),
    }
    return {name: _table(rows[name], "change", *names[name]) for name in rows}


def _table(rows: list[dict[str, Any]], *names: str) -> pa.Table:
    """Rows as a table, which has its first columns without rows too."""
    return pa.Table.from_pylist(rows) if rows else pa.table({name: pa.array([], pa.string()) for name in names})


def _step_us(steps: Sequence[RunSteps]) -> float:
    """The mean iteration, which shares are of; nothing without one, and then whatever changed is told."""
    means = [float(each.parts["duration_us"].mean()) for each in steps]
    return sum(means) / len(means) if means else 0.0


_MEMORY = ("peak_bytes", "peak_reserved_bytes", "growth_bytes_per_iteration")


def _memory(sides: Sequence[Sequence[Run]]) -> pa.Table:
    """Peak and growth of each device that both sides recorded; of several runs the mean."""
    known: list[dict[tuple[int, int], list[dict[str, Any]]]] = [{}, {}]
    for found, side in zip(known, sides, strict=True):
        for run in side:
            for recorded in run.memory().to_pylist():
                found.setdefault((recorded["rank"], recorded["device"]), []).append(recorded)
    rows = []
    for rank, device in sorted(known[0].keys() & known[1].keys()):
        row: dict[str, Any] = {"rank": rank, "device": device}
        for name in _MEMORY:
            before, after = (_mean([each[name] for each in found[rank, device]]) for found in known)
            row |= {f"base_{name}": before, f"other_{name}": after}
            row[f"change_{name}"] = None if before is None or after is None else after - before
        rows.append(row)
    amounts = [(f"{side}_{name}", pa.float64()) for name in _MEMORY for side in ("base", "other", "change")]
    return pa.Table.from_pylist(rows, schema=pa.schema([("rank", pa.int32()), ("device", pa.int32()), *amounts]))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _sites(sides: Sequence[Sequence[Run]]) -> pa.Table:
    """The difference by allocation site, where both sides recorded sites; no rows otherwise."""
    before, after = (pa.concat_tables([run.memory_sites() for run in side]) for side in sides)
    found = difference(before, after)
    return found if before.num_rows and after.num_rows else found.slice(0, 0)


def _findings(sides: Sequence[Sequence[Run]]) -> tuple[list[Any], list[Any]]:
    """Findings that came and went. One is the same when its id is: its ranks may move, and its title holds numbers."""
    found: list[dict[str, Any]] = [{}, {}]
    for known, side in zip(found, sides, strict=True):
        for run in side:
            for finding in run.findings() if hasattr(run, "findings") else []:
                known.setdefault(finding.id, finding)
    base, other = found
    return [other[each] for each in other if each not in base], [base[each] for each in base if each not in other]


def _finding(finding: Any) -> dict[str, Any]:
    return {"id": finding.id, "title": finding.title, "ranks": list(finding.ranks), "confidence": str(finding.confidence)}


def _change(change: Change) -> dict[str, Any]:
    return {
        "base_us": change.base,
        "other_us": change.other,
        "change_us": change.change,
        "low_us": change.low,
        "high_us": change.high,
        "relative": change.relative,
        "significant": change.significant,
    }


def _limitations(sides: Sequence[Sequence[Run]], steps: Sequence[Sequence[RunSteps | None]], *, folded: bool) -> list[str]:
    said: list[str] = []
    if folded:
        said.append("one side cannot tell waiting for other ranks from communication: the two are one part on both")
    if not all(each for side in steps for each in side):
        said.append("nothing marks iterations on one side: whole captures are compared, and no change of an iteration is known")
    for word, side, mine in zip(("base", "other"), sides, steps, strict=True):
        for run, each in zip(side, mine, strict=True):
            if each is not None and each.with_boundary:
                said.append(f"{word}: every iteration of {run.path} is at the profiler's start, stop or flush, and counts")
            said += [f"{word}: {sentence}" for sentence in run.limitations]
    return list(dict.fromkeys(said))
