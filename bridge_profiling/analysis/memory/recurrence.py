"""Iterations inferred from what repeats, where nothing marks them. Arrays in, times out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: The part of the kinds that recur whose number of occurrences must be a multiple of the iterations'. The rest are of set-up.
_EXPLAINED = 2 / 3

#: Kinds that occur once an iteration: fewer are a coincidence.
_MARKERS = 3


def iteration_ends(kind: NDArray[np.int64], time_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Moments between iterations, from events of which some occur once in each; empty when there is no such order.

    Each kind of event occurs the same number of times in every iteration, so its occurrences are a multiple of the iterations.
    The largest number that explains most kinds is taken; one below, such as a half, explains them too, and one above, such
    as the number of microbatches, does not explain what happens once an iteration.

    Args:
        kind: what each event is, as a number.
        time_ns: when each happened.

    Returns:
        For each iteration but the last, a moment before the first event that marks the next one.
    """
    _, of_event, occurrences = np.unique(kind, return_inverse=True, return_counts=True)
    recurring = occurrences[occurrences > 1]
    numbers, kinds = np.unique(recurring, return_counts=True)
    explains = [number for number, count in zip(numbers, kinds, strict=True) if count >= _MARKERS and _fits(recurring, number)]
    if not explains:
        return np.empty(0, np.int64)
    number = int(max(explains))
    marking = occurrences[of_event] == number
    order = np.lexsort((time_ns[marking], of_event[marking]))
    times = time_ns[marking][order].reshape(-1, number)
    # A kind that happens as often within one iteration marks none: its times are unlike those of the others.
    typical = np.median(times, axis=0)
    gap = np.diff(typical).min()
    times = times[(np.abs(times - typical) < max(gap, 1)).all(axis=1)]
    if len(times) < _MARKERS or (times[:, 1:].min(axis=0) <= times[:, :-1].max(axis=0)).any():
        return np.empty(0, np.int64)
    return times[:, 1:].min(axis=0) - 1


def _fits(occurrences: NDArray[np.int64], number: int) -> bool:
    return bool((occurrences % number == 0).mean() >= _EXPLAINED)
