"""The document that `bridge-profiling analyze --json` and `report --json` print; `run_document.toml` has its keys.

Keys may be added; within a `schema_version` none changes its meaning. Times are microseconds, points in
time nanoseconds, sizes bytes, bandwidths 10⁹ bytes per second.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from bridge_profiling.compare.bench import with_alone
from bridge_profiling.facts.parts import BY_CAUSE
from bridge_profiling.facts.run import RunFacts
from bridge_profiling.facts.types import Row, documented
from bridge_profiling.findings.scorecard import scorecard
from bridge_profiling.report import measurements
from bridge_profiling.report.documents import row as declared
from bridge_profiling.report.figures import PARTS
from bridge_profiling.report.rows import budget
from bridge_profiling.report.verdict import Conclusion, verdict

#: Columns that identify an operation in a group.
_KIND = ("operation", "group", "group_name", "group_ranks")


def document(facts: RunFacts, found: Conclusion) -> dict[str, Any]:
    """Every answer about a run as plain data."""
    return {
        "schema_version": 1,
        "verdict": documented(_verdict(facts, found)),
        "budget": documented(_budget(facts, found)),
        "scorecard": scorecard(facts).to_pylist(),
        "measured": {
            "training": measurements.training_rows(facts.manifests),
            "phase_memory": measurements.phase_memory_rows(facts.manifests),
            "wall_clock": documented(measurements.wall_clock_rows(facts.manifests)),
            "flops_profile": documented(measurements.flops_rows(facts.manifests)),
        },
        "ranks": _ranks(facts),
        "collectives": _collectives(facts),
        "collectives_by_size": [
            _chosen(declared("SizedCollective"), row | {"ranks": _members(row)}) for row in documented(with_alone(facts))
        ],
        "memory": documented(facts.memory),
        "pipeline": documented(facts.pipeline),
        "pipeline_waits": documented(facts.pipeline_waits),
        "gpu_metrics": documented(facts.gpu_metrics),
        "kernel_counters": documented(facts.kernel_counters),
        "bench": documented(found.bench),
        "findings": [_chosen(declared("Finding"), documented(finding)) for finding in found.findings],
        # Last: questions add to what the captures cannot show.
        "limitations": facts.limitations,
        "caveats": documented(facts.caveats()),
    }


def dumps(facts: RunFacts, found: Conclusion) -> str:
    """The document as JSON text; infinite and undefined numbers are null."""
    return as_text(document(facts, found), indent=1)


def _chosen(row: Row, found: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a row."""
    return {name: found[name] for name in row.columns}


def _ranks(facts: RunFacts) -> list[dict[str, Any]]:
    breakdowns = _by_capture(facts.breakdown, declared("Device"))
    # A list of objects is the fact of its name.
    lists = {
        name: _by_capture(getattr(facts, "kernels_by_rank" if name == "kernels" else name), column.kind.row)
        for name, column in declared("RankAnswer").columns.items()
        if column.kind.row is not None and "items" in column.kind.json
    }
    return [
        {
            "rank": info.rank,
            "source": info.source,
            "files": info.files,
            "coordinates": info.coordinates,
            "judged": info.judged,
            "lost": documented(info.lost),
            "device": breakdowns[info.rank, info.source][0],
            **{name: rows[info.rank, info.source] for name, rows in lists.items()},
        }
        for info in facts.every_info
    ]


def _by_capture(table: pa.Table, row: Row) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """Rows of each rank and source, without these two columns."""
    found: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for each in documented(table.select(["rank", "source", *row.schema().names])):
        found[each.pop("rank"), each.pop("source")].append(each)
    return found


def _verdict(facts: RunFacts, found: Conclusion) -> dict[str, Any]:
    said, first, unprofiled = verdict(facts, found), found.first, found.unprofiled
    saving_ns = None if first is None else first.recoverable_ns_per_iteration
    return {
        "outcome": found.outcome.value,
        "headline": said.headline,
        "sentences": said.sentences,
        "first": said.first,
        "notes": said.caveats,
        "finding": None if first is None else first.id,
        "iteration_ns": found.typical_ns,
        "iterations": found.fewest_iterations,
        "recoverable_ns_per_iteration": saving_ns,
        "at_most_ns_per_iteration": None if first is None else first.at_most_ns_per_iteration,
        "recoverable_share": found.share(saving_ns),
        "total_recoverable_ns_per_iteration": found.total_saving_ns,
        "total_recoverable_share": found.share(found.total_saving_ns),
        "confidence": None if first is None else first.confidence.value,
        "confidence_reason": None if first is None else first.confidence_reason,
        "profiler_ns": found.profiler_ns,
        "estimated_profiler_ns": None if unprofiled is None else unprofiled.estimated_cost_ns,
        "unprofiled_ns": None if unprofiled is None else unprofiled.iteration_ns,
        "unprofiled_source": None if unprofiled is None else unprofiled.source,
    }


def _budget(facts: RunFacts, found: Conclusion) -> dict[str, Any]:
    spent = budget(found.on_devices)
    return {
        "source": facts.source,
        "iteration_ns": spent.iteration_ns,
        "waiting_known": spent.waiting_known,
        "parts": [
            _part(part.column, part.time_ns, part.share) | {"low_share": part.low, "high_share": part.high}
            for part in spent.parts
        ],
        "ranks": [_rank_budget(row) for row in found.on_devices],
    }


def _rank_budget(row: dict[str, Any]) -> dict[str, Any]:
    """A row of `RunFacts.attribution`."""
    whole_ns = row["duration_ns"]
    return {
        "rank": row["rank"],
        "iteration_ns": whole_ns,
        "iterations": row["iterations"],
        "waiting_known": row["waiting_known"],
        "parts": [_part(name, row[name], row[name] / whole_ns if whole_ns else 0.0) for name in BY_CAUSE],
    }


def _part(column: str, time_ns: float, share: float) -> dict[str, Any]:
    return {"cause": column.removesuffix("_ns"), "name": PARTS[column][0], "time_ns": time_ns, "share": share}


def _collectives(facts: RunFacts) -> list[dict[str, Any]]:
    waits: dict[tuple[Any, ...], dict[str, float]] = defaultdict(dict)
    for row in documented(facts.communication_by_rank):
        if row["wait_us"] is not None:
            waits[tuple(row[name] for name in _KIND)][str(row["rank"])] = row["wait_us"]
    return [
        _chosen(
            declared("Collective"),
            row | {"ranks": _members(row), "size": row["group_size"], "wait_us": waits[tuple(row[name] for name in _KIND)]},
        )
        for row in documented(facts.communication)
    ]


def _members(row: Mapping[str, Any]) -> list[int] | None:
    return None if row["group_ranks"] is None else json.loads(row["group_ranks"])


def as_text(value: Any, **layout: Any) -> str:
    """JSON of plain data; infinite and undefined numbers become null. `layout` is that of `json.dumps`."""
    try:
        return json.dumps(value, allow_nan=False, **layout)
    except ValueError:  # rare, and a copy of a page's data takes 4 ms a rank
        return json.dumps(finite(value), allow_nan=False, **layout)


def finite(value: Any) -> Any:
    """Plain data that JSON can hold: infinite and undefined numbers become None."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
