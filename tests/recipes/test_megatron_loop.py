"""The training loop on real ranks: every layout trains, and what should not change a loss does not change a bit of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.forked_ranks import LAUNCHER_VARIABLES
from tests.ports import free_port

pytestmark = pytest.mark.needs("megatron")
pytest.importorskip("megatron.core")

ROOT = Path(__file__).parents[2]

#: A learning rate so small that no weight changes: what is left of a loss is its data.
FROZEN = ["optimizer.lr=1e-30", "optimizer.weight_decay=0"]

ONE_RANK = {
    "plain": [],
    "again": [],
    "evaluated": ["train.eval_interval=2"],
    "profiled": [
        "train.eval_interval=2",
        "profiling.use_pytorch_profiler=true",
        "profiling.profile_step_start=1",
        "profiling.profile_step_end=4",
        "profiling.record_shapes=true",
        "profiling.nvtx_ranges=true",
    ],
    "frozen": FROZEN,
    "frozen_from_3": [*FROZEN, "train.start_iteration=3", "train.eval_interval=1"],
    "warm_up": ["scheduler.lr_warmup_iters=4"],
    "warm_up_from_3": ["scheduler.lr_warmup_iters=4", "train.start_iteration=3"],
    "bf16": ["model.bf16=true", "ddp.use_distributed_optimizer=true"],
    "masked": ["dataset.reset_attention_mask=true", "dataset.reset_position_ids=true", "dataset.eod_mask_loss=true"],
}

TWO_RANKS = {
    "dp": [],
    "dp_overlapped": [
        "ddp.use_distributed_optimizer=true",
        "ddp.overlap_grad_reduce=true",
        "ddp.overlap_param_gather=true",
        "train.eval_interval=2",
    ],
    "tp": ["model.tensor_model_parallel_size=2"],
    "pp": ["model.pipeline_model_parallel_size=2", "train.eval_interval=3"],
    "pp_again": ["model.pipeline_model_parallel_size=2", "train.eval_interval=3"],
    "pp_interleaved": [
        "model.pipeline_model_parallel_size=2",
        "model.virtual_pipeline_model_parallel_size=2",
        "model.num_layers=4",
        "ddp.overlap_grad_reduce=true",
    ],
}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, run_cases):
    return run_cases(tmp_path_factory.mktemp("one_rank"), ONE_RANK)


@pytest.fixture(scope="module")
def one(one_rank):
    return one_rank[0]


@pytest.fixture(scope="module")
def two(tmp_path_factory, run_cases):
    return run_cases(tmp_path_factory.mktemp("two_ranks"), TWO_RANKS, ranks=2)[0]


def test_a_process_without_a_launcher_trains_alone(one):
    assert list(one["plain"].train) == list(range(6))
    assert one["plain"].values[-1] < one["plain"].values[0] - 0.3


def test_progress_says_iteration_loss_step_time_and_tokens(one_rank):
    lines = one_rank[1].splitlines()
    assert lines[0].startswith("training iterations 0 to 5 on 1 cpu rank(s): tp=1 pp=1 dp=1, 4 microbatches of 2 x 64 tokens")
    assert lines[1].startswith("layers: megatron-core's own")
    assert lines[2] == "on CPU: model.use_cpu_initialization=true, model.batch_p2p_comm=false"
    first = next(line for line in lines if line.startswith("iteration 0/6 | loss 4."))
    assert " ms/step | " in first
    assert first.endswith(" tokens/s")


def test_two_equal_runs_have_the_same_losses_to_the_bit(one, two):
    assert one["plain"].train == one["again"].train
    assert two["pp"].train == two["pp_again"].train
    assert two["pp"].evaluation == two["pp_again"].evaluation


def test_evaluations_come_every_interval_and_leave_training_as_it_was(one):
    assert list(one["evaluated"].evaluation) == [1, 3, 5]
    assert one["evaluated"].train == one["plain"].train


def test_an_evaluation_sees_the_same_data_every_time(one):
    assert len(set(one["frozen_from_3"].evaluation.values())) == 1


def test_starting_at_a_later_iteration_trains_on_that_iterations_data(one):
    later = one["frozen_from_3"].train
    assert list(later) == [3, 4, 5]
    assert later == {iteration: loss for iteration, loss in one["frozen"].train.items() if iteration >= 3}
    assert len(set(one["frozen"].train.values())) == 6


def test_starting_at_a_later_iteration_goes_on_with_the_learning_rate(one):
    """With warm-up the first step's rate is 0, so the second loss differs only through its data; from 3 on it does not."""
    warm, later, frozen = one["warm_up"].values, one["warm_up_from_3"].values, one["frozen"].values
    assert warm[1] == frozen[1]
    assert warm[2] < frozen[2]
    assert later[1] < frozen[4] - 0.05


def test_bf16_with_the_distributed_optimizer_trains_like_fp32(one):
    assert one["bf16"].values == pytest.approx(one["plain"].values, abs=0.02)


def test_documents_can_be_kept_apart(one):
    assert one["masked"].values != one["plain"].values
    assert one["masked"].values[-1] < one["masked"].values[0] - 0.3


@pytest.mark.parametrize("layout", ["dp", "dp_overlapped", "tp"])
def test_a_layout_gives_the_losses_of_one_rank(one, two, layout):
    assert two[layout].values == pytest.approx(one["plain"].values, abs=5e-5)


@pytest.mark.parametrize("layout", ["pp", "pp_interleaved"])
def test_pipeline_stages_train_together(two, layout):
    assert list(two[layout].train) == list(range(6))
    assert two[layout].values[-1] < two[layout].values[0] - 0.3


def test_evaluations_work_over_a_pipeline_and_with_overlapped_gathers(one, two):
    assert list(two["pp"].evaluation) == [2, 5]
    assert [float.fromhex(loss) for loss in two["dp_overlapped"].evaluation.values()] == pytest.approx(
        [float.fromhex(loss) for loss in one["evaluated"].evaluation.values()], abs=5e-5
    )


def test_profiling_changes_no_bit_of_any_loss(one):
    assert one["profiled"].train == one["evaluated"].train
    assert one["profiled"].evaluation == one["evaluated"].evaluation
    assert list(one["profiled"].folder.glob("profiled/torch/iter-1-4/rank-0.pt.trace.json.gz"))


def test_what_is_rewritten_for_the_cpu_is_what_megatron_core_is_known_to_need(monkeypatch):
    import torch

    from recipes.megatron import cpu, train
    from recipes.models import gpt_tiny

    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with cpu.megatron_on_cpu() as mode:
        monkeypatch.setattr(train, "megatron_on_cpu", nullcontext)
        config = gpt_tiny()
        config.train.train_iters = 1
        train.pretrain(config)
    # The first training of a process makes the causal mask, with ones; megatron-core keeps it for those that follow.
    assert mode.rewrites.keys() | {"ones"} == {"zeros", "ones", "tensor", "type"}


def test_pretrain_returns_the_losses_and_leaves_config_and_process_as_they_were(monkeypatch):
    import torch

    from recipes.megatron.train import pretrain
    from recipes.models import gpt_tiny

    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    config = gpt_tiny()
    config.train.train_iters = 2
    losses = pretrain(config)
    assert len(losses) == 2
    assert not torch.distributed.is_initialized()
    assert config.model.ffn_hidden_size is None
    assert pretrain(config) == losses


@pytest.mark.system
def test_the_tasks_of_a_slurm_step_find_each_other_without_torchrun(tmp_path):
    step = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "MASTER_PORT": str(free_port()),
    }
    command = [sys.executable, str(ROOT / "launch/pretrain.py"), "train.train_iters=2", f"logger.loss_file={tmp_path}/losses"]
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    tasks = [
        subprocess.Popen(
            command, env=environment | step | {"SLURM_PROCID": task, "SLURM_LOCALID": task, "OMP_NUM_THREADS": "1"}
        )
        for task in ("0", "1")
    ]
    assert [task.wait(timeout=240) for task in tasks] == [0, 0]
    losses = [json.loads(line) for line in (tmp_path / "losses").read_text().splitlines()]
    assert [record["iteration"] for record in losses if record["split"] == "train"] == [0, 1]


def test_nccl_without_a_gpu_is_refused(monkeypatch):
    import torch

    from bridge_profiling import ProfilingConfigError
    from recipes.megatron.train import pretrain
    from recipes.models import gpt_tiny

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = gpt_tiny()
    config.dist.distributed_backend = "nccl"
    with pytest.raises(ProfilingConfigError, match=r"dist\.distributed_backend=gloo"):
        pretrain(config)
    assert not torch.distributed.is_initialized()
