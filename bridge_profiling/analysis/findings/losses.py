"""What findings about lost time have in common: claim it, see whose it is, and say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bridge_profiling.analysis.attribution.idle import Cause
from bridge_profiling.analysis.findings.books import Grid
from bridge_profiling.analysis.findings.context import Context

#: A rank that loses at least this part of what the worst one does is to blame too.
_ALIKE = 0.5


@dataclass(frozen=True)
class Loss:
    """Claimed time.

    Args:
        recoverable_us: what an iteration of the job would be shorter, at the most.
        lost_us: what each rank loses of an iteration, in the mean.
        host_us: what each rank's host spends in ranges of the cause; empty where there are none.
        ranks: those to blame.
    """

    recoverable_us: float
    lost_us: Mapping[int, float]
    host_us: Mapping[int, float]
    ranks: list[int]

    @property
    def worst_us(self) -> float:
        """What the rank loses that loses most."""
        return max(self.lost_us.values())


def claimed(
    context: Context,
    lost_us: Grid,
    *,
    of: Sequence[Cause],
    at_least: float,
    host_us: Grid | None = None,
    cost_us: NDArray[np.float64] | None = None,
    captured: bool = False,
) -> Loss | None:
    """Claim time that ranks lose; None, and nothing claimed, where giving it back would change too little.

    Args:
        context: of one run.
        lost_us: what each rank loses in each iteration.
        of: the causes it is of.
        at_least: share of an iteration.
        host_us: what its host spends in the cause. Then that tells who is to blame: a rank that waits for others loses nothing
            of its own, and may be as slow as they.
        cost_us: as for `Books.claim`.
        captured: as for `Context.share`.
    """
    whole_us = context.captured_iteration_us if captured else context.iteration_us
    if not np.nansum(lost_us) > 0 or not whole_us:
        return None
    recoverable = context.claim(lost_us, of=of, cost_us=cost_us, at_least_us=max(at_least * whole_us, 1.0))
    if not recoverable:
        return None
    lost = context.mean_us(lost_us)
    host = {} if host_us is None else context.mean_us(host_us)
    return Loss(recoverable, lost, host, blamed(host or lost))


def claimed_cause(context: Context, cause: Cause, *, at_least: float) -> Loss | None:
    """The same for what earlier findings left of one cause.

    Args:
        context: of one run.
        cause: which.
        at_least: share of an iteration.
    """
    return claimed(context, context.unclaimed_us(cause), of=(cause,), at_least=at_least)


def claimed_ranges(context: Context, cause: Cause, *, at_least: float) -> Loss | None:
    """The same for a cause that ranges show, within iterations and between them.

    Args:
        context: of one run.
        cause: data_loading or checkpoint_stall.
        at_least: share of an iteration.
    """
    return claimed(
        context,
        context.unclaimed_us(cause) + context.between_us(cause),
        of=(cause,),
        at_least=at_least,
        host_us=context.host_us(cause) + context.host_us(cause, between=True),
        cost_us=context.in_turns_us(cause),
        captured=True,
    )


def blamed(by_rank_us: Mapping[int, float]) -> list[int]:
    """Ranks whose time is like that of the rank with most."""
    most = max(by_rank_us.values(), default=0.0)
    return sorted(rank for rank, time_us in by_rank_us.items() if time_us > 0 and time_us >= _ALIKE * most)


def ms(time_us: float) -> str:
    """A time as a sentence names it: three digits, in milliseconds."""
    return f"{time_us / 1e3:.3g} ms" if time_us < 1e6 else f"{time_us / 1e3:,.0f} ms"


def by_rank(times_us: Mapping[int, float]) -> dict[str, float]:
    """Times by rank as evidence holds them."""
    return {str(rank): round(time_us, 3) for rank, time_us in times_us.items()}
