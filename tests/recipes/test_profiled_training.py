"""Profiles of the real loop hold exactly what the window and the run have in common, read back from the traces."""

import json

import pytest

from tests.recipes.trainings import annotations, iterations, run_cases, window

pytestmark = [pytest.mark.integration, pytest.mark.needs("megatron")]

#: name: (overrides, iterations in the trace, status)
CASES = {
    "from_the_start": (window(0, 3), [0, 1, 2], "complete"),
    "around_an_evaluation": (f"{window(2, 4)} train.eval_interval=3", [2, 3], "complete"),
    "to_the_end": (window(4, 6), [4, 5], "complete"),
    "started_at_it": (f"{window(3, 5)} train.start_iteration=3", [3, 4], "complete"),
    "started_inside": (f"{window(2, 5)} train.start_iteration=4", [4], "partial"),
    "started_past_it": (f"{window(1, 3)} train.start_iteration=4", [], "missed"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profiled")
    run_cases(folder, {name: overrides for name, (overrides, _, _) in CASES.items()})
    return folder


@pytest.mark.parametrize("name", CASES)
def test_the_trace_holds_what_window_and_run_share(folder, name):
    _, captured, status = CASES[name]
    traces = list((folder / name / "torch").glob("*/rank-0.pt.trace.json.gz"))
    assert [iterations(trace) for trace in traces] == ([captured] if captured else [])
    [path] = (folder / name / "manifest").glob("*/rank-0.json")
    manifest = json.loads(path.read_text())
    assert manifest["status"] == status
    assert (manifest["captured"] or {"iterations": []})["iterations"] == captured
    assert bool(manifest["reason"]) == (status != "complete")


def test_every_phase_is_named_and_an_evaluation_inside_the_window(folder):
    [trace] = (folder / "around_an_evaluation" / "torch").glob("*/rank-0.pt.trace.json.gz")
    names = annotations(trace)
    # Two iterations of four microbatches, and an evaluation of as many.
    assert [names.count(phase) for phase in ("optimizer", "evaluation")] == [2, 1]
    assert [names.count(phase) for phase in ("forward-backward", "data-loading")] == [2, 16]
