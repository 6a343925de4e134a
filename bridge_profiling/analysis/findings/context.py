"""What findings are made from: one run's answers, as arrays of iterations by ranks, and the books on claimed time.

A finding reads the context, and claims the time it explains from `context.books`. Nothing here judges.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bridge_profiling.analysis.attribution.device import ranks_without_work
from bridge_profiling.analysis.attribution.idle import Cause
from bridge_profiling.analysis.attribution.parts import ENOUGH_ITERATIONS
from bridge_profiling.analysis.findings.books import Books, Grid
from bridge_profiling.analysis.findings.finding import Confidence, Event
from bridge_profiling.analysis.findings.profiler_cost import profiler_cost_us
from bridge_profiling.analysis.findings.thresholds import Thresholds
from bridge_profiling.analysis.ranks.stragglers import iterations_that_count
from bridge_profiling.manifest import RankCapture
from bridge_profiling.traces.types import RankInfo

if TYPE_CHECKING:
    from bridge_profiling.analysis.run import Run

#: Causes that a profiler inflates, the most inflated first: it costs time in every operator and launch, and none in a range
#: that waits for storage.
_INFLATED = (Cause.host_launch, Cause.small_kernels, Cause.host_sync, Cause.pageable_copy)


class Context:
    """A run, as findings look at it: the ranks' traces by the profiler that captured most ranks, and what the manifests say.

    Grids have a row for each of `numbers` and a column for each of `ranks`; NaN where a rank has not captured an iteration.

    Args:
        run: whose captures are asked.
        thresholds: above or below what a number becomes a finding.
    """

    def __init__(self, run: Run, thresholds: Thresholds | None = None) -> None:
        self.run = run
        self.thresholds = thresholds or Thresholds()
        self._taken_us: dict[Cause, Grid | float] = {}

    @cached_property
    def infos(self) -> list[RankInfo]:
        """What is known about each rank's trace, by rank."""
        return [info for info in self.run.infos if info.source == self.source]

    @cached_property
    def source(self) -> str:
        """The profiler that captured the most ranks: `kineto` or `nsys`."""
        return self.run.main_source

    @cached_property
    def manifests(self) -> list[RankCapture]:
        """What each profiled rank wrote down about its capture; empty for captures that are not ours. Damaged ones are none."""
        return self.run.manifests

    @cached_property
    def ranks(self) -> list[int]:
        """Ranks with a trace, ascending: the columns of grids. Beside others, those `without_device` are none of them."""
        captured = set(self.launches["rank"].to_pylist())
        return sorted(captured.difference(self.without_device) or captured)

    @cached_property
    def without_device(self) -> list[int]:
        """Ranks whose trace has no work on a device: what idles there is no device."""
        return ranks_without_work(self.run.breakdown(), self.source)

    @property
    def has_device(self) -> bool:
        """Whether there is a device that could be idle."""
        return not set(self.ranks) <= set(self.without_device)

    @cached_property
    def numbers(self) -> list[int | None]:
        """Iterations that count, ascending: the rows of grids. None stands for a whole capture without marked iterations.

        Boundary iterations are left out, unless fewer than three iterations are left: then all count.
        """
        boundary: dict[int, bool] = {}
        for row in self.iterations.select(["iteration", "boundary"]).to_pylist() if self.iterations.num_rows else ():
            boundary[row["iteration"]] = boundary.get(row["iteration"], False) or row["boundary"]
        if boundary:
            return list(iterations_that_count(boundary, []))
        return [None] if self.launches.num_rows else []

    @property
    def per(self) -> str:
        """What times are of: `iteration`, or `capture` where no iteration is marked."""
        return "capture" if self.numbers == [None] else "iteration"

    @cached_property
    def iterations(self) -> pa.Table:
        """`Run.iterations` of this profiler's traces, with boundary iterations; empty where none is marked."""
        return self._mine(self.run.iterations())

    @cached_property
    def launches(self) -> pa.Table:
        """`Run.launches` of this profiler's traces: as the iterations, and a row for a capture without any."""
        return self._mine(self.run.idle_gaps())

    def grid(self, table: pa.Table, column: str) -> Grid:
        """A column of a table with the columns `rank` and `iteration` as a grid. Rows of the same place are added up.

        Args:
            table: rows of ranks and iterations; others than `ranks` and `numbers` are left out.
            column: which.
        """
        grid = np.full((len(self.numbers), len(self.ranks)), np.nan)
        lines = {number: line for line, number in enumerate(self.numbers)}
        places = {rank: place for place, rank in enumerate(self.ranks)}
        for row in table.select(["rank", "iteration", column]).to_pylist() if table.num_rows else ():
            line, place = lines.get(row["iteration"]), places.get(row["rank"])
            if line is not None and place is not None and row[column] is not None:
                grid[line, place] = np.nan_to_num(grid[line, place]) + row[column]
        return grid

    @cached_property
    def duration_us(self) -> Grid:
        """How long each iteration lasts on each rank's device, the profiler's cost included."""
        return self.grid(self.launches, "duration_us")

    @cached_property
    def compute_us(self) -> Grid:
        """Compute of each iteration."""
        return self.duration_us - self.grid(self.launches, "non_compute_us")

    @cached_property
    def waiting_us(self) -> Grid:
        """What each rank waits for other ranks while it computes nothing.

        Where that is unknown, as of a rank none of whose communication is matched, all of its communication that nothing
        hides is: it cannot be more.
        """
        communicating = self.communicating_us
        if len(self.ranks) < 2:
            return communicating
        known = self.grid(self.run.ranks(), "waiting_us")
        return np.where(np.isnan(known), communicating, np.minimum(known, communicating))

    @cached_property
    def waiting_is_known(self) -> bool:
        """Whether what ranks wait for others could be told from what they transfer, for every rank."""
        if len(self.ranks) < 2:
            return False
        known = self.grid(self.run.ranks(), "waiting_us")
        return not bool((np.isnan(known) & ~np.isnan(self.duration_us)).any())

    @cached_property
    def communicating_us(self) -> Grid:
        """Time without compute in which communication ran: transfer and waiting."""
        return self.absent_us(Cause.blocked_by_communication, Cause.starved_beside_communication)

    def absent_us(self, *causes: Cause, profiler: bool = False) -> Grid:
        """Compute-absent time of each rank's iterations by why, less what the profiler itself cost there.

        Args:
            causes: which; several are added up.
            profiler: leave the profiler's cost in, as it was captured.
        """
        return sum(((self._captured_us if profiler else self._absent_us)[cause] for cause in causes), self._nothing)

    def between_us(self, cause: Cause) -> Grid:
        """Time without compute after each iteration and before the next, which neither holds, by why.

        Args:
            cause: which.
        """
        return self._nothing + np.nan_to_num(self.grid(self._of(cause, between=True), "lost_us"))

    def host_us(self, cause: Cause, *, between: bool = False) -> Grid:
        """What each rank's launching threads spent in ranges or calls of a cause, whether the device computed meanwhile or not.

        Args:
            cause: which: data_loading, checkpoint_stall, host_sync, pageable_copy or profiler.
            between: after each iteration and before the next, in place of within it.
        """
        return self._nothing + np.nan_to_num(self.grid(self._of(cause, between=between), "host_us"))

    def in_turns_us(self, cause: Cause) -> NDArray[np.float64]:
        """What a cause costs each iteration if its ranges follow each other, whichever rank loses most in each.

        The first range of an iteration on one rank goes with the first ones on the others, and so on.

        Args:
            cause: data_loading or checkpoint_stall.
        """
        cost = np.zeros(len(self.numbers))
        for between in (False, True):
            most: dict[int, list[float]] = {line: [] for line in range(len(self.numbers))}
            rows = self._of(cause, between=between)
            for row in rows.select(["iteration", "lost_each_us"]).to_pylist() if rows.num_rows else ():
                if row["iteration"] in self.numbers and row["lost_each_us"]:
                    line = self.numbers.index(row["iteration"])
                    pairs = itertools.zip_longest(most[line], row["lost_each_us"], fillvalue=0.0)
                    most[line] = [max(pair) for pair in pairs]
            cost += [sum(most[line]) for line in range(len(self.numbers))]
        return cost

    def calls(self, cause: Cause) -> Grid:
        """How many such ranges or calls began in each iteration.

        Args:
            cause: as for `host_us`.
        """
        return self._nothing + np.nan_to_num(self.grid(self._of(cause), "calls"))

    def events(self, *causes: Cause, ranks: Sequence[int] | None = None, between: bool = False, limit: int = 5) -> list[Event]:
        """What shows some causes, most compute-absent time first, of the iterations that count; what nothing names comes last.

        Args:
            causes: which.
            ranks: whose; None for all.
            between: after iterations, in place of within them.
            limit: how many.
        """
        rows = [
            row
            for cause in causes
            for row in self._of(cause, between=between).to_pylist()
            if row["iteration"] in self.numbers and row["lost_us"] > 0 and (ranks is None or row["rank"] in ranks)
        ]
        rows.sort(key=lambda row: (row["name"] is None, -row["lost_us"], row["rank"], row["start_ns"]))
        return [
            Event(
                rank=row["rank"],
                name=row["name"] or "others, or nothing that the capture names",
                iteration=row["iteration"],
                start_ns=row["start_ns"],
                duration_us=row["lost_us"],
                count=row["count"],
            )
            for row in rows[:limit]
        ]

    @cached_property
    def absences(self) -> pa.Table:
        """`Run.absences` of this profiler's traces, by the thresholds' names of ranges."""
        return self._mine(self.run.idle_causes(**self.thresholds.range_names()))

    @cached_property
    def pace(self) -> pa.Table:
        """`Run.pace` of this profiler's traces."""
        return self._mine(self.run.launch_statistics())

    @cached_property
    def profiler_us(self) -> dict[int, float]:
        """What the profiler made an iteration longer on each rank, from the manifests; empty where none tells."""
        return profiler_cost_us(self.manifests)

    @cached_property
    def profiler_cost_us(self) -> Grid:
        """The same for each iteration: of ranks without a manifest what it costs the median one, 0 where none tells."""
        usual = float(np.median(list(self.profiler_us.values()))) if self.profiler_us else 0.0
        return self._nothing + np.array([max(self.profiler_us.get(rank, usual), 0.0) for rank in self.ranks])

    @cached_property
    def captured_iteration_us(self) -> float:
        """A mean iteration of the job as it was captured. 0 without any."""
        return float(np.mean(np.nanmedian(self.duration_us, axis=1))) if len(self.numbers) else 0.0

    @cached_property
    def iteration_us(self) -> float:
        """A mean iteration of the job, less what the profiler cost. 0 without any."""
        cost = float(np.median(list(self.profiler_us.values()))) if self.profiler_us else 0.0
        return max(self.captured_iteration_us - cost, 0.0)

    def share(self, time_us: float, *, captured: bool = False) -> float:
        """A time as part of a mean iteration.

        Args:
            time_us: which.
            captured: the time can hold a part of the profiler's cost, so the iteration holds it too.
        """
        whole_us = self.captured_iteration_us if captured else self.iteration_us
        return time_us / whole_us if whole_us else 0.0

    def typical_us(self, grid: Grid) -> dict[int, float]:
        """The median over the iterations that count, by rank.

        Args:
            grid: of this context.
        """
        seen = ~np.isnan(grid)
        return {rank: float(np.median(grid[seen[:, at], at])) for at, rank in enumerate(self.ranks) if seen[:, at].any()}

    def mean_us(self, grid: Grid) -> dict[int, float]:
        """The mean over the iterations that count, by rank.

        Args:
            grid: of this context.
        """
        seen = ~np.isnan(grid)
        return {rank: float(grid[seen[:, at], at].mean()) for at, rank in enumerate(self.ranks) if seen[:, at].any()}

    @cached_property
    def books(self) -> Books:
        """Which time is claimed. Findings claim in the order of `PRECEDENCE`.

        Time that the profiler took counts as waiting: it would be gone, and who is late by it is late by it only there.
        """
        taken = sum((self._captured_us[cause] - self._absent_us[cause] for cause in _INFLATED), self._nothing)
        return Books(self.waiting_us + taken + self._captured_us[Cause.profiler])

    def claim(
        self,
        lost_us: Grid,
        *,
        of: Sequence[Cause] = (),
        cost_us: NDArray[np.float64] | None = None,
        waited: bool = False,
        at_least_us: float = 0.0,
    ) -> float:
        """`Books.claim`, remembering of which causes the time is: `unclaimed_us` gives later findings the rest.

        Args:
            lost_us: what each rank loses in each iteration.
            of: the causes it is taken from, the first ones first.
            cost_us: as for `Books.claim`.
            waited: as for `Books.claim`.
            at_least_us: as for `Books.claim`.
        """
        gained_us = self.books.claim(lost_us, cost_us=cost_us, waited=waited, at_least_us=at_least_us)
        left = np.nan_to_num(np.maximum(lost_us, 0.0)) if gained_us or not at_least_us else np.zeros(lost_us.shape)
        for cause in of:
            taken = np.minimum(np.nan_to_num(self.unclaimed_us(cause)), left)
            self._taken_us[cause] = self._taken_us.get(cause, 0.0) + taken
            left = left - taken
        return gained_us

    def unclaimed_us(self, *causes: Cause) -> Grid:
        """What earlier findings left of the compute-absent time of some causes.

        Args:
            causes: which; several are added up.
        """
        return sum((self.absent_us(cause) - self._taken_us.get(cause, 0.0) for cause in causes), self._nothing)

    def host_confidence(self) -> tuple[Confidence, str]:
        """How sure a finding about the host can be, and why not surer: the profiler itself slows the host."""
        if not self.profiler_us:
            return Confidence.low, (
                "no manifest tells what the profiler itself cost: it slows the host, so without it this is less; compare with "
                "iterations that were not profiled"
            )
        return self.confidence()

    def confidence(self) -> tuple[Confidence, str]:
        """How sure any finding about lost time can be, by how much was captured, and why not surer."""
        if len(self.numbers) >= ENOUGH_ITERATIONS:
            return Confidence.high, ""
        if self.per == "capture":
            return Confidence.medium, "no iteration is marked: what changes from one to the next cannot be told"
        counted = "one iteration counts" if len(self.numbers) == 1 else f"{len(self.numbers)} iterations count"
        return Confidence.medium, f"only {counted}"

    @cached_property
    def _nothing(self) -> Grid:
        return np.where(np.isnan(self.duration_us), np.nan, 0.0)

    def _of(self, cause: Cause, *, between: bool = False) -> pa.Table:
        """Rows of a cause."""
        if not self.absences.num_rows:
            return self.absences
        return self.absences.filter(
            pc.and_(pc.equal(self.absences["cause"], str(cause)), pc.equal(self.absences["between"], between))
        )

    @cached_property
    def _captured_us(self) -> Mapping[Cause, Grid]:
        return {cause: self._nothing + np.nan_to_num(self.grid(self._of(cause), "lost_us")) for cause in Cause}

    @cached_property
    def _absent_us(self) -> Mapping[Cause, Grid]:
        """The captured time less the profiler's: it is taken from causes that it inflates, each millisecond once."""
        found = dict(self._captured_us)
        left = self.profiler_cost_us
        # What the profiler recorded of itself is apart already, and an iteration that saves is not longer for being profiled.
        left = np.maximum(left - found[Cause.profiler] - found[Cause.checkpoint_stall], 0.0)
        for cause in _INFLATED:
            taken = np.minimum(found[cause], left)
            found[cause], left = found[cause] - taken, left - taken
        return found

    def _mine(self, table: pa.Table) -> pa.Table:
        """Of an answer about each rank the rows of this profiler's traces."""
        if not table.num_rows:
            return table
        return table.filter(pc.equal(table["source"], self.source))


def ranks_in_words(ranks: Sequence[int], everyone: Sequence[int]) -> str:
    """Ranks as a sentence names them: `all 4 ranks`, `rank 2`, `ranks 1, 3`.

    Args:
        ranks: those meant.
        everyone: all that are captured.
    """
    from bridge_profiling.analysis.caveats import name_ranks

    return f"all {len(everyone)} ranks" if len(ranks) == len(everyone) > 1 else name_ranks(ranks)
