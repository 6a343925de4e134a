"""Where a process stands among ranks, as launchers say it; and what becomes of ranks that fail."""

from __future__ import annotations

import pytest

from bridge_profiling.bench import ranks
from bridge_profiling.errors import ProfilingConfigError


def test_torchrun_says_rank_and_world():
    place = ranks.place_from({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"})
    assert (place.rank, place.size, place.local_rank, place.store) == (3, 8, 1, None)


def test_srun_says_it_in_its_own_words():
    environment = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "5", "SLURM_JOB_ID": "77"}
    place = ranks.place_from(environment)
    assert (place.rank, place.size, place.local_rank) == (5, 16, 5)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"},  # a batch script
        {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"},
    ],
)
def test_without_a_launcher_nobody_says_it(environment):
    assert ranks.place_from(environment) is None


def test_half_a_launcher_is_refused():
    with pytest.raises(ProfilingConfigError, match="WORLD_SIZE is not set"):
        ranks.place_from({"RANK": "0"})
