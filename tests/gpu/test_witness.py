"""Two profilers, each in a job of its own, see the same kernels, messages and copies; the messages are those of the layout."""

from __future__ import annotations

import pytest

from tests.gpu.catalog import JOBS
from tests.planted.expected_collectives import expected_collectives, recorded_collectives
from tests.planted.witness import differences

pytestmark = [pytest.mark.needs("gpus2", "megatron", "nemo_run", "nsys_on_path"), pytest.mark.timeout(900)]

#: A job captured by Kineto, and one that trains the same and is captured by nsys.
WITNESSES = [
    (f"{layout}-{kineto}", f"{layout}-{nsys}")
    for name, kineto, nsys in (("tp2", "torch-shapes-memory", "nsys"), ("pp2", "torch-memory", "nsys-shapes"))
    for layout in (name, f"{name}_dp2")
]

CAPTURED = [name for name, _ in WITNESSES]


@pytest.mark.parametrize(("job", "reference"), WITNESSES, indirect=True)
def test_both_profilers_saw_the_same_work_of_trainings_that_are_equal_to_the_last_bit(job, reference):
    assert job.losses, job.tail
    assert job.losses == reference.losses
    ranks = sorted({*job.spec.selected} & {*reference.spec.selected})
    assert len(ranks) >= 2
    for rank in ranks:
        found = list(differences(job.tables(rank, "kineto"), reference.tables(rank, "nsys")))
        assert found == [], f"rank {rank}"


@pytest.mark.parametrize("job", CAPTURED, indirect=True)
def test_ranks_communicate_exactly_what_their_layout_implies(job):
    config = configuration(job)
    for rank in job.spec.selected:
        expected = expected_collectives(config, job.spec.gpus, rank)
        found = recorded_collectives(job.tables(rank, "kineto"))
        assert sorted(found) == list(range(*job.spec.window))
        for iteration, operations in found.items():
            assert operations == expected, f"rank {rank}, iteration {iteration}"


def configuration(job):
    """What the job trained, finalized as its ranks did."""
    from launch.pretrain import build_config
    from recipes.finalize import finalize

    settings = [text for text in JOBS[job.name].overrides if "{folder}" not in text]
    if "layers: megatron-core's own" not in job.output:
        pytest.skip("Transformer Engine's layers were trained, and the expectation is of megatron-core's own")
    config = build_config(job.spec.recipe, overrides=[*settings, "model.transformer_impl=local"])
    finalize(config, job.spec.gpus)
    return config
