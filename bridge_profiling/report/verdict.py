"""The verdict on a run: a headline, where an iteration's time goes, what to do first, and what limits that answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from statistics import median

import pyarrow as pa

from bridge_profiling.compare.bench import AgainstBench
from bridge_profiling.facts.device import ranks_without_work
from bridge_profiling.facts.parts import BY_CAUSE, ENOUGH_ITERATIONS
from bridge_profiling.facts.run import RunFacts
from bridge_profiling.facts.types import sentences
from bridge_profiling.facts.words import named_ranks
from bridge_profiling.findings import Confidence, Finding
from bridge_profiling.findings.scorecard import scorecard
from bridge_profiling.findings.unprofiled import Unprofiled, timed_iterations, usual_cost_ns
from bridge_profiling.report import words
from bridge_profiling.report.figures import HOST_PARTS, PARTS
from bridge_profiling.report.rows import Rows, budget, mean_host_iterations
from bridge_profiling.report.views import Verdict
from bridge_profiling.traces.discover import ABOUT_MANIFESTS, WHICH_WINDOW

#: Durations, and shares, of ranks that differ by more than this are given as a range.
_ALIKE, _SHARES_ALIKE = 0.02, 0.05

#: Parts with less than this share of the iteration are combined.
_SMALL = 0.02

#: Sentences about manifests that come first.
_NAMED_MANIFESTS = 3

#: Findings whose advice is part of the verdict, and the one whose advice never is: the training loses nothing to it.
_FIRST = 3
_OVERHEAD = "profiler_overhead"


#: Codes of caveats without which the figures on top would be misread.
_FIRST_CAVEATS = frozenset(("kernels_unrecorded", "several_devices", "history_overwritten"))


class Outcome(StrEnum):
    """What the verdict is about."""

    finding = "finding"  # at least one finding
    nothing_found = "nothing_found"  # iterations were judged, and no number exceeds its threshold
    no_device_work = "no_device_work"  # traces without work on a device, as of training on CPUs
    memory_only = "memory_only"  # memory snapshots, and no trace
    too_little = "too_little"  # no iteration is marked
    not_judged = "not_judged"  # every trace lost too much of its device work


@dataclass(frozen=True)
class Conclusion:
    """What a report concludes from the answers: which ranks it judges, and the numbers in its sentences."""

    outcome: Outcome
    findings: list[Finding]  # as `Run.findings` orders them
    on_devices: Rows  # rows of `RunFacts.attribution` by the main source, of judged ranks with device work
    on_cpus: Rows  # `mean_host_iterations` of judged ranks, if no rank may have a device
    without_device: list[int]  # judged ranks without device work in their trace
    profiler_ns: float | None  # time that profiling added to an iteration, from the manifests: the median over ranks
    unprofiled: Unprofiled | None  # the iteration without the profiler
    bench: AgainstBench | None  # the run compared with benchmarks
    scorecard: Rows  # the checklist

    @property
    def typical_ns(self) -> float | None:
        """The median over ranks of the median iteration; None without iterations."""
        medians = [row["median_ns"] for row in self.on_cpus] or [row["duration_ns"] for row in self.on_devices]
        return median(medians) if medians else None

    @property
    def fewest_iterations(self) -> int | None:
        """Number of iterations behind the median of the rank that has the fewest; None without iterations."""
        return min((row["iterations"] for row in self.on_devices or self.on_cpus), default=None)

    @property
    def first(self) -> Finding | None:
        """The finding that the verdict is about. The profiler's own cost is not the training's."""
        return next((finding for finding in self.findings if finding.id != _OVERHEAD), None)

    @property
    def total_saving_ns(self) -> float | None:
        """Potential saving of all findings together per iteration; None if it is unknown for each."""
        known = [each.recoverable_ns_per_iteration for each in self.findings if each.recoverable_ns_per_iteration is not None]
        return sum(known) if known else None

    def share(self, time_ns: float | None) -> float | None:
        """A time as a share of the mean iteration without the profiler, else of the typical one; None if either is unknown."""
        whole_ns = self.unprofiled.iteration_ns if self.unprofiled else self.typical_ns
        return time_ns / whole_ns if time_ns is not None and whole_ns else None


def conclude(
    facts: RunFacts, findings: list[Finding], unprofiled: Unprofiled | None = None, bench: AgainstBench | None = None
) -> Conclusion:
    """What a report about a run with these findings concludes."""
    source, infos, unjudged = facts.source, facts.infos, set(facts.unjudged)
    without_device = [rank for rank in ranks_without_work(facts.breakdown, source) if rank not in unjudged]

    def judged(table: pa.Table, left_out: Container[int] = unjudged) -> Rows:
        return [row for row in table.to_pylist() if row["source"] == source and row["rank"] not in left_out]

    on_devices = judged(facts.attribution, {*unjudged, *without_device})
    has_device = on_devices or any(info.devices or info.has_unread_events for info in infos)
    on_cpus = [] if has_device else mean_host_iterations(judged(facts.host_iterations))
    if any(finding.id != _OVERHEAD for finding in findings):
        outcome = Outcome.finding
    elif on_devices or on_cpus:
        outcome = Outcome.nothing_found
    elif without_device:
        outcome = Outcome.no_device_work
    elif unjudged and len(unjudged) == len(infos):
        outcome = Outcome.not_judged
    else:
        outcome = Outcome.memory_only if _snapshots(facts) else Outcome.too_little
    profiler_ns = unprofiled.measured_cost_ns if unprofiled else usual_cost_ns(timed_iterations(facts.manifests))
    checks = scorecard(facts).to_pylist()
    return Conclusion(outcome, findings, on_devices, on_cpus, without_device, profiler_ns, unprofiled, bench, checks)


def _snapshots(facts: RunFacts) -> list[int]:
    """Ranks with a memory snapshot, if there is no trace."""
    return [] if facts.infos else sorted({row["rank"] for row in facts.memory.to_pylist()})


def notices(facts: RunFacts) -> list[str]:
    """What has to be known before anything else: the window that is shown, and a few of the manifests that are not used."""
    caveats = facts.capture_caveats
    of_manifests = sentences(caveat for caveat in caveats if caveat.code in ABOUT_MANIFESTS)
    left = len(of_manifests) - _NAMED_MANIFESTS
    more = [f"{left} more sentences about manifests are in the limitations"] if left > 0 else []
    shown = [caveat.text for caveat in caveats if caveat.code in WHICH_WINDOW]
    return [*shown, *of_manifests[:_NAMED_MANIFESTS], *more]


def verdict(facts: RunFacts, found: Conclusion) -> Verdict:
    """The conclusion in words."""
    findings = found.findings
    headline, *sentences = words.resource("sentences")["outcomes"][found.outcome]
    match found.outcome:
        case Outcome.finding:
            headline, sentences = words.sentence(findings[0].title), [*_iteration(facts, found), *_saving(found)]
        case Outcome.nothing_found:
            sentences = [*_iteration(facts, found), sentences[bool(findings)]]
        case Outcome.no_device_work:
            sentences += _on_host(facts, found)
        case Outcome.memory_only:
            sentences.insert(0, f"Memory was recorded on {named_ranks(_snapshots(facts))}.")
        case Outcome.too_little:
            headline, *sentences = [*_nothing_captured(facts)] or [headline, *sentences]
    findings = [finding for finding in findings if finding.id != _OVERHEAD]
    # A device that is not busy is a symptom of the others.
    causes = [finding for finding in findings if finding.id != "low_device_busy"] or findings
    first = [_advice(finding, len(facts.infos) - len(facts.unjudged)) for finding in causes[:_FIRST]]
    return Verdict(headline, sentences, first, list(_caveats(facts, found)))


def _iteration(facts: RunFacts, found: Conclusion) -> Iterator[str]:
    """How long an iteration takes, and where its time goes."""
    typical_ns, rows, on_cpus = found.typical_ns, found.on_devices or found.on_cpus, bool(found.on_cpus)
    if typical_ns is None:
        if nothing := " ".join(_nothing_captured(facts)):
            yield nothing
        elif facts.unjudged:
            yield words.say("work_lost")
        else:
            yield words.say("no_device_work" if found.without_device else "no_iterations")
            yield from _on_host(facts, found)
        return
    durations = [row["duration_ns"] for row in rows]
    counts = sorted({row["iterations"] for row in rows})
    of = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    spread = f"; {words.ms(min(durations))} to {words.ms(max(durations))} by rank)"
    differ = max(durations) - min(durations) > _ALIKE * typical_ns
    more = ", profiled), on CPUs" if on_cpus else spread if differ else ")"
    yield f"An iteration takes {words.ms(typical_ns)} (median of {of} on {words.counted(len(rows), 'rank')}{more}."
    spent = budget(rows, list(HOST_PARTS) if on_cpus else BY_CAUSE)
    parts, rest = [], 0.0
    # Compute first, then the others, the largest first.
    for part in sorted(spent.parts, key=lambda part: (part.column != "compute_ns", -part.share)):
        if (part.high if on_cpus else part.share) < _SMALL:
            rest += part.share
            continue
        name = (HOST_PARTS if on_cpus else PARTS)[part.column][0]
        if part.column == "communication_ns" and not on_cpus:
            name = f"exposed {name}{'' if spent.waiting_known else ' (including waiting for other ranks)'}"
        by_rank = f" ({part.low:.0%} to {part.high:.0%} by rank)" if part.high - part.low > _SHARES_ALIKE else ""
        parts.append(f"{words.percent(part.share)} {name}{by_rank}")
    yield f"Its parts: {', '.join([*parts, *([f'{words.percent(rest)} other'] if rest >= 0.005 else [])])}."


def _nothing_captured(facts: RunFacts) -> Iterator[str]:
    """That manifests are all there is, and a sentence for each reason."""
    if facts.manifests and not facts.infos and not _snapshots(facts):
        reasons: dict[str, list[int]] = defaultdict(list)
        for each in facts.manifests:
            reason = "the listed files are not there" if each.artifacts else "the reason is unknown"
            reasons[each.manifest.reason or reason].append(each.rank)
        yield "No capture was found." if any(each.artifacts for each in facts.manifests) else "Nothing was captured."
        for reason, ranks in reasons.items():
            yield words.sentence(f"{named_ranks(ranks)}: {reason}")


def _on_host(facts: RunFacts, found: Conclusion) -> Iterator[str]:
    """The iterations of a training on CPUs, and its most expensive operators."""
    known = [] if found.on_devices else facts.attribution.to_pylist()
    rows = [row for row in known if row["source"] == facts.source and row["rank"] in found.without_device]
    iterations = sum(row["iterations"] for row in rows)
    if iterations:
        typical = words.ms(median(row["duration_ns"] for row in rows))
        own_ns: dict[str, float] = defaultdict(float)
        for each in facts.operators.to_pylist():
            own_ns[each["name"]] += each["self_ns"] / iterations
        most = [f"{name} {words.ms(own_ns[name])}" for name in sorted(own_ns, key=own_ns.__getitem__)[:-4:-1]]
        operators = f"; operators with the most own time: {', '.join(most)}" if most else ""
        yield f"On the host an iteration takes {typical} (median, profiled){operators}."


def _saving(found: Conclusion) -> Iterator[str]:
    """What the first finding, and all of them, could save."""
    count, first, total = len(found.findings), found.first, found.total_saving_ns
    assert first is not None
    saving_ns, at_most_ns = first.recoverable_ns_per_iteration, first.at_most_ns_per_iteration

    # Without marked iterations, findings are about whole captures.
    per = " per iteration" if found.typical_ns is not None else " per capture"
    said = partial(words.saving, share=found.share, per=per)
    if saving_ns:
        more = f"; all {count} findings together {said(total)}" if count > 1 else ""
        yield f"Potential saving: {said(saving_ns, at_most_ns)}{more}."
    elif saving_ns is None and at_most_ns:
        yield f"Potential saving: {said(None, at_most_ns)}."
    elif saving_ns is None:
        yield "The potential saving is unknown." if not total else f"Potential saving of the other findings: {said(total)}."
    if found.unprofiled and (saving_ns or at_most_ns or total):
        yield words.say("share_of", found.unprofiled.iteration_ns)


def _advice(finding: Finding, judged: int) -> str:
    """The first sentence of a finding's advice, for the responsible ranks."""
    who = f"{words.sentence(named_ranks(finding.ranks))[:-1]}: " if finding.ranks and len(finding.ranks) < judged else ""
    return f"{who}{words.first_sentence(finding.action)}"


def _overhead(facts: RunFacts, found: Conclusion) -> Iterator[str]:
    """What the profiler cost, and how that is known."""
    cost_ns, typical_ns = found.profiler_ns, found.typical_ns
    timed = timed_iterations(facts.manifests)
    if cost_ns is not None:
        if timed and all(each.overlap for each in timed.values()):
            yield words.say("overhead_unclear")
        elif cost_ns > 0:
            yield words.say("overhead", cost_ns)
    elif found.unprofiled and typical_ns:
        cost_ns = found.unprofiled.estimated_cost_ns
        if cost_ns < _SMALL * typical_ns:
            yield words.say("overhead_small", small=_SMALL)
        else:
            yield words.say("overhead_estimated", profiled=typical_ns, without=max(typical_ns - cost_ns, 0.0))
    elif found.on_devices:
        yield words.say("overhead_unknown")


def _caveats(facts: RunFacts, found: Conclusion) -> Iterator[str]:
    infos, first, fewest = facts.infos, found.first, found.fewest_iterations
    if first is not None and first.confidence != Confidence.high:
        reason = f": {first.confidence_reason.rstrip('.')}" if first.confidence_reason else ""
        yield f"Confidence is {first.confidence}{reason}."
    if fewest is not None and fewest < ENOUGH_ITERATIONS:
        yield f"Only {words.counted(fewest, 'iteration')} captured, which cannot show what happens only sometimes. Capture ten."
    yield from _overhead(facts, found)
    world = max((info.world_size or 0 for info in infos), default=0)
    if world > len(infos):
        yield words.say("not_captured", captured=len(infos), world=world, were="was" if len(infos) == 1 else "were")
    if found.on_devices and found.without_device:
        yield words.say("without_device", found.without_device)
    if unjudged := [info for info in infos if not info.judged]:
        lost, of = (sum(getattr(info.lost, name) for info in unjudged) for name in ("device", "of_device"))
        are = "is" if len(unjudged) == 1 else "are"
        why = "not_recorded" if 2 * sum(info.lost.unrecorded for info in unjudged) > lost else "not_judged"
        yield words.sentence(words.say(why, facts.unjudged, are=are, lost=lost, all=of))
    yield from sentences(each for each in (*facts.capture_caveats, *facts.caveats("breakdown")) if each.code in _FIRST_CAVEATS)
    if facts.errors:
        yield f"{words.counted(len(facts.errors), 'capture')} could not be read, or only in part."
