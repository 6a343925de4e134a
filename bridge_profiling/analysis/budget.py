"""The step's budget: what a typical iteration of each rank is made of, in parts that add up to its duration exactly.

Medians of parts do not add up to the median of the whole. So the budget is that of the median iteration: of the middle one by
duration, or the mean of the middle two where their number is even; its duration is the median of the durations.

Time without compute is cut by what it is owed to (`absences`). What was owed to communication is cut once more: waiting for
other ranks, as far as `ranks` tells it, and the rest.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from bridge_profiling.analysis.absences import Cause
from bridge_profiling.analysis.iterations import steady

#: Which part each cause of `absences` belongs to.
_PART = {
    Cause.data_loading: "data_loading_us",
    Cause.host_sync: "host_sync_us",
    Cause.pageable_copy: "pageable_copy_us",
    Cause.checkpoint_stall: "checkpoint_us",
    Cause.profiler: "profiler_us",
    Cause.small_kernels: "small_kernels_us",
    Cause.host_launch: "host_launch_us",
    Cause.starved_beside_communication: "communication_us",
    Cause.blocked_by_communication: "communication_us",
    Cause.blocked_by_copy: "copy_us",
    Cause.blocked_by_device_copy: "copy_us",
    Cause.dependency_stalled: "dependency_stalled_us",
}

#: Parts by cause. They add up to `duration_us`; `communication_us` is without waiting for other ranks, as far as that is known.
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

#: Parts by what ran on the device. They add up to `duration_us` too; `copying_us`: copies and memsets, and nothing else, ran.
BY_ACTIVITY = ("compute_us", "exposed_communication_us", "copying_us", "idle_us")

_COLUMNS = ("duration_us", *dict.fromkeys((*BY_CAUSE, *BY_ACTIVITY)))

_SCHEMA = pa.schema(
    [
        ("rank", pa.int32()),
        ("source", pa.string()),
        ("iterations", pa.int32()),
        ("waiting_known", pa.bool_()),
        *((name, pa.float64()) for name in _COLUMNS),
    ]
)

_Captures = dict[tuple[int, str], dict[int | None, dict[str, float]]]


def budget(iterations: pa.Table, absences: pa.Table, ranks: pa.Table) -> pa.Table:
    """The budget of each capture's median iteration.

    Args:
        iterations: `Run.iterations`.
        absences: `Run.absences`.
        ranks: `Run.ranks`: what each rank waited for others.

    Returns:
        A row per rank and source that has iterations: rank, source, iterations (how many the median is of), waiting_known (else
        communication_us contains the waiting), duration_us, and the parts of `BY_CAUSE` and `BY_ACTIVITY`.
    """
    if not iterations.num_rows:
        return _SCHEMA.empty_table()
    lost = _lost(absences)
    waiting = {(row["rank"], row["iteration"]): row["waiting_us"] for row in ranks.to_pylist()}
    ordered = iterations.sort_by([("rank", "ascending"), ("source", "ascending"), ("iteration", "ascending")])
    captures = list(zip(ordered["rank"].to_pylist(), ordered["source"].to_pylist(), strict=True))
    begin, rows = 0, []
    for (number, each), mine in itertools.groupby(captures):
        length = sum(1 for _ in mine)
        counted = steady(ordered.slice(begin, length)).to_pylist()
        begin += length
        parts = [
            _parts(row, lost[number, each].get(row["iteration"], {}), waiting.get((number, row["iteration"])))
            for row in _middle(counted)
        ]
        means = {name: sum(part[name] for part in parts) / len(parts) for name in _COLUMNS}
        known = all(waiting.get((number, row["iteration"])) is not None for row in counted)
        rows.append({"rank": number, "source": each, "iterations": len(counted), "waiting_known": known, **means})
    return pa.Table.from_pylist(rows, schema=_SCHEMA)


def budget_of_iterations(iterations: pa.Table, absences: pa.Table, ranks: pa.Table) -> list[dict[str, Any]]:
    """Every iteration cut into the same parts, for those who compare iterations: rows with rank, source, iteration, boundary.

    Args:
        iterations: `Run.iterations`.
        absences: `Run.absences`.
        ranks: `Run.ranks`.
    """
    lost = _lost(absences)
    waiting = {(row["rank"], row["iteration"]): row["waiting_us"] for row in ranks.to_pylist()}
    return [
        {name: row[name] for name in ("rank", "source", "iteration", "boundary")}
        | _parts(row, lost[row["rank"], row["source"]].get(row["iteration"], {}), waiting.get((row["rank"], row["iteration"])))
        for row in (iterations.to_pylist() if iterations.num_rows else [])
    ]


def _middle(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The middle one or two by duration."""
    ordered = sorted(rows, key=lambda row: row["duration_us"])
    return ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]


def _parts(row: Mapping[str, Any], lost: Mapping[str, float], waiting_us: float | None) -> dict[str, float]:
    """One iteration of one rank, cut both ways."""
    found = {**dict.fromkeys(_COLUMNS, 0.0), **lost}
    for name in ("duration_us", "compute_us", "exposed_communication_us", "idle_us"):
        found[name] = row[name]
    found["waiting_us"] = min(waiting_us or 0.0, found["communication_us"])
    found["communication_us"] -= found["waiting_us"]
    # Never below nothing for the last digit's sake.
    found["copying_us"] = max(row["duration_us"] - row["idle_us"] - row["compute_us"] - row["exposed_communication_us"], 0.0)
    return found


def _lost(absences: pa.Table) -> _Captures:
    """What each iteration of each capture lost, by part."""
    found: _Captures = defaultdict(lambda: defaultdict(lambda: defaultdict(float)))
    if not absences.num_rows:
        return found
    # Time between two iterations belongs to neither of them.
    inside = absences.filter(pc.invert(absences["between"]))
    summed = inside.group_by(["rank", "source", "iteration", "cause"]).aggregate([("lost_us", "sum")])
    for row in summed.to_pylist():
        found[row["rank"], row["source"]][row["iteration"]][_PART[Cause(row["cause"])]] += row["lost_us_sum"]
    return found
