"""The published JSON Schemas: current, complete, and of use to someone who checks a document with them."""

import runpy
from pathlib import Path

from jsonschema import Draft202012Validator

from tests.report.published import published

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "json_schemas.py"


def test_the_files_and_the_page_are_current():
    script = runpy.run_path(str(SCRIPT))
    assert script["PAGE"].read_text() == script["page"](), "type: python tools/json_schemas.py"
    for name in script["DOCUMENTS"]:
        file = f"{name}.schema.json"
        assert (script["FOLDER"] / file).read_text() == script["text"](name), "type: python tools/json_schemas.py"
        assert (script["PAGE"].parent / "schemas" / file).read_text() == script["text"](name), (
            "docs/reference/schemas links to it"
        )
        Draft202012Validator.check_schema(published(name))


def test_every_key_is_described_and_numbers_with_a_unit_say_so():
    script = runpy.run_path(str(SCRIPT))
    units = {"_us": "µs", "_ns": "ns", "_bytes": "bytes", "_gbs": "10⁹ bytes/s", "_share": "share of 1"}
    for name in script["DOCUMENTS"]:
        for path, kind, unit, about in script["keys"](name):
            assert about, path
            if "number" in kind or "integer" in kind:
                assert unit == next((unit for end, unit in units.items() if path.endswith(end)), unit), path
