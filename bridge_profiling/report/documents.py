"""The documents that commands print with --json: `run_document.toml` and `documents.toml` declare them. Their JSON Schemas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from bridge_profiling.compare.bench import ComparedCommunication, ComparedCopies
from bridge_profiling.facts import columns
from bridge_profiling.facts.parts import BY_CAUSE
from bridge_profiling.facts.types import Column, Kind, Row, changes, choice, many, mapping, one
from bridge_profiling.findings import Confidence
from bridge_profiling.findings.scorecard import Check
from bridge_profiling.report.verdict import Outcome
from bridge_profiling.report.words import resource

#: The documents of each command: one of these objects.
DOCUMENTS = {
    "analyze": ("RunDocument",),
    "compare": ("ComparisonDocument", "SeriesDocument"),
    "memory": ("MemoryDocument",),
    "bench": ("CollectivesResult", "CopiesResult", "DataLoaderResult", "StepResult"),
}

#: Types and rows that are declared in Python; `facts.columns` knows all types of `facts.types`.
_KNOWN: dict[str, Any] = {
    **vars(columns),
    **{row.__name__: row for row in (Check, ComparedCommunication, ComparedCopies)},
    "Cause": choice(*(each.removesuffix("_us") for each in BY_CAUSE)),
    "Confidence": choice(*Confidence),
    "Outcome": choice(*Outcome),
    "Profiler": columns.PROFILER,
    "Pair": Kind({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}),
    "Object": Kind({"type": "object"}),
}

#: Regular expressions of keys: of any, of global ranks, and of parts of an iteration.
_KEYS = {"name": None, "rank": "^[0-9]+$", "part": "_us$"}


@cache
def row(name: str) -> type[Row]:
    """The objects of a name, with their keys as columns."""
    if name in _KNOWN:
        return _KNOWN[name]
    declared = next(found[name] for file in ("run_document", "documents") if name in (found := resource(file)))
    keys: dict[str, Column] = {}
    for key, value in declared.items():
        if isinstance(value, list):
            keys[key] = _column(value)
        elif isinstance(value, dict):
            each = {part: pair for name, pair in value.items() for part in (BY_CAUSE if name == "{part}" else [name])}
            keys |= changes(**{name: _column(pair) for name, pair in each.items()})
        elif key != "about":
            keys |= row(value).columns
    return type(name, (Row,), {"__doc__": declared["about"], "keys": keys})


def _column(pair: Sequence[str]) -> Column:
    return Column(pair[1], _kind(pair[0]))


def _kind(text: str) -> Kind:
    if text.endswith(", optional"):
        return replace(_kind(text.removesuffix(", optional")), optional=True)
    if text.endswith(" or null"):
        return _kind(text.removesuffix(" or null")).or_null
    if text.startswith("one of "):
        values = text.removeprefix("one of ").split(", ")
        return choice(*(int(value) if value.isdecimal() else value for value in values))
    if text.startswith("list of "):
        return many(_kind(text.removeprefix("list of ")))
    of, by, keys = text.rpartition(" by ")
    if by:
        return mapping(_kind(of), _KEYS[keys])
    known = _KNOWN.get(text)
    return known if isinstance(known, Kind) else one(row(text))


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


def _define(row: type[Row], definitions: dict[str, Any]) -> None:
    """Add the schemas of such objects, and of those inside."""
    if row.__name__ not in definitions:
        definitions[row.__name__] = {
            "description": row.__doc__,
            "type": "object",
            "properties": {name: {"description": column.about, **column.kind.json} for name, column in row.columns.items()},
            "required": [name for name, column in row.columns.items() if not column.kind.optional],
        }
        for column in row.columns.values():
            if column.kind.row is not None:
                _define(column.kind.row, definitions)
