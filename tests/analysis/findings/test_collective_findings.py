"""Collectives that a training need not run: reductions of every micro-batch, many small messages."""

from functools import partial

import pytest

from tests.analysis.findings.simulated_jobs import US, SimulatedJob

approx = pytest.approx

_BUCKET, _LAST_BUCKET = 25 << 20, 13 << 20


def _accumulating(job, _, sync=True, group="default_pg"):
    for micro_batch in range(4):
        with job.within("DistributedDataParallel.forward"):
            job.busy(kernels=4)
        job.busy(kernels=8)
        if sync or micro_batch == 3:
            for size in (_BUCKET, _BUCKET, _LAST_BUCKET):
                job.meet(500 * US, group=group, size=size)
    with job.within("Optimizer.step#AdamW.step"):
        job.launch(job.all, 100 * US, "aten::_fused_adamw_", name="multi_tensor_apply")


def test_gradients_reduced_after_each_micro_batch_cost_all_but_the_last(find):
    found = find(SimulatedJob(_accumulating, 2))["accumulation_sync"]
    assert found.ranks == [0, 1]
    assert (found.evidence["micro_batches"], found.evidence["collectives"]) == (4, 12)
    assert found.recoverable_us_per_iteration == approx(3 * 3 * 500, rel=0.02)
    assert "no_sync" in found.action


@pytest.mark.parametrize(
    "step",
    [
        partial(_accumulating, sync=False),
        partial(_accumulating, group="TENSOR_MODEL_PARALLEL_GROUP"),  # reduces activations
        lambda job, number: [_accumulating(job, number, sync=False), job.meet(500 * US, group="default_pg", size=1 << 25)],
    ],
)
def test_gradients_reduced_once_are_no_finding(find, step):
    assert "accumulation_sync" not in find(SimulatedJob(step, 2))


def _sharded(job, _, units=30, size=1 << 18):
    for unit in range(units):
        for operation in ("all_gather", "reduce_scatter"):
            step = "all_gather" if operation == "all_gather" else "post_backward_reduce"
            with job.within(f"FSDP::{step} (blocks.{unit})"):
                job.be_in(job.all, "copy-in", 300 * US, category="operator")
                job.meet(30 * US, group="default_pg", operation=operation, size=size)
        job.launch(job.all, 200 * US, count=2)


def test_many_small_units_cost_their_transfers_and_their_launches_and_few_or_large_ones_do_not(find):
    found = find(SimulatedJob(_sharded, 2))["small_collectives"]
    assert found.ranks == [0, 1]
    assert found.evidence["collectives"] == {"0": 60, "1": 60}
    # Beside the launches in a range, a collective of the other rank often still runs: then neither alone is responsible.
    assert found.evidence["host_us"]["0"] > 60 * 50
    assert found.evidence["host_us"]["0"] < found.recoverable_us_per_iteration < 60 * 335
    assert "fully_shard" in found.action
    for few_or_large in ({"size": 1 << 25}, {"units": 10}):
        assert "small_collectives" not in find(SimulatedJob(partial(_sharded, **few_or_large), 2))
