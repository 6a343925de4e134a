"""One rank's typical iteration, and the parts that add up to its duration.

Medians of parts do not add up to the median of the whole. So the parts are those of the median iteration: the middle one by
duration, or the mean of the middle two if their number is even.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bridge_profiling.facts.idle import Cause
from bridge_profiling.facts.types import Answer
from bridge_profiling.traces.types import Caveat

#: With fewer iterations than this, boundary ones count too, since few or none would be left.
ENOUGH_ITERATIONS = 3

#: The part that each idle cause belongs to.
PART_OF_CAUSE = {
    Cause.data_loading: "data_loading_us",
    Cause.host_sync: "host_sync_us",
    Cause.pageable_copy: "pageable_copy_us",
    Cause.checkpoint_stall: "checkpoint_us",
    Cause.profiler: "profiler_us",
    Cause.garbage_collection: "host_launch_us",
    Cause.recompilation: "host_launch_us",
    Cause.initialization: "host_launch_us",
    Cause.allocator_churn: "host_sync_us",
    Cause.small_kernels: "small_kernels_us",
    Cause.host_pause: "host_launch_us",
    Cause.host_launch: "host_launch_us",
    Cause.starved_beside_communication: "communication_us",
    Cause.blocked_by_communication: "communication_us",
    Cause.blocked_by_copy: "copy_us",
    Cause.blocked_by_device_copy: "copy_us",
    Cause.dependency_stalled: "dependency_stalled_us",
}

#: Parts by cause. `communication_us` is without waiting for other ranks, as far as that is known.
BY_CAUSE = (
    "compute_us",
    "communication_us",
    "waiting_us",
    "data_loading_us",
    "host_launch_us",
    "small_kernels_us",
    "host_sync_us",
    "pageable_copy_us",
    "copy_us",
    "checkpoint_us",
    "profiler_us",
    "dependency_stalled_us",
)

#: Parts by what ran on the device; `copying_us`: copies and memsets, and nothing else.
BY_ACTIVITY = ("compute_us", "exposed_communication_us", "copying_us", "idle_us")

_COLUMNS = ("duration_us", *dict.fromkeys((*BY_CAUSE, *BY_ACTIVITY)))

_ATTRIBUTION = pa.schema(
    [
        ("rank", pa.int32()),
        ("source", pa.string()),
        ("iterations", pa.int32()),
        ("waiting_known", pa.bool_()),
        *((name, pa.float64()) for name in _COLUMNS),
    ]
)


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
    times = [name for name in iterations.column_names if name.endswith("_us")]
    schema = [("rank", pa.int32()), ("source", pa.string()), ("iterations", pa.int64()), *((n, pa.float64()) for n in times)]
    rows: list[dict[str, Any]] = []
    caveats = []
    for (rank, source), mine in _captures(iterations.to_pylist()):
        counted = steady(mine)
        # A tenth of NumPy's time for the few iterations of a rank.
        medians = {name: median(row[name] for row in counted) for name in times}
        rows.append({"rank": rank, "source": source, "iterations": len(counted), **medians})
        if len(mine) < ENOUGH_ITERATIONS:
            captured = "one iteration was" if len(mine) == 1 else f"{len(mine)} iterations were"
            text = f"only {captured} captured: all count, including those at the profiler's start or stop"
            caveats.append(Caveat("few_iterations", text, (rank,)))
        elif all(row["boundary"] for row in mine):
            text = "all iterations are at the profiler's start, stop or flush: none is steady, and all count"
            caveats.append(Caveat("no_steady_iteration", text, (rank,)))
    return Answer(pa.Table.from_pylist(rows, schema=pa.schema(schema)), tuple(caveats))


def attribution(iterations: pa.Table, idle_causes: pa.Table, ranks: pa.Table) -> pa.Table:
    """The parts of each capture's median iteration.

    Returns:
        A row per rank and source that has iterations: rank, source, iterations (the number that the median is of),
        waiting_known (else communication_us contains the waiting), duration_us, and the parts of `BY_CAUSE` and `BY_ACTIVITY`,
        which add up to it.
    """
    rows = []
    for (rank, source), mine in _captures(parts_of_iterations(iterations, idle_causes, ranks)):
        counted = sorted(steady(mine), key=lambda row: row["duration_us"])
        middle = counted[(len(counted) - 1) // 2 : len(counted) // 2 + 1]
        means = {name: sum(row[name] for row in middle) / len(middle) for name in _COLUMNS}
        known = all(row["waiting_known"] for row in counted)
        rows.append({"rank": rank, "source": source, "iterations": len(counted), "waiting_known": known, **means})
    return pa.Table.from_pylist(rows, schema=_ATTRIBUTION)


def parts_of_iterations(iterations: pa.Table, idle_causes: pa.Table, ranks: pa.Table) -> list[dict[str, Any]]:
    """Every iteration cut into the same parts: its row, with the parts and waiting_known."""
    lost = _lost(idle_causes)
    waiting = {(row["rank"], row["iteration"]): row["waiting_us"] for row in ranks.to_pylist()}
    rows = []
    for row in iterations.to_pylist():
        rank, source, iteration = (row[name] for name in ("rank", "source", "iteration"))
        waiting_us = waiting.get((rank, iteration))
        found = row | dict.fromkeys(BY_CAUSE, 0.0) | lost[rank, source, iteration] | {"compute_us": row["compute_us"]}
        found["waiting_us"] = min(waiting_us or 0.0, found["communication_us"])
        found["communication_us"] -= found["waiting_us"]
        # Rounding can make the difference slightly negative.
        busy_us = row["duration_us"] - row["idle_us"]
        found["copying_us"] = max(busy_us - row["compute_us"] - row["exposed_communication_us"], 0.0)
        rows.append(found | {"waiting_known": waiting_us is not None})
    return rows


def _captures(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[tuple[int, str], list[dict[str, Any]]]]:
    """Rank and source, and the iterations, of each capture in order."""
    ordered = sorted(rows, key=itemgetter("rank", "source", "iteration"))
    return ((capture, list(mine)) for capture, mine in itertools.groupby(ordered, key=itemgetter("rank", "source")))


def _lost(idle_causes: pa.Table) -> dict[tuple[int, str, int | None], dict[str, float]]:
    """The loss of each iteration of each capture, by part. Time between two iterations belongs to neither of them."""
    found: dict[tuple[int, str, int | None], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    inside = idle_causes.filter(pc.invert(idle_causes["between"]))
    summed = inside.group_by(["rank", "source", "iteration", "cause"], use_threads=False).aggregate([("lost_us", "sum")])
    for row in summed.to_pylist():
        found[row["rank"], row["source"], row["iteration"]][PART_OF_CAUSE[Cause(row["cause"])]] += row["lost_us_sum"]
    return found
