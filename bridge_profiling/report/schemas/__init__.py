"""The documents that commands print with --json: their types, and the JSON Schemas that are generated from them.

A key is declared once, in the type of its object. `tools/json_schemas.py` writes the schemas here, and the tables of
docs/reference/json.md. Printing a schema needs neither msgspec nor pyarrow.
"""

from __future__ import annotations

from importlib.resources import files

#: Commands that print the document of another name.
_SAME = {"report": "analyze"}


def schema_text(command: str) -> str:
    """The JSON Schema of the document that a command prints with --json.

    Args:
        command: its name: `analyze`, `report`, `compare`, `memory` or `bench`.
    """
    return files(__package__).joinpath(f"{_SAME.get(command, command)}.schema.json").read_text(encoding="utf-8")
