"""The trace holds exactly the iterations that the window and the run have in common, read back from the trace itself."""

import sys

import pytest
import torch


@pytest.mark.parametrize(
    ("start", "end", "train_iters"),
    [(0, 1, 4), (0, 3, 4), (4, 6, 8), (2, 3, 8), (5, 8, 8), (1, 4, 6), (0, 4, 4)],
)
def test_a_window_is_captured_exactly(run, start, end, train_iters):
    run.train(run.config(start, end), range(train_iters))
    folder = f"iter-{start}-{end}"
    assert run.iterations(folder) == list(range(start, end))
    manifest = run.manifest(folder)
    assert manifest["status"] == "complete"
    assert manifest["reason"] is None
    assert (manifest["captured"]["first"], manifest["captured"]["last"]) == (start, end - 1)


def test_operators_of_other_iterations_are_not_in_the_trace(run):
    run.train(run.config(4, 6), range(10))
    operators = [event for event in run.trace("iter-4-6")["traceEvents"] if event.get("name") == "aten::linear"]
    assert len(operators) == 2


@pytest.mark.parametrize(
    ("first", "captured", "status"),
    [(2, [4, 5, 6], "complete"), (3, [4, 5, 6], "complete"), (4, [4, 5, 6], "complete"), (5, [5, 6], "partial")],
)
def test_a_resumed_run_captures_what_it_shares_with_the_window(run, first, captured, status):
    run.train(run.config(4, 7), range(first, 10))
    assert run.iterations("iter-4-7") == captured
    manifest = run.manifest("iter-4-7")
    assert manifest["status"] == status
    assert manifest["captured"]["iterations"] == captured
    if status == "partial":
        assert "first iteration was 5" in manifest["reason"]


@pytest.mark.parametrize("first", [7, 8, 105])
def test_a_run_resumed_past_the_window_says_so(run, first):
    run.train(run.config(4, 7), range(first, first + 3))
    manifest = run.manifest("iter-4-7")
    assert manifest["status"] == "missed"
    assert manifest["captured"] is None
    assert f"started at iteration {first}" in manifest["reason"]
    assert not (run.root / "torch").exists()


def test_a_resume_far_into_training_keeps_global_iteration_numbers(run):
    run.train(run.config(105, 107), range(100, 110))
    assert run.iterations("iter-105-107") == [105, 106]


@pytest.mark.parametrize("train_iters", [0, 2, 4])
def test_a_training_that_ends_before_the_window_says_so(run, train_iters):
    run.train(run.config(4, 6), range(train_iters))
    manifest = run.manifest("iter-4-6")
    assert manifest["status"] == "missed"
    assert "training ended" in manifest["reason"]
    assert manifest["captured"] is None


def test_an_evaluation_between_two_captured_iterations_is_in_the_trace_and_one_after_the_window_is_not(run):
    def evaluate(iteration, hook):
        if iteration in (4, 5):
            with hook.range("evaluation"):
                torch.ones(3).sum()

    run.train(run.config(4, 6), range(8), between=evaluate)
    assert run.iterations("iter-4-6") == [4, 5]
    evaluations = [event for event in run.trace("iter-4-6")["traceEvents"] if event.get("name") == "evaluation"]
    assert len(evaluations) == 1


def test_phases_lie_inside_their_iterations(run):
    run.train(run.config(4, 6), range(8))
    events = [event for event in run.trace("iter-4-6")["traceEvents"] if event.get("cat") == "user_annotation"]
    steps = {event["name"]: event for event in events if event["name"].startswith("ProfilerStep#")}
    for phase in ("forward-backward", "optimizer"):
        phases = sorted((event for event in events if event["name"] == phase), key=lambda event: event["ts"])
        assert len(phases) == 2
        for event, step in zip(phases, (steps["ProfilerStep#4"], steps["ProfilerStep#5"]), strict=True):
            assert step["ts"] <= event["ts"]
            assert event["ts"] + event["dur"] <= step["ts"] + step["dur"]


def test_losses_are_bit_identical_with_and_without_profiling(run, tmp_path):
    run.train(None, range(8))
    plain, run.losses = run.losses, []
    run.train(run.config(2, 5, record_shapes=True, pytorch_profiler_collect_callstack=True), range(8))
    assert run.losses == plain


def test_only_the_ranks_asked_for_write(run):
    config = run.config(1, 2, profile_ranks=[1])
    for rank in (0, 1):
        run.train(config, range(3), rank=rank, world_size=2)
    assert sorted(path.name for path in run.root.rglob("rank-*")) == ["rank-1.json", "rank-1.pt.trace.json.gz"]


def test_no_profiler_asked_for_writes_nothing(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BRIDGE_PROFILING_DIR", raising=False)
    run.train(None, range(3))
    run.train(run.config(1, 2, use_pytorch_profiler=False, on_demand=False), range(3))
    run.root = None
    run.train(run.config(1, 2, use_pytorch_profiler=False), range(3))
    assert not list(tmp_path.iterdir())


def test_a_training_that_names_a_directory_and_no_profiler_only_says_there_that_it_can_be_asked(run):
    run.train(run.config(1, 2, use_pytorch_profiler=False), range(3))
    assert [path.relative_to(run.root).as_posix() for path in run.root.rglob("*.*")] == ["on-demand/progress.json"]


def test_from_the_loop_to_the_profiler_it_is_four_calls(run, monkeypatch):
    """As CONTRIBUTING.md says: a reader who debugs the start of a window steps through three functions of ours."""
    seen = []
    real = torch.profiler.profile.start_trace

    def start_trace(self):
        frame = sys._getframe(1)
        while frame.f_code.co_name != "train":
            seen.append(frame.f_code.co_qualname)
            frame = frame.f_back
        real(self)

    monkeypatch.setattr(torch.profiler.profile, "start_trace", start_trace)
    run.train(run.config(1, 3), range(4))
    assert seen == ["TorchProfiler.start", "CaptureWindow.advance", "ProfilingHook.iteration"]
