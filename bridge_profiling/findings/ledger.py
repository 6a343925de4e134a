"""Attributed time: which finding explains which time without compute, so that potential savings add up.

Let w be the time that a rank waits for others in an iteration, and c the time that it loses to some causes. Without these
causes the job's iteration can be shorter by at most

    B = min(cost of the causes, the smallest w + c of any rank)

The second term is the critical path: a rank that neither waits nor has the cause still takes as long. A host that is ahead of
its device is in the next iteration when the device waits, so what a rank waits in a neighbouring iteration, and nothing there
explains, counts too; next to the last iteration, in the first one. The cost of a cause is the loss of the rank that loses most;
where ranks take turns, as in data loading, the sum over turns. Rules attribute in the order of `findings.RULES`, and each
finding saves the growth of B when its time joins the time attributed before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bridge_profiling.facts.idle import Cause
from bridge_profiling.findings.grids import Grids
from bridge_profiling.findings.types import Grid
from bridge_profiling.findings.unprofiled import total_us


class Ledger:
    """Time attributed so far.

    Args:
        waiting_us: NaN where a rank did not capture an iteration.
        non_compute_us: by cause.
        numbers: of the iterations; by default they follow one another.
        most_us: that all savings can be together.
    """

    def __init__(
        self,
        waiting_us: Grid,
        non_compute_us: Mapping[Cause, Grid] | None = None,
        *,
        numbers: Sequence[int | None] | None = None,
        most_us: float = math.inf,
    ) -> None:
        self.captured = ~np.isnan(waiting_us)
        known = [number or 0 for number in (range(len(waiting_us)) if numbers is None else numbers)]
        self._follows = np.diff(known, prepend=0) == 1  # whether an iteration comes directly after the one in the row before
        self._waiting_us = np.nan_to_num(waiting_us)  # w of the module docstring
        self.attributed_us: Grid = np.zeros(waiting_us.shape)  # c of all findings
        self._cost_us = np.zeros(len(waiting_us))  # of all attributed causes, in each iteration
        self._saving_us = 0.0  # B, mean over iterations: the savings of all findings
        self._most_us = most_us
        self.sporadic_us = 0.0  # savings of findings about some of the iterations
        self._non_compute_us = non_compute_us or {}
        self._of_causes_us: Mapping[Cause, Grid] = {}  # the attributed part

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
        return cls(free_us, {cause: grids.idle_us(cause) for cause in Cause}, numbers=grids.numbers, most_us=most_us)

    @property
    def is_empty(self) -> bool:
        """Whether no finding has attributed any time."""
        return not np.any(self.attributed_us > 0.0)

    def left_us(self, *causes: Cause) -> Grid:
        """Non-compute time of some causes that is not attributed yet."""
        empty = np.where(self.captured, 0.0, np.nan)
        return sum((self._non_compute_us[cause] - self._of_causes_us.get(cause, 0.0) for cause in causes), empty)

    def attribute(
        self,
        lost_us: Grid,
        causes: Sequence[Cause] = (),
        at_least_us: float = 0.0,
        *,
        cost_us: NDArray[np.float64] | None = None,
        waited: bool = False,
    ) -> float:
        """Attribute time that ranks lose, and return its saving per iteration.

        Args:
            lost_us: not attributed before.
            causes: the causes that the time is taken from, in this order.
            at_least_us: with a smaller saving nothing is attributed, and the time is left for later findings.
            cost_us: cost in each iteration where ranks take turns.
            waited: the lost time is waiting for other ranks, such as a pipeline bubble.
        """
        lost_us = np.nan_to_num(np.maximum(lost_us, 0.0))
        mine_us, waiting_us = np.where(self.captured, lost_us, 0.0), self._waiting_us
        if waited:
            mine_us = np.minimum(mine_us, waiting_us)
            waiting_us = waiting_us - mine_us
        attributed_us, total_cost_us = self.attributed_us + mine_us, self._cost_us
        if mine_us.shape[1]:
            most_us = mine_us.max(axis=1)
            total_cost_us = total_cost_us + (most_us if cost_us is None else np.maximum(most_us, cost_us))
        bound_us, counted = 0.0, self.captured.any(axis=1)
        if counted.any():
            path_us = np.where(self.captured, attributed_us + waiting_us, np.inf)
            path_us = _with_neighbours(path_us, total_cost_us, self._follows)[counted].min(axis=1)
            bound_us = min(float(np.minimum(total_cost_us[counted], path_us).mean()), self._most_us)
        saving_us = max(self._saving_us, bound_us) - self._saving_us
        if saving_us < at_least_us:
            return 0.0
        for cause in causes:
            taken_us = np.minimum(np.nan_to_num(self.left_us(cause)), lost_us)
            self._of_causes_us = {**self._of_causes_us, cause: self._of_causes_us.get(cause, 0.0) + taken_us}
            lost_us = lost_us - taken_us
        self._waiting_us, self.attributed_us, self._cost_us = waiting_us, attributed_us, total_cost_us
        self._saving_us = max(self._saving_us, bound_us)
        return saving_us


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
