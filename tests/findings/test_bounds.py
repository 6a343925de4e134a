"""The upper bound of a saving, without its margin: what would go with the cause, and what would stay, by the kind of cause."""

from functools import partial

import pytest

from tests.findings.simulated_jobs import MS, US, SimulatedJob


def _loads(job, number, varies=False):
    job.be_in(0, "data-loading", (20 + 20 * (varies and number % 2)) * MS)
    job.busy()
    job.meet()


def _waits(job, _):
    for time in range(20):
        job.launch(0, 50 * US, count=20)
        job.wait(0, operator="aten::item")
        job.be_in(0, "data-loading" if time % 2 else "forward", 300 * US)


def _loads_and_copies(job, number):
    job.be_in(0, "data-loading", 40 * MS if number == 12 else 0)
    job.launch(0, 500 * US, count=20)
    job.copy(0, (40 if number == 12 else 10) * MS, memory="pinned")
    job.busy()


def _attention(job, _):
    for name, operator in (("nvjet_a", "aten::bmm"), ("softmax_warp_forward", "aten::softmax"), ("nvjet_b", "aten::bmm")):
        job.launch(0, 2 * MS, operator, name=name)
    job.busy()


def _computes_more(job, _):
    job.busy()
    job.launch(1, 1 * MS, name="gemm", count=8)
    job.meet(3 * MS)


@pytest.mark.parametrize(
    ("step", "ranks", "cause", "about_ns", "at_most_ns"),
    [
        # No more than the time in the ranges, although the device idles for other reasons too.
        (_loads, 2, "data_loading", 20 * MS, 20 * MS),
        # Of four iterations with 20 and 40 ms, no more than the most: t(95%, 3) = 2.353 standard errors of 5.8 ms are more.
        (partial(_loads, varies=True), 2, "data_loading", 30 * MS, 40 * MS),
        # The compute of 20 ms stays. So does what the host does, but for an operator of each call, which has 20 kernels.
        (_waits, 1, "host_sync", 3 * MS, 6 * MS),
        # All that one of four iterations has beyond its compute, and the copies of the others.
        (_loads_and_copies, 1, "copy_bound", (40 + 3 * 10) * MS / 4, (40 + 40 + 3 * 10) * MS / 4),
        # All of the kernels, while fused ones are expected to take 30% of the products.
        (_attention, 1, "unfused_attention", (2 + 0.7 * 4) * MS, 6 * MS),
        # What rank 0 takes without waiting stays.
        (_computes_more, 2, "straggler_compute", 8 * MS, 8 * MS),
    ],
)
def test_what_goes_and_what_stays(find, step, ranks, cause, about_ns, at_most_ns):
    finding = find(SimulatedJob(step, ranks))[cause]
    assert finding.recoverable_ns_per_iteration == pytest.approx(about_ns, rel=0.05)
    assert finding.at_most_ns_per_iteration == pytest.approx(1.1 * at_most_ns, rel=0.05)
