"""The verdict in one paragraph, from the budget and the findings: what an iteration takes, where it goes, who is to blame
first, how sure that is, what to change and how much that could give back. Says so when nothing was found. Judges nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from bridge_profiling.analysis.attribution.parts import BY_CAUSE, ENOUGH_ITERATIONS
from bridge_profiling.analysis.findings import Confidence, Finding
from bridge_profiling.report import wording
from bridge_profiling.report.answers import Summary

#: Durations of ranks that differ by more than this are given as a range.
_ALIKE = 0.02

#: Shares of ranks that differ by more than this are given as a range.
_SHARES_ALIKE = 0.05

#: Parts with less than this of the iteration are summed up as the rest.
_SMALL = 0.02

#: What to change is put in so many letters; the findings have all of it.
_LONG = 220

#: Where a sentence ends and another one begins.
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")

_GOES = {
    "compute_us": "compute",
    "communication_us": "communication that nothing hides",
    "waiting_us": "waiting for other ranks",
    "data_loading_us": "data loading",
    "host_launch_us": "waiting for a host that launches late",
    "small_kernels_us": "kernels too small for any host to launch ahead",
    "host_sync_us": "the host synchronising",
    "pageable_copy_us": "copies of pageable memory",
    "copy_us": "copies",
    "checkpoint_us": "checkpoints",
    "profiler_us": "the profiler's own work",
    "dependency_stalled_us": "gaps between dependent kernels",
}

#: What a capture without a device has to tell.
_OF_A_HOST = "What the host did is in the page's table of operators, and in the trace itself."


@dataclass(frozen=True)
class Verdict:
    """The answer in words.

    Args:
        headline: one sentence: the first thing to know.
        budget: what an iteration takes and where it goes.
        first: who is to blame first, what to change, what it could give back; or that nothing was found.
        sure: how sure that is, and why not surer.
        rest: what else was found; "" for nothing.
        caveats: sentences on what this verdict does not know.
    """

    headline: str
    budget: str
    first: str
    sure: str = ""
    rest: str = ""
    caveats: list[str] = field(default_factory=list)

    @property
    def paragraph(self) -> str:
        """All of it but the headline."""
        return " ".join(part for part in (self.budget, self.first, self.sure, self.rest, *self.caveats) if part)


def verdict(summary: Summary) -> Verdict:
    """The verdict on a run.

    Args:
        summary: of the run.
    """
    findings = summary.findings
    typical_us = median(row["duration_us"] for row in summary.budget) if summary.budget else None
    budget = _budget(summary, typical_us)
    caveats = list(_caveats(summary, findings[0].confidence_reason if findings else ""))
    if not findings:
        headline = "Nothing was found to change." if summary.budget else "There is too little here to judge."
        if not summary.budget and summary.without_device:
            headline = "There is no device here whose time could be judged."
            return Verdict(headline, budget, _OF_A_HOST, caveats=caveats)
        first = (
            "No number is past its threshold: no single cause is worth an engineer's day, as far as these captures can tell."
            if summary.budget
            else "No iteration is marked in these captures and no finding was made from the rest."
        )
        return Verdict(headline, budget, first, caveats=caveats)
    best = findings[0]
    return Verdict(
        headline=_sentence(best.title),
        budget=budget,
        first=_first(best, len(summary.infos), typical_us),
        sure=_sure(best),
        rest=_rest(findings, typical_us),
        caveats=caveats,
    )


def _budget(summary: Summary, typical_us: float | None) -> str:
    rows = summary.budget
    if not rows and summary.without_device:
        return (
            "No work on a device was recorded: a training on CPUs leaves such captures, and so does one whose profiler could "
            "not reach its GPUs."
        )
    if not rows or typical_us is None:
        return "No iteration is marked in these captures, so there is no step to divide."
    durations = [row["duration_us"] for row in rows]
    counts = sorted({row["iterations"] for row in rows})
    of = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    apart = max(durations) - min(durations) > _ALIKE * typical_us
    spread = f", {wording.milliseconds(min(durations))} to {wording.milliseconds(max(durations))} by rank" if apart else ""
    takes = (
        f"An iteration takes {wording.milliseconds(typical_us)} (median of {of} captured on "
        f"{_counted(len(rows), 'rank')}{spread})"
    )
    shares = {part: [row[part] / row["duration_us"] for row in rows if row["duration_us"]] for part in BY_CAUSE}
    means = {part: fmean(values) for part, values in shares.items() if values}
    parts = []
    # Compute first, then where the rest goes, the most first.
    for part in sorted(means, key=lambda part: (part != "compute_us", -means[part])):
        if means[part] >= _SMALL:
            low, high = min(shares[part]), max(shares[part])
            by_rank = f" ({low:.0%} to {high:.0%} by rank)" if high - low > _SHARES_ALIKE else ""
            goes = _GOES[part]
            if part == "communication_us" and not all(row["waiting_known"] for row in rows):
                goes = "communication, waiting for other ranks included, as the two cannot be told apart here"
            parts.append(f"{wording.percent(means[part])} {goes}{by_rank}")
    rest = sum(share for share in means.values() if share < _SMALL)
    if rest >= 0.005:
        parts.append(f"{wording.percent(rest)} other")
    return f"{takes}: {', '.join(parts)}."


def _first(finding: Finding, captured: int, typical_us: float | None) -> str:
    blame = "" if not finding.ranks or len(finding.ranks) == captured else f" To blame: {wording.ranks(finding.ranks)}."
    back = finding.recoverable_us_per_iteration
    if not back:
        gain = " How much time that gives back cannot be told." if back is None else ""
    else:
        share = f", {wording.percent(back / typical_us)}" if typical_us else ""
        gain = f" That could give back {wording.milliseconds(back)} of each iteration at the most{share}."
    return f"{blame} Change first: {shortened(finding.action)}{gain}".strip()


def _sure(finding: Finding) -> str:
    if finding.confidence == Confidence.high:
        return "This is sure (high confidence)."
    reason = f": {finding.confidence_reason.rstrip('.')}" if finding.confidence_reason else ""
    return f"Confidence is {finding.confidence}{reason}."


def shortened(action: str) -> str:
    """What to change first of all: the first sentence, and of a long one what stands before the last comma that fits.

    Args:
        action: of a finding.
    """
    first = _sentence(_SENTENCE_END.split(action.strip())[0])
    if len(first) <= _LONG:
        return first
    ends = [match.start() for match in re.finditer(r"[,;](?= )", first[:_LONG]) if _closed(first[: match.start()])]
    return f"{first[: ends[-1]]} …" if ends else first


def _closed(text: str) -> bool:
    return text.count("(") == text.count(")")


def _rest(findings: Sequence[Finding], typical_us: float | None) -> str:
    others = findings[1:]
    if not others:
        return ""
    together = sum(finding.recoverable_us_per_iteration or 0.0 for finding in findings)
    share = f" ({wording.percent(together / typical_us)})" if typical_us and together else ""
    back = f"; all of them together could give back at most {wording.milliseconds(together)}{share}" if together else ""
    return f"{_counted(len(others), 'more finding')} below{back}."


def _caveats(summary: Summary, said: str) -> Iterator[str]:
    fewest = min((row["iterations"] for row in summary.budget), default=None)
    if fewest is not None and fewest < ENOUGH_ITERATIONS:
        yield (
            f"Only {_counted(fewest, 'iteration')} captured: medians of so few say little, and what happens now and then "
            "cannot be told from what always does. Capture ten."
        )
    cost: dict[int, float] = summary.profiler_cost_us
    if cost:
        usual = median(cost.values())
        if usual > 0:
            yield f"The profiler itself made an iteration {wording.milliseconds(usual)} longer, by the manifests."
    elif summary.budget and "manifest" not in said:
        yield "No manifest says what the profiler itself cost: profiled iterations are longer than others."
    world = max((info.world_size or 0 for info in summary.infos), default=0)
    if world > len(summary.infos):
        yield f"{len(summary.infos)} of the job's {world:,} ranks were captured: the others are not judged."
    if summary.budget and summary.without_device:
        yield f"Of {wording.ranks(summary.without_device)} no work on a device was recorded: that is not judged."
    if summary.errors:
        yield f"{_counted(len(summary.errors), 'capture')} could not be read, or not to the end."


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."
