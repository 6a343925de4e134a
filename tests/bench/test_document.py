"""The file of results: what is kept beside what, and what is no such file."""

from __future__ import annotations

import pytest

from bridge_profiling.bench import document
from bridge_profiling.errors import ProfilingConfigError


def result(kind="collectives", **circumstances):
    return {"kind": kind, "world_size": 2, "hosts": 1, "backend": "gloo", "device": "cpu", "rows": []} | circumstances


def row(gbs):
    return {"operation": "send", "message_bytes": 8, "algorithm_bandwidth_gbs": gbs, "correct": True}


def test_a_new_result_replaces_that_of_the_same_circumstances_and_leaves_the_others(tmp_path):
    path = tmp_path / "bench.json"
    document.add(path, result(rows=[row(1.0)]))
    document.add(path, result(world_size=4))
    document.add(path, result("copies"))
    document.add(path, result(rows=[row(2.0)]))
    found = document.read(path)
    assert [(each["kind"], each["world_size"]) for each in found.results] == [
        ("collectives", 4),
        ("copies", 2),
        ("collectives", 2),
    ]
    assert found.of_kind("collectives")[-1]["rows"] == [row(2.0)]
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


@pytest.mark.parametrize(
    "damaged",
    [
        result(rows=[{}]),
        result(rows=[row("fast")]),
        result(rows=[row(None)]),
        result(world_size=None),
        {"kind": "copies", "rows": []},
        {"kind": "step", "device": "cpu", "subject": "a:b", "rows": [{"time_us": 3}]},
        {"kind": "data_loader", "subject": "a:b", "rows": [{}]},
    ],
)
def test_a_result_without_what_is_read_of_it_is_damaged(tmp_path, damaged):
    path = tmp_path / "bench.json"
    document.write(path, [damaged])
    with pytest.raises(ProfilingConfigError, match="its results are damaged"):
        document.read(path)


def test_a_kind_of_a_later_version_is_left_alone(tmp_path):
    path = tmp_path / "bench.json"
    document.write(path, [{"kind": "disks", "rows": [{}]}])
    document.add(path, result())
    assert [each["kind"] for each in document.read(path).results] == ["disks", "collectives"]


def test_what_is_not_there_is_told_with_what_makes_it(tmp_path):
    with pytest.raises(ProfilingConfigError, match="bridge-profiling bench collectives -o"):
        document.read(tmp_path / "nowhere.json")


def test_what_json_cannot_hold_is_never_written(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        document.write(tmp_path / "bench.json", [result(rows=[row(float("inf"))])])
    assert not list(tmp_path.iterdir())
