"""Who is late, with what, and who only waits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bridge_profiling.analysis import Run
from bridge_profiling.analysis.findings import Confidence, Finding, Thresholds
from bridge_profiling.analysis.findings.ranks import straggler_compute, straggler_host
from tests.analysis.findings.simulated_jobs import MS, US, Here, SimulatedJob, found_by

Find = Callable[..., dict[str, Finding]]


@pytest.fixture
def find(tmp_path_factory: pytest.TempPathFactory, run_of: Callable[..., Run]) -> Find:
    """Findings on stragglers, by id."""

    def found(job: SimulatedJob, thresholds: Thresholds | None = None, **info: object) -> dict[str, Finding]:
        run = run_of(job.write(tmp_path_factory.mktemp("job"), **info), engine=Here())
        return {finding.id: finding for finding in found_by(run, straggler_compute, straggler_host, thresholds=thresholds)}

    return found


def _job(extra: Callable[[SimulatedJob, int], None], *, ranks: int = 4, iterations: int = 4) -> SimulatedJob:
    job = SimulatedJob(ranks=ranks)

    def step(number: int) -> None:
        extra(job, number)
        job.even_step()

    job.iterate(iterations, step)
    return job


def test_ranks_that_do_the_same_are_no_stragglers(find: Find) -> None:
    assert find(_job(lambda job, _: None)) == {}


def test_a_rank_that_computes_more_is_named_with_its_matrix_products(find: Find) -> None:
    found = find(_job(lambda job, _: job.compute(2, 1 * MS, name="nvjet_sm90_tst_256x128", count=5)))
    assert list(found) == ["straggler_compute"]
    finding = found["straggler_compute"]
    assert finding.ranks == [2]
    assert finding.evidence["excess_compute_us"]["2"] == pytest.approx(5_000, rel=0.01)
    assert finding.evidence["of_matrix_products_us"] == pytest.approx(5_000, rel=0.01)
    assert finding.recoverable_us_per_iteration == pytest.approx(5_000, rel=0.02)
    assert (finding.events[0].rank, finding.events[0].name, finding.events[0].count) == (2, "nvjet_sm90_tst_256x128", 5)
    assert finding.confidence is Confidence.high
    assert "sequences" in finding.action


def test_a_rank_whose_same_kernels_are_slower_has_a_slow_device(find: Find) -> None:
    job = SimulatedJob(ranks=4)

    def step(_: int) -> None:
        for rank in range(4):
            job.compute(rank, 600 * US if rank == 1 else 500 * US, count=40)
        job.transfer(200 * US, range(4))

    job.iterate(4, step)
    finding = find(job)["straggler_compute"]
    assert finding.ranks == [1]
    assert finding.evidence["of_more_kernels_us"] == 0
    assert finding.evidence["of_slower_kernels_us"] == pytest.approx(4_000, rel=0.01)
    assert "clocks" in finding.action


def test_two_iterations_may_be_chance(find: Find) -> None:
    finding = find(_job(lambda job, _: job.compute(2, 5 * MS), iterations=2))["straggler_compute"]
    assert finding.confidence is Confidence.medium
    assert finding.confidence_reason


def test_compute_that_communication_slows_on_a_waiting_rank_is_not_its_fault(find: Find) -> None:
    """Rank 1 is early, and its communication runs beside its compute while it waits; that slows its kernels."""
    job = SimulatedJob(ranks=2)

    def step(_: int) -> None:
        job.compute(0, 5 * MS)
        job.be_in(0, "something", 6 * MS)
        job.transfer(1 * MS, [0, 1], group="DATA_PARALLEL_GROUP", beside=True)
        job.compute(0, 10 * MS)
        job.compute(1, 15 * MS + 2 * MS)
        job.transfer(100 * US, [0, 1])

    job.iterate(4, step)
    assert "straggler_compute" not in find(job)


def test_stages_of_a_pipeline_do_different_work(find: Find, tmp_path: Path, run_of: Callable[..., Run]) -> None:
    job = _job(lambda job, _: [job.compute(rank, 5 * MS) for rank in (2, 3)])
    folder = job.write(tmp_path)
    by_stage = {rank: {"pp": (rank // 2, 2), "dp": (rank % 2, 2)} for rank in range(4)}
    run = run_of(folder, engine=Here())
    for info in run.infos:
        info.coordinates = by_stage[info.rank]
    assert found_by(run, straggler_compute) == []


def test_a_late_host_is_named_and_not_the_ranks_that_wait_for_it(find: Find) -> None:
    def late(job: SimulatedJob, _: int) -> None:
        for _ in range(4):
            job.wait(3)
            job.be_in(3, "something", 2 * MS)
            job.compute(3, 10 * US)

    found = find(_job(late))
    assert list(found) == ["straggler_host"]
    finding = found["straggler_host"]
    assert finding.ranks == [3]
    assert finding.evidence["late_us"]["3"] == pytest.approx(8_000, rel=0.1)
    assert finding.recoverable_us_per_iteration == pytest.approx(8_000, rel=0.1)
    assert finding.evidence["waited_for_us"]["3"] > finding.evidence["waiting_us"]["3"]
    assert {event.rank for event in finding.events} == {3}
    assert finding.confidence is Confidence.low  # no manifest says what the profiler cost
    assert "manual_gc" in finding.action


def test_lateness_in_one_iteration_of_many_makes_no_straggler(find: Find) -> None:
    def late(job: SimulatedJob, number: int) -> None:
        if number == 12:
            job.wait(3)
            job.be_in(3, "something", 8 * MS)

    assert find(_job(late, iterations=5)) == {}


def test_communication_that_names_no_group_leaves_the_late_host_and_doubt(find: Find) -> None:
    def late(job: SimulatedJob, _: int) -> None:
        job.wait(0)
        job.be_in(0, "something", 8 * MS)

    job = _job(late)
    job.without_groups()
    finding = find(job)["straggler_host"]
    assert finding.ranks == [0]
    assert finding.confidence is Confidence.low
    assert "matched" in finding.confidence_reason


def test_one_rank_alone_is_compared_with_none(find: Find) -> None:
    assert find(_job(lambda job, _: None, ranks=1)) == {}


def test_the_threshold_can_be_set(find: Find) -> None:
    job = _job(lambda job, _: job.compute(2, 1 * MS, count=2))
    assert "straggler_compute" in find(job)
    assert "straggler_compute" not in find(job, Thresholds(cause=0.2))


@pytest.mark.parametrize(("capture", "of_compute_ranks"), [("kineto/plant_straggler", [2]), ("kineto/tp2_dp2", [])])
def test_real_captures_with_planted_stragglers(
    captures: Path, run_of: Callable[..., Run], capture: str, of_compute_ranks: list[int]
) -> None:
    run = run_of(captures / capture)
    found = found_by(run, straggler_compute)
    assert [rank for finding in found for rank in finding.ranks] == of_compute_ranks
    for finding in found:
        assert finding.evidence["of_matrix_products_us"] == pytest.approx(27_400, rel=0.02)
        assert finding.events[0].name.startswith("nvjet")
        assert finding.events[0].count == 160
    hosts = [rank for finding in found_by(run, straggler_host) for rank in finding.ranks]
    assert hosts == ([0, 2] if of_compute_ranks else [1, 3])
