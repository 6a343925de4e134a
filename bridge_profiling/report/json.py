"""The document that `bridge-profiling analyze --json` prints.

Keys may be added; within a `schema_version` none changes its meaning. Times are microseconds,
 sizes bytes, bandwidths 10⁹ bytes per second.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    from bridge_profiling.analysis import Run
    from bridge_profiling.analysis.findings import Finding, Thresholds

SCHEMA_VERSION = 1

_ITERATION = (
    "iteration",
    "duration_us",
    "compute_us",
    "communication_us",
    "exposed_communication_us",
    "idle_us",
    "launch_starved_us",
    "blocked_us",
    "dependency_stalled_us",
    "boundary",
)
_KERNEL = ("name", "kind", "count", "total_us", "mean_us", "min_us", "max_us")

#: Columns that identify an operation in a group.
_KIND = ("operation", "group", "group_name", "group_ranks")


def document(run: Run, thresholds: Thresholds | None = None) -> dict[str, Any]:
    """Every answer about a run as plain data; None stands for the default thresholds."""
    # Findings first: one pass over the captures then reads everything.
    findings = [as_plain_data(finding) for finding in run.findings(thresholds)]
    breakdowns = _by_capture(run.breakdown())
    iterations = _by_capture(run.iterations(), _ITERATION)
    kernels = _by_capture(run.kernels(), _KERNEL)
    ranks = []
    for info in run.infos:
        capture = (info.rank, info.source)
        places = info.coordinates
        ranks.append(
            {
                "rank": info.rank,
                "source": info.source,
                "files": info.files,
                "coordinates": None if places is None else {name: list(place) for name, place in places.items()},
                "device": breakdowns[capture][0],
                "iterations": iterations[capture],
                "kernels": kernels[capture],
            }
        )
    collectives, memory, pipeline = _collectives(run), run.memory().to_pylist(), run.pipeline().to_pylist()
    bench = run.against_bench
    return {
        "schema_version": SCHEMA_VERSION,
        "ranks": ranks,
        "collectives": collectives,
        "memory": memory,
        "pipeline": pipeline,
        "bench": None if bench is None else bench.as_plain_data(),
        "findings": findings,
        "limitations": run.limitations,
        "caveats": [asdict(caveat) for caveat in run.caveats()],
    }


def dumps(run: Run, thresholds: Thresholds | None = None) -> str:
    """The document as JSON text; infinite and undefined numbers are null."""
    return json.dumps(finite(document(run, thresholds)), indent=1, allow_nan=False)


def as_plain_data(finding: Finding) -> dict[str, Any]:
    """A finding as the document holds it."""
    return {
        "id": finding.id,
        "title": finding.title,
        "ranks": finding.ranks,
        "evidence": dict(finding.evidence),
        "recoverable_us_per_iteration": finding.recoverable_us_per_iteration,
        "confidence": str(finding.confidence),
        "confidence_reason": finding.confidence_reason,
        "action": finding.action,
        "events": [asdict(event) for event in finding.events],
        "severe": finding.severe,
    }


def _by_capture(table: pa.Table, columns: Sequence[str] | None = None) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """Rows of each rank and source, without these two columns; `columns`: the others, or None for all."""
    found: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    if columns is not None:
        table = table.select(["rank", "source", *columns])
    for row in table.to_pylist():
        found[row.pop("rank"), row.pop("source")].append(row)
    return found


def _collectives(run: Run) -> list[dict[str, Any]]:
    waits: dict[tuple[Any, ...], dict[str, float]] = defaultdict(dict)
    for row in run.communication(by_rank=True).to_pylist():
        if row["wait_us"] is not None:
            waits[tuple(row[name] for name in _KIND)][str(row["rank"])] = row["wait_us"]
    return [
        {
            "operation": row["operation"],
            "group": row["group"],
            "ranks": None if row["group_ranks"] is None else json.loads(row["group_ranks"]),
            "size": row["group_size"],
            "count": row["count"],
            "matched_count": row["matched_count"],
            "bytes": row["bytes"],
            "transfer_us": row["transfer_us"],
            "wait_us": waits[tuple(row[name] for name in _KIND)],
            "algorithm_bandwidth_gbs": row["algorithm_bandwidth_gbs"],
            "bus_bandwidth_gbs": row["bus_bandwidth_gbs"],
        }
        for row in run.communication().to_pylist()
    ]


def finite(value: Any) -> Any:
    """Plain data that JSON can hold: infinite and undefined numbers become None."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
