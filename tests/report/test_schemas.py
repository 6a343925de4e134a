"""The published JSON Schemas: current, complete, and of use to someone who checks a document with them."""

from __future__ import annotations

import copy
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from bridge_profiling.run import Run
from tests.report.published import problems, published

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "json_schemas.py"


def test_the_files_and_the_page_are_current() -> None:
    script = runpy.run_path(str(SCRIPT))
    assert script["PAGE"].read_text() == script["page"](), "type: python tools/json_schemas.py"
    for name in script["DOCUMENTS"]:
        file = f"{name}.schema.json"
        assert (script["FOLDER"] / file).read_text() == script["text"](name), "type: python tools/json_schemas.py"
        assert (script["PAGE"].parent / "schemas" / file).read_text() == script["text"](name), (
            "docs/reference/schemas links to it"
        )
        Draft202012Validator.check_schema(published(name))


def test_every_key_is_described_and_numbers_with_a_unit_say_so() -> None:
    script = runpy.run_path(str(SCRIPT))
    units = {"_us": "µs", "_ns": "ns", "_bytes": "bytes", "_gbs": "10⁹ bytes/s", "_share": "share of 1"}
    for name in script["DOCUMENTS"]:
        for path, kind, unit, about in script["keys"](name):
            assert about, path
            if "number" in kind or "integer" in kind:
                assert unit == next((unit for end, unit in units.items() if path.endswith(end)), unit), path


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("findings 0 confidence", "sure", "'sure' is not one of"),
        ("ranks 0 kernels 0 count", 1.5, "1.5 is not of type 'integer'"),
        ("budget parts 0 cause", "compute_us", "'compute_us' is not one of"),
        ("budget", ..., "'budget' is a required property"),
        ("is_new", 1, None),
    ],
)
def test_a_wrong_document_is_refused_and_a_new_key_is_not(
    made: Callable[..., Run], place: str, value: Any, said: str | None
) -> None:
    document = json.loads(made().to_json())
    assert problems("analyze", document) == []
    wrong = copy.deepcopy(document)
    *path, last = (int(key) if key.isdigit() else key for key in place.split())
    inner: Any = wrong
    for key in path:
        inner = inner[key]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    errors = [error.message for error in Draft202012Validator(published("analyze")).iter_errors(wrong)]
    assert any(said in message for message in errors) if said else errors == []
    # Our own tests do not tolerate a key without a description.
    assert problems("analyze", wrong) != []
