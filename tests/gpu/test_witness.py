"""Two profilers, each in a job of its own, see the same kernels, messages and copies."""

import pytest

from tests.planted.witness import differences

pytestmark = [pytest.mark.needs("gpus2", "megatron", "nemo_run", "nsys_on_path"), pytest.mark.timeout(900)]

#: A job captured by Kineto, and one that trains the same and is captured by nsys.
WITNESSES = [("tp2-torch-shapes-memory", "tp2-nsys"), ("pp2-torch-memory", "pp2-nsys-shapes")]


@pytest.mark.parametrize(("job", "reference"), WITNESSES, indirect=True)
def test_both_profilers_saw_the_same_work_of_trainings_that_are_equal_to_the_last_bit(job, reference):
    assert job.losses, job.tail
    assert job.losses == reference.losses
    for rank in (0, 1):
        found = list(differences(job.tables(rank, "kineto"), reference.tables(rank, "nsys")))
        assert found == [], f"rank {rank}"
