"""No fault of a profiler, of a directory or of the hook itself reaches the training, and the manifest says what happened."""

import threading

import pytest
import torch

from bridge_profiling.capture.torch_profiler import TorchProfiler
from bridge_profiling.capture.window import CaptureWindow
from tests.capture.conftest import at, raising


@pytest.mark.parametrize(
    ("owner", "method", "reason"),
    [
        (TorchProfiler, "open", "open: RuntimeError: it broke"),
        (TorchProfiler, "warm_up", "warm up: RuntimeError: it broke"),
        (TorchProfiler, "start", "start: RuntimeError: it broke"),
        (TorchProfiler, "stop", "stop: RuntimeError: it broke"),
        (CaptureWindow, "iteration_ended", "RuntimeError: it broke"),
    ],
)
def test_a_profiler_that_fails_leaves_the_losses_alone(run, monkeypatch, caplog, owner, method, reason):
    run.train(None, range(8))
    plain, run.losses = run.losses, []
    monkeypatch.setattr(owner, method, raising(RuntimeError("it broke")))
    run.train(run.config(2, 5), range(8))
    assert run.losses == plain
    assert (*run.outcome("iter-2-5"), run.manifest("iter-2-5")["reason"]) == ("failed", None, reason)
    assert "it broke. Training goes on." in caplog.text
    assert not torch.autograd._profiler_enabled()


def test_a_profiler_of_the_users_own_is_left_alone(run):
    with torch.profiler.profile() as theirs:
        run.train(run.config(1, 3), range(5))
    assert any(event.key == "aten::linear" for event in theirs.key_averages())
    assert run.outcome("iter-1-3") == ("failed", None)
    assert "another profiler" in run.manifest("iter-1-3")["reason"]


def test_an_output_directory_that_cannot_be_made_is_one_line_and_training_goes_on(tmp_path, run, caplog):
    (tmp_path / "file").write_text("in the way")
    run.root = tmp_path / "file" / "profiles"
    run.train(run.config(1, 3), range(5))
    assert len(run.losses) == 5
    [error] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "Training goes on" in error


def test_an_output_directory_that_vanishes_fails_the_capture_alone(run):
    run.train(run.config(1, 3), range(5), on_iteration=at(2, lambda: (run.root / "torch").write_text("in the way")))
    assert len(run.losses) == 5
    assert run.outcome("iter-1-3") == ("failed", None)


def test_a_process_that_can_start_no_thread_writes_its_trace_itself(run, monkeypatch, caplog):
    """From Python 3.12 on an interpreter that exits starts none: so it is where nobody left the hook."""
    refused = RuntimeError("can't create new thread at interpreter shutdown")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", raising(refused))
        run.train(run.config(1, 3), range(5))
    assert run.outcome("iter-1-3") == ("complete", [1, 2])
    assert [record.getMessage().partition(":")[2] for record in caplog.records if record.levelname == "ERROR"] == [
        f" no captures on demand: RuntimeError: {refused}. Training goes on."
    ]
