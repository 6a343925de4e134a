"""Profiles of the real loop hold exactly what the window and the run have in common, read back from the traces."""

import gzip
import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.needs("megatron")


def window(start, end, *more):
    return [
        "profiling.use_pytorch_profiler=true",
        f"profiling.profile_step_start={start}",
        f"profiling.profile_step_end={end}",
        *more,
    ]


#: name: (overrides, iterations in the trace, status)
ONE_RANK = {
    "first_iteration": (window(0, 1), [0], "complete"),
    "from_the_start": (window(0, 3), [0, 1, 2], "complete"),
    "middle": (window(2, 4), [2, 3], "complete"),
    "to_the_end": (window(4, 6), [4, 5], "complete"),
    "around_an_evaluation": (window(2, 4, "train.eval_interval=3"), [2, 3], "complete"),
    "resumed_before": (window(3, 5, "train.start_iteration=1"), [3, 4], "complete"),
    "resumed_at": (window(3, 5, "train.start_iteration=3"), [3, 4], "complete"),
    "resumed_inside": (window(2, 5, "train.start_iteration=4"), [4], "partial"),
    "resumed_past": (window(1, 3, "train.start_iteration=4"), [], "missed"),
}

TWO_RANKS = {
    "one_of_two": window(1, 3, "profiling.profile_ranks=[1]"),
    "stages": window(1, 3, "profiling.profile_ranks=pp", "model.pipeline_model_parallel_size=2"),
    "tensor_parallel": window(1, 3, "profiling.profile_ranks=pp", "model.tensor_model_parallel_size=2"),
}


@pytest.fixture(scope="module")
def one(tmp_path_factory, run_cases):
    folder = tmp_path_factory.mktemp("one")
    run_cases(folder, {name: overrides for name, (overrides, _, _) in ONE_RANK.items()})
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory, run_cases):
    folder = tmp_path_factory.mktemp("two")
    run_cases(folder, TWO_RANKS, ranks=2)
    return folder


def annotations(trace: Path) -> list[str]:
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "user_annotation"]


def iterations(trace: Path) -> list[int]:
    return sorted(int(name.removeprefix("ProfilerStep#")) for name in annotations(trace) if name.startswith("ProfilerStep#"))


@pytest.mark.parametrize("name", ONE_RANK)
def test_the_trace_holds_what_window_and_run_share(one, name):
    _, captured, status = ONE_RANK[name]
    traces = list((one / name / "torch").glob("*/rank-0.pt.trace.json.gz"))
    assert [iterations(trace) for trace in traces] == ([captured] if captured else [])
    [path] = (one / name / "manifest").glob("*/rank-0.json")
    manifest = json.loads(path.read_text())
    assert manifest["status"] == status
    assert (manifest["captured"] or {"iterations": []})["iterations"] == captured
    if status != "complete":
        assert manifest["reason"]


def test_an_evaluation_inside_the_window_is_in_the_trace(one):
    [trace] = (one / "around_an_evaluation" / "torch").glob("*/rank-0.pt.trace.json.gz")
    assert annotations(trace).count("evaluation") == 1


def test_every_phase_is_named(one):
    [trace] = (one / "middle" / "torch").glob("*/rank-0.pt.trace.json.gz")
    names = annotations(trace)
    # Two iterations of four microbatches.
    assert [names.count(phase) for phase in ("forward-backward", "optimizer", "data-loading")] == [2, 2, 8]


@pytest.mark.parametrize(("name", "ranks"), [("one_of_two", [1]), ("stages", [0, 1]), ("tensor_parallel", [0])])
def test_exactly_the_ranks_asked_for_are_captured(two, name, ranks):
    traces = {int(path.name.split("-")[1].split(".")[0]): path for path in (two / name / "torch").glob("iter-1-3/*.json.gz")}
    assert sorted(traces) == ranks
    assert all(iterations(trace) == [1, 2] for trace in traces.values())
    manifests = sorted(path.name for path in (two / name / "manifest" / "iter-1-3").glob("rank-*"))
    assert manifests == [f"rank-{rank}.json" for rank in ranks]
