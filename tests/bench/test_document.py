"""The file of results: what is kept beside what, and what is no such file."""

from __future__ import annotations

import pytest

from bridge_profiling.bench import document
from bridge_profiling.errors import ProfilingConfigError


def result(kind="collectives", **circumstances):
    return {"kind": kind, "world_size": 2, "hosts": 1, "backend": "gloo", "device": "cpu", "rows": [{"n": 1}]} | circumstances


def test_a_new_result_replaces_that_of_the_same_circumstances_and_leaves_the_others(tmp_path):
    path = tmp_path / "bench.json"
    document.add(path, result(rows=[{"n": 1}]))
    document.add(path, result(world_size=4))
    document.add(path, result("copies"))
    document.add(path, result(rows=[{"n": 2}]))
    found = document.read(path)
    assert [(each["kind"], each["world_size"]) for each in found.results] == [
        ("collectives", 4),
        ("copies", 2),
        ("collectives", 2),
    ]
    assert found.of_kind("collectives")[-1]["rows"] == [{"n": 2}]
    assert [each.name for each in tmp_path.iterdir()] == ["bench.json"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no json", "it is no JSON"),
        ("[]", "does not say that it is one"),
        ('{"traceEvents": []}', "does not say that it is one"),
        ('{"format": "bridge-profiling bench", "schema_version": 9, "results": []}', "schema version 9"),
        ('{"format": "bridge-profiling bench", "schema_version": 1, "results": [{"kind": "step"}]}', "damaged"),
    ],
)
def test_a_file_of_something_else_is_refused_and_left_as_it_is(tmp_path, text, said):
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(ProfilingConfigError, match=said):
        document.read(path)
    with pytest.raises(ProfilingConfigError, match=said):
        document.add(path, result())
    assert path.read_text() == text


def test_what_is_not_there_is_told_with_what_makes_it(tmp_path):
    with pytest.raises(ProfilingConfigError, match="bridge-profiling bench collectives -o"):
        document.read(tmp_path / "nowhere.json")


def test_what_json_cannot_hold_is_never_written(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        document.write(tmp_path / "bench.json", [result(rows=[{"n": float("inf")}])])
    assert not list(tmp_path.iterdir())
