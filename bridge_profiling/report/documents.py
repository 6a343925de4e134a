"""The documents that commands print with --json: `run_document.toml` and `documents.toml` declare them. Their JSON Schemas."""

from __future__ import annotations

import json
from typing import Any

from bridge_profiling.facts.parts import BY_CAUSE
from bridge_profiling.facts.types import COLUMNS, Declarations, Row, choice, one
from bridge_profiling.findings import Confidence
from bridge_profiling.report.verdict import Outcome

#: The documents of each command: one of these objects.
DOCUMENTS = {
    "analyze": ("RunDocument",),
    "compare": ("ComparisonDocument", "SeriesDocument"),
    "memory": ("MemoryDocument",),
    "bench": ("CollectivesResult", "CopiesResult", "DataLoaderResult", "StepResult"),
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
    parts=[each.replace("_ns", "_us") for each in BY_CAUSE],
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
