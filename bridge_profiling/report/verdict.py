"""The verdict on a run: a headline, where an iteration's time goes, what to do first, and what limits that answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bridge_profiling.analysis import Run
from bridge_profiling.analysis.attribution.device import ranks_without_work
from bridge_profiling.analysis.attribution.parts import BY_CAUSE, ENOUGH_ITERATIONS
from bridge_profiling.analysis.compare.bench import AgainstBench
from bridge_profiling.analysis.findings import Confidence, Finding, Thresholds
from bridge_profiling.analysis.findings.evidence import profiler_cost_us
from bridge_profiling.manifest import RankCapture
from bridge_profiling.report import words
from bridge_profiling.report.figures import PARTS
from bridge_profiling.report.views import Verdict
from bridge_profiling.traces.discover import WHICH_WINDOW
from bridge_profiling.traces.types import RankInfo

#: Durations, and shares, of ranks that differ by more than this are given as a range.
_ALIKE, _SHARES_ALIKE = 0.02, 0.05

#: Parts with less than this share of the iteration are combined.
_SMALL = 0.02

#: Findings whose advice is part of the verdict.
_FIRST = 3


@dataclass(frozen=True)
class Summary:
    """The answers that the verdict needs.

    Args:
        source: the profiler whose captures answer across ranks, `kineto` or `nsys`.
        infos: each rank's trace by that profiler, by rank.
        attribution: rows of `Run.attribution` of ranks with a device.
        findings: as `Run.findings` orders them.
        manifests: of the ranks.
        limitations: sentences.
        notices: those on which of several captures is shown.
        errors: captures that could not be read, or only in part.
        bench: the run compared with benchmarks; None without any.
        without_device: ranks without device work in their trace.
        stragglers: rows of `Run.stragglers`, the slowest first.
        snapshots: ranks with a memory snapshot.
    """

    path: Path
    source: str
    infos: list[RankInfo]
    attribution: list[dict[str, Any]]
    findings: list[Finding]
    manifests: list[RankCapture]
    limitations: list[str]
    errors: list[str]
    bench: AgainstBench | None = None
    without_device: list[int] = field(default_factory=list)
    stragglers: list[dict[str, Any]] = field(default_factory=list)
    snapshots: list[int] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def typical_us(self) -> float | None:
        """The median over ranks of the median iteration."""
        return median(row["duration_us"] for row in self.attribution) if self.attribution else None


def summarize(run: Run, thresholds: Thresholds | None = None) -> Summary:
    """Ask what the verdict needs; None stands for the default thresholds."""
    # Findings first: one pass over the captures then reads everything.
    findings = run.findings(thresholds)
    source = run.main_source
    on_cpu = ranks_without_work(run.breakdown(), source)
    infos = [info for info in run.infos if info.source == source]
    stragglers = run.stragglers().to_pylist()
    snapshots = [] if infos else sorted({row["rank"] for row in run.memory().to_pylist()})
    limitations = run.limitations
    return Summary(
        path=run.path,
        source=source,
        infos=infos,
        attribution=[row for row in run.attribution().to_pylist() if row["source"] == source and row["rank"] not in on_cpu],
        findings=findings,
        manifests=run.manifests,
        stragglers=stragglers,
        bench=run.against_bench,
        without_device=on_cpu,
        snapshots=snapshots,
        limitations=limitations,
        notices=[caveat.text for caveat in run.capture_caveats if caveat.code in WHICH_WINDOW],
        errors=run.errors,
    )


def verdict(summary: Summary) -> Verdict:
    """The verdict on a run."""
    findings = summary.findings
    if findings:
        headline = words.sentence(findings[0].title)
        sentences = [*_iteration(summary), *_saving(summary)]
    elif summary.attribution:
        headline = "Nothing to change was found."
        sentences = [*_iteration(summary), "No number exceeds its threshold."]
    elif summary.without_device:
        headline = "These captures hold no device work to judge."
        sentences = [
            "Captures of training on CPUs look like this, and so do those of a profiler that could not access its GPUs.",
            "The page's table of operators and the trace itself show the host's work.",
        ]
    elif summary.snapshots:
        headline = "These captures hold memory only."
        sentences = [f"Memory was recorded on {words.ranks(summary.snapshots)}.", "A trace shows where the time goes."]
    else:
        headline = "These captures hold too little to judge."
        sentences = ["No iteration is marked in them."]
    # A device that is not busy is a symptom of the others.
    causes = [finding for finding in findings if finding.id != "low_device_busy"] or findings
    first = [_advice(finding, len(summary.infos)) for finding in causes[:_FIRST]]
    return Verdict(headline, sentences, first, list(_caveats(summary)))


def _iteration(summary: Summary) -> Iterator[str]:
    """How long an iteration takes, and where its time goes."""
    rows, typical_us = summary.attribution, summary.typical_us
    if typical_us is None:
        no_device = summary.without_device and not summary.attribution
        yield "No device work was recorded." if no_device else "No iteration is marked in these captures."
        return
    durations = [row["duration_us"] for row in rows]
    counts = sorted({row["iterations"] for row in rows})
    of = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    spread = f"; {words.milliseconds(min(durations))} to {words.milliseconds(max(durations))} by rank"
    differ = max(durations) - min(durations) > _ALIKE * typical_us
    on = words.counted(len(rows), "rank")
    yield f"An iteration takes {words.milliseconds(typical_us)} (median of {of} on {on}{spread if differ else ''})."
    shares = {part: [row[part] / row["duration_us"] for row in rows if row["duration_us"]] for part in BY_CAUSE}
    means = {part: fmean(values) for part, values in shares.items() if values}
    parts = []
    # Compute first, then the others, the largest first.
    for part in sorted(means, key=lambda part: (part != "compute_us", -means[part])):
        if means[part] >= _SMALL:
            low, high = min(shares[part]), max(shares[part])
            by_rank = f" ({low:.0%} to {high:.0%} by rank)" if high - low > _SHARES_ALIKE else ""
            name = "exposed communication" if part == "communication_us" else PARTS[part][0]
            if part == "communication_us" and not all(row["waiting_known"] for row in rows):
                name += " (including waiting for other ranks)"
            parts.append(f"{words.percent(means[part])} {name}{by_rank}")
    rest = sum(share for share in means.values() if share < _SMALL)
    yield f"Its parts: {', '.join([*parts, *([f'{words.percent(rest)} other'] if rest >= 0.005 else [])])}."


def _saving(summary: Summary) -> Iterator[str]:
    """What the first finding, and all of them, could save."""
    savings = [finding.recoverable_us_per_iteration for finding in summary.findings]
    total = sum(saving or 0.0 for saving in savings)

    def said(saving: float) -> str:
        share = f" ({words.percent(saving / summary.typical_us)})" if summary.typical_us else ""
        return f"up to {words.milliseconds(saving)} per iteration{share}"

    if savings[0]:
        more = f"; all {len(savings)} findings together {said(total)}" if len(savings) > 1 else ""
        yield f"Potential saving: {said(savings[0])}{more}."
    elif savings[0] is None:
        yield "The potential saving is unknown." if not total else f"Potential saving of the other findings: {said(total)}."


def _advice(finding: Finding, captured: int) -> str:
    """The first sentence of a finding's advice, for the responsible ranks."""
    who = f"{words.sentence(words.ranks(finding.ranks))[:-1]}: " if finding.ranks and len(finding.ranks) < captured else ""
    return f"{who}{words.first_sentence(finding.action)}"


def _caveats(summary: Summary) -> Iterator[str]:
    first: Sequence[Finding] = summary.findings[:1]
    for finding in first:
        if finding.confidence != Confidence.high:
            reason = f": {finding.confidence_reason.rstrip('.')}" if finding.confidence_reason else ""
            yield f"Confidence is {finding.confidence}{reason}."
    fewest = min((row["iterations"] for row in summary.attribution), default=None)
    if fewest is not None and fewest < ENOUGH_ITERATIONS:
        yield f"Only {words.counted(fewest, 'iteration')} captured, which cannot show what happens only sometimes. Capture ten."
    cost = profiler_cost_us(summary.manifests)
    if cost and median(cost.values()) > 0:
        yield f"Profiling made an iteration {words.milliseconds(median(cost.values()))} longer, according to the manifests."
    elif summary.attribution and not cost and not any("manifest" in finding.confidence_reason for finding in first):
        yield "Profiler overhead is unknown (no manifest); profiled iterations are longer than others."
    world = max((info.world_size or 0 for info in summary.infos), default=0)
    if world > len(summary.infos):
        yield f"{len(summary.infos)} of the job's {world:,} ranks were captured; the others are not judged."
    if summary.attribution and summary.without_device:
        yield f"The trace of {words.ranks(summary.without_device)} has no device work and is not judged."
    if summary.errors:
        yield f"{words.counted(len(summary.errors), 'capture')} could not be read, or only in part."
