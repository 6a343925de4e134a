"""A training that stops and resumes in another process goes on to the bit, and its profile with it."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import signal
import time
from contextlib import contextmanager

import pytest

pytestmark = pytest.mark.needs("megatron")
pytest.importorskip("megatron.core")

TP, PP = "model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2"
VIRTUAL = ["model.virtual_pipeline_model_parallel_size=2", "model.num_layers=4"]
DISTRIBUTED_OPTIMIZER = "ddp.use_distributed_optimizer=true"

#: Ranks, and layouts of that many. Dropout and the schedule are there to show that generators and learning rate go on.
LAYOUTS = {
    2: {
        "dp": ["model.hidden_dropout=0.1", "scheduler.lr_decay_style=cosine", "scheduler.lr_warmup_iters=2"],
        "distributed_optimizer": [DISTRIBUTED_OPTIMIZER, "scheduler.lr_warmup_iters=4"],
        "bf16_overlapped": [
            "model.bf16=true",
            DISTRIBUTED_OPTIMIZER,
            "ddp.overlap_grad_reduce=true",
            "ddp.overlap_param_gather=true",
        ],
        "tp": [TP],
        "pp": [PP],
        "vpp_distributed_optimizer": [PP, *VIRTUAL, DISTRIBUTED_OPTIMIZER],
    },
    4: {"tp_pp": [TP, PP], "tp_pp_distributed_optimizer": [TP, PP, DISTRIBUTED_OPTIMIZER]},
}


def window(start, end):
    return [
        "profiling.use_pytorch_profiler=true",
        f"profiling.profile_step_start={start}",
        f"profiling.profile_step_end={end}",
    ]


#: The run stops after iteration 2. name: (window, captured and status of the first run, of the resumed one).
WINDOWS = {
    "resumed_before": ((4, 6), ([], "missed"), ([4, 5], "complete")),
    "resumed_inside": ((2, 5), ([2], "partial"), ([3, 4], "partial")),
    "resumed_past": ((0, 2), ([0, 1], "complete"), ([], "missed")),
}


def resumed_pair(tmp_path_factory, run_cases, layouts, ranks):
    """Each layout trains through, and again up to iteration 3 with a checkpoint; another process resumes from that."""
    folder = tmp_path_factory.mktemp("resumed")
    first, second = {}, {}
    for name, overrides in layouts.items():
        first[name] = overrides
        first[f"{name}_stopped"] = [*overrides, "train.exit_interval=3", f"checkpoint.save={folder}/checkpoints/{name}"]
        second[f"{name}_resumed"] = [*overrides, f"checkpoint.load={folder}/checkpoints/{name}"]
    losses = run_cases(folder, first, ranks)[0]
    return losses | run_cases(folder, second, ranks)[0]


@pytest.fixture(scope="module")
def layouts(tmp_path_factory, run_cases):
    losses = {}
    for ranks, cases in LAYOUTS.items():
        losses |= resumed_pair(tmp_path_factory, run_cases, cases, ranks)
    return losses


# Sixteen trainings on two ranks and six on four.
@pytest.mark.system
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", [name for cases in LAYOUTS.values() for name in cases])
def test_a_resumed_training_has_the_losses_of_one_that_never_stopped(layouts, layout):
    whole, stopped, resumed = (layouts[name].train for name in (layout, f"{layout}_stopped", f"{layout}_resumed"))
    assert (list(stopped), list(resumed)) == ([0, 1, 2], [3, 4, 5])
    assert stopped | resumed == whole
    assert len(set(whole.values())) == 6


@pytest.fixture(scope="module")
def one(tmp_path_factory, run_cases):
    """One rank: windows of the profiler, a run that is out of time, one that saves regularly; then all of them resumed."""
    folder = tmp_path_factory.mktemp("one")
    first, second = {"whole": []}, {}
    for name, (edges, _, _) in WINDOWS.items():
        both = [*window(*edges), f"profiling.output_dir={folder}/profiles/{name}"]
        first[name] = [*both, "train.exit_interval=3", f"checkpoint.save={folder}/{name}"]
        second[f"{name}_second"] = [*both, f"checkpoint.load={folder}/{name}"]
    first["late"] = ["train.exit_duration_in_mins=1e-6", f"checkpoint.save={folder}/late"]
    regular = [f"checkpoint.save={folder}/regular", f"checkpoint.load={folder}/regular", "checkpoint.save_interval=2"]
    first["regular"] = [*regular, "checkpoint.most_recent_k=2"]
    second["regular_again"] = regular
    second["longer"] = [f"checkpoint.load={folder}/regular", "train.train_iters=8", "optimizer.lr=1e-30"]
    losses, first_output = run_cases(folder, first)
    return folder, losses, first_output, *run_cases(folder, second)


def manifest(folder):
    return json.loads((folder / "rank-0.json").read_text())


def iterations(folder):
    names = []
    for trace in folder.glob("rank-0.pt.trace.json.gz"):
        with gzip.open(trace, "rt") as file:
            names += [event["name"] for event in json.load(file)["traceEvents"] if event.get("cat") == "user_annotation"]
    return sorted(int(name.removeprefix("ProfilerStep#")) for name in names if name.startswith("ProfilerStep#"))


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_is_captured_once_or_its_rest_under_global_iteration_numbers(one, name):
    (start, end), *expected = WINDOWS[name]
    for suffix, (captured, status) in zip(("", ".1"), expected, strict=True):
        attempt = f"iter-{start}-{end}{suffix}"
        assert manifest(one[0] / "profiles" / name / "manifest" / attempt)["status"] == status
        assert iterations(one[0] / "profiles" / name / "torch" / attempt) == captured


@pytest.mark.parametrize("name", WINDOWS)
def test_a_profiled_training_resumes_to_the_bit(one, name):
    _, losses, _, resumed, _ = one
    assert losses[name].train | resumed[f"{name}_second"].train == losses["whole"].train


def test_a_training_that_is_out_of_time_stops_with_a_checkpoint(one):
    folder, losses, output, *_ = one
    assert list(losses["late"].train) == [0]
    assert (folder / "late/latest_checkpointed_iteration.txt").read_text() == "1"
    assert "training stops after iteration 0: train.exit_duration_in_mins=1e-06 is over" in output


def test_checkpoints_come_at_their_interval_and_at_the_end_and_old_ones_go(one):
    folder, losses, output, *_ = one
    assert losses["regular"].train == losses["whole"].train
    assert f"no checkpoint under {folder}/regular yet: training starts from scratch" in output
    assert output.count(f"{folder}/regular/iter_") == 3
    assert {path.name for path in (folder / "regular").glob("iter_*")} == {"iter_0000004", "iter_0000006"}


def test_a_finished_training_that_is_started_again_has_nothing_to_do(one):
    folder, _, _, resumed, output = one
    assert resumed["regular_again"].train == {}
    assert f"nothing is left to train: the checkpoint under {folder}/regular holds 6 iterations" in output


def test_a_training_can_be_made_longer_with_other_settings_of_the_optimizer(one):
    """With a learning rate of nothing, the model stays what the checkpoint held: two batches cost what that model gives."""
    _, losses, _, resumed, _ = one
    assert list(resumed["longer"].train) == [6, 7]
    assert max(resumed["longer"].values) < losses["whole"].values[0] - 0.3


@contextmanager
def killed_at_the_end():
    yield
    raise SystemExit(143)


def test_a_save_that_is_broken_off_leaves_no_process_to_wait_for():
    from recipes.megatron.checkpoint import none_left_behind

    own, started = (multiprocessing.Process(target=time.sleep, args=(600,)) for _ in range(2))
    own.start()
    try:
        with pytest.raises(SystemExit), none_left_behind(), killed_at_the_end():
            started.start()
        started.join(timeout=60)
        assert started.exitcode == -signal.SIGTERM
        assert own.is_alive()
    finally:
        own.kill()
        own.join()
