"""Attributed time: which finding explains which time without compute, so that potential savings add up.

Let w be the time that a rank waits for others in an iteration, and c the time that it loses to some causes. Without these
causes the job's iteration can be shorter by at most

    B = min(cost of the causes, the smallest w + c of any rank)

The second term is the critical path: a rank that neither waits nor has the cause still takes as long. A host that is ahead of
its device is in the next iteration when the device waits, so what a rank waits in a neighbouring iteration, and nothing there
explains, counts too; next to the last iteration, in the first one. The cost of a cause is the loss of the rank that loses most;
where ranks take turns, as in data loading, the sum over turns. Findings attribute in the order of `findings.ORDER`, and each
saves the growth of B when its time joins the time attributed before. A finding's function states what differs; `of_cause`,
`finding` and `finding_of` do what all of them have in common.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from bridge_profiling.facts.idle import Cause
from bridge_profiling.findings.grids import Grids
from bridge_profiling.findings.types import Confidence, Event, Finding, Grid, Occurrence, Thresholds, advice, by_rank, ms
from bridge_profiling.findings.unprofiled import total_us

#: A rank that loses at least this share of what the worst rank loses is responsible too.
_ALIKE = 0.5

#: Pauses of a host in an iteration that are many, and how long they take at most, in the mean, as long as threads take turns.
_MANY_PAUSES, _SHORT_US = 10, 30_000

#: Findings whose usual advice is about devices, with an entry of their own for trainings on CPUs.
_OF_CPUS_TOO = (Cause.data_loading, Cause.checkpoint_stall)

#: An iteration is struck if it loses this many times what the others usually lose, and this share of what the worst one loses.
_TIMES, _OF_WORST = 3.0, 0.25

#: With fewer iterations, which of them are the usual ones is unknown.
_ENOUGH = 3


@dataclass(frozen=True)
class Ledger:
    """Time attributed so far."""

    captured: NDArray[np.bool_]
    follows: NDArray[np.bool_]  # whether an iteration comes directly after the one in the row before
    waiting_us: Grid  # w of the module docstring; 0 where not captured, as in the next field
    attributed_us: Grid  # c of all findings
    cost_us: NDArray[np.float64]  # of all attributed causes, in each iteration
    saving_us: float = 0.0  # B, mean over iterations: the savings of all findings
    most_us: float = math.inf  # that B can be
    sporadic_us: float = 0.0  # savings of findings about some of the iterations
    non_compute_us: Mapping[Cause, Grid] = field(default_factory=dict)  # all of it, by cause
    of_causes_us: Mapping[Cause, Grid] = field(default_factory=dict)  # the attributed part

    @classmethod
    def empty(
        cls,
        waiting_us: Grid,
        non_compute_us: Mapping[Cause, Grid] | None = None,
        *,
        numbers: Sequence[int | None] | None = None,
        most_us: float = math.inf,
    ) -> Self:
        """A ledger without attributed time.

        Args:
            waiting_us: NaN where a rank did not capture an iteration.
            non_compute_us: by cause.
            numbers: of the iterations; by default they follow one another.
            most_us: that all savings can be together.
        """
        captured, cost_us = ~np.isnan(waiting_us), np.zeros(len(waiting_us))
        waiting_us = np.nan_to_num(waiting_us)
        known = [number or 0 for number in (range(len(waiting_us)) if numbers is None else numbers)]
        return cls(
            captured=captured,
            follows=np.diff(known, prepend=0) == 1,
            waiting_us=waiting_us,
            attributed_us=np.zeros(waiting_us.shape),
            cost_us=cost_us,
            most_us=most_us,
            non_compute_us=non_compute_us or {},
        )

    @classmethod
    def of(cls, grids: Grids) -> Self:
        """The ledger before any finding. The profiler's part counts as waiting, because it is gone without the profiler.

        All savings together are at most what an iteration without the profiler has besides its compute: in each iteration that
        of the rank that computes least, so that ranks which compute more in turns can lose all of that.
        """
        compute_us = grids.compute_us[~np.isnan(grids.compute_us).all(axis=1)]
        least_us = float(np.nanmin(compute_us, axis=1).mean()) if compute_us.size else 0.0
        free_us = grids.waiting_us + total_us(grids.profiler.explained_us)
        most_us = max(grids.iteration_us - least_us, 0.0)
        non_compute_us = {cause: grids.idle_us(cause) for cause in Cause}
        return cls.empty(free_us, non_compute_us, numbers=grids.numbers, most_us=most_us)

    @property
    def is_empty(self) -> bool:
        """Whether no finding has attributed any time."""
        return not np.any(self.attributed_us > 0.0)

    def left_us(self, *causes: Cause) -> Grid:
        """Non-compute time of some causes that is not attributed yet."""
        empty = np.where(self.captured, 0.0, np.nan)
        return sum((self.non_compute_us[cause] - self.of_causes_us.get(cause, 0.0) for cause in causes), empty)

    def attribute(
        self,
        lost_us: Grid,
        causes: Sequence[Cause] = (),
        at_least_us: float = 0.0,
        *,
        cost_us: NDArray[np.float64] | None = None,
        waited: bool = False,
    ) -> tuple[float, Ledger]:
        """Attribute time that ranks lose, and return its saving per iteration with the new ledger.

        Args:
            lost_us: not attributed before.
            causes: the causes that the time is taken from, in this order.
            at_least_us: with a smaller saving nothing is attributed, and the time is left for later findings.
            cost_us: cost in each iteration where ranks take turns.
            waited: the lost time is waiting for other ranks, such as a pipeline bubble.
        """
        lost_us = np.nan_to_num(np.maximum(lost_us, 0.0))
        mine_us, waiting_us = np.where(self.captured, lost_us, 0.0), self.waiting_us
        if waited:
            mine_us = np.minimum(mine_us, waiting_us)
            waiting_us = waiting_us - mine_us
        attributed_us, total_cost_us = self.attributed_us + mine_us, self.cost_us
        if mine_us.shape[1]:
            most_us = mine_us.max(axis=1)
            total_cost_us = total_cost_us + (most_us if cost_us is None else np.maximum(most_us, cost_us))
        bound_us, counted = 0.0, self.captured.any(axis=1)
        if counted.any():
            path_us = np.where(self.captured, attributed_us + waiting_us, np.inf)
            path_us = _with_neighbours(path_us, total_cost_us, self.follows)[counted].min(axis=1)
            bound_us = min(float(np.minimum(total_cost_us[counted], path_us).mean()), self.most_us)
        saving_us = max(self.saving_us, bound_us) - self.saving_us
        if saving_us < at_least_us:
            return 0.0, self
        of_causes_us = dict(self.of_causes_us)
        for cause in causes:
            taken_us = np.minimum(np.nan_to_num(self.left_us(cause)), lost_us)
            of_causes_us[cause] = of_causes_us.get(cause, 0.0) + taken_us
            lost_us = lost_us - taken_us
        return saving_us, replace(
            self,
            waiting_us=waiting_us,
            attributed_us=attributed_us,
            cost_us=total_cost_us,
            saving_us=max(self.saving_us, bound_us),
            of_causes_us=of_causes_us,
        )


def _with_neighbours(path_us: Grid, cost_us: NDArray[np.float64], follows: NDArray[np.bool_]) -> Grid:
    """The critical path of each iteration and rank, with time of the next and the previous one that exceeds their own cost.

    What comes after the last iteration is not captured. The first one shows the same of those before it.
    """
    path_us, cost, last = path_us.copy(), cost_us[:, np.newaxis], len(path_us) - 1
    spare_us = np.where(np.isfinite(path_us), np.maximum(path_us - cost, 0.0), 0.0)
    # Only these can take any, however many iterations there are: their paths only grow.
    for line in np.flatnonzero((cost > path_us).any(axis=1)).tolist():
        for neighbour in (line + 1, line - 1, *([0] if line == last else [])):
            if 0 <= neighbour <= last and (follows[max(line, neighbour)] or neighbour == line - last):
                moved_us = np.minimum(np.maximum(cost[line] - path_us[line], 0.0), spare_us[neighbour])
                path_us[line] += moved_us
                spare_us[neighbour] -= moved_us
    return path_us


#: A finding's function, and its return value: what was found, and the ledger with the time of that.
Found = tuple[list[Finding], Ledger]
Find = Callable[[Grids, Thresholds, Ledger], Found]


@dataclass(frozen=True)
class Loss:
    """Time attributed to a finding, means per iteration."""

    cause: Cause
    saving_us: float
    lost_us: Mapping[int, float]  # by rank
    host_us: Mapping[int, float]  # in ranges of the cause, by rank; empty for causes without ranges
    ranks: list[int]  # responsible
    occurrence: Occurrence | None  # where it strikes some iterations only


_Says = Callable[[Grids, Thresholds, Loss], Finding | None]


def responsible(by_rank_us: Mapping[int, float]) -> list[int]:
    """Ranks whose time is similar to that of the rank with most."""
    most = max(by_rank_us.values(), default=0.0)
    return sorted(rank for rank, time_us in by_rank_us.items() if time_us > 0 and time_us >= _ALIKE * most)


def advice_on_short_pauses(grids: Grids, ranks: Sequence[int]) -> list[str]:
    """One advice if a host of these pauses often and shortly in an iteration, as those do that share the interpreter's lock."""
    count, lost_us = (grids.mean_us(grids.of_cause(Cause.host_pause, column)) for column in ("count", "lost_us"))
    many = any(count.get(rank, 0.0) >= _MANY_PAUSES and lost_us[rank] <= _SHORT_US * count[rank] for rank in ranks)
    return [advice("host_pause", "many")] if many else []


def occurrence(numbers: Sequence[int | None], lost_us: NDArray[np.float64]) -> Occurrence | None:
    """The iterations in which most of a loss occurs, if these are at most half of all; None for a loss of every iteration.

    Args:
        numbers: of the iterations.
        lost_us: in each of them.
    """
    count = len(lost_us)
    if count < _ENOUGH or not lost_us.max() > 0:
        return None
    usual_us = np.sort(lost_us)[(count - 1) // 2]
    struck = (lost_us > _TIMES * usual_us) & (lost_us >= _OF_WORST * lost_us.max())
    if not 0 < struck.sum() <= count / 2 or lost_us[struck].sum() < lost_us.sum() / 2:
        return None
    iterations = tuple(int(number) for number, hit in zip(numbers, struck, strict=True) if hit and number is not None)
    return Occurrence(iterations, count, float(lost_us[struck].mean()))


def cost_in_words(grids: Grids, saving_us: float, struck: Occurrence | None) -> str:
    """What a cause costs: "4 ms of each iteration (17%)" or "360 ms in 3 of 7 iterations (mean 154 ms, 75%)"."""
    share = f"{grids.share(saving_us):.0%}"
    if struck is None:
        return f"{ms(saving_us)} of each {grids.per} ({share})"
    return f"{ms(struck.each_us)} in {len(struck.iterations)} of {struck.of} iterations (mean {ms(saving_us)}, {share})"


def attributed(
    grids: Grids,
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
    whole_us = grids.iteration_us if host_us is None else grids.captured_iteration_us
    if not np.nansum(lost_us) > 0 or not whole_us or grids.is_doubtful(*causes):
        return None, ledger
    saving_us, ledger = ledger.attribute(lost_us, causes, max(at_least * whole_us, 1.0), cost_us=cost_us)
    if not saving_us:
        return None, ledger
    by_rank_us = grids.mean_us(lost_us)
    host = {} if host_us is None else grids.mean_us(host_us)
    most_us = np.nan_to_num(lost_us).max(axis=1)
    struck = occurrence(grids.numbers, most_us if cost_us is None else np.maximum(most_us, cost_us))
    if struck:
        ledger = replace(ledger, sporadic_us=ledger.sporadic_us + saving_us)
    return Loss(causes[0], saving_us, by_rank_us, host, responsible(host or by_rank_us), struck), ledger


def of_cause(cause: Cause, *, at_least: str = "cause", in_ranges: bool = False, stops: str = "") -> Callable[[_Says], Find]:
    """A finding about what earlier ones left of a cause: the decorated function says what it is, or that it is none.

    Args:
        cause: of non-compute time.
        at_least: the threshold of its saving, a share of an iteration.
        in_ranges: whether ranges of hosts show the cause, within iterations and between them.
        stops: what the cause does to ranks, in a title, where it may strike only iterations that do not count.
    """

    def decorated(says: _Says) -> Find:
        @wraps(says)
        def find(grids: Grids, thresholds: Thresholds, ledger: Ledger) -> Found:
            lost_us, known = ledger.left_us(cause), dict[str, Any]()
            if in_ranges:
                lost_us = lost_us + grids.of_cause(cause, "lost_us", between=True)
                # A range can begin in one iteration and cost time in the next one.
                cost_us = np.minimum(grids.in_turns_us(cause), np.nansum(lost_us, axis=1))
                known = {"host_us": grids.in_ranges_us(cause), "cost_us": cost_us}
            loss, after = attributed(grids, ledger, lost_us, (cause,), getattr(thresholds, at_least), **known)
            if loss is None:
                return _in_left_out(grids, thresholds, cause, stops) if stops else [], ledger
            found = says(grids, thresholds, loss)
            return ([found], after) if found else ([], ledger)

        return find

    return decorated


def finding(
    id: str,
    title: str,
    ranks: list[int],
    numbers: Mapping[str, Any],
    sure: tuple[Confidence, str],
    *,
    saving_us: float | None = None,
    doubt: str = "",
    action: str = "",
    case: str = "default",
    **known: Any,
) -> Finding:
    """A finding.

    Args:
        sure: confidence, and why it is not high.
        doubt: another reason.
        action: what to change; by default the advice for the case.
        known: other fields of the finding.
    """
    return Finding(
        id=id,
        title=title,
        ranks=ranks,
        evidence=numbers,
        recoverable_us_per_iteration=saving_us,
        confidence=sure[0],
        confidence_reason="; ".join(filter(None, (sure[1], doubt))),
        action=action or advice(id, case),
        **known,
    )


def finding_of(
    grids: Grids,
    loss: Loss,
    title: str,
    numbers: Mapping[str, Any],
    *,
    id: str = "",
    lost: str = "idle_us",
    ranks: list[int] | None = None,
    sure: tuple[Confidence, str] | None = None,
    severe: float = math.inf,
    **known: Any,
) -> Finding:
    """The finding of a loss.

    Args:
        title: names {ranks} and {cost}.
        lost: name of the lost time in the numbers.
        severe: a share of an iteration.
        known: other arguments of `finding`.
    """
    ranks = loss.ranks if ranks is None else ranks
    share = grids.share(loss.saving_us)
    events = grids.events(loss.cause, ranks=ranks)
    if loss.host_us:
        events += grids.events(loss.cause, ranks=ranks, between=True, limit=5 - len(events))
    title = title.format(ranks=grids.named(ranks), cost=cost_in_words(grids, loss.saving_us, loss.occurrence))
    return finding(
        id or str(loss.cause),
        title[0].upper() + title[1:],
        ranks,
        {"share_of_iteration": round(share, 4), lost: by_rank(loss.lost_us), **numbers},
        sure or grids.confidence(of_host=True),
        saving_us=loss.saving_us,
        events=events,
        severe=share >= severe,
        occurrence=loss.occurrence,
        **{"case": _case(grids, loss.cause), **known},
    )


def _case(grids: Grids, cause: Cause) -> str:
    """The kind of machine that the training ran on, where advice depends on it."""
    return "on_host" if cause in _OF_CPUS_TOO and not grids.has_device else "default"


def _in_left_out(grids: Grids, thresholds: Thresholds, cause: Cause, does: str) -> list[Finding]:
    """The finding of a cause that strikes only iterations that do not count: it made them unlike the others.

    They are outside the ledger, so the saving is the mean over all captured iterations.
    """
    lost: dict[int, dict[int, float]] = {}
    for row in grids.facts.idle_causes.to_pylist():
        number, rank = row["iteration"], row["rank"]
        if row["cause"] == cause and number is not None and number not in grids.lines and rank in grids.ranks:
            of_ranks = lost.setdefault(number, {})
            of_ranks[rank] = of_ranks.get(rank, 0.0) + row["lost_us"]
    captured = max(grids.captured_iterations.values(), default=0)
    total_us = sum(max(of_ranks.values()) for of_ranks in lost.values())
    if not captured or grids.share(total_us / captured) < thresholds.cause:
        return []
    worst = max(lost, key=lambda number: max(lost[number].values()))
    ranks = responsible(lost[worst])
    each = f"{ms(max(lost[worst].values()))} in {len(lost)} of {captured} captured iterations"
    return [
        finding(
            str(cause),
            f"{does} {grids.named(ranks)} for {each}, which medians leave out",
            ranks,
            {"idle_us": by_rank(lost[worst]), "iterations": sorted(lost), "iterations_captured": captured},
            grids.confidence(),
            saving_us=total_us / captured,
            case=_case(grids, cause),
            events=[Event(rank, str(cause), worst, None, lost[worst][rank]) for rank in ranks[:5]],
            severe=True,
            occurrence=Occurrence(tuple(sorted(lost)), captured, total_us / len(lost)),
        )
    ]
