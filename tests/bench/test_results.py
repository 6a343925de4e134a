"""Requests that are refused before anything starts, and the result file: what it keeps, and files that are refused."""

from functools import partial

import pytest

from bridge_profiling.bench import requests, results
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
    for added in (result(rows=[row(1.0)]), result(world_size=4), result("copies"), result(rows=[row(2.0)])):
        results.add(path, added)
    found = results.read(path)
    kept = [("disks", 1), ("collectives", 4), ("copies", 2), ("collectives", 2)]
    assert [(each["kind"], each["world_size"]) for each in found.results] == kept
    assert found.of_kind("collectives")[-1]["rows"] == [row(2.0)]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no json", "it is not JSON"),
        ('{"traceEvents": []}', "it lacks the format"),
        (f'{{{HEAD}: 9, "results": []}}', "schema version 9"),
        (f'{{{HEAD}: 1, "results": [{{"kind": "step"}}]}}', "damaged"),
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


KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("1KiB:64KiB:4x", (KIB, 4 * KIB, 16 * KIB, 64 * KIB)), ("1MiB,1KB,8", (8, 1000, MIB)), ("1.5MiB", (3 * MIB // 2,))],
)
def test_sizes(text, sizes):
    assert requests.sizes_from(text) == sizes


WRONG_SIZES = ("", "big", "1KiB:", "4KiB:1KiB:2x", "1KiB:4KiB:1x", "1KiB:4KiB:2x:3", "0", "100GiB", "-1")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        *((partial(requests.sizes_from, text), "Type --sizes 1KiB:256MiB:4x") for text in WRONG_SIZES),
        (lambda: requests.CollectivesRequest(("all_red",), (1,)), "unknown operation 'all-red'. Type all-reduce"),
        (lambda: requests.CollectivesRequest(("send",), (1,), processes=1), "--nproc 1 is too small"),
        (lambda: requests.DataLoaderRequest("train"), "does not name a factory.*--loader module:factory"),
        (lambda: requests.integers_from("0,two", "--workers"), "--workers '0,two' is not a list"),
    ],
)
def test_what_cannot_be_measured_is_refused(make, said):
    with pytest.raises(ProfilingConfigError, match=said):
        make()
