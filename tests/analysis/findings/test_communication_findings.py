"""Data that moves while nothing is computed, and waiting, which is another rank's finding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bridge_profiling.analysis import Run
from bridge_profiling.analysis.findings import Confidence, Finding
from bridge_profiling.analysis.findings.communication import exposed_communication, low_overlap, transfers
from tests.analysis.findings.simulated_jobs import MS, US, Here, SimulatedJob, found_by

Find = Callable[..., dict[str, Finding]]


@pytest.fixture
def find(tmp_path_factory: pytest.TempPathFactory, run_of: Callable[..., Run]) -> Find:
    """Findings on communication, by id."""

    def found(job: SimulatedJob, **info: object) -> dict[str, Finding]:
        run = run_of(job.write(tmp_path_factory.mktemp("job"), **info), engine=Here())
        return {finding.id: finding for finding in found_by(run, exposed_communication, low_overlap)}

    return found


def _job(step: Callable[[SimulatedJob], None], *, ranks: int = 2, iterations: int = 4) -> SimulatedJob:
    job = SimulatedJob(ranks=ranks)
    job.iterate(iterations, lambda _: step(job))
    return job


def _slow_link(job: SimulatedJob, *, size: int = 64 << 20, took_ns: int = 4 * MS) -> None:
    for _ in range(3):
        for rank in range(job.ranks):
            job.compute(rank, 500 * US, count=10)
        job.transfer(took_ns, range(job.ranks), size=size)


def test_transfers_that_nothing_hides_are_told_with_their_group_and_link(find: Find) -> None:
    found = find(_job(_slow_link), host="node-1")
    assert list(found) == ["exposed_communication"]
    finding = found["exposed_communication"]
    assert finding.ranks == [0, 1]
    assert finding.evidence["exposed_transfer_us"]["0"] == pytest.approx(12_000, rel=0.02)
    assert finding.recoverable_us_per_iteration == pytest.approx(12_000, rel=0.02)
    (group,) = finding.evidence["groups"]
    assert (group["dimension"], group["limited_by"]) == ("tp", "link")
    assert group["bus_bandwidth_gbs"] == pytest.approx((64 << 20) / 4e-3 / 1e9, rel=0.01)
    assert "NCCL" in finding.action
    assert "tp_comm_overlap" in finding.action
    assert finding.confidence is Confidence.high


def _seldom(job: SimulatedJob) -> None:
    """A tenth of the iteration moves data."""
    for rank in range(job.ranks):
        job.compute(rank, 500 * US, count=40)
    job.transfer(2 * MS, range(job.ranks), size=64 << 20)
    for rank in range(job.ranks):
        job.compute(rank, 100 * US)


def test_a_slow_link_is_told_as_soon_as_a_faster_one_would_save_enough(find: Find) -> None:
    finding = find(_job(_seldom), host="node-1")["exposed_communication"]
    bandwidth = (64 << 20) / 2e-3 / 1e9
    assert "slow link" in finding.title
    assert finding.evidence["groups"][0]["limited_by"] == "link"
    assert finding.recoverable_us_per_iteration == pytest.approx(2_000 * (1 - bandwidth / 60), rel=0.02)


def test_between_hosts_the_same_bandwidth_is_not_slow(find: Find) -> None:
    assert find(_job(_seldom)) == {}


def test_small_messages_are_bound_by_latency(find: Find) -> None:
    def step(job: SimulatedJob) -> None:
        for _ in range(100):
            for rank in range(2):
                job.compute(rank, 50 * US)
            job.transfer(40 * US, [0, 1], group="DATA_PARALLEL_GROUP", size=1 << 16)

    finding = find(_job(step))["exposed_communication"]
    assert finding.evidence["groups"][0]["limited_by"] == "latency"
    assert "ddp.bucket_size" in finding.action


def test_waiting_for_another_rank_is_not_exposed_communication(find: Find) -> None:
    def step(job: SimulatedJob) -> None:
        job.compute(0, 10 * MS)
        job.compute(1, 1 * MS)
        job.transfer(200 * US, [0, 1])

    job = _job(step)
    assert find(job) == {}


def test_a_late_host_beside_communication_is_no_communication(find: Find) -> None:
    def step(job: SimulatedJob) -> None:
        for rank in range(2):
            job.compute(rank, 5 * MS)
        job.transfer(5 * MS, [0, 1])
        for rank in range(2):
            job.be_in(rank, "something", 11 * MS)
            job.compute(rank, 100 * US)

    assert find(_job(step)) == {}


def test_communication_beside_compute_is_no_loss(find: Find) -> None:
    def step(job: SimulatedJob) -> None:
        for rank in range(2):
            job.compute(rank, 20 * MS)
        job.transfer(10 * MS, [0, 1], group="DATA_PARALLEL_GROUP", size=1 << 28, beside=True)
        job.transfer(100 * US, [0, 1])

    assert find(_job(step)) == {}


def test_a_rank_captured_alone_gives_an_estimate_at_most(find: Find) -> None:
    job = _job(_slow_link)
    job.ranks = 1  # of two, the other is not captured
    finding = find(job)["exposed_communication"]
    assert finding.confidence is Confidence.low
    assert finding.evidence["estimated"]
    assert finding.evidence["exposed_transfer_us"]["0"] == pytest.approx(12_000, rel=0.05)


def test_of_a_rank_captured_alone_that_waits_the_shortest_tells_that_it_waits(find: Find) -> None:
    lateness = iter([5, 9, 0, 8] * 12)

    def step(job: SimulatedJob) -> None:
        for _ in range(4):
            job.compute(0, 1 * MS)
            job.compute(1, 1 * MS + next(lateness) * MS)
            job.transfer(100 * US, [0, 1])

    job = _job(step)
    job.ranks = 1
    assert find(job) == {}


def test_without_groups_and_sizes_nothing_is_said(find: Find) -> None:
    job = _job(_slow_link)
    job.without_groups()
    assert find(job) == {}


def test_gradients_reduced_after_the_last_pass_could_be_hidden(find: Find) -> None:
    def step(job: SimulatedJob) -> None:
        for rank in range(2):
            job.compute(rank, 500 * US, count=40)
        job.transfer(2 * MS, [0, 1], group="DATA_PARALLEL_GROUP_WITH_CP", operation="reduce_scatter", size=1 << 28)
        for rank in range(2):
            job.compute(rank, 100 * US, name="adam")

    finding = find(_job(step))["low_overlap"]
    assert finding.ranks == [0, 1]
    assert finding.evidence["could_hide_us"]["1"] == pytest.approx(2_000, rel=0.02)
    assert finding.evidence["hidden_share"]["0"] == 0
    assert finding.recoverable_us_per_iteration == pytest.approx(2_000, rel=0.02)
    assert "overlap_grad_reduce" in finding.action


def test_what_exposed_communication_gives_back_is_not_given_back_twice(find: Find) -> None:
    def step(job: SimulatedJob) -> None:
        for rank in range(2):
            job.compute(rank, 500 * US, count=10)
        job.transfer(10 * MS, [0, 1], group="DATA_PARALLEL_GROUP", operation="reduce_scatter", size=1 << 28)
        for rank in range(2):
            job.compute(rank, 100 * US, name="adam")

    found = find(_job(step))
    assert set(found) == {"exposed_communication", "low_overlap"}
    assert found["exposed_communication"].recoverable_us_per_iteration == pytest.approx(10_000, rel=0.02)
    assert found["low_overlap"].recoverable_us_per_iteration == 0


@pytest.mark.parametrize(
    ("group", "dimension"),
    [
        ("DATA_PARALLEL_GROUP_WITH_CP", "dp"),
        ("INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", "dp"),
        ("EXPERT_DATA_PARALLEL_GROUP", "dp"),
        ("TENSOR_MODEL_PARALLEL_GROUP", "tp"),
        ("CONTEXT_PARALLEL_GROUP", "cp"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "ep"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
    ],
)
def test_groups_are_told_apart_by_megatrons_names(
    tmp_path: Path, run_of: Callable[..., Run], group: str, dimension: str
) -> None:
    job = SimulatedJob(ranks=2)
    job.iterate(3, lambda _: job.transfer(1 * MS, [0, 1], group=group))
    assert {each.dimension for each in transfers(run_of(job.write(tmp_path), engine=Here()).evidence())} == {dimension}


def test_a_group_without_a_telling_name_is_told_by_the_coordinates_of_its_ranks(
    tmp_path: Path, run_of: Callable[..., Run]
) -> None:
    job = SimulatedJob(ranks=2)
    job.iterate(3, lambda _: job.transfer(1 * MS, [0, 1], group="7"))
    run = run_of(job.write(tmp_path), engine=Here())
    for info in run.infos:
        info.coordinates = {"tp": (0, 1), "dp": (info.rank, 2)}
    assert {each.dimension for each in transfers(run.evidence())} == {"dp"}


@pytest.mark.parametrize("capture", ["kineto/tp2_dp2", "kineto/tp2_dp2_overlap", "nsys/tp2_dp2"])
def test_real_captures_whose_ranks_wait_are_not_bound_by_communication(
    captures: Path, run_of: Callable[..., Run], capture: str
) -> None:
    assert found_by(run_of(captures / capture), exposed_communication, low_overlap) == []
