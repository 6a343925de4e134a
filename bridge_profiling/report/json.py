"""The document that `bridge-profiling analyze --json` and `report --json` print; `run_document.toml` has its keys.

Keys may be added; within a `schema_version` none changes its meaning. Times are microseconds, sizes bytes, bandwidths
10⁹ bytes per second.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from bridge_profiling.compare.bench import with_alone
from bridge_profiling.facts.parts import BY_CAUSE
from bridge_profiling.facts.run import RunFacts
from bridge_profiling.facts.types import Row
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
        "verdict": _verdict(facts, found),
        "budget": _budget(facts, found),
        "scorecard": found.scorecard,
        "measured": {
            "training": measurements.training(facts.manifests),
            "phase_memory": measurements.phase_memory(facts.manifests),
            "wall_clock": measurements.wall_clock(facts.manifests),
            "flops_profile": measurements.flops_profile(facts.manifests),
        },
        "ranks": _ranks(facts),
        "collectives": _collectives(facts),
        "collectives_by_size": [
            _chosen(declared("SizedCollective"), row | {"ranks": _members(row)}) for row in with_alone(facts).to_pylist()
        ],
        "memory": facts.memory.to_pylist(),
        "pipeline": facts.pipeline.to_pylist(),
        "pipeline_waits": facts.pipeline_waits.to_pylist(),
        "gpu_metrics": facts.gpu_metrics.to_pylist(),
        "kernel_counters": facts.kernel_counters.to_pylist(),
        "bench": None if found.bench is None else found.bench.as_plain_data(),
        "findings": [_chosen(declared("Finding"), asdict(finding)) for finding in found.findings],
        # Last: questions add to what the captures cannot show.
        "limitations": facts.limitations,
        "caveats": [asdict(caveat) for caveat in facts.caveats()],
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
            "lost": asdict(info.lost),
            "device": breakdowns[info.rank, info.source][0],
            **{name: rows[info.rank, info.source] for name, rows in lists.items()},
        }
        for info in facts.every_info
    ]


def _by_capture(table: pa.Table, row: Row) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """Rows of each rank and source, without these two columns."""
    found: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for each in table.select(["rank", "source", *row.columns]).to_pylist():
        found[each.pop("rank"), each.pop("source")].append(each)
    return found


def _verdict(facts: RunFacts, found: Conclusion) -> dict[str, Any]:
    said, first, unprofiled = verdict(facts, found), found.first, found.unprofiled
    saving_us = None if first is None else first.recoverable_us_per_iteration
    return {
        "outcome": found.outcome.value,
        "headline": said.headline,
        "sentences": said.sentences,
        "first": said.first,
        "notes": said.caveats,
        "finding": None if first is None else first.id,
        "iteration_us": found.typical_us,
        "iterations": found.fewest_iterations,
        "recoverable_us_per_iteration": saving_us,
        "at_most_us_per_iteration": None if first is None else first.at_most_us_per_iteration,
        "recoverable_share": found.share(saving_us),
        "total_recoverable_us_per_iteration": found.total_saving_us,
        "total_recoverable_share": found.share(found.total_saving_us),
        "confidence": None if first is None else first.confidence.value,
        "confidence_reason": None if first is None else first.confidence_reason,
        "profiler_us": found.profiler_us,
        "estimated_profiler_us": None if unprofiled is None else unprofiled.estimated_cost_us,
        "unprofiled_us": None if unprofiled is None else unprofiled.iteration_us,
        "unprofiled_source": None if unprofiled is None else unprofiled.source,
    }


def _budget(facts: RunFacts, found: Conclusion) -> dict[str, Any]:
    spent = budget(found.on_devices)
    return {
        "source": facts.source,
        "iteration_us": spent.iteration_us,
        "waiting_known": spent.waiting_known,
        "parts": [
            _part(part.column, part.time_us, part.share) | {"low_share": part.low, "high_share": part.high}
            for part in spent.parts
        ],
        "ranks": [_rank_budget(row) for row in found.on_devices],
    }


def _rank_budget(row: dict[str, Any]) -> dict[str, Any]:
    """A row of `RunFacts.attribution`."""
    whole_us = row["duration_us"]
    return {
        "rank": row["rank"],
        "iteration_us": whole_us,
        "iterations": row["iterations"],
        "waiting_known": row["waiting_known"],
        "parts": [_part(name, row[name], row[name] / whole_us if whole_us else 0.0) for name in BY_CAUSE],
    }


def _part(column: str, time_us: float, share: float) -> dict[str, Any]:
    return {"cause": column.removesuffix("_us"), "name": PARTS[column][0], "time_us": time_us, "share": share}


def _collectives(facts: RunFacts) -> list[dict[str, Any]]:
    waits: dict[tuple[Any, ...], dict[str, float]] = defaultdict(dict)
    for row in facts.communication_by_rank.to_pylist():
        if row["wait_us"] is not None:
            waits[tuple(row[name] for name in _KIND)][str(row["rank"])] = row["wait_us"]
    return [
        _chosen(
            declared("Collective"),
            row | {"ranks": _members(row), "size": row["group_size"], "wait_us": waits[tuple(row[name] for name in _KIND)]},
        )
        for row in facts.communication.to_pylist()
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
