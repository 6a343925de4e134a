"""Answers about a case, as tests compare them with those about its clean twin: medians over the iterations of each rank."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

import pyarrow as pa

from bridge_profiling.analysis import Run


def typical_ms(run: Run, column: str) -> dict[int, float]:
    """The median of a column of `Run.iterations` for each rank, in milliseconds."""
    return _medians(run.iterations(), column, 1e3)


def kernel_counts(run: Run) -> dict[int, set[int]]:
    """How many kernels each rank launched in its iterations."""
    found = defaultdict(set)
    for row in run.launch_statistics().to_pylist():
        found[row["rank"]].add(row["kernel_count"])
    return dict(found)


def lost_ms(run: Run, cause: str) -> dict[int, dict[int, float]]:
    """Compute-absent milliseconds that are owed to a cause, by rank and iteration; with those between it and the next."""
    found: dict[int, dict[int, float]] = {rank: dict.fromkeys(iterations, 0.0) for rank, iterations in _iterations(run).items()}
    for row in run.idle_causes().to_pylist():
        if row["cause"] == cause:
            found[row["rank"]][row["iteration"]] += row["lost_us"] / 1e3
    return found


def waited_ms(run: Run, rank: int, waits_for: int) -> dict[int, float]:
    """How long a rank waits for another in each iteration."""
    found = dict.fromkeys(_iterations(run)[rank], 0.0)
    for row in run.waits().to_pylist():
        if (row["rank"], row["waits_for"]) == (rank, waits_for) and row["iteration"] is not None:
            found[row["iteration"]] += row["wait_us"] / 1e3
    return found


def verdicts(run: Run) -> dict[int, str]:
    """What is said of each rank: stable, sometimes or no."""
    return {row["rank"]: row["verdict"] for row in run.stragglers().to_pylist()}


def copies(run: Run, direction: str, from_memory: str) -> dict[int, dict[str, float]]:
    """The copies of one kind on each rank."""
    rows = run.copies().to_pylist()
    return {row["rank"]: row for row in rows if (row["direction"], row["from_memory"]) == (direction, from_memory)}


def bus_bandwidth_gbs(run: Run, operation: str, group: str) -> list[float]:
    """The bus bandwidth of an operation in each group of that name, waiting not counted."""
    rows = run.communication().to_pylist()
    return [row["bus_bandwidth_gbs"] for row in rows if (row["operation"], row["group"]) == (operation, group)]


def _iterations(run: Run) -> dict[int, list[int]]:
    found = defaultdict(list)
    for row in run.iterations().select(["rank", "iteration"]).to_pylist():
        found[row["rank"]].append(row["iteration"])
    return dict(found)


def _medians(table: pa.Table, column: str, divided_by: float) -> dict[int, float]:
    values = defaultdict(list)
    for row in table.select(["rank", column]).to_pylist():
        values[row["rank"]].append(row[column] / divided_by)
    return {rank: median(each) for rank, each in values.items()}
