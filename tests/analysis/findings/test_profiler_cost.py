"""What recording costs a simulated host, and what is left of the findings about it."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from bridge_profiling.analysis import Run
from bridge_profiling.analysis.attribution import profiler_cost
from bridge_profiling.analysis.attribution.profiler_cost import Rates
from tests.analysis.findings.conftest import RunOf
from tests.analysis.findings.simulated_jobs import LAUNCH_NS, MS, US, SimulatedJob

approx = pytest.approx

RunJob = Callable[..., Run]

#: Each operator costs 20 µs, and the 10 µs that are left of a launch are the host's own.
_COST_US, _OWN_NS = 20, 10 * US


@pytest.fixture
def run_job(tmp_path_factory: pytest.TempPathFactory, run_of: RunOf, monkeypatch: pytest.MonkeyPatch) -> RunJob:
    """Opens a simulated job whose recorded operators, and what their shapes add, cost so much."""

    def opened(job: SimulatedJob, shapes_us: float = 0.0, launch_us: float = LAUNCH_NS / US) -> Run:
        monkeypatch.setattr(profiler_cost, "rates", lambda: Rates(_COST_US, 0.0, 0.0, 0.0, 0.0, shapes_us, launch_us, 0.0))
        return run_of(job.write(tmp_path_factory.mktemp("job")))

    return opened


def _job(step: Callable[[SimulatedJob, int], Any], own_ns: int = _OWN_NS, ranks: int = 1) -> SimulatedJob:
    return SimulatedJob(step, ranks, pause_ns=own_ns + _COST_US * US - LAUNCH_NS)


def _kernels(took_ns: int, count: int = 100) -> Callable[[SimulatedJob, int], None]:
    return lambda job, _: job.launch(job.all, took_ns, count=count)


def test_a_device_that_waits_for_recording_alone_is_not_launch_bound(run_job: RunJob) -> None:
    # A launch takes 30 µs with recording and 10 without, as long as a kernel.
    run = run_job(_job(_kernels(10 * US)))
    assert run.evidence().profiler.estimated_us == approx(100 * _COST_US, rel=0.05)
    found = {finding.id: finding for finding in run.findings()}
    assert found.keys() == {"profiler_overhead", "dominant_kernel"}
    overhead = found["profiler_overhead"]
    assert overhead.evidence["unprofiled_iteration_us"] == {"0": approx(1_000, rel=0.05)}
    assert overhead.evidence["host_cost_us"] == {"operators": 100 * _COST_US}
    assert re.search(r": 3\.0\d ms profiled, about 1\.0\d ms without the profiler$", overhead.title)
    assert "device alone" in overhead.action


def test_what_recording_does_not_explain_is_a_finding(run_job: RunJob) -> None:
    # A launch takes 90 µs with recording and 70 without.
    run = run_job(_job(_kernels(10 * US), own_ns=70 * US))
    found = {finding.id: finding for finding in run.findings()}
    assert found["host_launch_bound"].recoverable_us_per_iteration == approx(100 * 60, rel=0.05)
    assert run.unprofiled().iteration_us == approx(100 * 70, rel=0.05)
    assert found["host_launch_bound"].evidence["share_of_iteration"] == approx(6 / 7, rel=0.05)


def test_recording_costs_nothing_while_the_host_is_ahead(run_job: RunJob) -> None:
    run = run_job(_job(_kernels(100 * US)))
    assert run.evidence().profiler.estimated_us < 2 * _COST_US
    assert run.ask("profiler_cost")["host_cost_us"].to_pylist() == [100 * _COST_US] * 4


def test_what_the_host_gains_while_the_device_is_busy_shortens_every_later_gap(run_job: RunJob) -> None:
    def step(job: SimulatedJob, _: int) -> None:
        job.launch(0, 10 * US, count=100)
        job.launch(0, 100 * US)
        job.launch(0, 5 * MS)
        job.call(0, "cudaFree", 200 * US, "aten::empty")  # a wait that ends while the device is busy
        job.launch(0, 10 * US, count=50)  # recorded for 1 ms beside the same kernel
        job.be_in(0, "thinking", 4_400 * US)
        job.launch(0, 10 * US)  # 0.56 ms late
        job.be_in(0, "thinking", 370 * US)
        job.launch(0, 10 * US)  # 0.39 ms late

    assert run_job(_job(step)).evidence().profiler.estimated_us == approx(101 * _COST_US + 950, rel=0.01)


def test_a_reduction_beside_later_kernels_does_not_hide_the_cost(run_job: RunJob) -> None:
    def step(job: SimulatedJob, _: int) -> None:
        job.meet(2 * MS, overlaps=True)
        job.launch(job.all, 10 * US, count=100)  # 2 of 3 ms beside the reduction

    evidence = run_job(_job(step, ranks=2)).evidence()
    assert evidence.profiler.estimated_us == approx(100 * _COST_US, rel=0.05)


def test_a_first_iteration_that_launches_slowly_is_the_profilers(run_job: RunJob) -> None:
    def step(job: SimulatedJob, number: int) -> None:
        job.pause_ns = (100 if number == 10 else 25) * US
        job.launch(0, 10 * US, count=100)

    run = run_job(SimulatedJob(step))
    assert {finding.id for finding in run.findings()} == {"profiler_overhead", "dominant_kernel"}
    assert run.unprofiled().iteration_us == approx(1_000, rel=0.05)


def test_faster_kernels_do_not_make_an_iteration_shorter_than_its_host_needs(run_job: RunJob) -> None:
    def step(job: SimulatedJob, _: int) -> None:
        job.launch(0, 75 * US, count=100, name="ampere_sgemm_128x64_tn")

    # In bf16 the device needs 0.5 ms, and the host 7 without the profiler.
    (finding,) = (each for each in run_job(_job(step, own_ns=70 * US)).findings() if each.id == "full_precision_matmul")
    assert finding.recoverable_us_per_iteration < 0.2 * finding.evidence["matrix_products_us"]["FP32"]


def test_what_a_waiting_rank_records_costs_the_job_nothing(run_job: RunJob) -> None:
    def step(job: SimulatedJob, _: int) -> None:
        job.launch(0, 10 * US, count=100)
        job.launch(1, 1 * MS, count=20)
        job.meet()

    evidence = run_job(_job(step, ranks=2)).evidence()
    explained = evidence.mean_us(sum(evidence.profiler.explained_us.values()))
    assert explained[0] > 90 * _COST_US
    assert evidence.profiler.estimated_us < 3 * _COST_US


def test_shapes_cost_more(run_job: RunJob) -> None:
    job = _job(_kernels(10 * US), own_ns=70 * US)
    for row in job.rows[0]["host_events"]:
        row["shapes"] = "[[16, 16]]" if row["category"] == "operator" else None
    run = run_job(job, shapes_us=30)
    assert run.evidence().profiler.estimated_us == approx(100 * (_COST_US + 30), rel=0.05)
    found = {finding.id: finding for finding in run.findings()}
    assert found["profiler_overhead"].evidence["host_cost_us"] == {"operators": 2_000, "shapes": 3_000}
    assert "record_shapes=false" in found["profiler_overhead"].action


@pytest.mark.parametrize(("launch_us", "factor"), [(2.5, 2), (10, 0.5), (0.1, 2.5)])
def test_a_slower_host_pays_more_for_the_same_records(run_job: RunJob, launch_us: float, factor: float) -> None:
    run = run_job(_job(_kernels(10 * US), own_ns=100 * US), launch_us=launch_us)
    assert run.evidence().profiler.estimated_us == approx(100 * _COST_US * factor, rel=0.05)


def test_a_host_that_recording_slows_is_no_straggler(run_job: RunJob) -> None:
    def step(job: SimulatedJob, _: int) -> None:
        job.pause_ns = 25 * US
        job.launch(0, 10 * US, count=300)
        job.pause_ns = 31 * US  # the same records cost this host a quarter more
        job.launch(1, 10 * US, count=300)
        job.meet()

    assert "straggler_host" not in {finding.id for finding in run_job(SimulatedJob(step, 2)).findings()}


@pytest.mark.parametrize("own_us", [10, 70])
def test_savings_are_less_than_the_unprofiled_iteration_has_besides_compute(run_job: RunJob, own_us: int) -> None:
    def step(job: SimulatedJob, number: int) -> None:
        if number == 12:
            job.be_in(job.all, "checkpoint", 500 * MS)
        job.be_in(0, "data-loading", 5 * MS)
        job.launch(job.all, 10 * US, count=200)
        job.wait(1, operator="aten::item")
        job.launch(1, 100 * US, count=20)
        job.meet(1 * MS)

    run = run_job(_job(step, own_ns=own_us * US, ranks=2))
    compute_us = min(run.iterations()["compute_us"].to_pylist())
    savings = [finding.recoverable_us_per_iteration or 0.0 for finding in run.findings()]
    assert sum(savings) > 0.9 * 500_000 / 4
    assert sum(savings) <= run.unprofiled().iteration_us - compute_us + 1e-6
