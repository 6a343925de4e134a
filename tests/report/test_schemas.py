"""The JSON document has the numbers that the terminal prints, and its published schemas are valid and complete."""

import json

import pytest
from jsonschema import Draft202012Validator

from bridge_profiling.report import words
from bridge_profiling.report.documents import DOCUMENTS
from tests.planted.cases import CASES
from tests.report.known import printed
from tests.report.published import published
from tests.traces.kineto_files import kernel

UNITS = {"_us": "us", "_ns": "ns", "_bytes": "bytes", "_gbs": "1e9 bytes/s", "_share": "share"}


@pytest.mark.parametrize("command", DOCUMENTS)
def test_the_schemas_are_valid_describe_every_key_and_numbers_with_a_unit_say_so(command):
    schema = published(command)
    Draft202012Validator.check_schema(schema)
    for name, each in schema["$defs"].items():
        assert each["description"], name
        for key, kind in each["properties"].items():
            assert kind["description"], (name, key)
            if {"number", "integer"} & {*([kind["type"]] if isinstance(kind.get("type"), str) else kind.get("type", ()))}:
                unit = kind.get("x-unit")
                assert unit == next((unit for end, unit in UNITS.items() if key.endswith(end)), unit), (name, key)


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
