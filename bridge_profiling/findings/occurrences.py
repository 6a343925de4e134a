"""Causes that strike some iterations: which ones, and how long each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bridge_profiling.findings.types import Occurrence, ms

#: An iteration is struck if it loses this many times what the others usually lose, and this share of what the worst one loses.
_TIMES, _OF_WORST = 3.0, 0.25

#: With fewer iterations, which of them are the usual ones is unknown.
_ENOUGH = 3


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


def cost_in_words(saving_us: float, share: float, per: str, found: Occurrence | None) -> str:
    """What a cause costs: "4 ms of each iteration (17%)" or "360 ms in 3 of 7 iterations (mean 154 ms, 75%)"."""
    if found is None:
        return f"{ms(saving_us)} of each {per} ({share:.0%})"
    return f"{ms(found.each_us)} in {len(found.iterations)} of {found.of} iterations (mean {ms(saving_us)}, {share:.0%})"
