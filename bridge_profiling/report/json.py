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
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from bridge_profiling.facts.parts import BY_CAUSE
from bridge_profiling.facts.types import Row
from bridge_profiling.report import measurements
from bridge_profiling.report.documents import row as declared
from bridge_profiling.report.figures import PARTS
from bridge_profiling.report.rows import budget
from bridge_profiling.report.verdict import Conclusion, conclude, verdict

if TYPE_CHECKING:
    from bridge_profiling.answers import Answers
    from bridge_profiling.findings import Thresholds

#: Columns that identify an operation in a group.
_KIND = ("operation", "group", "group_name", "group_ranks")


def document(run: Answers, thresholds: Thresholds | None = None) -> dict[str, Any]:
    """Every answer about a run as plain data; None stands for the default thresholds."""
    # First: one pass over the captures for the findings then reads everything.
    found = conclude(run, thresholds)
    return {
        "schema_version": 1,
        "verdict": _verdict(run, found),
        "budget": _budget(run, found),
        "scorecard": run.scorecard().to_pylist(),
        "measured": {
            "training": measurements.training_rows(run.manifests),
            "phase_memory": measurements.phase_memory_rows(run.manifests),
            "wall_clock": measurements.wall_clock_rows(run.manifests),
            "flops_profile": measurements.flops_rows(run.manifests),
        },
        "ranks": _ranks(run),
        "collectives": _collectives(run),
        "collectives_by_size": [
            _chosen(declared("SizedCollective"), row | {"ranks": _members(row)})
            for row in run.communication(by_size=True).to_pylist()
        ],
        "memory": run.memory().to_pylist(),
        "pipeline": run.pipeline().to_pylist(),
        "pipeline_waits": run.pipeline_waits().to_pylist(),
        "gpu_metrics": run.gpu_metrics().to_pylist(),
        "kernel_counters": run.kernel_counters().to_pylist(),
        "bench": None if run.against_bench is None else run.against_bench.as_plain_data(),
        "findings": [_chosen(declared("Finding"), asdict(finding)) for finding in found.findings],
        # Last: questions add to what the captures cannot show.
        "limitations": run.limitations,
        "caveats": [asdict(caveat) for caveat in run.caveats()],
    }


def dumps(run: Answers, thresholds: Thresholds | None = None) -> str:
    """The document as JSON text; infinite and undefined numbers are null."""
    return as_text(document(run, thresholds), indent=1)


def _chosen(row: Row, found: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a row."""
    return {name: found[name] for name in row.columns}


def _ranks(run: Answers) -> list[dict[str, Any]]:
    breakdowns = _by_capture(run.breakdown(), declared("Device"))
    # A list of objects is the answer of the question of its name.
    lists = {
        name: _by_capture(getattr(run, name)(), column.kind.row)
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
        for info in run.infos
    ]


def _by_capture(table: pa.Table, row: Row) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """Rows of each rank and source, without these two columns."""
    found: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for each in table.select(["rank", "source", *row.columns]).to_pylist():
        found[each.pop("rank"), each.pop("source")].append(each)
    return found


def _verdict(run: Answers, found: Conclusion) -> dict[str, Any]:
    said, first, unprofiled = verdict(run, found), found.first, found.unprofiled
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


def _budget(run: Answers, found: Conclusion) -> dict[str, Any]:
    spent = budget(found.on_devices)
    return {
        "source": run.main_source,
        "iteration_us": spent.iteration_us,
        "waiting_known": spent.waiting_known,
        "parts": [
            _part(part.column, part.time_us, part.share) | {"low_share": part.low, "high_share": part.high}
            for part in spent.parts
        ],
        "ranks": [_rank_budget(row) for row in found.on_devices],
    }


def _rank_budget(row: dict[str, Any]) -> dict[str, Any]:
    """A row of `Run.attribution`."""
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


def _collectives(run: Answers) -> list[dict[str, Any]]:
    waits: dict[tuple[Any, ...], dict[str, float]] = defaultdict(dict)
    for row in run.communication(by_rank=True).to_pylist():
        if row["wait_us"] is not None:
            waits[tuple(row[name] for name in _KIND)][str(row["rank"])] = row["wait_us"]
    return [
        _chosen(
            declared("Collective"),
            row | {"ranks": _members(row), "size": row["group_size"], "wait_us": waits[tuple(row[name] for name in _KIND)]},
        )
        for row in run.communication().to_pylist()
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
