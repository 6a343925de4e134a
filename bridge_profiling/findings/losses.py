"""Time that devices lose, attributed to findings: who is responsible, how much it costs, and the finding that says so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge_profiling.facts.idle import Cause
from bridge_profiling.findings.evidence import Evidence
from bridge_profiling.findings.ledger import Grid, Ledger
from bridge_profiling.findings.occurrences import cost_in_words, occurrence
from bridge_profiling.findings.types import (
    Event,
    Finding,
    Occurrence,
    Thresholds,
    advice,
    by_rank,
    ms,
    ranks_in_words,
)

#: A rank that loses at least this share of what the worst rank loses is responsible too.
_ALIKE = 0.5

#: Pauses of a host in an iteration that are many, and how long they take at most, in the mean, as long as threads take turns.
_MANY_PAUSES, _SHORT_US = 10, 30_000

#: Findings whose usual advice is about devices, with an entry of their own for trainings on CPUs.
_OF_CPUS_TOO = (Cause.data_loading, Cause.checkpoint_stall)


@dataclass(frozen=True)
class Loss:
    """Time attributed to a finding, means per iteration."""

    saving_us: float
    lost_us: Mapping[int, float]  # by rank
    host_us: Mapping[int, float]  # in ranges of the cause, by rank; empty for causes without ranges
    ranks: list[int]  # responsible
    occurrence: Occurrence | None  # where it strikes some iterations only


def responsible(by_rank_us: Mapping[int, float]) -> list[int]:
    """Ranks whose time is similar to that of the rank with most."""
    most = max(by_rank_us.values(), default=0.0)
    return sorted(rank for rank, time_us in by_rank_us.items() if time_us > 0 and time_us >= _ALIKE * most)


def advice_on_short_pauses(evidence: Evidence, ranks: Sequence[int]) -> list[str]:
    """One advice if a host of these pauses often and shortly in an iteration, as those do that share the interpreter's lock."""
    count, lost_us = (evidence.mean_us(evidence.of_cause(Cause.host_pause, column)) for column in ("count", "lost_us"))
    many = any(count.get(rank, 0.0) >= _MANY_PAUSES and lost_us[rank] <= _SHORT_US * count[rank] for rank in ranks)
    return [advice("host_pause", "many")] if many else []


def lost(evidence: Evidence, ledger: Ledger, cause: Cause, at_least: float) -> tuple[Loss | None, Ledger]:
    """Attribute what earlier findings left of a cause."""
    return attributed(evidence, ledger, ledger.left_us(cause), (cause,), at_least)


def lost_in_ranges(evidence: Evidence, ledger: Ledger, cause: Cause, at_least: float) -> tuple[Loss | None, Ledger]:
    """Attribute a cause that host ranges show, within iterations and between them."""
    lost_us = ledger.left_us(cause) + evidence.of_cause(cause, "lost_us", between=True)
    return attributed(
        evidence,
        ledger,
        lost_us,
        (cause,),
        at_least,
        host_us=evidence.of_cause(cause, "host_us") + evidence.of_cause(cause, "host_us", between=True),
        # A range can begin in one iteration and cost time in the next one.
        cost_us=np.minimum(evidence.in_turns_us(cause), np.nansum(lost_us, axis=1)),
    )


def attributed(
    evidence: Evidence,
    ledger: Ledger,
    lost_us: Grid,
    causes: Sequence[Cause],
    at_least: float,
    *,
    host_us: Grid | None = None,
    cost_us: NDArray[np.float64] | None = None,
) -> tuple[Loss | None, Ledger]:
    """Attribute time; None, and an unchanged ledger, when it saves less than a share of an iteration.

    With `host_us`, the host's time shows who is responsible: a rank that waits for others loses nothing, and can be as slow.
    """
    # Ranges can contain a part of the profiler's cost that cannot be separated from theirs.
    whole_us = evidence.iteration_us if host_us is None else evidence.captured_iteration_us
    if not np.nansum(lost_us) > 0 or not whole_us or evidence.is_doubtful(*causes):
        return None, ledger
    saving_us, ledger = ledger.attribute(lost_us, causes, max(at_least * whole_us, 1.0), cost_us=cost_us)
    if not saving_us:
        return None, ledger
    by_rank_us = evidence.mean_us(lost_us)
    host = {} if host_us is None else evidence.mean_us(host_us)
    most_us = np.nan_to_num(lost_us).max(axis=1)
    struck = occurrence(evidence.numbers, most_us if cost_us is None else np.maximum(most_us, cost_us))
    if struck:
        ledger = replace(ledger, sporadic_us=ledger.sporadic_us + saving_us)
    return Loss(saving_us, by_rank_us, host, responsible(host or by_rank_us), struck), ledger


def _advice(evidence: Evidence, id: str) -> str:
    """What to change about a finding, on the kind of machine that the training ran on."""
    return advice(id, "on_host" if id in _OF_CPUS_TOO and not evidence.has_device else "default")


def finding_of(
    evidence: Evidence,
    cause: Cause,
    loss: Loss,
    title: str,
    numbers: Mapping[str, Any],
    *,
    id: str | None = None,
    ranks: list[int] | None = None,
    action: str | None = None,
    reason: str | None = None,
    of_host: bool = True,
    severe: float = math.inf,
) -> Finding:
    """The finding of a loss; `title` names {ranks} and {cost}, `severe` is a share of an iteration."""
    ranks = loss.ranks if ranks is None else ranks
    share = evidence.share(loss.saving_us)
    events = evidence.events(cause, ranks=ranks)
    if loss.host_us:
        events += evidence.events(cause, ranks=ranks, between=True, limit=5 - len(events))
    confidence, why = evidence.confidence(of_host=of_host)
    named = ranks_in_words(ranks, evidence.ranks)
    title = title.format(ranks=named, cost=cost_in_words(loss.saving_us, share, evidence.per, loss.occurrence))
    return Finding(
        id=id or str(cause),
        title=title[0].upper() + title[1:],
        ranks=ranks,
        evidence={"share_of_iteration": round(share, 4), **numbers},
        recoverable_us_per_iteration=loss.saving_us,
        confidence=confidence,
        confidence_reason="; ".join(filter(None, (why, reason))),
        action=action or _advice(evidence, id or str(cause)),
        events=events,
        severe=share >= severe,
        occurrence=loss.occurrence,
    )


def in_left_out(evidence: Evidence, thresholds: Thresholds, cause: Cause, does: str) -> list[Finding]:
    """The finding of a cause that strikes only iterations that do not count: it made them unlike the others.

    They are outside the ledger, so the saving is the mean over all captured iterations.
    """
    lost: dict[int, dict[int, float]] = {}
    for row in evidence.idle_causes.to_pylist():
        number, rank = row["iteration"], row["rank"]
        if row["cause"] == cause and number is not None and number not in evidence.lines and rank in evidence.ranks:
            of_ranks = lost.setdefault(number, {})
            of_ranks[rank] = of_ranks.get(rank, 0.0) + row["lost_us"]
    captured = max(evidence.captured_iterations.values(), default=0)
    total_us = sum(max(of_ranks.values()) for of_ranks in lost.values())
    if not captured or evidence.share(total_us / captured) < thresholds.cause:
        return []
    worst = max(lost, key=lambda number: max(lost[number].values()))
    ranks = responsible(lost[worst])
    each = f"{ms(max(lost[worst].values()))} in {len(lost)} of {captured} captured iterations"
    confidence, reason = evidence.confidence()
    return [
        Finding(
            id=str(cause),
            title=f"{does} {ranks_in_words(ranks, evidence.ranks)} for {each}, which medians leave out",
            ranks=ranks,
            evidence={"idle_us": by_rank(lost[worst]), "iterations": sorted(lost), "iterations_captured": captured},
            recoverable_us_per_iteration=total_us / captured,
            confidence=confidence,
            confidence_reason=reason,
            action=_advice(evidence, str(cause)),
            events=[Event(rank, str(cause), worst, None, lost[worst][rank]) for rank in ranks[:5]],
            severe=True,
            occurrence=Occurrence(tuple(sorted(lost)), captured, total_us / len(lost)),
        )
    ]
