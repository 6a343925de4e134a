"""The verdict on a run: a headline, where an iteration's time goes, what to do first, and what limits that answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from bridge_profiling.answers import Answers
from bridge_profiling.compare.bench import AgainstBench
from bridge_profiling.facts.caveats import sentences
from bridge_profiling.facts.device import ranks_without_work
from bridge_profiling.facts.parts import ENOUGH_ITERATIONS
from bridge_profiling.findings import Confidence, Finding, Thresholds
from bridge_profiling.findings.unprofiled import Unprofiled, timed_iterations, usual_cost_us
from bridge_profiling.manifest import RankCapture
from bridge_profiling.report import words
from bridge_profiling.report.figures import HOST_PARTS, PARTS
from bridge_profiling.report.rows import Budget, budget, mean_host_iterations
from bridge_profiling.report.views import Verdict
from bridge_profiling.traces.discover import ABOUT_MANIFESTS, WHICH_WINDOW
from bridge_profiling.traces.types import Caveat, RankInfo

#: Durations, and shares, of ranks that differ by more than this are given as a range.
_ALIKE, _SHARES_ALIKE = 0.02, 0.05

#: Parts with less than this share of the iteration are combined.
_SMALL = 0.02

#: Sentences about manifests that come first.
_NAMED_MANIFESTS = 3

#: Findings whose advice is part of the verdict, and the one whose advice never is: the training loses nothing to it.
_FIRST = 3
_OVERHEAD = "profiler_overhead"


class Outcome(StrEnum):
    """What the verdict is about."""

    finding = "finding"  # at least one finding
    nothing_found = "nothing_found"  # iterations were judged, and no number exceeds its threshold
    no_device_work = "no_device_work"  # traces without work on a device, as of training on CPUs
    memory_only = "memory_only"  # memory snapshots, and no trace
    too_little = "too_little"  # no iteration is marked
    not_judged = "not_judged"  # every trace lost too much of its device work


@dataclass(frozen=True)
class Summary:
    """The answers that the verdict needs."""

    path: Path
    source: str  # the profiler whose captures answer across ranks, `kineto` or `nsys`
    infos: list[RankInfo]  # each rank's trace by that profiler, by rank
    attribution: list[dict[str, Any]]  # rows of `Run.attribution` of ranks with a device
    findings: list[Finding]  # as `Run.findings` orders them
    manifests: list[RankCapture]  # of the ranks
    limitations: list[str]  # sentences
    errors: list[str]  # captures that could not be read, or only in part
    bench: AgainstBench | None = None  # the run compared with benchmarks; None without any
    without_device: list[int] = field(default_factory=list)  # ranks without device work in their trace
    on_host: list[dict[str, Any]] = field(default_factory=list)  # rows of `Run.attribution` of those ranks, with iterations
    operators: list[dict[str, Any]] = field(default_factory=list)  # rows of `Run.operators`, if no rank has device work
    host_iterations: list[dict[str, Any]] = field(default_factory=list)  # rows of `Run.host_iterations`
    phases: list[dict[str, Any]] = field(default_factory=list)  # rows of `Run.phases`
    scorecard: list[dict[str, Any]] = field(default_factory=list)  # rows of `Run.scorecard`
    stragglers: list[dict[str, Any]] = field(default_factory=list)  # rows of `Run.stragglers`, the slowest first
    snapshots: list[int] = field(default_factory=list)  # ranks with a memory snapshot
    notices: list[str] = field(default_factory=list)  # those on which of several captures is shown
    unjudged: list[RankInfo] = field(default_factory=list)  # traces that lost too much of their device work
    unprofiled: Unprofiled | None = None  # the iteration without the profiler; None if unknown

    @cached_property
    def budget(self) -> Budget:
        """Where the time of the typical iteration goes."""
        return budget(self.attribution)

    @cached_property
    def on_cpus(self) -> list[dict[str, Any]]:
        """The mean iteration of each rank of a training on CPUs; empty if any may have a device, or none marks iterations."""
        has_device = self.attribution or any(info.devices or info.has_unread_events for info in self.infos)
        return [] if has_device else mean_host_iterations(self.host_iterations)

    @property
    def typical_us(self) -> float | None:
        """The median over ranks of the median iteration."""
        if self.on_cpus:
            return median(row["median_us"] for row in self.on_cpus)
        return self.budget.iteration_us

    @property
    def fewest_iterations(self) -> int | None:
        """Number of iterations behind the median of the rank that has the fewest; None without iterations."""
        return min((row["iterations"] for row in self.attribution or self.on_cpus), default=None)

    @property
    def first(self) -> Finding | None:
        """The finding that the verdict is about. The profiler's own cost is not the training's."""
        return next((finding for finding in self.findings if finding.id != _OVERHEAD), None)

    @property
    def saving_us(self) -> float | None:
        """Potential saving of the first finding per iteration; None if unknown, or without findings."""
        return self.first.recoverable_us_per_iteration if self.first else None

    @property
    def at_most_us(self) -> float | None:
        """Upper bound of that saving."""
        return self.first.at_most_us_per_iteration if self.first else None

    @property
    def total_saving_us(self) -> float | None:
        """Potential saving of all findings together; None if it is unknown for each."""
        known = [each.recoverable_us_per_iteration for each in self.findings if each.recoverable_us_per_iteration is not None]
        return sum(known) if known else None

    @property
    def profiler_us(self) -> float | None:
        """Time that profiling added to an iteration: the median over ranks, from the manifests; None if unknown."""
        return self.unprofiled.measured_cost_us if self.unprofiled else usual_cost_us(timed_iterations(self.manifests))

    def share(self, time_us: float | None) -> float | None:
        """A time as a share of the mean iteration without the profiler, else of the typical one; None if either is unknown."""
        whole_us = self.unprofiled.iteration_us if self.unprofiled else self.typical_us
        return time_us / whole_us if time_us is not None and whole_us else None


def summarize(run: Answers, thresholds: Thresholds | None = None) -> Summary:
    """Ask what the verdict needs; None stands for the default thresholds."""
    findings = run.findings(thresholds)
    source = run.main_source
    infos = [info for info in run.infos if info.source == source]
    unjudged = [info for info in infos if not info.judged]
    out = {info.rank for info in unjudged}
    on_cpu = [rank for rank in ranks_without_work(run.breakdown(), source) if rank not in out]
    stragglers = run.stragglers().to_pylist()
    snapshots = [] if infos else sorted({row["rank"] for row in run.memory().to_pylist()})
    rows = [row for row in run.attribution().to_pylist() if row["source"] == source and row["rank"] not in out]
    attribution = [row for row in rows if row["rank"] not in on_cpu]
    operators = [] if attribution or not on_cpu else run.operators().to_pylist()
    limitations = run.limitations
    return Summary(
        path=run.path,
        source=source,
        infos=infos,
        attribution=attribution,
        findings=findings,
        manifests=run.manifests,
        scorecard=run.scorecard().to_pylist(),
        stragglers=stragglers,
        host_iterations=[
            row for row in run.host_iterations().to_pylist() if row["source"] == source and row["rank"] not in out
        ],
        phases=[row for row in run.phases().to_pylist() if row["source"] == source],
        bench=run.against_bench,
        without_device=on_cpu,
        on_host=[row for row in rows if row["rank"] in on_cpu],
        operators=operators,
        snapshots=snapshots,
        unjudged=unjudged,
        unprofiled=run.unprofiled(thresholds),
        limitations=limitations,
        notices=_notices(run.capture_caveats),
        errors=run.errors,
    )


def _notices(caveats: Sequence[Caveat]) -> list[str]:
    """What has to be known before anything else: the window that is shown, and a few of the manifests that are not used."""
    of_manifests = sentences(caveat for caveat in caveats if caveat.code in ABOUT_MANIFESTS)
    left = len(of_manifests) - _NAMED_MANIFESTS
    more = [f"{left} more sentences about manifests are in the limitations"] if left > 0 else []
    return [
        *(caveat.text for caveat in caveats if caveat.code in WHICH_WINDOW),
        *of_manifests[:_NAMED_MANIFESTS],
        *more,
    ]


def outcome(summary: Summary) -> Outcome:
    """What the verdict on a run is about."""
    if summary.first:
        return Outcome.finding
    if summary.attribution or summary.on_cpus:
        return Outcome.nothing_found
    if summary.without_device:
        return Outcome.no_device_work
    if summary.unjudged and len(summary.unjudged) == len(summary.infos):
        return Outcome.not_judged
    return Outcome.memory_only if summary.snapshots else Outcome.too_little


def verdict(summary: Summary) -> Verdict:
    """The verdict on a run."""
    findings = summary.findings
    match outcome(summary):
        case Outcome.finding:
            headline = words.sentence(findings[0].title)
            sentences = [*_iteration(summary), *_saving(summary)]
        case Outcome.nothing_found:
            headline = "Nothing to change was found."
            only = "Only the profiler's own cost exceeds its threshold." if findings else "No number exceeds its threshold."
            sentences = [*_iteration(summary), only]
        case Outcome.no_device_work:
            headline = "These captures hold no device work to judge."
            sentences = [
                "Captures of training on CPUs look like this. So do captures whose profiler could not access the GPUs, and"
                " those of a type of device that is not supported yet.",
                *_on_host(summary),
            ]
        case Outcome.not_judged:
            headline = "These captures lost too much of their device work to judge."
            sentences = ["Where their time goes is unknown. Capture again."]
        case Outcome.memory_only:
            headline = "These captures hold memory only."
            sentences = [f"Memory was recorded on {words.ranks(summary.snapshots)}.", "A trace shows where the time goes."]
        case Outcome.too_little:
            nothing = list(_nothing_captured(summary))
            headline = nothing[0] if nothing else "These captures hold too little to judge."
            sentences = nothing[1:] or ["No iteration is marked in them."]
    findings = [finding for finding in findings if finding.id != _OVERHEAD]
    # A device that is not busy is a symptom of the others.
    causes = [finding for finding in findings if finding.id != "low_device_busy"] or findings
    first = [_advice(finding, len(summary.infos)) for finding in causes[:_FIRST]]
    return Verdict(headline, sentences, first, list(_caveats(summary)))


def _iteration(summary: Summary) -> Iterator[str]:
    """How long an iteration takes, and where its time goes."""
    typical_us, on_cpus = summary.typical_us, summary.on_cpus
    if typical_us is None:
        no_device = summary.without_device and not summary.attribution
        nothing = list(_nothing_captured(summary))
        if nothing:
            yield " ".join(nothing)
        elif summary.unjudged:
            yield "Where the time goes is unknown: too much of the device work was lost."
        else:
            yield "No device work was recorded." if no_device else "No iteration is marked in these captures."
            yield from _on_host(summary)
        return
    rows = on_cpus or summary.attribution
    durations = [row["duration_us"] for row in rows]
    counts = sorted({row["iterations"] for row in rows})
    of = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    spread = f"; {words.milliseconds(min(durations))} to {words.milliseconds(max(durations))} by rank)"
    differ = max(durations) - min(durations) > _ALIKE * typical_us
    more = ", profiled), on CPUs" if on_cpus else spread if differ else ")"
    yield f"An iteration takes {words.milliseconds(typical_us)} (median of {of} on {words.counted(len(rows), 'rank')}{more}."
    found = budget(on_cpus, list(HOST_PARTS)) if on_cpus else summary.budget
    parts, rest = [], 0.0
    # Compute first, then the others, the largest first.
    for part in sorted(found.parts, key=lambda part: (part.column != "compute_us", -part.share)):
        if (part.high if on_cpus else part.share) < _SMALL:
            rest += part.share
            continue
        name = (HOST_PARTS if on_cpus else PARTS)[part.column][0]
        if part.column == "communication_us" and not on_cpus:
            name = f"exposed {name}{'' if found.waiting_known else ' (including waiting for other ranks)'}"
        by_rank = f" ({part.low:.0%} to {part.high:.0%} by rank)" if part.high - part.low > _SHARES_ALIKE else ""
        parts.append(f"{words.percent(part.share)} {name}{by_rank}")
    yield f"Its parts: {', '.join([*parts, *([f'{words.percent(rest)} other'] if rest >= 0.005 else [])])}."


def _nothing_captured(summary: Summary) -> Iterator[str]:
    """That manifests are all there is, and a sentence for each reason."""
    if summary.manifests and not summary.infos and not summary.snapshots:
        reasons: dict[str, list[int]] = {}
        for each in summary.manifests:
            reason = "the listed files are not there" if each.artifacts else "the reason is unknown"
            reasons.setdefault(each.manifest.reason or reason, []).append(each.rank)
        found = any(each.artifacts for each in summary.manifests)
        yield "No capture was found." if found else "Nothing was captured."
        for reason, ranks in reasons.items():
            yield words.sentence(f"{words.ranks(ranks)}: {reason}")


def _on_host(summary: Summary) -> Iterator[str]:
    """The iterations of a training on CPUs, and its most expensive operators."""
    rows = [] if summary.attribution else summary.on_host
    iterations = sum(row["iterations"] for row in rows)
    if iterations:
        typical = words.milliseconds(median(row["duration_us"] for row in rows))
        own_us: dict[str, float] = defaultdict(float)
        for each in summary.operators:
            own_us[each["name"]] += each["self_us"] / iterations
        most = [f"{name} {words.milliseconds(own_us[name])}" for name in sorted(own_us, key=own_us.__getitem__)[:-4:-1]]
        operators = f"; operators with the most own time: {', '.join(most)}" if most else ""
        yield f"On the host an iteration takes {typical} (median, profiled){operators}."


def _saving(summary: Summary) -> Iterator[str]:
    """What the first finding, and all of them, could save."""
    count, first, total = len(summary.findings), summary.saving_us, summary.total_saving_us

    def said(saving: float | None, at_most_us: float | None = None) -> str:
        # Without marked iterations, findings are about whole captures.
        per = " per iteration" if summary.typical_us is not None else " per capture"
        return words.saving(saving, at_most_us, summary.share, per)

    if first and total is not None:
        more = f"; all {count} findings together {said(total)}" if count > 1 else ""
        yield f"Potential saving: {said(first, summary.at_most_us)}{more}."
    elif first is None and summary.at_most_us:
        yield f"Potential saving: {said(None, summary.at_most_us)}."
    elif first is None:
        yield "The potential saving is unknown." if not total else f"Potential saving of the other findings: {said(total)}."


def _advice(finding: Finding, captured: int) -> str:
    """The first sentence of a finding's advice, for the responsible ranks."""
    who = f"{words.sentence(words.ranks(finding.ranks))[:-1]}: " if finding.ranks and len(finding.ranks) < captured else ""
    return f"{who}{words.first_sentence(finding.action)}"


def _overhead(summary: Summary) -> Iterator[str]:
    """What the profiler cost, and how that is known."""
    cost_us, typical_us = summary.profiler_us, summary.typical_us
    timed = timed_iterations(summary.manifests)
    if cost_us is not None:
        if timed and all(each.overlap for each in timed.values()):
            yield "Profiler overhead is unclear: some unprofiled iterations take as long as profiled ones."
        elif cost_us > 0:
            yield f"Profiling made an iteration {words.milliseconds(cost_us)} longer, according to the manifests."
    elif summary.unprofiled and typical_us:
        cost_us, how = summary.unprofiled.estimated_cost_us, "estimated: no unprofiled one is recorded"
        if cost_us < _SMALL * typical_us:
            yield f"Profiler overhead is below {words.percent(_SMALL)} of an iteration ({how})."
        else:
            without = words.milliseconds(max(typical_us - cost_us, 0.0))
            took = words.milliseconds(typical_us)
            yield f"Profiled, an iteration takes {took}; without the profiler about {without} ({how})."
    elif summary.attribution:
        yield "Profiler overhead is unknown (no unprofiled iteration is recorded); profiled iterations are longer than others."


def _caveats(summary: Summary) -> Iterator[str]:
    finding = summary.first
    if finding is not None and finding.confidence != Confidence.high:
        reason = f": {finding.confidence_reason.rstrip('.')}" if finding.confidence_reason else ""
        yield f"Confidence is {finding.confidence}{reason}."
    fewest = summary.fewest_iterations
    if fewest is not None and fewest < ENOUGH_ITERATIONS:
        yield f"Only {words.counted(fewest, 'iteration')} captured, which cannot show what happens only sometimes. Capture ten."
    yield from _overhead(summary)
    world = max((info.world_size or 0 for info in summary.infos), default=0)
    if world > len(summary.infos):
        verb = "was" if len(summary.infos) == 1 else "were"
        yield f"{len(summary.infos)} of the job's {world:,} ranks {verb} captured; no other rank is judged."
    if summary.attribution and summary.without_device:
        yield f"The trace of {words.ranks(summary.without_device)} has no device work and is not judged."
    if summary.unjudged:
        which = words.ranks([info.rank for info in summary.unjudged])
        lost, of = (sum(getattr(info.lost, name) for info in summary.unjudged) for name in ("device", "of_device"))
        verb = "is" if len(summary.unjudged) == 1 else "are"
        text = f"{which} {verb} not judged: {lost:,} of {of:,} device events could not be used"
        yield words.sentence(text)
    if summary.errors:
        yield f"{words.counted(len(summary.errors), 'capture')} could not be read, or only in part."
