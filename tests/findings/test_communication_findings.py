"""Data that moves while nothing is computed, waiting, which is another rank's finding, and collectives that are not needed."""

from functools import partial

import pytest

from bridge_profiling.findings import Confidence, Thresholds
from bridge_profiling.findings import communication as finds
from bridge_profiling.findings.collectives import small_collectives
from tests.findings.simulated_jobs import MS, US, SimulatedJob, found_by

approx = pytest.approx

DATA = "DATA_PARALLEL_GROUP"


@pytest.fixture
def communication(find):
    """Findings on communication, of two ranks, by id."""
    all_of_them = (finds.exposed_communication, finds.low_overlap, finds.unmatched_communication)
    return lambda step, **how: find(SimulatedJob(step, 2), *all_of_them, **how)


def _slow_link(job, _, size=64 << 20):
    for _ in range(3):
        job.busy(kernels=10)
        job.meet(4 * MS, size=size)


def _a_tenth_of_the_time(job, _, size=64 << 20):
    job.busy()
    job.meet(2 * MS, size=size)
    job.launch(job.all, 100 * US)


def _gradients_at_the_end(job, _, kernels=40, took_ns=2 * MS):
    job.busy(kernels=kernels)
    job.meet(took_ns, group=f"{DATA}_WITH_CP", operation="reduce_scatter", size=1 << 28)
    job.launch(job.all, 100 * US, name="adam")


@pytest.mark.parametrize(
    ("step", "title", "limited_by", "saving_ns", "advice"),
    [
        (_slow_link, "", ("tp", "link"), 12 * MS, "tp_comm_overlap"),
        # As soon as a faster link would save enough.
        (_a_tenth_of_the_time, "slow link", ("tp", "link"), 2 * MS * (1 - (64 << 20) / 2e-3 / 1e9 / 60), "NCCL"),
        (partial(_slow_link, size=1 << 16), "", ("tp", "latency"), 12 * MS, "ddp.bucket_size"),
    ],
)
def test_exposed_transfers_have_their_group_and_what_limits_it(communication, step, title, limited_by, saving_ns, advice):
    finding = communication(step, host="node-1")["exposed_communication"]
    (group,) = finding.evidence["groups"]
    assert (group["dimension"], group["limited_by"]) == limited_by
    assert (finding.ranks, finding.confidence, title in finding.title) == ([0, 1], Confidence.high, True)
    assert finding.recoverable_ns_per_iteration == approx(saving_ns, rel=0.02)
    assert advice in finding.action


def _waiting_for_rank_0(job, _):
    job.launch(0, 10 * MS)
    job.launch(1, 1 * MS)
    job.meet(200 * US)


def _late_hosts_after_communication(job, _):
    job.launch(job.all, 5 * MS)
    job.meet(5 * MS)
    job.be_in(job.all, "something", 11 * MS)
    job.launch(job.all, 100 * US)


def _overlapped(job, _):
    job.launch(job.all, 20 * MS)
    job.meet(10 * MS, group=DATA, size=1 << 28, overlaps=True)
    job.meet()


def _reduced_while_a_host_is_late(job, _):
    job.busy()
    job.meet(2 * MS, group=f"{DATA}_WITH_CP", operation="reduce_scatter", size=1 << 28)
    job.be_in(1, "something", 26 * MS)
    job.launch(job.all, 100 * US, name="adam")


# Between hosts, the bandwidth of the first is not slow.
_SAVE_NOTHING = (_a_tenth_of_the_time, _waiting_for_rank_0, _late_hosts_after_communication, _overlapped)


@pytest.mark.parametrize("step", [*_SAVE_NOTHING, _reduced_while_a_host_is_late, partial(_a_tenth_of_the_time, size=1 << 16)])
def test_what_a_faster_link_would_not_save_is_no_communication(communication, step):
    assert communication(step) == {}


def test_waiting_of_a_rank_captured_alone_may_be_either(communication):
    (finding,) = communication(_waiting_for_rank_0, ranks=[1]).values()
    assert (finding.id, finding.ranks, finding.confidence) == ("unmatched_communication", [1], Confidence.low)
    assert finding.evidence["exposed_ns"]["1"] == finding.recoverable_ns_per_iteration == approx(9_200 * US, rel=0.02)
    assert finding.events[0].duration_ns == approx(9_200 * US, rel=0.02)
    assert communication(_waiting_for_rank_0, ranks=[0]) == {}
    # Of transfers, an estimate at most.
    estimate = communication(_slow_link, ranks=[0])["exposed_communication"]
    assert (estimate.confidence, estimate.evidence["estimated"]) == (Confidence.low, True)


def test_gradients_reduced_after_the_last_pass_could_be_hidden(communication):
    finding = communication(_gradients_at_the_end)["low_overlap"]
    assert finding.evidence["could_hide_ns"] == {"0": approx(2 * MS, rel=0.02), "1": approx(2 * MS, rel=0.02)}
    assert finding.recoverable_ns_per_iteration == approx(2 * MS, rel=0.02)
    assert "overlap_grad_reduce" in finding.action
    # Exposed communication that is a finding itself is not saved twice.
    found = communication(partial(_gradients_at_the_end, kernels=10, took_ns=10 * MS))
    savings = {name: each.recoverable_ns_per_iteration for name, each in found.items()}
    assert savings == {"exposed_communication": approx(10 * MS, rel=0.02), "low_overlap": 0}


def _accumulating(job, _, sync=True, group="default_pg"):
    for micro_batch in range(4):
        with job.within("DistributedDataParallel.forward"):
            job.busy(kernels=4)
        job.busy(kernels=8)
        if sync or micro_batch == 3:
            for size in (25 << 20, 25 << 20, 13 << 20):
                job.meet(500 * US, group=group, size=size)
    with job.within("Optimizer.step#AdamW.step"):
        job.launch(job.all, 100 * US, "aten::_fused_adamw_", name="multi_tensor_apply")


def test_gradients_reduced_after_each_micro_batch_cost_all_but_the_last_and_once_nothing(find):
    found = find(SimulatedJob(_accumulating, 2))["accumulation_sync"]
    assert found.ranks == [0, 1]
    assert (found.evidence["micro_batches"], found.evidence["collectives"]) == (4, 12)
    assert found.recoverable_ns_per_iteration == approx(3 * 3 * 500 * US, rel=0.02)
    assert "no_sync" in found.action
    once = partial(_accumulating, sync=False)
    once_more = lambda job, number: [once(job, number), job.meet(500 * US, group="default_pg", size=1 << 25)]  # noqa: E731
    activations = partial(_accumulating, group="TENSOR_MODEL_PARALLEL_GROUP")
    for step in (once, once_more, activations):
        assert "accumulation_sync" not in find(SimulatedJob(step, 2))


def _sharded(job, _, units=30, size=1 << 18, stops_ns=0, issuing="copy-in", named="FSDP"):
    job.be_in(job.all, "something", stops_ns)
    for number in range(units):
        for operation, step in (("all_gather", "all_gather"), ("reduce_scatter", "post_backward_reduce")):
            with job.within(f"{named}::{step} (blocks.{number})"):
                job.be_in(job.all, issuing, 300 * US, category="operator")
                job.meet(30 * US, group="default_pg", operation=operation, size=size)
        job.launch(job.all, 200 * US, count=2)


def test_many_small_units_cost_their_transfers_and_their_launches_and_few_or_large_ones_do_not(open_job):
    def small(run, thresholds=None):
        """The finding, if it is one."""
        return next(iter(found_by(run, small_collectives, thresholds=thresholds)), None)

    def of(**changed):
        return small(open_job(SimulatedJob(partial(_sharded, **changed), 2, iterations=3)))

    run = open_job(SimulatedJob(_sharded, 2))
    assert small(run, Thresholds(collectives=60.01)) is None
    found = small(run, Thresholds(collectives=60))
    assert found.evidence["collectives"] == {"0": 60, "1": 60}
    # Beside the launches in a range, a collective of the other rank often still runs: then neither alone is responsible.
    assert found.evidence["host_ns"]["0"] > 60 * 50 * US
    assert found.evidence["host_ns"]["0"] < found.recoverable_ns_per_iteration < 60 * 335 * US
    assert "fully_shard" in found.action
    # Time in the ranges, however long the host stops elsewhere, else in the operators that issue collectives.
    for changed in ({"stops_ns": 200 * MS}, {"issuing": "c10d::_allgather_base_", "named": "DDP", "stops_ns": 200 * MS}):
        assert of(**changed).evidence["host_ns"]["0"] == approx(60 * 305 * US, rel=0.02)
    for few_or_large in ({"size": 1 << 25}, {"units": 10}):
        assert of(**few_or_large) is None
