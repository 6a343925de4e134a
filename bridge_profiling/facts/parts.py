"""What an iteration consists of: one rank's typical iteration, and the parts that add up to its duration.

Medians of parts do not add up to the median of the whole. So the parts are those of the median iteration: the middle one by
duration, or the mean of the middle two if their number is even.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bridge_profiling.facts.device import until_next
from bridge_profiling.facts.idle import Cause
from bridge_profiling.facts.intervals import Intervals, coded, judged, parents, ranged, rows_named, rows_of, totals, union
from bridge_profiling.facts.names import CHECKPOINT, DATA_LOADING
from bridge_profiling.facts.operators import unit_rows
from bridge_profiling.facts.types import Answer, Connection, caveat, declared, queried, schema
from bridge_profiling.traces.tables import to_int64

#: With fewer iterations than this, boundary ones count too, since few or none would be left.
ENOUGH_ITERATIONS = 3

#: Parts by cause: see `Cause.part`. `communication_ns` is without waiting for other ranks, as far as that is known.
BY_CAUSE = (
    *("compute_ns", "communication_ns", "waiting_ns", "data_loading_ns", "host_launch_ns", "small_kernels_ns", "host_sync_ns"),
    *("pageable_copy_ns", "copy_ns", "checkpoint_ns", "profiler_ns", "dependency_stalled_ns"),
)

#: Parts by what ran on the device; `copying_ns`: copies and memsets, and nothing else.
BY_ACTIVITY = ("compute_ns", "exposed_communication_ns", "copying_ns", "idle_ns")

_COLUMNS = ("duration_ns", *dict.fromkeys((*BY_CAUSE, *BY_ACTIVITY)))

_ATTRIBUTION = schema(*("rank", "source", "iterations", "waiting_known"), *_COLUMNS, iterations=pa.int32())


def steady(iterations: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """The iterations of one rank that count in medians: without boundary ones, unless fewer than three are captured."""
    inside = [row for row in iterations if not row["boundary"]]
    return inside if len(iterations) >= ENOUGH_ITERATIONS and inside else iterations


def steady_iterations(boundary: Mapping[int, bool], *, at_least: int = ENOUGH_ITERATIONS) -> list[int]:
    """The iterations of several ranks that count: without boundary ones, or all of them if that leaves too few."""
    inside = sorted(number for number, edge in boundary.items() if not edge)
    return inside if len(inside) >= at_least else sorted(boundary)


def counted_iterations(iterations: pa.Table) -> NDArray[np.bool_]:
    """Which iterations of one rank count in means: not boundary ones, or all if that leaves too few."""
    inside = ~iterations["boundary"].to_numpy().astype(bool)
    return inside if inside.sum() >= ENOUGH_ITERATIONS else np.ones(len(inside), bool)


def typical_iteration(iterations: pa.Table) -> Answer:
    """One row per capture: the median of each time over its steady iterations, and how many they are.

    Medians of parts do not add up to the median of the whole.
    """
    times = [name for name in iterations.column_names if name.endswith("_ns") and name not in ("start_ns", "end_ns")]
    rows: list[dict[str, Any]] = []
    caveats = []
    for (rank, source), mine in _captures(iterations.to_pylist()):
        counted = steady(mine)
        # A tenth of NumPy's time for the few iterations of a rank.
        medians = {name: round(median(row[name] for row in counted)) for name in times}
        rows.append({"rank": rank, "source": source, "iterations": len(counted), **medians})
        if len(mine) < ENOUGH_ITERATIONS:
            captured = "one iteration was" if len(mine) == 1 else f"{len(mine)} iterations were"
            caveats.append(caveat("few_iterations", (rank,), captured=captured))
        elif all(row["boundary"] for row in mine):
            caveats.append(caveat("no_steady_iteration", (rank,)))
    columns = schema("rank", "source", "iterations", *times, iterations=pa.int64())
    return Answer(pa.Table.from_pylist(rows, schema=columns), tuple(caveats))


def attribution(iterations: pa.Table, idle_causes: pa.Table, ranks: pa.Table) -> pa.Table:
    """The parts of each capture's median iteration.

    Returns:
        A row per rank and source that has iterations: rank, source, iterations (the number that the median is of),
        waiting_known (else communication_ns contains the waiting), duration_ns, and the parts of `BY_CAUSE` and `BY_ACTIVITY`,
        which add up to it.
    """
    rows = []
    for (rank, source), mine in _captures(parts_of_iterations(iterations, idle_causes, ranks)):
        counted = sorted(steady(mine), key=lambda row: row["duration_ns"])
        middle = counted[(len(counted) - 1) // 2 : len(counted) // 2 + 1]
        means = {name: round(sum(row[name] for row in middle) / len(middle)) for name in _COLUMNS}
        known = all(row["waiting_known"] for row in counted)
        rows.append({"rank": rank, "source": source, "iterations": len(counted), "waiting_known": known, **means})
    return pa.Table.from_pylist(rows, schema=_ATTRIBUTION)


def parts_of_iterations(iterations: pa.Table, idle_causes: pa.Table, ranks: pa.Table) -> list[dict[str, Any]]:
    """Every iteration cut into the same parts: its row, with the parts and waiting_known."""
    lost: dict[tuple[int, str, int | None], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    # Time between two iterations belongs to neither of them.
    inside = idle_causes.filter(pc.invert(idle_causes["between"]))
    for row in totals(inside, ("rank", "source", "iteration", "cause"), lost_ns=("lost_ns", "sum")).to_pylist():
        lost[row["rank"], row["source"], row["iteration"]][Cause(row["cause"]).part] += row["lost_ns"]
    waiting = {(row["rank"], row["iteration"]): row["waiting_ns"] for row in ranks.to_pylist()}
    rows = []
    for row in iterations.to_pylist():
        rank, source, iteration = (row[name] for name in ("rank", "source", "iteration"))
        waiting_ns = waiting.get((rank, iteration))
        found = row | dict.fromkeys(BY_CAUSE, 0) | lost[rank, source, iteration] | {"compute_ns": row["compute_ns"]}
        found["waiting_ns"] = min(waiting_ns or 0, found["communication_ns"])
        found["communication_ns"] -= found["waiting_ns"]
        found["copying_ns"] = row["duration_ns"] - sum(row[name] for name in BY_ACTIVITY if name != "copying_ns")
        rows.append(found | {"waiting_known": waiting_ns is not None})
    return rows


def _captures(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[tuple[int, str], list[dict[str, Any]]]]:
    """Rank and source, and the iterations, of each capture in order."""
    ordered = sorted(rows, key=itemgetter("rank", "source", "iteration"))
    return ((capture, list(mine)) for capture, mine in itertools.groupby(ordered, key=itemgetter("rank", "source")))


#: Ranges that count passes and steps, by the beginning of their names.
_RANGES = {"passes": "DistributedDataParallel.forward", "steps": "Optimizer.step#"}

#: Operators that issue a collective, by the beginning of their names. torch 1.x records the second one alone.
ISSUING = ("c10d::", "record_param_comms")


def host_rows(host_events: pa.Table) -> NDArray[np.bool_]:
    """Which host events `loop_counts` reads."""
    beginnings = (*_RANGES.values(), *ISSUING)
    return rows_named(host_events["name"], lambda name: name.startswith(beginnings)) | unit_rows(host_events)


def loop_counts(host_events: pa.Table, iterations: pa.Table) -> pa.Table:
    """One row per iteration: how often DDP's forward pass and an optimizer's step began, and the host's time in collectives.

    `issuing_ns`: in the operators that issue collectives, on all threads, outside of the ranges of a sharded model's units.
    """
    codes, names = coded(host_events["name"])
    start, stop = (host_events[name].to_numpy() for name in ("start_ns", "end_ns"))
    shown = rows_of(host_events["category"], "operator", "annotation")
    begin, end = (iterations[name].to_numpy() for name in ("start_ns", "end_ns"))

    def named(*beginnings: str) -> NDArray[np.bool_]:
        return judged(codes, names, lambda name: name.startswith(beginnings)) & shown

    counts = {}
    for column, beginning in _RANGES.items():
        starts = np.sort(start[named(beginning)])
        counts[column] = np.searchsorted(starts, end) - np.searchsorted(starts, begin)
    issuing, of_units = (union(start[rows], stop[rows]) for rows in (named(*ISSUING), unit_rows(host_events)))
    issuing_ns = (issuing - of_units).within_ns(begin, end)
    return pa.table(
        {"iteration": pa.array(to_int64(iterations["iteration"]), pa.int32()), **counts, "issuing_ns": pa.array(issuing_ns)}
    )


#: Ranges of collectives on CPUs, mostly on a thread of the backend, and the operators that issue them.
_COLLECTIVE = re.compile(r"(?:gloo|mpi|ucc):")

_ISSUING = re.compile("|".join(ISSUING))

#: Parts of an iteration, in the order in which a time that fits several is attributed.
HOST_PARTS = ("data_loading_ns", "checkpoint_ns", "communication_ns", "operators_ns", "other_ns")

_HOST_STEPS = declared("HostIteration").schema("iteration", "boundary", "duration_ns", *HOST_PARTS, "collectives_ns")


def host_steps(host_blocks: Callable[[], Iterable[pa.Table]], device_events: pa.Table, iterations: pa.Table) -> pa.Table:
    """One row per iteration of a rank without device work; none otherwise.

    Returns:
        `duration_ns`: to the start of the next iteration. Its parts, of the loop's thread: in ranges of data loading and of
        checkpoints, blocked by communication (a collective runs, and the thread computes in no operator), in operators, and the
        rest, which is Python for the most part. `collectives_ns`: collectives of all threads, hidden ones included.

    Args:
        host_blocks: `host.COLUMNS` of the host events.
        device_events: of the same rank.
        iterations: of the same rank.
    """
    if device_events.num_rows or not iterations.num_rows:
        return _HOST_STEPS.empty_table()
    host_events = pa.concat_tables(host_blocks())
    code, names = coded(host_events["name"])
    thread, start, end = ranged(host_events)
    begin, stop = until_next(iterations)
    ranges = rows_of(host_events["category"], "annotation", "python", "operator")
    operators = rows_of(host_events["category"], "operator")

    def named(pattern: re.Pattern[str]) -> np.ndarray:
        return judged(code, names, pattern.search)

    marks = (
        rows_of(host_events["category"], "annotation") & np.isin(start, begin) & np.isin(end, to_int64(iterations["end_ns"]))
    )
    known, count = np.unique(thread[marks], return_counts=True)
    loop = thread == known[count.argmax()] if len(known) else np.ones(len(thread), bool)

    def during(rows: np.ndarray) -> Intervals:
        return union(start[rows], end[rows])

    issuing, mine = named(_ISSUING), np.flatnonzero(operators & loop)
    outer = np.zeros(len(code), bool)
    above = parents(thread[mine], start[mine], end[mine])
    outer[mine[above[above >= 0]]] = True
    computing = during(operators & loop & ~outer & ~issuing)
    collectives = during((named(_COLLECTIVE) & ranges) | (issuing & operators & loop))
    loading = during(ranges & loop & named(re.compile(DATA_LOADING, re.IGNORECASE)))
    saving = during(ranges & loop & named(re.compile(CHECKPOINT, re.IGNORECASE))) - loading
    blocked = collectives - computing - loading - saving
    working = during(operators & loop) - loading - saving - blocked
    found = [each.within_ns(begin, stop) for each in (loading, saving, blocked, working)]
    rest = stop - begin - sum(found)
    columns = [iterations["iteration"], iterations["boundary"], stop - begin, *found, rest, collectives.within_ns(begin, stop)]
    return pa.table(columns, schema=_HOST_STEPS)


_HOST_ITERATIONS = """
with waited as (
    select *, if(count(*) over same > 1, communication_ns - min(communication_ns) over same, null) as waiting_ns
    from host_steps window same as (partition by source, iteration)
)
select * replace (communication_ns - coalesce(waiting_ns, 0) as communication_ns),
    duration_ns - coalesce(waiting_ns, 0) as own_ns
from waited order by iteration, rank, source
"""


def host_iterations(connection: Connection, host_steps: pa.Table) -> pa.Table:
    """The rows of `host_steps` by iteration and rank, with waiting taken out of communication.

    Returns:
        `waiting_ns`: what communication blocks a rank longer than the rank that it blocks least in the same iteration, which
        is the last to arrive. `communication_ns`: the rest. `own_ns`: the iteration without waiting. Of one rank alone waiting
        is unknown, and null.
    """
    return queried(connection, _HOST_ITERATIONS, host_steps=host_steps)
