"""No fault of a profiler, of a directory or of the hook itself reaches the training, and the manifest says what happened.

Nor does writing: training does not wait for more of it than it must. test_fault_table.py has more faults.
"""

import json
import logging
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from bridge_profiling.capture import torch_profiler
from bridge_profiling.capture.torch_profiler import TorchProfiler
from bridge_profiling.capture.window import CaptureWindow
from bridge_profiling.errors import ProfilingConfigError
from tests.capture.conftest import at, iterations_in, raising


@pytest.mark.parametrize(
    ("owner", "method", "reason"),
    [
        (TorchProfiler, "open", "open: RuntimeError: it broke"),
        (TorchProfiler, "warm_up", "warm up: RuntimeError: it broke"),
        (CaptureWindow, "iteration_ended", "RuntimeError: it broke"),
    ],
)
def test_a_profiler_that_fails_leaves_the_losses_alone(run, monkeypatch, caplog, owner, method, reason):
    run.train(None, range(8))
    plain, run.losses = run.losses, []
    monkeypatch.setattr(owner, method, raising(RuntimeError("it broke")))
    run.train(run.config(2, 5), range(8))
    assert run.losses == plain
    manifest = run.manifest("iter-2-5")
    assert (*run.outcome("iter-2-5"), manifest["reason"], manifest["final"]) == ("failed", None, reason, True)
    assert "it broke. Training goes on." in caplog.text
    assert ("Traceback" in caplog.text) == (owner is CaptureWindow), "only an error of the hook's own needs one"
    assert not torch.autograd._profiler_enabled()


@pytest.mark.parametrize(
    ("rank", "level", "printed"), [(1, logging.WARNING, True), (2, logging.WARNING, False), (1, logging.INFO, False)]
)
def test_a_training_without_logging_prints_where_its_first_profiled_rank_wrote(run, monkeypatch, capsys, rank, level, printed):
    monkeypatch.setattr(logging.getLogger("bridge_profiling"), "level", level)
    logging.getLogger("bridge_profiling.capture.profiler").manager._clear_cache()
    run.train(run.config(1, 4, profile_ranks=[2, 1]), range(5), rank=rank, world_size=4)
    where = f"{run.root}/torch/iter-1-4/rank-{rank}.pt.trace.json.gz"
    expected = f"bridge_profiling: rank {rank}: torch captured iterations 1 to 3 (complete): {where}\n"
    assert (expected in capsys.readouterr().err) == printed


@pytest.mark.parametrize(("size", "refused"), [("2", True), ("8", False)])
def test_ranks_outside_the_world_of_the_launcher_are_refused(run, monkeypatch, size, refused):
    """The loop passes no world size here; mp.spawn's ranks have no launcher that knows it."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(ProfilingConfigError, match="names 5, but the job has 2 ranks") if refused else nullcontext():
        run.train(run.config(1, 2, profile_ranks=[5]), range(1))


@pytest.mark.parametrize(("profiler", "said"), [(True, "Training goes on"), (False, "no captures on demand")])
def test_an_output_directory_that_cannot_be_made_is_one_line_and_training_goes_on(tmp_path, run, caplog, profiler, said):
    (tmp_path / "file").write_text("in the way")
    run.root = tmp_path / "file" / "profiles"
    run.listen(range(50), config=run.config(1, 3, use_pytorch_profiler=profiler, on_demand_seconds=0.03))
    assert len(run.losses) == 50
    [error] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert said in error


@pytest.mark.parametrize(("iterations", "status"), [(12, "complete"), (5, "partial")])
def test_training_goes_on_while_a_trace_is_compressed_and_a_process_killed_then_leaves_it_whole(
    run, monkeypatch, iterations, status
):
    """What a launcher's SIGKILL would leave at that moment, while training goes on and at its end, is read instead.

    Compression ends only after a later iteration has begun: a training that waited for it would wait for ever.
    """
    reached, compress, left = threading.Event(), torch_profiler._compress, []

    def held_up(raw, *arguments):
        assert reached.wait(timeout=60), "training waited for the compression"
        manifest = run.manifest("iter-1-9")
        where = Path(manifest["reason"].partition("the whole trace is in ")[2])
        left.append((manifest["status"], where == raw, iterations_in(json.loads(where.read_text())["traceEvents"])))
        compress(raw, *arguments)

    monkeypatch.setattr(torch_profiler, "_compress", held_up)
    run.train(run.config(1, 9), range(iterations), on_iteration=at(min(11, iterations - 1), reached.set))
    captured = list(range(1, min(iterations, 9)))
    assert left == [("failed", True, captured)]
    assert run.outcome("iter-1-9") == (status, captured)
    assert len(list((run.root / "torch").rglob("*rank-0*"))) == 1
