"""Write the tables of docs/reference/json.md: the keys of the documents that commands print with --json.

  python tools/json_schemas.py

They are made from the rows that the documents declare. tests/report/test_schemas.py checks that they are current.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bridge_profiling.facts.types import Row  # noqa: E402
from bridge_profiling.report.documents import DOCUMENTS, row  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "json.md"

#: Units as the page shows them.
_UNITS = {"us": "µs", "ns": "ns", "bytes": "bytes", "1e9 bytes/s": "10⁹ bytes/s", "share": "share of 1"}


def keys(name: str) -> Iterator[tuple[str, str, str, str]]:
    """Every key of a document: its path, its type, its unit and its description."""
    for each in DOCUMENTS[name]:
        yield from _keys(row(each), "")


def _keys(row: Row, path: str) -> Iterator[tuple[str, str, str, str]]:
    for key, column in row.columns.items():
        about = column.about
        if about.endswith((": after", ": the change")):
            continue  # in the row of the same amount before
        if about.endswith(": before"):
            after = "after" if key.startswith("before_") else "other"
            about = f"{about.removesuffix(': before')} before; and after, and the change: `{after}_…`, `change_…`"
        kind, unit, below = _kind(column.kind.json)
        yield f"{path}{key}", kind, _UNITS.get(unit, ""), about
        if column.kind.row is not None:
            yield from _keys(column.kind.row, f"{path}{key}{below}.")


def _kind(schema: dict[str, Any]) -> tuple[str, str, str]:
    """The type of a value in words, the unit of it or of what it holds, and how a path names what it holds."""
    if "anyOf" in schema:
        kind, unit, below = _kind(schema["anyOf"][0])
        return f"{kind} or null", unit, below
    kinds = schema.get("type", "object")
    null = " or null" if "null" in kinds or None in schema.get("enum", ()) else ""
    if "enum" in schema:
        return ", ".join(sorted(f"`{each}`" for each in schema["enum"] if each is not None)) + null, "", ""
    for inside, word, of in (("items", "list of", "[]"), ("additionalProperties", "map to", ".*")):
        if inside in schema:
            kind, unit, below = _kind(schema[inside])
            several = f"{kind}s" if kind.isalpha() else kind
            count = f" {schema['maxItems']}" if "maxItems" in schema else ""
            return f"{word}{count} {several}{null}", unit, f"{of}{below}"
    return (kinds if isinstance(kinds, str) else kinds[0]) + null, schema.get("x-unit", ""), ""


def page() -> str:
    """The page with the tables of all documents."""
    found = PAGE.read_text(encoding="utf-8")
    for name in DOCUMENTS:
        begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        before, rest = found.split(begin)
        rows = dict.fromkeys(keys(name))  # results of benchmarks share keys
        lines = [f"| `{path}` | {kind} | {unit} | {about} |" for path, kind, unit, about in rows]
        found = before + begin + "\n".join(["| key | type | unit | |", "|---|---|---|---|", *lines]) + end + rest.split(end)[1]
    return found


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
