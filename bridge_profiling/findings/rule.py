"""Rules, and how what they detect becomes findings.

A rule's `detect` knows what differs from other causes: which time is lost, who is responsible, and the numbers that show it. It
attributes time in a ledger of its own, which `diagnose` keeps if anything is found. This module has what all rules share.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Flag, auto
from functools import wraps
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge_profiling.facts.idle import Cause
from bridge_profiling.findings.grids import Grids
from bridge_profiling.findings.ledger import Ledger
from bridge_profiling.findings.types import Confidence, Event, Finding, Grid, Occurrence, Thresholds, by_rank, text

#: A rank that loses at least this share of what the worst rank loses is responsible too.
_ALIKE = 0.5

#: Pauses of a host in an iteration that are many, and how long they take at most, in the mean, as long as threads take turns.
_MANY_PAUSES, _SHORT_NS = 10, 30_000_000

#: Rules whose usual advice is about devices, with an entry of their own for trainings on CPUs.
_ON_CPUS_TOO = (Cause.data_loading, Cause.checkpoint_stall)

#: An iteration is struck if it loses this many times what the others usually lose, and this share of what the worst one loses.
_TIMES, _OF_WORST = 3.0, 0.25

#: With fewer iterations, which of them are the usual ones is unknown.
_ENOUGH = 3


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a rule detects.

    Args:
        ranks: responsible, ascending.
        measures: numbers by name, with units in the names.
        saving_ns: of an iteration; None if it is unknown or none.
        title: entries of text.toml, which follow one another.
        advice: the same.
        values: what these entries name besides `measures`, {ranks} (at the start: {Ranks}), {per} (iteration or capture),
            {saving} in nanoseconds and {cost} in words.
        sure: confidence, and the entry of `reasons` in text.toml that says why it is not high; by default that of the number of
            iterations.
        doubts: further such entries.
        events: the places that show it best, most telling first.
        severe: past the threshold for trouble.
        occurrence: which iterations it strikes; None if it is about all of them.
        id: of the rule, as are the next two; `diagnose` fills them in.
        texts: of the rule.
        bound: of the rule.
    """

    ranks: list[int]
    measures: Mapping[str, Any]
    saving_ns: float | None = None
    title: Sequence[str] = ("title",)
    advice: Sequence[str] = ("default",)
    values: Mapping[str, object] = field(default_factory=dict)
    sure: tuple[Confidence, str] | None = None
    doubts: Sequence[str] = ()
    events: list[Event] = field(default_factory=list)
    severe: bool = False
    occurrence: Occurrence | None = None
    id: str = ""
    texts: Mapping[str, str] | None = None
    bound: Bound | str = ""

    def finding(self, grids: Grids, iteration_ns: float, at_most_ns: float | None) -> Finding:
        """The finding, in words: last, when nothing changes its saving any more.

        Args:
            iteration_ns: what shares refer to.
            at_most_ns: its upper bound.
        """
        confidence, reason = self.sure or grids.confidence()
        named = grids.named(self.ranks)
        values = {
            "ranks": named,
            "Ranks": named[:1].upper() + named[1:],
            "per": grids.per,
            "counted": len(grids.numbers),
            "saving": self.saving_ns or 0.0,
            "cost": _cost_in_words(grids, self.saving_ns, self.occurrence, iteration_ns),
            **self.measures,
            **self.values,
        }

        def say(section: str, *entries: str) -> str:
            own = {self.id: self.texts} if self.texts else {}
            return text(section, *entries, own=own, iteration_ns=iteration_ns, **values)

        return Finding(
            id=self.id,
            title=say(self.id, *self.title),
            ranks=self.ranks,
            evidence=self.measures,
            recoverable_ns_per_iteration=self.saving_ns,
            at_most_ns_per_iteration=at_most_ns,
            confidence=confidence,
            confidence_reason="; ".join(say("reasons", each) for each in (reason, *self.doubts) if each),
            action=say(self.id, *self.advice),
            events=self.events,
            severe=self.severe,
            occurrence=self.occurrence,
        )


class About(Flag):
    """Trainings that a rule judges."""

    devices = auto()
    cpus = auto()
    unread_devices = auto()  # what hosts wait for is unknown


Detect = Callable[[Grids, Thresholds, Ledger], Iterable[Evidence]]

#: The largest saving in an iteration that removing the cause of a finding can bring.
Bound = Callable[[Grids, Evidence], float]


@dataclass(frozen=True)
class Rule:
    """A kind of finding.

    Args:
        id: of its findings, and of its entries in text.toml.
        detect: evidence from facts, given the time that earlier rules left.
        bound: the largest saving in an iteration that removing the cause can bring, or why there is none. Of `bounds`, `calls`,
            `ranges` and `kernels` know our own causes and roles only.
        about: the trainings that it judges.
        texts: entries of its texts, for a rule from outside of this package, which has none in text.toml.
    """

    id: str
    detect: Detect
    bound: Bound | str
    about: About = About.devices
    texts: Mapping[str, str] | None = None


def responsible(by_rank_ns: Mapping[int, float]) -> list[int]:
    """Ranks whose time is similar to that of the rank with most."""
    most = max(by_rank_ns.values(), default=0.0)
    return sorted(rank for rank, time_ns in by_rank_ns.items() if time_ns > 0 and time_ns >= _ALIKE * most)


def pauses_are_short(grids: Grids, ranks: Sequence[int]) -> bool:
    """Whether a host of these pauses often and shortly in an iteration, as those do that share the interpreter's lock."""
    count, lost_ns = (grids.mean_ns(grids.of_cause(Cause.host_pause, column)) for column in ("count", "lost_ns"))
    return any(count.get(rank, 0.0) >= _MANY_PAUSES and lost_ns[rank] <= _SHORT_NS * count[rank] for rank in ranks)


def occurrence(numbers: Sequence[int | None], lost_ns: NDArray[np.float64]) -> Occurrence | None:
    """The iterations in which most of a loss occurs, if these are at most half of all; None for a loss of every iteration.

    Args:
        numbers: of the iterations.
        lost_ns: in each of them.
    """
    count = len(lost_ns)
    if count < _ENOUGH or not lost_ns.max() > 0:
        return None
    usual_ns = np.sort(lost_ns)[(count - 1) // 2]
    struck = (lost_ns > _TIMES * usual_ns) & (lost_ns >= _OF_WORST * lost_ns.max())
    if not 0 < struck.sum() <= count / 2 or lost_ns[struck].sum() < lost_ns.sum() / 2:
        return None
    iterations = tuple(int(number) for number, hit in zip(numbers, struck, strict=True) if hit and number is not None)
    return Occurrence(iterations, count, float(lost_ns[struck].mean()))


def _cost_in_words(grids: Grids, saving_ns: float | None, struck: Occurrence | None, iteration_ns: float) -> str:
    """What a cause costs: "4 ms of each iteration (17%)" or "360 ms in 3 of 7 iterations (mean 154 ms, 75%)"."""
    if struck is None:
        return text("cost", "each", iteration_ns=iteration_ns, cost=saving_ns or 0.0, per=grids.per)
    mean_ns = struck.each_ns * len(struck.iterations) / struck.of if saving_ns is None else saving_ns
    known: dict[str, Any] = {"each": struck.each_ns, "struck": len(struck.iterations), "of": struck.of, "cost": mean_ns}
    return text("cost", "some", iteration_ns=iteration_ns, **known)


# Rules about a cause of non-compute time.


@dataclass(frozen=True)
class Loss:
    """Time attributed to a rule, means per iteration."""

    cause: Cause
    saving_ns: float
    lost_ns: Mapping[int, float]  # by rank
    host_ns: Mapping[int, float]  # in ranges of the cause, by rank; empty for causes without ranges
    ranks: list[int]  # responsible
    occurrence: Occurrence | None  # where it strikes some iterations only


def attributed(
    grids: Grids,
    ledger: Ledger,
    lost_ns: Grid,
    causes: Sequence[Cause],
    at_least: float,
    *,
    host_ns: Grid | None = None,
    cost_ns: NDArray[np.float64] | None = None,
) -> Loss | None:
    """Attribute time; None, and an unchanged ledger, when it saves less than a share of an iteration.

    With `host_ns`, the host's time shows who is responsible: a rank that waits for others loses nothing, and can be as slow.
    """
    # Ranges can contain a part of the profiler's cost that cannot be separated from theirs.
    whole_ns = grids.iteration_ns if host_ns is None else grids.captured_iteration_ns
    if not np.nansum(lost_ns) > 0 or not whole_ns or grids.is_doubtful(*causes):
        return None
    saving_ns = ledger.attribute(lost_ns, causes, max(at_least * whole_ns, 1_000), cost_ns=cost_ns)
    if not saving_ns:
        return None
    by_rank_ns = grids.mean_ns(lost_ns)
    host = {} if host_ns is None else grids.mean_ns(host_ns)
    most_ns = np.nan_to_num(lost_ns).max(axis=1)
    struck = occurrence(grids.numbers, most_ns if cost_ns is None else np.maximum(most_ns, cost_ns))
    if struck:
        ledger.sporadic_ns += saving_ns
    return Loss(causes[0], saving_ns, by_rank_ns, host, responsible(host) or responsible(by_rank_ns), struck)


def evidence_of(
    grids: Grids,
    loss: Loss,
    measures: Mapping[str, Any],
    *,
    lost: str = "idle_ns",
    ranks: list[int] | None = None,
    severe: float = math.inf,
    **known: Any,
) -> Evidence:
    """The evidence of a loss.

    Args:
        lost: name of the lost time in the measures.
        severe: a share of an iteration.
        known: other fields of the evidence.
    """
    ranks = loss.ranks if ranks is None else ranks
    events = grids.events(loss.cause, ranks=ranks)
    if loss.host_ns:
        events += grids.events(loss.cause, ranks=ranks, between=True, limit=5 - len(events))
    fields = {
        "ranks": ranks,
        "measures": {lost: by_rank(loss.lost_ns), **measures},
        "saving_ns": loss.saving_ns,
        "advice": _usual_advice(grids, loss.cause),
        "sure": grids.confidence(of_host=True),
        "events": events,
        "severe": grids.share(loss.saving_ns) >= severe,
        "occurrence": loss.occurrence,
    }
    return Evidence(**{**fields, **known})


def _usual_advice(grids: Grids, cause: Cause) -> list[str]:
    """By the kind of machine that the training ran on, where advice depends on it."""
    return ["on_host" if cause in _ON_CPUS_TOO and not grids.has_device else "default"]


def of_cause(
    cause: Cause, *, at_least: str = "cause", in_ranges: bool = False, left_out: bool = False
) -> Callable[[Callable[[Grids, Thresholds, Loss], Evidence | None]], Detect]:
    """A rule about what earlier ones left of a cause: the decorated function says what it is, or that it is none.

    Args:
        cause: of non-compute time.
        at_least: the threshold of its saving, a share of an iteration.
        in_ranges: whether ranges of hosts show the cause, within iterations and between them.
        left_out: whether it also counts where it strikes only iterations that do not count.
    """

    def decorated(says: Callable[[Grids, Thresholds, Loss], Evidence | None]) -> Detect:
        @wraps(says)
        def detect(grids: Grids, thresholds: Thresholds, ledger: Ledger) -> Iterator[Evidence]:
            lost_ns, known = ledger.left_ns(cause), dict[str, Any]()
            if in_ranges:
                lost_ns = lost_ns + grids.of_cause(cause, "lost_ns", between=True)
                # A range can begin in one iteration and cost time in the next one.
                cost_ns = np.minimum(grids.in_turns_ns(cause), np.nansum(lost_ns, axis=1))
                known = {"host_ns": grids.in_ranges_ns(cause), "cost_ns": cost_ns}
            loss = attributed(grids, ledger, lost_ns, (cause,), getattr(thresholds, at_least), **known)
            if loss is not None:
                yield from filter(None, [says(grids, thresholds, loss)])
            elif left_out:
                yield from _in_left_out(grids, thresholds, cause)

        return detect

    return decorated


def _in_left_out(grids: Grids, thresholds: Thresholds, cause: Cause) -> Iterator[Evidence]:
    """A cause that strikes only iterations that do not count: it made them unlike the others.

    They are outside the ledger, so the saving is the mean over all captured iterations.
    """
    lost: dict[int, Counter[int]] = defaultdict(Counter)
    for row in grids.facts.idle_causes.to_pylist():
        number, rank = row["iteration"], row["rank"]
        if row["cause"] == cause and number is not None and number not in grids.lines and rank in grids.ranks:
            lost[number][rank] += row["lost_ns"]
    captured = max(grids.captured_iterations.values(), default=0)
    total_ns = sum(max(of_ranks.values()) for of_ranks in lost.values())
    if not captured or grids.share(total_ns / captured) < thresholds.cause:
        return
    worst = max(lost, key=lambda number: max(lost[number].values()))
    ranks = responsible(lost[worst])
    yield Evidence(
        ranks=ranks,
        measures={"idle_ns": by_rank(lost[worst]), "iterations": sorted(lost), "iterations_captured": captured},
        saving_ns=total_ns / captured,
        title=["left_out"],
        advice=_usual_advice(grids, cause),
        values={"longest": max(lost[worst].values()), "struck": len(lost)},
        events=[Event(rank, str(cause), worst, None, lost[worst][rank]) for rank in ranks[:5]],
        severe=True,
        occurrence=Occurrence(tuple(sorted(lost)), captured, total_ns / len(lost)),
    )
