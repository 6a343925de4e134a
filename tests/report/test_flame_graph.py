"""Flame graphs as files, on the page and in a notebook."""

import json
from pathlib import Path

import pytest

from bridge_profiling.common.errors import ProfilingConfigError
from bridge_profiling.report.flame_graph import Weight, flame_graph_figure, write_flame_graph
from tests.traces.kineto_files import call, complete, kernel

jsonschema = pytest.importorskip("jsonschema")

SCHEMA = json.loads((Path(__file__).parent / "speedscope" / "file-format-schema.json").read_text())

#: Microseconds: a function that runs an operator on thread 1, and an operator on thread 2.
EVENTS = [
    complete("user_annotation", "ProfilerStep#1", 0, 100),
    complete("python_function", "lib/train.py(3): <module>", 0, 100),
    complete("python_function", "lib/model.py(7): <listcomp>", 10, 50),
    complete("cpu_op", "aten::mm", 20, 30),
    call("cudaLaunchKernel", 25, 5, 1),
    kernel("gemm", 40, 12.5, correlation=1),
    complete("cpu_op", "a;b\nc", 20, 10, tid=2),
]


def test_a_speedscope_file_has_a_profile_of_each_thread_and_folded_text_a_line_of_nanoseconds_for_each_stack(made, tmp_path):
    run = made(events=EVENTS)
    write_flame_graph(run.facts, tmp_path / "host.json")
    document = json.loads((tmp_path / "host.json").read_text())
    jsonschema.validate(document, SCHEMA)
    frames = document["shared"]["frames"]
    assert [frame["name"] for frame in frames] == ["<module>", "<listcomp>", "aten::mm", "cudaLaunchKernel", "a;b\nc"]
    assert frames[1] == {"name": "<listcomp>", "file": "lib/model.py", "line": 7}
    assert [[profile[key] for key in ("name", "samples", "weights", "endValue")] for profile in document["profiles"]] == [
        ["rank 0, thread 1, host time", [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]], [50_000, 20_000, 25_000, 5_000], 100_000],
        ["rank 0, thread 2, host time", [[4]], [10_000], 10_000],
    ]
    output = tmp_path / "stacks.txt"
    assert write_flame_graph(run.facts, output, folded=True) == 5
    first, *_, last = output.read_text().splitlines()
    assert (first, last) == ("rank 0;thread 1;lib/train.py(3): <module> 50000", "rank 0;thread 2;a:b c 10000")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": [0, 5, 6]}, "no stacks of ranks 5-6 were captured. Type ranks from 0."),
        ({"weight": "device"}, "no stacks with device time. Type --weight host"),
    ],
)
def test_what_was_not_captured_is_refused(made, tmp_path, options, message):
    with pytest.raises(ProfilingConfigError, match=message):
        write_flame_graph(made(events=EVENTS[:4]).facts, tmp_path / "flame.json", **options)
    assert not (tmp_path / "flame.json").exists()


def _boxes(figure):
    """Each label with its parent's label and its time."""
    (trace,) = figure["data"]
    label = dict(zip(trace["ids"], trace["labels"], strict=True)) | {"": ""}
    rows = zip(trace["labels"], trace["parents"], trace["values"], strict=True)
    return {name: (label[parent], value) for name, parent, value in rows}


def test_the_pictures_boxes_are_the_stacks_without_frames_that_all_have_in_common(made):
    rows = made(events=EVENTS).facts.flame_graph.to_pylist()
    boxes = _boxes(flame_graph_figure(rows, Weight.host, "rank 0"))
    assert list(boxes)[:3] == ["rank 0", "thread 1", "<module> (train.py:3)"]
    assert boxes["rank 0"] == ("", 110_000)
    assert boxes["aten::mm"] == ("<listcomp> (model.py:7)", 30_000)
    assert {time for _, time in _boxes(flame_graph_figure(rows, Weight.device, "rank 0")).values()} == {12_500}
