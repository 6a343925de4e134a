"""The published JSON Schemas, and what is wrong with a document."""

import functools
import json
from typing import Any

from jsonschema import Draft202012Validator

from bridge_profiling.report.documents import schema_text


@functools.cache
def published(command: str) -> dict[str, Any]:
    """The schema of what a command prints."""
    return json.loads(schema_text(command))


def strict(node: Any) -> Any:
    """A schema that refuses keys it does not describe."""
    if isinstance(node, list):
        return [strict(each) for each in node]
    if not isinstance(node, dict):
        return node
    found = {key: strict(value) for key, value in node.items()}
    return found | {"additionalProperties": False} if isinstance(node.get("properties"), dict) else found


def problems(command: str, document: Any) -> list[str]:
    """What does not fit the command's schema, undocumented keys included."""
    validator = Draft202012Validator(strict(published(command)))
    return [f"{error.json_path}: {error.message[:300]}" for error in validator.iter_errors(document)]
