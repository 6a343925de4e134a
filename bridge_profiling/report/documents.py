"""The documents that commands print with --json, and their JSON Schemas: `run_document.toml` and `documents.toml` declare them.

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
from bridge_profiling.facts.types import COLUMNS, Declarations, Row, choice, document_key, documented, one
from bridge_profiling.findings import Confidence
from bridge_profiling.report import measurements
from bridge_profiling.report.figures import PARTS
from bridge_profiling.report.rows import budget
from bridge_profiling.report.verdict import Conclusion, Outcome, verdict

#: The documents of each command: one of these objects.
DOCUMENTS = {
    "analyze": ("RunDocument",),
    "compare": ("ComparisonDocument", "SeriesDocument"),
    "memory": ("MemoryDocument",),
    "bench": ("CollectivesResult", "DataLoaderResult"),
}

#: The objects of a name, with their keys as columns.
row = Declarations(
    (__package__, "run_document.toml"),
    COLUMNS,
    (__package__, "documents.toml"),
    known={
        "Cause": choice(*(each.removesuffix("_ns") for each in BY_CAUSE)),
        "Confidence": choice(*Confidence),
        "Outcome": choice(*Outcome),
    },
    parts=[*map(document_key, BY_CAUSE)],
)


def schema_text(command: str) -> str:
    """The JSON Schema (draft 2020-12) of the document that a command prints with --json, as text.

    Args:
        command: its name: `analyze`, `report`, `compare`, `memory` or `bench`.
    """
    name = "analyze" if command == "report" else command
    rows, definitions = [row(each) for each in DOCUMENTS[name]], dict[str, Any]()
    for each in rows:
        _define(each, definitions)
    found = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:bridge-profiling:schema:{name}:1",
        "title": f"bridge-profiling {name} --json",
        **(one(rows[0]).json if len(rows) == 1 else {"oneOf": [one(each).json for each in rows]}),
        "$defs": definitions,
    }
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def _define(row: Row, definitions: dict[str, Any]) -> None:
    """Add the schemas of such objects, and of those inside."""
    if row.name not in definitions:
        definitions[row.name] = {
            "description": row.about,
            "type": "object",
            "properties": {name: {"description": column.about, **column.kind.json} for name, column in row.columns.items()},
            "required": [name for name, column in row.columns.items() if not column.kind.optional],
        }
        for column in row.columns.values():
            if column.kind.row is not None:
                _define(column.kind.row, definitions)


def document(facts: RunFacts, found: Conclusion) -> dict[str, Any]:
    """Every answer about a run as plain data: what is not made here is the fact of its name."""
    measured = row("Measured").columns
    sizes = [each | {"ranks": _members(each)} for each in documented(with_alone(facts))]
    made = {
        "schema_version": 1,
        "verdict": _verdict(facts, found),
        "budget": documented(_budget(facts, found)),
        "scorecard": found.scorecard,
        "measured": {name: documented(getattr(measurements, name)(facts.manifests)) for name in measured},
        "ranks": _ranks(facts),
        "collectives": _collectives(facts),
        "collectives_by_size": [_chosen("SizedCollective", each) for each in sizes],
        "bench": documented(found.bench),
        "findings": [_chosen("Finding", documented(finding)) for finding in found.findings],
        "caveats": documented(facts.caveats()),
    }
    answers = {name: made[name] if name in made else getattr(facts, name) for name in row("RunDocument").columns}
    return {name: documented(each) if isinstance(each, pa.Table) else each for name, each in answers.items()}


def dumps(facts: RunFacts, found: Conclusion) -> str:
    """The document as JSON text; infinite and undefined numbers are null."""
    return as_text(document(facts, found), indent=1)


def _chosen(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """The declared keys of an object."""
    return {key: found[key] for key in row(name).columns}


def _ranks(facts: RunFacts) -> list[dict[str, Any]]:
    columns, facts_of = row("RankAnswer").columns, {"device": "breakdown", "kernels": "kernels_by_rank"}
    of_info = ("rank", "source", "files", "coordinates", "judged")
    lists = {
        name: _by_capture(getattr(facts, facts_of.get(name, name)), column.kind.row)
        for name, column in columns.items()
        if column.kind.row is not None and name != "lost"
    }
    found = []
    for info in facts.every_info:
        mine = {name: rows[info.rank, info.source] for name, rows in lists.items()}
        known = {name: getattr(info, name) for name in of_info} | {"lost": documented(info.lost)}
        found.append(known | mine | {"device": mine["device"][0]})
    return found


def _by_capture(table: pa.Table, declared: Row) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """Rows of each rank and source, without these two columns."""
    found: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for each in documented(table.select(["rank", "source", *declared.schema().names])):
        found[each.pop("rank"), each.pop("source")].append(each)
    return found


def _verdict(facts: RunFacts, found: Conclusion) -> dict[str, Any]:
    said, first, unprofiled = verdict(facts, found), found.first, found.unprofiled
    # Without a finding, or the iteration without the profiler, what comes from it is null.
    known = ({} if first is None else {**vars(first), "finding": first.id}) | {
        "outcome": found.outcome.value,
        "headline": said.headline,
        "sentences": said.sentences,
        "first": said.first,
        "notes": said.caveats,
        "iteration_ns": found.typical_ns,
        "iterations": found.fewest_iterations,
        "recoverable_share": found.share(None if first is None else first.recoverable_ns_per_iteration),
        "total_recoverable_ns_per_iteration": found.total_saving_ns,
        "total_recoverable_share": found.share(found.total_saving_ns),
        "profiler_ns": found.profiler_ns,
    }
    if unprofiled is not None:
        known |= {"estimated_profiler_ns": unprofiled.estimated_cost_ns, "unprofiled_ns": unprofiled.iteration_ns}
        known["unprofiled_source"] = unprofiled.source
    written = documented(known)
    return {name: written.get(name) for name in row("Verdict").columns}


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
        "ranks": [_rank_budget(each) for each in found.on_devices],
    }


def _rank_budget(found: dict[str, Any]) -> dict[str, Any]:
    """A row of `RunFacts.attribution`."""
    whole_ns = found["duration_ns"]
    return {
        "rank": found["rank"],
        "iteration_ns": whole_ns,
        "iterations": found["iterations"],
        "waiting_known": found["waiting_known"],
        "parts": [_part(name, found[name], found[name] / whole_ns if whole_ns else 0.0) for name in BY_CAUSE],
    }


def _part(column: str, time_ns: float, share: float) -> dict[str, Any]:
    return {"cause": column.removesuffix("_ns"), "name": PARTS[column][0], "time_ns": time_ns, "share": share}


def _collectives(facts: RunFacts) -> list[dict[str, Any]]:
    waits: dict[tuple[Any, ...], dict[str, float]] = defaultdict(dict)
    for each in documented(facts.communication_by_rank):
        if each["wait_us"] is not None:
            waits[_kind(each)][str(each["rank"])] = each["wait_us"]
    found = documented(facts.communication)
    known = [{"ranks": _members(each), "size": each["group_size"], "wait_us": waits[_kind(each)]} for each in found]
    return [_chosen("Collective", each | more) for each, more in zip(found, known, strict=True)]


def _kind(found: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(found[name] for name in ("operation", "group", "group_name", "group_ranks"))


def _members(found: Mapping[str, Any]) -> list[int] | None:
    return None if found["group_ranks"] is None else json.loads(found["group_ranks"])


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
