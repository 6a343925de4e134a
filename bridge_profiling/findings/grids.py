"""The facts of a run as arrays of iterations by ranks."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bridge_profiling.facts import intervals, words
from bridge_profiling.facts.device import ranks_without_work
from bridge_profiling.facts.idle import Cause
from bridge_profiling.facts.intervals import summed
from bridge_profiling.facts.matching import POINT_TO_POINT
from bridge_profiling.facts.parts import ENOUGH_ITERATIONS, steady_iterations
from bridge_profiling.findings.types import Confidence, Event, Grid, JudgedFacts, text
from bridge_profiling.findings.unprofiled import (
    LAUNCHING,
    ProfilerTime,
    TimedIterations,
    longer_than_any_ns,
    timed_iterations,
    total_ns,
)

#: Hosts differ in what recording costs them: the profiler's part of a cause can be wrong by this share. On most of eighteen
#: trainings on H200s, an event cost 1.7 to 2.6 µs.
DOUBT = 0.25

#: The same records can cost one host so many times as much as another one. Manifests time the job's iterations, not each host.
_APART = 1.5

#: Causes of idle time for which the capture shows no reason.
_UNRECORDED = (Cause.host_pause, Cause.host_launch)


@dataclass(frozen=True)
class Grids:
    """The facts of a run as grids.

    A grid has a row for each of `numbers` and a column for each of `ranks`; NaN where a rank did not capture an iteration.
    """

    facts: JudgedFacts

    @cached_property
    def doubts(self) -> dict[str, list[int]]:
        """What is wrong with the times of captures, and the ranks of each."""
        found: dict[str, list[int]] = {}
        for info in self.facts.infos:
            for doubt in dict.fromkeys(info.doubts):
                found.setdefault(doubt, []).append(info.rank)
        return found

    @cached_property
    def compute_kernels(self) -> list[dict[str, Any]]:
        """The rows of `kernels_by_rank` that are compute."""
        return [row for row in self.facts.kernels_by_rank.to_pylist() if row["kind"] == "compute"]

    # Rows and columns of grids.

    @cached_property
    def ranks(self) -> list[int]:
        """Captured ranks, ascending; without ranks whose trace shows no device, unless that is all of them."""
        captured = set(self.facts.idle_gaps["rank"].to_pylist())
        return sorted(captured.difference(self._without_device) or captured)

    def named(self, ranks: Sequence[int]) -> str:
        """Some of the ranks, in words."""
        return words.named_ranks(ranks, len(self.ranks))

    @property
    def has_device(self) -> bool:
        """Whether any trace shows work on a device."""
        return not set(self.ranks) <= set(self._without_device)

    @cached_property
    def _without_device(self) -> list[int]:
        return ranks_without_work(self.facts.breakdown, self.facts.infos[0].source) if self.facts.infos else []

    @cached_property
    def numbers(self) -> list[int | None]:
        """Iterations that count, ascending, without boundary iterations if possible; [None] when none is marked."""
        boundary: dict[int, bool] = {}
        for number, is_boundary in _values(self.facts.iterations, "iteration", "boundary"):
            boundary[number] = boundary.get(number, False) or is_boundary
        if boundary:
            steady = steady_iterations(boundary)
            usual = [number for number in steady if number not in self.chance]
            return list(usual if len(usual) >= ENOUGH_ITERATIONS else steady)
        return [None] if self.facts.idle_gaps.num_rows else []

    @cached_property
    def lines(self) -> dict[int | None, int]:
        """The line of grids of each iteration that counts."""
        return {number: line for line, number in enumerate(self.numbers)}

    @cached_property
    def chance(self) -> frozenset[int]:
        """Captured iterations that a pause without a recorded reason makes longer than every unprofiled one.

        Their share of the captured iterations says little about the run, and the pause may be the profiler's.
        """
        unrecorded = summed(
            ((number, rank), lost_ns)
            for cause, between in itertools.product(_UNRECORDED, (False, True))
            for number, rank, lost_ns in _values(self._rows(cause, between=between), "iteration", "rank", "lost_ns")
        )
        return frozenset(
            number
            for number, excess_ns in longer_than_any_ns(self.facts.manifests).items()
            if any(time_ns >= excess_ns / 2 for (iteration, _), time_ns in unrecorded.items() if iteration == number)
        )

    @cached_property
    def left_out_ns(self) -> dict[int, float]:
        """Duration of each captured iteration that does not count, without the profiler's recorded work; of the longest rank.

        The capture does not say how long the profiler takes to start and to stop.
        """
        lost = _values(self._rows(Cause.profiler), "rank", "iteration", "lost_ns")
        own = summed(((rank, number), lost_ns) for rank, number, lost_ns in lost)
        found: dict[int, float] = {}
        for rank, number, duration_ns in _values(self.facts.iterations, "rank", "iteration", "duration_ns"):
            if number not in self.lines:
                found[number] = max(found.get(number, 0.0), duration_ns - own.get((rank, number), 0.0))
        return found

    @property
    def per(self) -> str:
        """The unit that times refer to: `iteration`, or `capture` where no iteration is marked."""
        return "capture" if self.numbers == [None] else "iteration"

    @cached_property
    def captured_iterations(self) -> Counter[int]:
        """Iterations in each rank's capture, boundary iterations included."""
        return Counter(rank for (rank,) in _values(self.facts.iterations, "rank"))

    def grid(self, table: str | pa.Table, column: str) -> Grid:
        """A column of a table with `rank` and `iteration` as a grid; values of the same rank and iteration are added up.

        Args:
            table: the name of a fact, or some rows of one.
        """
        rows = getattr(self.facts, table) if isinstance(table, str) else table
        if not rows.num_rows:  # an empty table need not have the columns
            return np.full((len(self.numbers), len(self.ranks)), np.nan)
        return intervals.grid(rows, column, self.numbers, self.ranks)

    def filled(self, table: str | pa.Table, column: str) -> Grid:
        """The same with 0 where a captured iteration has no value."""
        return self.zero + np.nan_to_num(self.grid(table, column))

    def column(self, grid: Grid, rank: int) -> list[float | None]:
        """A rank's values in a grid, by iteration."""
        return [None if np.isnan(value) else float(value) for value in grid[:, self.ranks.index(rank)]]

    def typical_ns(self, grid: Grid) -> dict[int, float]:
        """The median over iterations, by rank."""
        if not np.isnan(grid).any() and grid.size:
            # A call for each rank took 5 ms a rank in all findings together.
            return dict(zip(self.ranks, np.median(grid, axis=0).tolist(), strict=True))
        return self._by_rank(grid, np.median)

    def mean_ns(self, grid: Grid) -> dict[int, float]:
        """The mean over iterations, by rank."""
        return self._by_rank(grid, np.mean)

    def _by_rank(self, grid: Grid, of: Callable[[NDArray[np.float64]], np.floating[Any]]) -> dict[int, float]:
        seen = ~np.isnan(grid)
        return {rank: float(of(grid[seen[:, at], at])) for at, rank in enumerate(self.ranks) if seen[:, at].any()}

    def role(self, role: str) -> pa.Table:
        """The rows of `device_roles` about one role."""
        return self.facts.device_roles.filter(pc.equal(self.facts.device_roles["role"], role))

    def captured_row(self, by_rank: Mapping[int, float]) -> Grid:
        """The same value of a rank in each iteration that it captured."""
        return self.zero + [by_rank.get(rank, 0.0) for rank in self.ranks]

    # Ranks with the same work.

    @cached_property
    def peers(self) -> list[list[int]]:
        """Sets of ranks with the same work, as columns of grids: ranks of one pipeline stage; of unknown work, each alone."""
        places = {info.rank: (info.coordinates or {}).get("pp") for info in self.facts.infos}
        stages: dict[int, int | str] = {rank: place[0] for rank, place in places.items() if place is not None}
        if len(stages) < len(self.ranks):
            stages |= dict(_values(self.facts.pipeline_by_rank, "rank", "stage"))
        # Sends and receives without a group show that there are stages, but not which.
        unknown = not stages and any(
            operation in POINT_TO_POINT and members is None
            for operation, members in _values(self.facts.communication, "operation", "group_ranks")
        )
        sets: dict[int | str | None, list[int]] = {}
        for place, rank in enumerate(self.ranks):
            sets.setdefault(f"rank {rank}" if unknown else stages.get(rank), []).append(place)
        return list(sets.values())

    def beyond_peers(self, grid: Grid) -> Grid:
        """The difference to the median of the peers; NaN without a captured peer. A grid can have other rows.

        The lower of two middle values is taken, so that a slow half of the ranks is still found.
        """
        found = np.full(grid.shape, np.nan)
        for places in self.peers:
            mine = grid[:, places]
            captured = (~np.isnan(mine)).sum(axis=1)
            middle = np.sort(mine, axis=1)[np.arange(len(mine)), np.maximum(captured - 1, 0) // 2]  # NaN is sorted last
            found[:, places] = np.where(captured[:, None] > 1, mine - middle[:, None], np.nan)
        return found

    # Times of iterations.

    @cached_property
    def duration_ns(self) -> Grid:
        """Duration of each iteration on each rank's device, with the profiler's cost."""
        return self.grid("idle_gaps", "duration_ns")

    @cached_property
    def compute_ns(self) -> Grid:
        """Compute of each iteration."""
        return self.duration_ns - self.grid("idle_gaps", "non_compute_ns")

    @cached_property
    def communicating_ns(self) -> Grid:
        """Non-compute time in which communication ran: transfer and waiting."""
        return self.idle_ns(Cause.blocked_by_communication, Cause.starved_beside_communication, with_profiler=True)

    @cached_property
    def overlapped_ns(self) -> Grid:
        """Communication that overlaps with compute."""
        name = "overlapped_communication_ns"
        if self.facts.iterations.num_rows:
            return self.grid("iterations", name)
        whole = pa.array([None] * self.facts.breakdown.num_rows, pa.int32())
        return self.grid(self.facts.breakdown.append_column("iteration", whole), name)

    @cached_property
    def waiting_ns(self) -> Grid:
        """Non-compute time in which a rank waits for others; where that is unknown, all communication as an upper bound."""
        if len(self.ranks) < 2:
            return self.communicating_ns
        if not self.has_device:
            return self.filled("host_iterations", "waiting_ns")
        known = self.grid("ranks", "waiting_ns")
        return np.where(np.isnan(known), self.communicating_ns, np.minimum(known, self.communicating_ns))

    @cached_property
    def waiting_is_known(self) -> bool:
        """Whether waiting is known apart from transfers, for every rank."""
        if len(self.ranks) < 2 or not self.has_device:
            return len(self.ranks) > 1 and bool(self.facts.host_iterations.num_rows)
        known = self.grid("ranks", "waiting_ns")
        return not bool((np.isnan(known) & ~np.isnan(self.duration_ns)).any())

    @cached_property
    def captured_iterations_ns(self) -> Grid:
        """Each iteration as captured, with the time until the next one."""
        between = [self.of_cause(cause, "lost_ns", between=True) for cause in Cause if cause is not Cause.profiler]
        return sum(between, self.duration_ns)

    @cached_property
    def captured_iteration_ns(self) -> float:
        """A mean iteration of the job as captured, with the time until the next one; 0 without any."""
        if not self.numbers:
            return 0.0
        each_ns = self.captured_iterations_ns
        if self.facts.iterations.num_rows:
            # Captures need not begin together: in their first iteration, ranks wait for the one whose capture begins last.
            begin_ns = self.grid("iterations", "start_ns")[0]
            early_ns = np.nanmax(begin_ns) - begin_ns
            each_ns = np.vstack((each_ns[:1] - np.where(early_ns < each_ns[0], early_ns, 0.0), each_ns[1:]))
        return float(np.mean(np.nanmedian(each_ns, axis=1)))

    @cached_property
    def iteration_ns(self) -> float:
        """A mean iteration of the job without the profiler's cost; 0 without any."""
        cost_ns = float(np.mean(np.nanmedian(self.profiler.cost_ns, axis=1))) if self.numbers else 0.0
        return max(self.captured_iteration_ns - cost_ns, *self.mean_ns(self.compute_ns).values(), 0.0)

    def share(self, time_ns: float) -> float:
        """A time as a share of a mean iteration without the profiler's cost."""
        return time_ns / self.iteration_ns if self.iteration_ns else 0.0

    # The profiler's cost.

    @cached_property
    def timed_iterations(self) -> dict[int, TimedIterations]:
        """Iterations with and without the profiler by rank, as far as manifests show both."""
        return timed_iterations(self.facts.manifests, self.typical_ns(self.compute_ns), self.typical_ns(self.duration_ns))

    @property
    def profiler_ns(self) -> dict[int, float]:
        """The profiler's cost by rank, as far as manifests show it."""
        return {rank: timed.cost_ns for rank, timed in self.timed_iterations.items()}

    @cached_property
    def profiler(self) -> ProfilerTime:
        """The profiler's part of each iteration."""
        explained = {cause: np.minimum(self.of_cause(cause, "profiler_ns"), self._captured_ns[cause]) for cause in Cause}
        return ProfilerTime.of(self._captured_ns, explained, self.waiting_ns, self.ranks, self.profiler_ns)

    @cached_property
    def profiler_of_host_ns(self) -> dict[int, float]:
        """How late the profiler can make each rank. Hosts pay differently for the same records: ranks can differ by it."""
        return {rank: _APART * time_ns for rank, time_ns in self.typical_ns(total_ns(self.profiler.explained_ns)).items()}

    def is_doubtful(self, *causes: Cause) -> bool:
        """Whether the remaining time of some causes can still be the profiler's, in a mean iteration of the worst rank.

        How much of a gap in which the host launches on is due to which cause is uncertain. So these are judged together.
        """
        if not self.numbers:
            return False
        together = (*causes, *(cause for cause in LAUNCHING if cause not in causes)) if set(causes) & set(LAUNCHING) else causes
        explained = sum((self.profiler.explained_ns[cause] for cause in together), self.zero)
        left_ns, explained_ns = (float(np.mean(np.nanmax(times, axis=1))) for times in (self.idle_ns(*together), explained))
        return left_ns < DOUBT * explained_ns

    def confidence(self, *, of_host: bool = False) -> tuple[Confidence, str]:
        """How certain a finding about lost time can be, and the entry of `reasons` that says why not more.

        The profiler's cost matters to times of the host.
        """
        if of_host and not self.profiler_ns:
            return Confidence.low, "estimated"
        if len(self.numbers) >= ENOUGH_ITERATIONS:
            return Confidence.high, ""
        if self.per == "capture":
            return Confidence.medium, "unmarked"
        return Confidence.medium, "few" if len(self.numbers) > 1 else "one"

    # Non-compute time by cause.

    def idle_ns(self, *causes: Cause, with_profiler: bool = False) -> Grid:
        """Non-compute time within iterations of some causes together, without the profiler's cost unless asked for."""
        times = self._captured_ns if with_profiler else self._idle_ns
        return sum((times[cause] for cause in causes), self.zero)

    def of_cause(self, cause: Cause, column: str, *, between: bool = False) -> Grid:
        """A column of a cause, within iterations or after each and before the next.

        `lost_ns`: non-compute time; `host_ns`: time of the launching threads in its ranges or calls, whether the device
        computed meanwhile or not; `calls`: number of ranges or calls that began.
        """
        return self.filled(self._rows(cause, between=between), column)

    def in_ranges_ns(self, cause: Cause) -> Grid:
        """Time of the launching threads in the ranges or calls of a cause, within iterations and after each."""
        return self.of_cause(cause, "host_ns") + self.of_cause(cause, "host_ns", between=True)

    def in_turns_ns(self, cause: Cause) -> NDArray[np.float64]:
        """Cost of a cause in each iteration when its ranges follow one another: the rank that loses most in each range."""
        cost = np.zeros(len(self.numbers))
        for between in (False, True):
            most: dict[int, list[float]] = {line: [] for line in range(len(self.numbers))}
            for number, lost_ns in _values(self._rows(cause, between=between), "iteration", "lost_each_ns"):
                if number in self.lines and lost_ns:
                    line = self.lines[number]
                    most[line] = [max(pair) for pair in itertools.zip_longest(most[line], lost_ns, fillvalue=0.0)]
            cost += [sum(most[line]) for line in range(len(self.numbers))]
        return cost

    def events(self, *causes: Cause, ranks: Sequence[int] | None = None, between: bool = False, limit: int = 5) -> list[Event]:
        """Events of some causes in the iterations that count, most lost time first, unnamed ones last."""
        rows = [
            row
            for cause in causes
            for row in self._rows(cause, between=between).to_pylist()
            if row["iteration"] in self.lines and row["lost_ns"] > 0 and (ranks is None or row["rank"] in ranks)
        ]
        rows.sort(key=lambda row: (row["name"] is None, -row["lost_ns"], row["rank"], row["start_ns"]))
        return [
            Event(
                rank=row["rank"],
                name=row["name"] or text("events", "unnamed"),
                iteration=row["iteration"],
                start_ns=row["start_ns"],
                duration_ns=row["lost_ns"],
                count=row["count"],
            )
            for row in rows[:limit]
        ]

    def by_range(self, cause: Cause) -> dict[str, float]:
        """Time lost to a cause by the name of the range that shows it, over all iterations that count and all ranks."""
        found = Counter[str]()
        for row in self._rows(cause).to_pylist():
            if row["iteration"] in self.lines and row["host_ns"] is not None and row["name"] is not None:
                found[row["name"]] += row["lost_ns"]
        return dict(found)

    @cached_property
    def room_ns(self) -> float:
        """The most that less work for devices saves, before the slowest host, never waiting for its device, limits it.

        What recording costs a host is an estimate, even where manifests measure what of it the job's iteration shows.
        """
        own_ns = self.grid("profiler_cost", "host_own_ns") - DOUBT * self.grid("profiler_cost", "host_cost_ns")
        return max(self.iteration_ns - max(self.typical_ns(own_ns).values(), default=0.0), 0.0)

    @cached_property
    def zero(self) -> Grid:
        """0 in each captured iteration."""
        return np.where(np.isnan(self.duration_ns), np.nan, 0.0)

    def _rows(self, cause: Cause, *, between: bool = False) -> pa.Table:
        return self._by_cause.get((cause, between), self.facts.idle_causes.slice(0, 0))

    @cached_property
    def _by_cause(self) -> dict[tuple[str, bool], pa.Table]:
        """`idle_causes` by cause, within iterations and between them: to choose the rows on each use took 12 ms of each run."""
        rows = self.facts.idle_causes
        places: dict[Any, list[int]] = defaultdict(list)
        for place, key in enumerate(_values(rows, "cause", "between")):
            places[key].append(place)
        return {key: rows.take(pa.array(mine)) for key, mine in places.items()}

    @cached_property
    def _captured_ns(self) -> Mapping[Cause, Grid]:
        found = {cause: self.of_cause(cause, "lost_ns") for cause in Cause}
        if not self.has_device and self.facts.host_iterations.num_rows:
            # Nothing is recorded on the loop's thread while a collective on a CPU blocks it.
            blocked = sum(np.nan_to_num(self.grid("host_iterations", f"{part}_ns")) for part in ("communication", "waiting"))
            found[Cause.host_pause] = np.maximum(found[Cause.host_pause] - blocked, 0.0)
        return found

    @cached_property
    def _idle_ns(self) -> Mapping[Cause, Grid]:
        """Captured time without the profiler's part."""
        return {
            cause: np.maximum(time_ns - self.profiler.explained_ns[cause], 0.0) for cause, time_ns in self._captured_ns.items()
        }


def _values(table: pa.Table, *columns: str) -> Iterable[tuple[Any, ...]]:
    """The rows of some columns; an empty table need not have them."""
    return zip(*(table[name].to_pylist() for name in columns), strict=True) if table.num_rows else ()
