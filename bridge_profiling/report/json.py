"""The document that `bridge-profiling analyze --json` and `report --json` print; `schemas.run` has its keys.

Keys may be added; within a `schema_version` none changes its meaning. Times are microseconds, sizes bytes, bandwidths
10⁹ bytes per second.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from bridge_profiling.facts.parts import BY_CAUSE
from bridge_profiling.report import measurements
from bridge_profiling.report.figures import PARTS
from bridge_profiling.report.schemas import run as schema
from bridge_profiling.report.verdict import Summary, outcome, summarize, verdict

if TYPE_CHECKING:
    from bridge_profiling.answers import Answers
    from bridge_profiling.findings import Finding, Occurrence, Thresholds

#: Columns that identify an operation in a group.
_KIND = ("operation", "group", "group_name", "group_ranks")


def document(run: Answers, thresholds: Thresholds | None = None) -> schema.RunDocument:
    """Every answer about a run as plain data; None stands for the default thresholds."""
    # First: one pass over the captures for the findings then reads everything.
    summary = summarize(run, thresholds)
    breakdowns = _by_capture(run.breakdown())
    iterations = _by_capture(run.iterations(), list(schema.Iteration.__annotations__))
    kernels = _by_capture(run.kernels(), list(schema.Kernel.__annotations__))
    groups = _by_capture(run.kernel_groups(), list(schema.KernelGroup.__annotations__))
    products = _by_capture(run.matrix_products(), list(schema.MatrixProduct.__annotations__))
    hosts = _by_capture(run.host_iterations(), list(schema.HostIteration.__annotations__))
    phases = _by_capture(run.phases(), list(schema.Phase.__annotations__))
    operators = _by_capture(run.operators(), list(schema.Operator.__annotations__))
    system_calls = _by_capture(run.system_calls(), list(schema.SystemCall.__annotations__))
    cuda_memory = _by_capture(run.cuda_memory(), list(schema.CudaMemory.__annotations__))
    ranks: list[Any] = []
    for info in run.infos:
        capture = (info.rank, info.source)
        places = info.coordinates
        ranks.append(
            {
                "rank": info.rank,
                "source": info.source,
                "files": info.files,
                "coordinates": None if places is None else {name: list(place) for name, place in places.items()},
                "judged": info.judged,
                "lost": asdict(info.lost),
                "device": breakdowns[capture][0],
                "iterations": iterations[capture],
                "host_iterations": hosts[capture],
                "phases": phases[capture],
                "operators": operators[capture],
                "matrix_products": products[capture],
                "kernels": kernels[capture],
                "kernel_groups": groups[capture],
                "system_calls": system_calls[capture],
                "cuda_memory": cuda_memory[capture],
            }
        )
    collectives, memory, pipeline = _collectives(run), run.memory().to_pylist(), run.pipeline().to_pylist()
    sizes: Any = _by_size(run)
    measured: Any = {
        "training": measurements.training_rows(run.manifests),
        "phase_memory": measurements.phase_memory_rows(run.manifests),
        "wall_clock": measurements.wall_clock_rows(run.manifests),
        "flops_profile": measurements.flops_rows(run.manifests),
    }
    counters: Any = run.kernel_counters().to_pylist()
    waits: Any = run.pipeline_waits().to_pylist()
    scorecard: Any = summary.scorecard
    bench: Any = None if summary.bench is None else summary.bench.as_plain_data()
    caveats: list[Any] = [asdict(caveat) for caveat in run.caveats()]
    return {
        "schema_version": 1,
        "verdict": _verdict(summary),
        "budget": _budget(summary),
        "scorecard": scorecard,
        "measured": measured,
        "ranks": ranks,
        "collectives": collectives,
        "collectives_by_size": sizes,
        "memory": memory,
        "pipeline": pipeline,
        "pipeline_waits": waits,
        "gpu_metrics": run.gpu_metrics().to_pylist(),
        "kernel_counters": counters,
        "bench": bench,
        "findings": [as_plain_data(finding) for finding in summary.findings],
        # Last: questions add to what the captures cannot show.
        "limitations": run.limitations,
        "caveats": caveats,
    }


def dumps(run: Answers, thresholds: Thresholds | None = None) -> str:
    """The document as JSON text; infinite and undefined numbers are null."""
    return as_text(document(run, thresholds), indent=1)


def as_plain_data(finding: Finding) -> schema.Finding:
    """A finding as the document holds it."""
    events: list[Any] = [asdict(event) for event in finding.events]
    return {
        "id": finding.id,
        "title": finding.title,
        "ranks": finding.ranks,
        "evidence": dict(finding.evidence),
        "recoverable_us_per_iteration": finding.recoverable_us_per_iteration,
        "at_most_us_per_iteration": finding.at_most_us_per_iteration,
        "confidence": finding.confidence.value,
        "confidence_reason": finding.confidence_reason,
        "action": finding.action,
        "events": events,
        "severe": finding.severe,
        "occurrence": None if finding.occurrence is None else _occurrence(finding.occurrence),
    }


def _occurrence(occurrence: Occurrence) -> schema.Occurrence:
    return {"iterations": list(occurrence.iterations), "of": occurrence.of, "each_us": occurrence.each_us}


def _verdict(summary: Summary) -> schema.Verdict:
    said = verdict(summary)
    first = summary.first
    unprofiled = summary.unprofiled
    return {
        "outcome": outcome(summary).value,
        "headline": said.headline,
        "sentences": list(said.sentences),
        "first": list(said.first),
        "notes": list(said.caveats),
        "finding": None if first is None else first.id,
        "iteration_us": summary.typical_us,
        "iterations": summary.fewest_iterations,
        "recoverable_us_per_iteration": summary.saving_us,
        "at_most_us_per_iteration": summary.at_most_us,
        "recoverable_share": summary.share(summary.saving_us),
        "total_recoverable_us_per_iteration": summary.total_saving_us,
        "total_recoverable_share": summary.share(summary.total_saving_us),
        "confidence": None if first is None else first.confidence.value,
        "confidence_reason": None if first is None else first.confidence_reason,
        "profiler_us": summary.profiler_us,
        "estimated_profiler_us": None if unprofiled is None else unprofiled.estimated_cost_us,
        "unprofiled_us": None if unprofiled is None else unprofiled.iteration_us,
        "unprofiled_source": None if unprofiled is None else unprofiled.source,
    }


def _budget(summary: Summary) -> schema.Budget:
    found = summary.budget
    source: Any = summary.source
    parts: list[Any] = [
        {
            "cause": part.column.removesuffix("_us"),
            "name": PARTS[part.column][0],
            "time_us": part.time_us,
            "share": part.share,
            "low_share": part.low,
            "high_share": part.high,
        }
        for part in found.parts
    ]
    return {
        "source": source,
        "iteration_us": found.iteration_us,
        "waiting_known": found.waiting_known,
        "parts": parts,
        "ranks": [_rank_budget(row) for row in summary.attribution],
    }


def _rank_budget(row: dict[str, Any]) -> schema.RankBudget:
    """A row of `Run.attribution`."""
    parts: list[Any] = [
        {
            "cause": column.removesuffix("_us"),
            "name": PARTS[column][0],
            "time_us": row[column],
            "share": row[column] / row["duration_us"] if row["duration_us"] else 0.0,
        }
        for column in BY_CAUSE
    ]
    return {
        "rank": row["rank"],
        "iteration_us": row["duration_us"],
        "iterations": row["iterations"],
        "waiting_known": row["waiting_known"],
        "parts": parts,
    }


def _by_capture(table: pa.Table, columns: Sequence[str] | None = None) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """Rows of each rank and source, without these two columns; `columns`: the others, or None for all."""
    found: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    if columns is not None:
        table = table.select(["rank", "source", *columns])
    for row in table.to_pylist():
        found[row.pop("rank"), row.pop("source")].append(row)
    return found


def _collectives(run: Answers) -> list[schema.Collective]:
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
            "dimension": row["dimension"],
        }
        for row in run.communication().to_pylist()
    ]


def _by_size(run: Answers) -> list[dict[str, Any]]:
    columns = [name for name in schema.SizedCollective.__annotations__ if name != "ranks"]
    return [
        {name: row[name] for name in columns}
        | {"ranks": None if row["group_ranks"] is None else json.loads(row["group_ranks"])}
        for row in run.communication(by_size=True).to_pylist()
    ]


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
