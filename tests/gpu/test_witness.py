"""Two profilers, each in a job of its own, see the same kernels, messages and copies."""

from __future__ import annotations

import pytest

from tests.planted.witness import differences

pytestmark = [pytest.mark.needs("gpus2", "megatron", "nemo_run", "nsys_on_path"), pytest.mark.timeout(900)]

#: A job captured by Kineto, and one that trains the same and is captured by nsys.
WITNESSES = [
    (f"{layout}-{kineto}", f"{layout}-{nsys}")
    for name, kineto, nsys in (("tp2", "torch-shapes-memory", "nsys"), ("pp2", "torch-memory", "nsys-shapes"))
    for layout in (name, f"{name}_dp2")
]


@pytest.mark.parametrize(("job", "reference"), WITNESSES, indirect=True)
def test_both_profilers_saw_the_same_work_of_trainings_that_are_equal_to_the_last_bit(job, reference):
    assert job.losses, job.tail
    assert job.losses == reference.losses
    ranks = sorted({*job.spec.selected} & {*reference.spec.selected})
    assert len(ranks) >= 2
    for rank in ranks:
        found = list(differences(job.tables(rank, "kineto"), reference.tables(rank, "nsys")))
        assert found == [], f"rank {rank}"
