"""A training that stops and resumes in another process goes on to the bit, and its profile with it."""

import multiprocessing
import re
import signal
import time

import pytest

from tests.recipes.trainings import run_cases, window
from tests.system.jobs import manifests, trace_iterations

pytestmark = pytest.mark.integration
pytest.importorskip("megatron.core")

from bridge_profiling import ProfilingConfigError  # noqa: E402
from recipes.megatron.checkpoint import latest_iteration, none_left_behind  # noqa: E402

TENSORS, PIPELINE = "model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2"
VIRTUAL = f"{PIPELINE} model.virtual_pipeline_model_parallel_size=2 model.num_layers=4"
DISTRIBUTED = "ddp.use_distributed_optimizer=true"
OVERLAPPED = f"{DISTRIBUTED} ddp.overlap_grad_reduce=true ddp.overlap_param_gather=true"

#: Ranks, and a layout's settings. Dropout and the schedule are there to show that generators and learning rate go on.
LAYOUTS = {
    "dp": (2, "model.hidden_dropout=0.1 scheduler.lr_decay_style=cosine scheduler.lr_warmup_iters=2"),
    "bf16_overlapped": (2, f"model.bf16=true {OVERLAPPED}"),
    "vpp_distributed_optimizer": (2, f"{VIRTUAL} {DISTRIBUTED}"),
    "tp_pp_distributed_optimizer": (4, f"{TENSORS} {PIPELINE} {DISTRIBUTED}"),
}

OUT_OF_TIME = "train.exit_duration_in_mins=1e-6"

#: The run stops after its first iteration. name: (window, captured and status of the first run, of the resumed one).
WINDOWS = {
    "resumed_before": ((2, 4), ([], "missed"), ([2, 3], "complete")),
    "resumed_inside": ((0, 3), ([0], "partial"), ([1, 2], "partial")),
}


@pytest.mark.system
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_training_has_the_losses_of_one_that_never_stopped(tmp_path, layout):
    ranks, overrides = LAYOUTS[layout]
    stopped = f"{overrides} {OUT_OF_TIME} checkpoint.save={tmp_path}/saved"
    first, _ = run_cases(tmp_path, {"whole": overrides, "stopped": stopped}, ranks)
    second, _ = run_cases(tmp_path, {"resumed": f"{overrides} checkpoint.load={tmp_path}/saved"}, ranks)
    assert (list(first["stopped"].train), list(second["resumed"].train)) == ([0], [1, 2, 3, 4, 5])
    assert first["stopped"].train | second["resumed"].train == first["whole"].train
    assert len(set(first["whole"].values)) == 6


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """One rank: windows of the profiler, a run that is out of time, one that saves regularly; then all of them resumed."""
    folder = tmp_path_factory.mktemp("one")
    regular = f"checkpoint.save={folder}/regular checkpoint.load={folder}/regular checkpoint.save_interval=2"
    first = {
        "whole": "",
        "late": f"{OUT_OF_TIME} checkpoint.save={folder}/late",
        "regular": regular,
    }
    second = {"regular_again": regular, "longer": f"checkpoint.load={folder}/regular train.train_iters=8 optimizer.lr=1e-30"}
    for name, (edges, _, _) in WINDOWS.items():
        both = f"{window(*edges)} profiling.output_dir={folder}/profiles/{name}"
        first[name] = f"{both} {OUT_OF_TIME} checkpoint.save={folder}/{name}"
        second[f"{name}_second"] = f"{both} checkpoint.load={folder}/{name}"
    losses, first_output = run_cases(folder, first)
    resumed, second_output = run_cases(folder, second)
    return folder, losses | resumed, first_output + second_output


@pytest.mark.parametrize("name", WINDOWS)
def test_a_profiled_training_resumes_to_the_bit_and_captures_the_rest_of_its_window(one, name):
    folder, losses, _ = one
    assert losses[name].train | losses[f"{name}_second"].train == losses["whole"].train
    (start, end), *expected = WINDOWS[name]
    for suffix, (captured, status) in zip(("", ".1"), expected, strict=True):
        attempt = f"iter-{start}-{end}{suffix}"
        assert manifests(folder / "profiles" / name, attempt)[0]["status"] == status
        traces = (folder / "profiles" / name / "torch" / attempt).glob("rank-0.pt.trace.json.gz")
        assert [iteration for trace in traces for iteration in trace_iterations(trace)] == captured


def test_checkpoints_come_when_time_is_up_and_at_their_interval_and_a_training_can_go_on(one):
    folder, losses, output = one
    assert list(losses["late"].train) == [0]
    assert "training stops after iteration 0: train.exit_duration_in_mins=1e-06 is over" in output
    # At its interval, and at the end.
    assert losses["regular"].train == losses["whole"].train
    assert f"no checkpoint under {folder}/regular yet: training starts from scratch" in output
    written = re.findall(rf"checkpoint of (\d) iterations written in .*: {folder}/regular/", output)
    assert written == ["2", "4", "6"]
    assert {path.name for path in (folder / "regular").glob("iter_*")} == {"iter_0000002", "iter_0000004", "iter_0000006"}
    # Started again as it was, and longer, with a learning rate of nothing: two batches cost what the checkpoint's model gives.
    assert losses["regular_again"].train == {}
    assert f"nothing is left to train: the checkpoint under {folder}/regular holds 6 iterations" in output
    assert list(losses["longer"].train) == [6, 7]
    assert max(losses["longer"].values) < losses["whole"].values[0] - 0.3


def test_a_save_that_is_broken_off_leaves_no_process_to_wait_for():
    def killed_while_it_saves():
        started.start()
        raise SystemExit(143)

    own, started = (multiprocessing.Process(target=time.sleep, args=(600,)) for _ in range(2))
    own.start()
    try:
        with pytest.raises(SystemExit), none_left_behind():
            killed_while_it_saves()
        started.join(timeout=60)
        assert started.exitcode == -signal.SIGTERM
        assert own.is_alive()
    finally:
        own.kill()
        own.join()


def test_the_newest_checkpoint_that_was_finished_is_the_one_to_resume_from(tmp_path):
    assert latest_iteration(tmp_path / "none yet") is None
    for name in ("iter_0000005", "iter_0000010", ".iter_0000015.incomplete", ".iter_0000020.deleted", "other"):
        (tmp_path / name).mkdir()
    assert latest_iteration(tmp_path) == 10
    (tmp_path / "a file").touch()
    with pytest.raises(ProfilingConfigError, match="Name a directory of checkpoints"):
        latest_iteration(tmp_path / "a file")
