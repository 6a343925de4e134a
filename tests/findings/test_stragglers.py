"""Which ranks are late, why, and which only wait for them."""

from functools import partial

import pytest

from bridge_profiling.findings import Confidence
from bridge_profiling.findings.ranks import straggler_compute, straggler_host
from tests.findings.simulated_jobs import MS, US, SimulatedJob, found_by

approx = pytest.approx

_FINDS = (straggler_compute, straggler_host)


def _job(extra, ranks=4, iterations=4):
    """All ranks compute the same, launched well in time, and meet; before that, some do more."""
    return SimulatedJob(lambda job, number: [extra(job, number), job.busy(), job.meet(200 * US)], ranks, iterations)


def _late(rank, took_ns=8 * MS, pieces=1):
    def extra(job, _):
        for _ in range(pieces):
            job.wait(rank)
            job.be_in(rank, "something", took_ns // pieces)
            job.launch(rank, 10 * US)

    return extra


def _more_products(job, number, ranks):
    job.launch(ranks[number % len(ranks)], 1 * MS, name="nvjet_sm90_tst_256x128", count=5)


def test_a_rank_that_computes_more_is_named_with_its_matrix_products(find):
    step = partial(_more_products, ranks=[2])
    (finding,) = find(_job(step), *_FINDS).values()
    assert (finding.id, finding.ranks, finding.confidence) == ("straggler_compute", [2], Confidence.high)
    assert finding.evidence["excess_compute_ns"] == {"2": approx(5 * MS, rel=0.01)}
    assert finding.evidence["of_matrix_products_ns"] == finding.recoverable_ns_per_iteration == approx(5 * MS, rel=0.02)
    assert [(event.rank, event.name, event.count) for event in finding.events] == [(2, "nvjet_sm90_tst_256x128", 5)]
    # Two iterations may be chance.
    assert find(_job(step, iterations=2), *_FINDS)["straggler_compute"].confidence is Confidence.medium


def test_a_rank_whose_same_kernels_are_slower_than_clocks_differ_has_a_slow_device(find):
    def found(took_ns):
        def step(job, _):
            for rank in job.all:
                job.launch(rank, took_ns if rank == 1 else 500 * US, count=40)
            job.meet(200 * US)

        return find(SimulatedJob(step, 4), *_FINDS)

    assert found(520 * US) == {}
    finding = found(600 * US)["straggler_compute"]
    assert finding.ranks == [1]
    assert (finding.evidence["of_more_kernels_ns"], finding.evidence["of_slower_kernels_ns"]) == (0, approx(4 * MS, rel=0.01))


def test_stages_of_a_pipeline_do_different_work(tmp_path, run_of):
    run = run_of(_job(lambda job, _: job.launch((2, 3), 5 * MS)).write(tmp_path))
    for info in run.facts.every_info:
        info.coordinates = {"pp": (info.rank // 2, 2), "dp": (info.rank % 2, 2)}
    assert found_by(run, straggler_compute) == []


def test_a_late_host_is_named_and_not_the_ranks_that_wait_for_it(find):
    (finding,) = find(_job(_late(3, pieces=4)), *_FINDS).values()
    assert finding.evidence["late_ns"] == {"3": finding.recoverable_ns_per_iteration} == {"3": approx(8 * MS, rel=0.1)}
    assert finding.evidence["waited_for_ns"]["3"] > finding.evidence["waiting_ns"]["3"]
    assert (finding.id, finding.ranks, {event.rank for event in finding.events}) == ("straggler_host", [3], {3})
    assert "mostly in pauses for no recorded reason" in finding.title
    assert finding.confidence is Confidence.low  # no manifest says what the profiler cost


def test_a_host_with_many_short_pauses_may_share_the_interpreter_with_another_thread(find):
    for pieces in (4, 12):
        (finding,) = find(_job(_late(3, took_ns=5 * MS * pieces, pieces=pieces)), *_FINDS).values()
        assert ("GIL" in finding.action) == (pieces == 12)


def test_a_host_is_as_late_as_the_others_could_be_earlier(find):
    """Both hosts limit the job. The faster one is far ahead, so that only the other one's device waits for launches."""

    def step(job, _):
        job.wait = lambda ranks, operator=None: None
        for rank, pause_us in ((0, 130), (1, 100)):
            for _ in range(50):
                job.be_in(rank, "something", pause_us * US)
                job.launch(rank, 10 * US)
        job.meet()

    finding = find(SimulatedJob(step, 2, iterations=10), *_FINDS)["straggler_host"]
    assert (finding.ranks, finding.evidence["late_ns"]) == ([0], {"0": approx(1_500 * US, rel=0.1)})
    assert "pauses" not in finding.title
    assert finding.evidence["launch_starved_ns"]["0"] == approx(6_500 * US, rel=0.1)


def test_ranks_that_change_by_chance_are_no_stragglers(find):
    for took in (lambda number: number % 2 * 1_500 * US, lambda number: (number - 10) ** 2 % 5 * 400 * US):
        assert find(_job(lambda job, number, took=took: job.launch(1, took(number)), 2, iterations=6), *_FINDS) == {}


@pytest.mark.parametrize(
    ("extra", "finding", "saving_ns"),
    [
        (partial(_more_products, ranks=[0, 1]), "straggler_compute", approx(5 * MS, rel=0.05)),
        (lambda job, number: _late(number % 2, pieces=4)(job, number), "straggler_host", approx(8 * MS, rel=0.2)),
    ],
)
def test_ranks_that_take_turns_in_being_late_are_all_named(find, extra, finding, saving_ns):
    (found,) = find(_job(extra, 2), *_FINDS).values()
    assert (found.id, found.ranks, found.evidence["rotating"]) == (finding, [0, 1], True)
    assert found.evidence["slowest_share"] == {"0": 0.5, "1": 0.5}
    assert found.recoverable_ns_per_iteration == saving_ns


def test_ranks_that_take_turns_with_as_many_kernels_have_data_of_different_sizes(find):
    def step(job, number):
        for rank in job.all:
            for place, name in enumerate(("gemm", "norm", "gelu", "copy", "add", "scale")):
                job.launch(rank, 800 * US if rank == number % 2 == place // 3 else 400 * US, count=10, name=name)
        job.meet(200 * US)

    found = find(SimulatedJob(step, 2))
    assert "straggler_compute" not in found
    assert found["uneven_work"].ranks == [0, 1]
    # One has 36 ms and the other 24: evened out, both have 30.
    assert found["uneven_work"].recoverable_ns_per_iteration == approx(6 * MS, rel=0.05)
    # All turns cost the same: one is enough.
    assert find(SimulatedJob(step, 2, iterations=3))["uneven_work"].ranks == [0, 1]


def test_kernels_that_are_interrupted_on_one_device_share_it(find):
    def step(job, _):
        for rank in job.all:
            for name in ("gemm", "norm", "copy", "gelu"):
                job.launch(rank, 300 * US, name=name, count=10)
                job.launch(rank, 2_900 * US if rank == 1 else 300 * US, name=name)
        job.meet(200 * US)

    found = find(SimulatedJob(step, 2))
    assert "straggler_compute" not in found
    assert found["contended_device"].ranks == [1]
    assert found["contended_device"].recoverable_ns_per_iteration == approx(4 * 2_600 * US, rel=0.02)


def _unmarked(job):
    for rows in job.rows.values():
        rows["iterations"].clear()
        for row in (*rows["device_events"], *rows["collectives"]):
            row["iteration"] = None
    return job


def test_captures_without_iterations_can_cover_different_work_so_no_rank_computes_too_long(find):
    assert list(find(_unmarked(_job(partial(_more_products, ranks=[1]), 2)), *_FINDS)) == []


def test_a_capture_without_iterations_that_begins_late_makes_no_late_host(find):
    def step(job, number, late):
        if number in late:
            job.wait(1)
            job.launch(1, 10 * US)
            job.be_in(1, "something", 30 * MS)
        job.busy()
        job.meet()

    assert list(find(_unmarked(SimulatedJob(partial(step, late=(10,)), 2)), *_FINDS)) == []
    assert find(_unmarked(SimulatedJob(partial(step, late=(10, 12)), 2)), *_FINDS)["straggler_host"].ranks == [1]
