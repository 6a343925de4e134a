"""What recording costs a simulated host, and what is left of the findings about it."""

import pytest

from bridge_profiling.facts import profiler_cost
from bridge_profiling.facts.profiler_cost import Rates
from bridge_profiling.findings.unprofiled import LAUNCHING
from tests.findings.simulated_jobs import LAUNCH_NS, MS, US, SimulatedJob

approx = pytest.approx

#: Each operator costs 20 µs, and the 20 µs that are left of a launch are the host's own.
_COST_NS, _OWN_NS = 20 * US, 20 * US


@pytest.fixture
def run_job(tmp_path_factory, run_of, monkeypatch):
    """Opens a simulated job whose recorded operators, and what their shapes add, cost so much."""

    def opened(job, shapes_ns=0.0, launch_ns=LAUNCH_NS):
        monkeypatch.setattr(
            profiler_cost, "rates", lambda source: Rates(_COST_NS, 0.0, 0.0, 0.0, 0.0, shapes_ns, launch_ns, 0.0, 0.0)
        )
        return run_of(job.write(tmp_path_factory.mktemp("job")))

    return opened


def _job(step, own_ns=_OWN_NS, ranks=1):
    return SimulatedJob(step, ranks, pause_ns=own_ns + _COST_NS - LAUNCH_NS)


def _kernels(took_ns, count=100):
    return lambda job, _: job.launch(job.all, took_ns, count=count)


def test_a_device_that_waits_for_recording_alone_is_not_launch_bound(run_job):
    # A launch takes 40 µs with recording and 20 without, as long as a kernel.
    run = run_job(_job(_kernels(20 * US)))
    assert run.grids.profiler.estimated_ns == approx(100 * _COST_NS, rel=0.05)
    assert all(run.grids.is_doubtful(cause) for cause in LAUNCHING)  # which of them is uncertain
    found = {finding.id: finding for finding in run.findings}
    assert found.keys() == {"profiler_overhead", "dominant_kernel"}
    overhead = found["profiler_overhead"]
    assert overhead.evidence["unprofiled_iteration_ns"] == {"0": approx(2 * MS, rel=0.05)}
    assert overhead.evidence["host_cost_ns"] == {"operators": 100 * _COST_NS}


def test_waits_that_recording_does_not_prolong_are_in_no_doubt(run_job):
    def step(job, _):
        job.launch(0, 10 * US, count=200)
        for _ in range(4):
            job.wait(0)
            job.be_in(0, "thinking", 190 * US)
            job.launch(0, 10 * US, None)

    assert "host_sync" in {finding.id for finding in run_job(_job(step)).findings}


def test_what_recording_does_not_explain_is_a_finding(run_job):
    # A launch takes 90 µs with recording and 70 without.
    run = run_job(_job(_kernels(10 * US), own_ns=70 * US))
    found = {finding.id: finding for finding in run.findings}
    assert found["host_launch_bound"].recoverable_ns_per_iteration == approx(100 * 60 * US, rel=0.05)
    assert run.conclusion.unprofiled.iteration_ns == approx(100 * 70 * US, rel=0.05)
    assert "(85%)" in found["host_launch_bound"].title


def _gaining_while_the_device_is_busy(job, _):
    """What the host gains shortens every later gap."""
    job.launch(0, 10 * US, count=100)
    job.launch(0, 100 * US)
    job.launch(0, 5 * MS)
    job.call(0, "cudaFree", 200 * US, "aten::empty")  # a wait that ends while the device is busy
    job.launch(0, 10 * US, count=50)  # recorded for 1 ms beside the same kernel
    job.be_in(0, "thinking", 4_400 * US)
    job.launch(0, 10 * US)  # 0.56 ms late
    job.be_in(0, "thinking", 370 * US)
    job.launch(0, 10 * US)  # 0.39 ms late


def _reducing_beside_later_kernels(job, _):
    job.meet(2 * MS, overlaps=True)
    job.launch(job.all, 10 * US, count=100)  # 2 of 3 ms beside the reduction


def _waiting_on_rank_0(job, _):
    job.launch(0, 10 * US, count=100)
    job.launch(1, 1 * MS, count=20)
    job.meet()


def _reading_after_each_kernel(job, _):
    for _ in range(50):
        job.launch(0, 10 * US)
        job.copy(0, 2 * US, memory="pinned", size=8, out=True)
        job.wait(0, operator="aten::item")


@pytest.mark.parametrize(
    ("step", "how", "launch_ns", "estimated_ns"),
    [
        (_kernels(100 * US), {}, 5 * US, approx(0, abs=2 * _COST_NS)),  # nothing while the host is ahead
        (_gaining_while_the_device_is_busy, {"own_ns": 10 * US}, 5 * US, approx(101 * _COST_NS + 950 * US, rel=0.01)),
        (_reducing_beside_later_kernels, {"ranks": 2}, 5 * US, approx(100 * _COST_NS, rel=0.05)),
        (_waiting_on_rank_0, {"ranks": 2}, 5 * US, approx(0, abs=3 * _COST_NS)),
        # A host that is earlier at a copy waits less for it. The last part of each gap is in doubt.
        (_reading_after_each_kernel, {}, 5 * US, approx(3 * 50 * _COST_NS, rel=0.25)),
        # A slower host pays more for the same records.
        (_kernels(10 * US), {"own_ns": 100 * US}, 2.5 * US, approx(200 * _COST_NS, rel=0.05)),
        (_kernels(10 * US), {"own_ns": 100 * US}, 0.1 * US, approx(300 * _COST_NS, rel=0.05)),
        # What records nothing but operators needs about as long without the profiler as that costs.
        (_kernels(10 * US, 1000), {"own_ns": 5 * US}, 5 * US, approx(0.55 * 25 * MS, rel=0.05)),
    ],
)
def test_recording_costs_what_it_delays_the_device(run_job, step, how, launch_ns, estimated_ns):
    assert run_job(_job(step, **how), launch_ns=launch_ns).grids.profiler.estimated_ns == estimated_ns


@pytest.mark.parametrize("slow", [[10], [10, 11]])
def test_a_first_iteration_that_launches_slowly_is_the_profilers(run_job, slow):
    def step(job, number):
        job.pause_ns = (100 if number in slow else 35) * US
        job.launch(0, 20 * US, count=100)

    run = run_job(SimulatedJob(step))
    bound = {"host_launch_bound", "low_device_busy"} if len(slow) > 1 else set()
    assert {finding.id for finding in run.findings} == {"profiler_overhead", "dominant_kernel"} | bound
    assert bound or run.conclusion.unprofiled.iteration_ns == approx(2 * MS, rel=0.05)


def test_shapes_cost_more(run_job):
    job = _job(_kernels(10 * US), own_ns=70 * US)
    for row in job.rows[0]["host_events"]:
        row["shapes"] = "[[16, 16]]" if row["category"] == "operator" else None
    run = run_job(job, shapes_ns=30 * US)
    assert run.grids.profiler.estimated_ns == approx(100 * (_COST_NS + 30 * US), rel=0.05)
    found = {finding.id: finding for finding in run.findings}
    assert found["profiler_overhead"].evidence["host_cost_ns"] == {"operators": 2 * MS, "shapes": 3 * MS}


def test_a_host_that_recording_slows_is_no_straggler(run_job):
    def step(job, _):
        job.pause_ns = 25 * US
        job.launch(0, 10 * US, count=300)
        job.pause_ns = 31 * US  # the same records cost this host a quarter more
        job.launch(1, 10 * US, count=300)
        job.meet()

    assert "straggler_host" not in {finding.id for finding in run_job(SimulatedJob(step, 2)).findings}


def test_savings_are_less_than_the_unprofiled_iteration_has_besides_compute(run_job):
    def step(job, number):
        if number == 12:
            job.be_in(job.all, "checkpoint", 500 * MS)
        job.be_in(0, "data-loading", 5 * MS)
        job.launch(job.all, 10 * US, count=200)
        job.wait(1, operator="aten::item")
        job.launch(1, 100 * US, count=20)
        job.meet(1 * MS)

    run = run_job(_job(step, ranks=2))
    compute_ns = min(run.facts.iterations["compute_ns"].to_pylist())
    savings = [finding.recoverable_ns_per_iteration or 0.0 for finding in run.findings]
    assert sum(savings) > 0.9 * 500 * MS / 4
    assert sum(savings) <= run.conclusion.unprofiled.iteration_ns - compute_ns + 1e-6
