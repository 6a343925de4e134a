"""The result file: what it keeps, and files that are refused."""

import pytest

from bridge_profiling.bench import results
from bridge_profiling.common.errors import ProfilingConfigError

HEAD = '"format": "bridge-profiling bench", "schema_version"'


@pytest.fixture
def path(tmp_path):
    return tmp_path / "bench.json"


def result(kind="collectives", **circumstances):
    return {"kind": kind, "world_size": 2, "hosts": 1, "backend": "gloo", "device": "cpu", "rows": []} | circumstances


def row(gbs):
    return {"operation": "send", "message_bytes": 8, "algorithm_bandwidth_gbs": gbs, "correct": True}


def test_a_new_result_replaces_the_one_of_the_same_conditions_and_keeps_the_others(path):
    # One of a later version's kind, too.
    results.write(path, [{"kind": "disks", "world_size": 1, "rows": [{}]}])
    for added in (result(rows=[row(1.0)]), result(world_size=4), result(backend="nccl"), result(rows=[row(2.0)])):
        results.add(path, added)
    found = results.read(path)
    kept = [("disks", 1, None), ("collectives", 4, "gloo"), ("collectives", 2, "nccl"), ("collectives", 2, "gloo")]
    assert [(each["kind"], each["world_size"], each.get("backend")) for each in found.results] == kept
    assert found.of_kind("collectives")[-1]["rows"] == [row(2.0)]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no json", "it is not JSON"),
        ('{"traceEvents": []}', "it lacks the format"),
        (f'{{{HEAD}: 9, "results": []}}', "schema version 9"),
        (f'{{{HEAD}: 1, "results": [{{"kind": "collectives"}}]}}', "damaged"),
    ],
)
def test_another_kind_of_file_is_refused_and_not_changed(path, text, said):
    path.write_text(text)
    for use in (results.read, lambda path: results.add(path, result())):
        with pytest.raises(ProfilingConfigError, match=said):
            use(path)
    assert path.read_text() == text


def test_a_missing_file_is_an_error_with_the_command_that_creates_one(path):
    with pytest.raises(ProfilingConfigError, match="bridge-profiling bench collectives -o"):
        results.read(path)


def test_values_that_json_does_not_support_are_not_written(path):
    with pytest.raises(ValueError, match="JSON"):
        results.write(path, [result(rows=[row(float("inf"))])])
    assert not list(path.parent.iterdir())
