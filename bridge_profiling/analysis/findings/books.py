"""The books: which milliseconds without compute are claimed by which finding, so that the findings' bounds add up.

All ranks of a job have the same iteration: who is ready early waits for the others. So what a cause costs is not what all
ranks lose to it together, and on a rank that waits it costs nothing of its own. In one iteration let w be what a rank waits for
others and c what it loses to some causes. Without these the rank still has to do the rest, so the iteration is not shorter by
more than w + c of any rank. What can be got back is at most

    B = min(what the causes cost, the least w + c of any rank)

The second is the critical path: a rank with neither waiting nor that cause holds the iteration up as before. What a cause
costs is what the rank loses that loses most to it: ranks lose their time side by side. Ranks can also lose theirs in turns,
each waiting for the other. Where the capture tells, as for data loading, a cause costs what the rank that loses most loses in
the first range of the iteration, and in the second, and so on.

Findings claim in the order of their precedence. A finding may give back what B grows by when its losses join those claimed
before. So the findings' bounds add up to B of all of them together, and that is never more than the compute-absent time of a
rank all of whose losses are such time. Times are means over the iterations that count: sums of means are means of sums, and
what happens in one iteration of several, as saving a checkpoint, is not lost.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: One value for each iteration that counts (rows) and rank (columns); NaN where the rank has not captured the iteration.
Grid = NDArray[np.float64]


class Books:
    """What is claimed of each rank's iterations.

    Args:
        waiting_us: what each rank waits for others in each iteration, as far as it computes nothing meanwhile.
    """

    def __init__(self, waiting_us: Grid) -> None:
        self._captured = ~np.isnan(waiting_us)
        self._waiting_us = np.nan_to_num(waiting_us)
        self._claimed_us = np.zeros(waiting_us.shape)
        self._cost_us = np.zeros(len(waiting_us))
        self._bound_us = 0.0

    @property
    def claimed_us(self) -> Grid:
        """What the findings until now claimed of each rank."""
        return np.where(self._captured, self._claimed_us, np.nan)

    def claim(
        self,
        lost_us: Grid,
        *,
        cost_us: NDArray[np.float64] | None = None,
        waited: bool = False,
        at_least_us: float = 0.0,
    ) -> float:
        """Claim lost time, and learn what the job's iteration would be shorter without it, at the most.

        Args:
            lost_us: what each rank loses in each iteration; apart from what is claimed already.
            cost_us: what the cause costs each iteration, where ranks lose their time in turns; None for what the rank loses
                that loses most.
            waited: the lost time is waiting for other ranks, as a pipeline's bubble is: it is taken from the waiting.
            at_least_us: what would give back less is not claimed, and left to findings that come later.

        Returns:
            Microseconds per iteration, beyond what earlier findings may give back; 0 for what was not claimed.
        """
        before = self._waiting_us, self._claimed_us, self._cost_us, self._bound_us
        lost_us = np.where(self._captured, np.nan_to_num(np.maximum(lost_us, 0.0)), 0.0)
        if waited:
            lost_us = np.minimum(lost_us, self._waiting_us)
            self._waiting_us = self._waiting_us - lost_us
        self._claimed_us = self._claimed_us + lost_us
        if lost_us.shape[1]:
            most = lost_us.max(axis=1)
            self._cost_us = self._cost_us + (most if cost_us is None else np.maximum(most, cost_us))
        self._bound_us = max(self._bound_us, self._bound())
        gained_us = self._bound_us - before[-1]
        if gained_us < at_least_us:
            self._waiting_us, self._claimed_us, self._cost_us, self._bound_us = before
            return 0.0
        return gained_us

    def _bound(self) -> float:
        """B of the module's text, for all that is claimed."""
        counted = self._captured.any(axis=1)
        if not counted.any():
            return 0.0
        left = np.where(self._captured, self._claimed_us + self._waiting_us, np.inf)[counted].min(axis=1)
        return float(np.minimum(self._cost_us[counted], left).mean())
