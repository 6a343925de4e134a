"""A number is a finding from its threshold on, or past it, to the last bit; the defaults are of the size that they are."""

import pytest

from bridge_profiling.findings import Thresholds, communication, device_work, idle, kernels, ranks
from tests.findings.simulated_jobs import MS, US, SimulatedJob, found_by

_DATA, _BF16, _CONVOLUTION = "DATA_PARALLEL_GROUP", "nvjet_sm90_tst", "aten::cudnn_convolution"
_PRODUCTS = [(500, "aten::bmm", _BF16), (1_000, "aten::_softmax", "softmax_warp_forward"), (500, "aten::bmm", _BF16)]
_LAYOUTS = [(1_500, _CONVOLUTION, "cudnn::ops::nchwToNhwcKernel"), (9, _CONVOLUTION, "fprop")]
_SWEEP = [(time, f"aten::{name}", name) for time in (12, 32) * 20 for name in ("mul_", "add_")]


def _launches(*each):
    """Kernels besides 20 ms of others: how long, the operator and the name."""
    return lambda job, _: [job.busy(), *(job.launch(0, us * US, operator, name=name) for us, operator, name in each)]


def _waits(times, took_ns):
    """Late launches after so many waits."""
    step = lambda job: [job.launch(0, took_ns), job.wait(0, "aten::item"), job.be_in(0, "forward", 180 * US)]  # noqa: E731
    return lambda job, _: [step(job) for _ in range(times)]


def _reduced(took_ns, **how):
    return lambda job, _: [job.busy(), job.meet(took_ns, group=_DATA, **how), job.launch(job.all, 100 * US)]


# The number: a share of the iteration, in the evidence or the saving, as a multiple of the threshold; or itself.
@pytest.mark.parametrize(
    ("find", "step", "on", "threshold", "number", "times", "at_it"),
    [
        (communication.exposed_communication, _reduced(8 * MS, size=9), 2, "communication", "exposed_transfer_ns", 1, False),
        (communication.low_overlap, _reduced(MS, size=1 << 28), 2, "cause", "could_hide_ns", 1, False),
        (device_work.full_precision_matmul, _launches((1_500, "aten::mm", "sgemm")), 1, "device_work", "saving", 1, True),
        (device_work.unfused_attention, _launches(*_PRODUCTS), 1, "device_work", "saving", 1, True),
        (device_work.layout_conversion, _launches(*_LAYOUTS), 1, "device_work", "saving", 1, True),
        (device_work.unfused_optimizer, _launches(*_SWEEP), 1, "device_work", "saving", 1, True),
        (
            ranks.straggler_compute, lambda job, _: [job.busy(), job.launch(1, 100 * US, count=12), job.meet()], 2,
            "cause", "excess_compute_ns", 1, False,
        ),
        (
            kernels.dominant_kernel, lambda job, _: [job.launch(0, MS, name=name) for name in "aaabcdef"], 1,
            "dominant_kernel", 3 / 8, 1, False,
        ),
        # Few waits must cost twice the threshold.
        (idle.host_sync, _waits(5, 2 * MS), 1, "cause", "saving", 2, None),
    ],
)  # fmt: skip
def test_a_number_is_a_finding_from_its_threshold_on(open_job, find, step, on, threshold, number, times, at_it):
    run, default = open_job(SimulatedJob(step, on)), getattr(Thresholds(), threshold)
    (finding,) = found_by(run, find)
    if isinstance(number, str):
        time_ns = finding.recoverable_ns_per_iteration if number == "saving" else finding.evidence[number]["1"]
        number = run.grids.share(time_ns) / times
    assert default < number < 2 * default
    for factor, is_one in ((1 - 1e-12, True), (1, at_it), (1 + 1e-12, False)):
        found = found_by(run, find, thresholds=Thresholds(**{threshold: number * factor}))
        assert is_one is None or bool(found) == is_one
