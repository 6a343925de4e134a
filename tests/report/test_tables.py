"""Tables as `tables.toml` declares them, numbers in words, and the JSON document with its published schemas."""

import json
from pathlib import Path
from string import Formatter
from types import SimpleNamespace

import pytest
from jsonschema import Draft202012Validator

from bridge_profiling.facts.words import is_format, written
from bridge_profiling.findings import ORDER
from bridge_profiling.report import tables, words
from bridge_profiling.report.documents import DOCUMENTS
from bridge_profiling.report.findings_view import Pictures
from bridge_profiling.report.measurements import phase_memory, training_facts
from bridge_profiling.report.tables import view
from bridge_profiling.run import Run
from tests.report.known import manifest, printed
from tests.report.published import published
from tests.traces.kineto_files import complete, kernel, write_capture


def test_every_declared_column_can_be_written_and_every_function_is_declared():
    columns = [tables._Column.of(each) for id in words.resource("tables") for each in tables.declared(id)["columns"]]
    called = {column.name[:-2] for column in columns if column.name.endswith("()")}
    assert called == set(tables.FUNCTIONS)
    assert {column.heading for column in columns if column.name == "exposed_communication_ns"} == {
        "exposed",
        "exposed communication",
    }


def test_rows_are_sorted_and_cut_and_columns_without_values_left_out():
    call = {"rank": 0, "calls": 2.0, "share": None, "longest_ns": 500_000, "iterations": 0}
    rows = [call | {"name": name, "time_ns": time_ns} for name, time_ns in (("poll", 2e6), ("read", 3e9), ("open", 1e6))]
    view = tables.view("system-calls", rows, 2)
    assert view.columns == ["rank", "calls", "ms", "longest ms", "name"]
    assert [[cell.text for cell in row] for row in view.rows] == [
        ["0", "2.0", "3,000.00", "0.50", "read"],
        ["0", "2.0", "2.00", "0.50", "poll"],
    ]
    assert (view.sorted_by, view.note) == (2, "1 more with less time: bridge-profiling analyze --json lists them.")
    marked = tables.view("system-calls", [row | {"iterations": 3, "share": 0.5} for row in rows], 2)
    assert ("of the iteration" in marked.columns, "in an iteration" in marked.title) == (True, True)


def test_memory_counts_in_powers_of_two_and_messages_in_powers_of_ten():
    assert (words.memory(5 * 2**30), written("size", 1_068_089_344)) == ("5.00 GiB", "1.07 GB")


def test_evidence_is_written_with_the_unit_in_its_name():
    assert (words.label("waiting_ns"), words.value("waiting_ns", 1_500_000)) == ("waits for others", "1.5 ms")
    assert words.value("waiting_ns", {0: 1_500_000, "3": 25_000_000}) == "rank 0: 1.5 ms, rank 3: 25 ms"
    assert words.label("idle_ns") == "idle"
    assert words.value("idle_ns", {"host_sync": {1: 2_000_000}}) == "host sync: rank 1: 2 ms"


def test_sentences_name_formats_that_exist_and_every_sentence_is_said():
    sentences = words.resource("sentences")
    source = "\n".join(path.read_text() for path in Path(words.__file__).parent.glob("*.py"))
    for name, template in sentences.items():
        if name == "outcomes":
            continue
        assert any(f'"{begin}' in source for begin in (f'{name}"', *_beginnings(name))), name
        specs = {spec for _, field, spec, _ in Formatter().parse(template) if field is not None and spec}
        assert {spec for spec in specs if not is_format(spec)} <= {",", ".0%", ".3g"}, name


def _beginnings(name):
    """A name whose end is a value, as f-strings have it: `compared_{verdict}`."""
    return [name[: place + 1] + "{" for place, letter in enumerate(name) if letter in "_ "]


def test_findings_that_exist_have_pictures_that_can_be_drawn():
    pictures = words.resource("text")["pictures"]
    assert set(pictures) <= set(ORDER)
    assert all(hasattr(Pictures, f"_{method}") for method, *_ in pictures.values())


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


@pytest.mark.parametrize("name", ["data_loading_2_nsys", "straggler_compute_4", "memory_leak_2"])
def test_the_verdict_and_the_budget_are_the_numbers_on_the_terminal(planted, name):
    run = planted(name)
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


_MB = 2**20
_MEMORY = {"phase": ["forward", "backward", "forward"], "before_bytes": [_MB, 5 * _MB, 3 * _MB]}
_MEMORY |= {"after_bytes": [5 * _MB, _MB, 7 * _MB], "peak_bytes": [6 * _MB, 9 * _MB, 8 * _MB]}
_FRAMEWORK = {"phase_memory": {"device": "cuda", "iteration": [4, 4, 5], **_MEMORY}}


def test_memory_by_phase():
    measured, other, unavailable = (manifest(rank, [100, 100], [90]) for rank in range(3))
    measured.manifest.framework = _FRAMEWORK
    other.manifest.framework = {"phase_memory": {"phase": "forward"}}
    unavailable.manifest.framework = {"phase_memory": "this rank has no CUDA device"}
    table = view("phase-memory", phase_memory([measured, other, unavailable]))
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["0", "forward", "2", "2.0 MiB", "6.0 MiB", "8.0 MiB"],
        ["0", "backward", "1", "5.0 MiB", "1.0 MiB", "9.0 MiB"],
    ]


def test_it_is_on_the_page(tmp_path):
    write_capture(tmp_path, [complete("user_annotation", "ProfilerStep#4", 4000, 900)], range(4, 6), framework=_FRAMEWORK)
    with Run(tmp_path) as run:
        assert len(json.loads(run.to_json())["measured"]["phase_memory"]) == 2
        assert "memory allocated by phase" in run.report(tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "shown"), [("ddp", "parameters"), ("recipe", "parameters of rank 1"), ("megatron-bridge", "parameters of rank 1")]
)
def test_a_part_of_a_model_is_shown_as_that_of_its_rank(name, shown):
    measured = manifest(1, [100, 100], [90])
    measured.manifest.framework = {"name": name, "parameters": 1234, "trainable_parameters": 1234, "batch_size": 4}
    assert training_facts(SimpleNamespace(manifests=[measured])) == [(shown, "1,234"), ("batch of a rank", "4")]
