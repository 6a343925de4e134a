"""Write the JSON Schemas of the documents that commands print with --json, and the tables of docs/reference/json.md.

  python tools/json_schemas.py

Both are made from the types in bridge_profiling/report/schemas. tests/report/test_schemas.py checks that they are current.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, is_typeddict

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bridge_profiling.report.schemas import bench, comparison, memory, run  # noqa: E402

FOLDER = ROOT / "bridge_profiling" / "report" / "schemas"
PAGE = ROOT / "docs" / "reference" / "json.md"

#: The types of each document: it is one of them.
DOCUMENTS: dict[str, tuple[type, ...]] = {
    "analyze": (run.RunDocument,),
    "compare": (comparison.ComparisonDocument, comparison.SeriesDocument),
    "memory": (memory.MemoryDocument,),
    "bench": (bench.CollectivesResult, bench.CopiesResult, bench.DataLoaderResult, bench.StepResult),
}

TITLES = {
    "analyze": "bridge-profiling analyze --json, and report --json",
    "compare": "bridge-profiling compare --json",
    "memory": "bridge-profiling memory --json",
    "bench": "bridge-profiling bench --json",
}

#: Units as the page shows them.
_UNITS = {"us": "µs", "ns": "ns", "bytes": "bytes", "1e9 bytes/s": "10⁹ bytes/s", "share": "share of 1"}

_HERE = "#/$defs/"

#: The type of each object by its name in `$defs`.
_TYPES = {
    name: kind for module in (run, comparison, memory, bench) for name, kind in vars(module).items() if is_typeddict(kind)
}


def schema(name: str) -> dict[str, Any]:
    """The JSON Schema of a document, draft 2020-12."""
    types = DOCUMENTS[name]
    references, definitions = msgspec.json.schema_components(types, ref_template=f"{_HERE}{{name}}")
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:bridge-profiling:schema:{name}:1",
        "title": TITLES[name],
    }
    ordered = {each: _tidy(_in_order(each, definitions[each])) for each in definitions}
    if len(types) > 1:
        return {**head, "oneOf": list(references), "$defs": ordered}
    return {**head, **{key: value for key, value in ordered.pop(types[0].__name__).items() if key != "title"}, "$defs": ordered}


def text(name: str) -> str:
    """The file of a document's schema."""
    return json.dumps(schema(name), indent=1, ensure_ascii=False) + "\n"


def _in_order(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """An object's schema with its keys in the order of its type: msgspec sorts them."""
    keys = [key for key in _TYPES[name].__annotations__ if key in found["properties"]]
    required = [key for key in keys if key in found["required"]]
    return found | {"properties": {key: found["properties"][key] for key in keys}, "required": required}


def _tidy(node: Any) -> Any:
    """With `{"type": ["number", "null"]}` for what msgspec writes as a choice of the two."""
    if isinstance(node, list):
        return [_tidy(each) for each in node]
    if not isinstance(node, dict):
        return node
    node = {key: _tidy(value) for key, value in node.items()}
    match node.get("anyOf"):
        case [{"type": str() as kind} as one, {"type": "null"}]:
            rest = {key: value for key, value in node.items() if key != "anyOf"}
            return rest | one | {"type": [kind, "null"]}
    return node


def keys(name: str) -> Iterator[tuple[str, str, str, str]]:
    """Every key of a document: its path, its type, its unit and its description."""
    found = schema(name)
    for each in found.get("oneOf", [found]):
        yield from _keys(each, "", found["$defs"])


def _keys(node: dict[str, Any], path: str, definitions: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for key, value in _resolved(node, definitions).get("properties", {}).items():
        about = value["description"]
        if about.endswith((": after", ": the change")):
            continue  # in the row of the same amount before
        if about.endswith(": before"):
            about = f"{about.removesuffix(': before')} before; and after, and the change: `other_…`, `change_…`"
        inner, below = _inner(value, definitions)
        yield f"{path}{key}", _kind(value, definitions), _UNITS.get(inner.get("x-unit", ""), ""), about
        yield from _keys(inner, f"{path}{key}{below}.", definitions)


def _resolved(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema itself instead of a reference to it, or of a choice between it and null."""
    if "anyOf" in node:
        node = node["anyOf"][0]
    return definitions[node["$ref"].removeprefix(_HERE)] if "$ref" in node else node


def _inner(node: dict[str, Any], definitions: dict[str, Any], path: str = "") -> tuple[dict[str, Any], str]:
    """What lists and maps hold in the end, and how a path names that."""
    node = _resolved(node, definitions)
    if node.get("items"):
        return _inner(node["items"], definitions, f"{path}[]")
    if node.get("additionalProperties"):
        return _inner(node["additionalProperties"], definitions, f"{path}.*")
    return node, path


def _kind(node: dict[str, Any], definitions: dict[str, Any]) -> str:
    found = _resolved(node, definitions)
    kinds = found.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    null = ["null"] if "anyOf" in node or "null" in kinds or None in found.get("enum", []) else []
    if "enum" in found:
        kinds = [", ".join(f"`{each}`" for each in found["enum"] if each is not None)]
    elif found.get("items"):
        kinds = [f"list of {_several(found['items'], definitions)}"]
    elif "prefixItems" in found:
        kinds = [f"list of {len(found['prefixItems'])} {_several(found['prefixItems'][0], definitions)}"]
    elif found.get("additionalProperties"):
        kinds = [f"map to {_several(found['additionalProperties'], definitions)}"]
    return " or ".join([*(kind for kind in kinds if kind != "null"), *null]) or "any"


def _several(node: dict[str, Any], definitions: dict[str, Any]) -> str:
    kind = _kind(node, definitions)
    return f"{kind}s" if kind.isalpha() else kind


def _table(name: str) -> str:
    lines = ["| key | type | unit | |", "|---|---|---|---|"]
    rows = dict.fromkeys(keys(name))  # results of benchmarks share keys
    return "\n".join([*lines, *(f"| `{path}` | {kind} | {unit} | {about} |" for path, kind, unit, about in rows)])


def page() -> str:
    """The page with the tables of all documents."""
    found = PAGE.read_text(encoding="utf-8")
    for name in DOCUMENTS:
        begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        before, rest = found.split(begin)
        found = before + begin + _table(name) + end + f"\n{rest}".split(end)[1]
    return found


if __name__ == "__main__":
    for document in DOCUMENTS:
        (FOLDER / f"{document}.schema.json").write_text(text(document), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
