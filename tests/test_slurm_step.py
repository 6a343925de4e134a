"""What srun tells a process, in torchrun's words."""

from __future__ import annotations

import pytest

from bridge_profiling.easy.launch import Place, place
from bridge_profiling.slurm_step import first_host, join_slurm_step, meeting_point

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


def test_a_task_of_srun_joins_as_a_rank_of_torchrun_would() -> None:
    told = dict(STEP)
    join_slurm_step(told)
    assert place(told) == Place(rank=9, world_size=16, local_rank=1)
    assert (told["MASTER_ADDR"], int(told["MASTER_PORT"])) == meeting_point(STEP) == ("gpu07", 24711)


@pytest.mark.parametrize(
    "changed",
    [
        {"RANK": "3", "WORLD_SIZE": "16"},  # torchrun inside a step: it has told the rank
        {"SLURM_STEP_NUM_TASKS": "1"},  # a shell that srun opened
    ],
)
def test_what_is_no_rank_of_srun_stays_as_it_is(changed: dict[str, str]) -> None:
    told = STEP | changed
    join_slurm_step(told)
    assert told == STEP | changed


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[07-09,12],cpu1", "gpu07"),
        ("node3", "node3"),
        ("a1,a2", "a1"),
        ("gpu[1,3]-ib", "gpu1-ib"),
        ("dgx-a[003-004]", "dgx-a003"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
