"""What a process learns of the job from its environment."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.needs("megatron")
pytest.importorskip("torch")

from recipes.megatron.process import Process  # noqa: E402

TASK = {"SLURM_JOB_ID": "123456", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}


def test_without_a_launcher_a_process_is_alone():
    assert Process.from_environment({}) == Process(rank=0, world_size=1, local_rank=0)


def test_torchrun_is_believed_also_inside_a_slurm_step():
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    assert Process.from_environment(torchrun | TASK) == Process(rank=5, world_size=8, local_rank=1)


def test_a_batch_script_is_no_task_though_slurm_names_its_tasks():
    assert Process.from_environment({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}).world_size == 1


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node1", "node1"), ("node[03-05,9],other", "node03"), ("gpu[1,3]-ib", "gpu1-ib"), ("a-1,b-2", "a-1")],
)
def test_slurm_tasks_meet_on_the_steps_first_node(nodes, first):
    process = Process.from_environment(TASK | {"SLURM_STEP_NODELIST": nodes})
    assert process == Process(rank=3, world_size=4, local_rank=1, address=f"tcp://{first}:23456")
