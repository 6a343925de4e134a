"""The JSON document has the numbers that the terminal prints, and its published schemas are valid and complete."""

import json
import runpy
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from bridge_profiling.report import words
from tests.planted.cases import CASES
from tests.report.known import printed
from tests.report.published import published
from tests.traces.kineto_files import kernel

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "json_schemas.py"


def test_the_page_is_current_and_the_schemas_are_valid():
    script = runpy.run_path(str(SCRIPT))
    assert script["PAGE"].read_text() == script["page"](), "type: python tools/json_schemas.py"
    for name in script["DOCUMENTS"]:
        Draft202012Validator.check_schema(published(name))


def test_every_key_is_described_and_numbers_with_a_unit_say_so():
    script = runpy.run_path(str(SCRIPT))
    units = {"_us": "µs", "_ns": "ns", "_bytes": "bytes", "_gbs": "10⁹ bytes/s", "_share": "share of 1"}
    for name in script["DOCUMENTS"]:
        for path, kind, unit, about in script["keys"](name):
            assert about, path
            if "number" in kind or "integer" in kind:
                assert unit == next((unit for end, unit in units.items() if path.endswith(end)), unit), path


@pytest.mark.parametrize("name", ["data_loading_2", "straggler_compute_4", "clean_2_nsys"])
def test_the_verdict_and_the_budget_are_the_numbers_on_the_terminal(run_of, tmp_path, name):
    run = run_of(CASES[name].folder, parquet=tmp_path / "tables")
    text = printed(run)
    document = json.loads(run.to_json())
    verdict = document["verdict"]
    for sentence in (verdict["headline"], *verdict["sentences"], *verdict["first"], *verdict["notes"]):
        assert sentence in text
    assert f"An iteration takes {words.ms(1e3 * verdict['iteration_us'])} (median of {verdict['iterations']} on" in text
    (parts,) = (sentence for sentence in verdict["sentences"] if sentence.startswith("Its parts: "))
    for part in document["budget"]["parts"]:
        name = "exposed communication" if part["cause"] == "communication" else part["name"]
        assert (f" {words.percent(part['share'])} {name}" in parts) == (part["share"] >= 0.02)
    assert (verdict["confidence"] in (None, "high")) != (f"Confidence is {verdict['confidence']}" in text)


def test_coordinates_come_from_the_trace_and_what_is_no_number_is_null(write_trace, run_of):
    ours = {"rank": 3, "coordinates": {"tp": [1, 2], "pp": [0, 1]}}
    run = run_of(write_trace([kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL()", 1, 0)], bridge_profiling=ours))
    (rank,) = json.loads(run.to_json(), parse_constant=pytest.fail)["ranks"]
    assert (rank["coordinates"], rank["device"]["span_us"]) == (ours["coordinates"], 0)
