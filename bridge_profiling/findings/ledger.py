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
from bridge_profiling.findings.unprofiled import total_ns


class Ledger:
    """Time attributed so far.

    Args:
        waiting_ns: NaN where a rank did not capture an iteration.
        non_compute_ns: by cause.
        numbers: of the iterations; by default they follow one another.
        most_ns: that all savings can be together.
    """

    def __init__(
        self,
        waiting_ns: Grid,
        non_compute_ns: Mapping[Cause, Grid] | None = None,
        *,
        numbers: Sequence[int | None] | None = None,
        most_ns: float = math.inf,
    ) -> None:
        self.captured = ~np.isnan(waiting_ns)
        known = [number or 0 for number in (range(len(waiting_ns)) if numbers is None else numbers)]
        self._follows = np.diff(known, prepend=0) == 1  # whether an iteration comes directly after the one in the row before
        self._waiting_ns = np.nan_to_num(waiting_ns)  # w of the module docstring
        self.attributed_ns: Grid = np.zeros(waiting_ns.shape)  # c of all findings
        self._cost_ns = np.zeros(len(waiting_ns))  # of all attributed causes, in each iteration
        self._saving_ns = 0.0  # B, mean over iterations: the savings of all findings
        self._most_ns = most_ns
        self.sporadic_ns = 0.0  # savings of findings about some of the iterations
        self._non_compute_ns = non_compute_ns or {}
        self._of_causes_ns: Mapping[Cause, Grid] = {}  # the attributed part

    @classmethod
    def of(cls, grids: Grids) -> Self:
        """The ledger before any finding. The profiler's part counts as waiting, because it is gone without the profiler.

        All savings together are at most what an iteration without the profiler has besides its compute: in each iteration that
        of the rank that computes least, so that ranks which compute more in turns can lose all of that.
        """
        compute_ns = grids.compute_ns[~np.isnan(grids.compute_ns).all(axis=1)]
        least_ns = float(np.nanmin(compute_ns, axis=1).mean()) if compute_ns.size else 0.0
        free_ns = grids.waiting_ns + total_ns(grids.profiler.explained_ns)
        most_ns = max(grids.iteration_ns - least_ns, 0.0)
        return cls(free_ns, {cause: grids.idle_ns(cause) for cause in Cause}, numbers=grids.numbers, most_ns=most_ns)

    @property
    def is_empty(self) -> bool:
        """Whether no finding has attributed any time."""
        return not np.any(self.attributed_ns > 0.0)

    def left_ns(self, *causes: Cause) -> Grid:
        """Non-compute time of some causes that is not attributed yet."""
        empty = np.where(self.captured, 0.0, np.nan)
        return sum((self._non_compute_ns[cause] - self._of_causes_ns.get(cause, 0.0) for cause in causes), empty)

    def attribute(
        self,
        lost_ns: Grid,
        causes: Sequence[Cause] = (),
        at_least_ns: float = 0.0,
        *,
        cost_ns: NDArray[np.float64] | None = None,
        waited: bool = False,
    ) -> float:
        """Attribute time that ranks lose, and return its saving per iteration.

        Args:
            lost_ns: not attributed before.
            causes: the causes that the time is taken from, in this order.
            at_least_ns: with a smaller saving nothing is attributed, and the time is left for later findings.
            cost_ns: cost in each iteration where ranks take turns.
            waited: the lost time is waiting for other ranks, such as a pipeline bubble.
        """
        lost_ns = np.nan_to_num(np.maximum(lost_ns, 0.0))
        mine_ns, waiting_ns = np.where(self.captured, lost_ns, 0.0), self._waiting_ns
        if waited:
            mine_ns = np.minimum(mine_ns, waiting_ns)
            waiting_ns = waiting_ns - mine_ns
        attributed_ns, total_cost_ns = self.attributed_ns + mine_ns, self._cost_ns
        if mine_ns.shape[1]:
            most_ns = mine_ns.max(axis=1)
            total_cost_ns = total_cost_ns + (most_ns if cost_ns is None else np.maximum(most_ns, cost_ns))
        bound_ns, counted = 0.0, self.captured.any(axis=1)
        if counted.any():
            path_ns = np.where(self.captured, attributed_ns + waiting_ns, np.inf)
            path_ns = _with_neighbours(path_ns, total_cost_ns, self._follows)[counted].min(axis=1)
            bound_ns = min(float(np.minimum(total_cost_ns[counted], path_ns).mean()), self._most_ns)
        saving_ns = max(self._saving_ns, bound_ns) - self._saving_ns
        if saving_ns < at_least_ns:
            return 0.0
        for cause in causes:
            taken_ns = np.minimum(np.nan_to_num(self.left_ns(cause)), lost_ns)
            self._of_causes_ns = {**self._of_causes_ns, cause: self._of_causes_ns.get(cause, 0.0) + taken_ns}
            lost_ns = lost_ns - taken_ns
        self._waiting_ns, self.attributed_ns, self._cost_ns = waiting_ns, attributed_ns, total_cost_ns
        self._saving_ns = max(self._saving_ns, bound_ns)
        return saving_ns


def _with_neighbours(path_ns: Grid, cost_ns: NDArray[np.float64], follows: NDArray[np.bool_]) -> Grid:
    """The critical path of each iteration and rank, with time of the next and the previous one that exceeds their own cost.

    What comes after the last iteration is not captured. The first one shows the same of those before it.
    """
    path_ns, cost, last = path_ns.copy(), cost_ns[:, np.newaxis], len(path_ns) - 1
    spare_ns = np.where(np.isfinite(path_ns), np.maximum(path_ns - cost, 0.0), 0.0)
    # Only these can take any, however many iterations there are: their paths only grow.
    for line in np.flatnonzero((cost > path_ns).any(axis=1)).tolist():
        for neighbour in (line + 1, line - 1, *([0] if line == last else [])):
            if 0 <= neighbour <= last and (follows[max(line, neighbour)] or neighbour == line - last):
                moved_ns = np.minimum(np.maximum(cost[line] - path_ns[line], 0.0), spare_ns[neighbour])
                path_ns[line] += moved_ns
                spare_ns[neighbour] -= moved_ns
    return path_ns
