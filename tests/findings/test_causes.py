"""A run with one cause has the finding of that cause, on the ranks that have it, with what it costs and its bounds."""

from functools import partial

import pytest

from bridge_profiling.findings import Thresholds, communication, device_work, idle, kernels, ranks
from tests.findings.simulated_jobs import MS, US, SimulatedJob, found_by

approx = pytest.approx

#: What follows from other causes, or describes the work.
CONSEQUENCES = {"low_device_busy", "dominant_kernel"}

_NEXT = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


def _loading(job, _, ranks=(0, 1)):
    for _ in range(2):
        job.wait(job.all)
        job.be_in(ranks, "data-loading", 15 * MS)
        job.busy()
    job.meet()


def _loading_in_turns(job, _):
    for place in range(2):
        for rank in job.all:
            job.be_in(rank, _NEXT, 20 * MS if place == rank else 10 * US)
            job.busy(rank, kernels=20)
        job.meet()
        job.wait(job.all)


def _loading_while_the_device_works(job, _, took_ns=15 * MS):
    job.busy()
    job.be_in(0, "data-loading", took_ns)  # 20 ms of kernels are launched before
    job.busy()


def _items(job, _, items=20):
    for place in range(20):
        job.launch(0, 100 * US, count=5)
        if place < items:
            job.wait(0, operator="aten::_local_scalar_dense")
        # What a host needs to get going again; while it is ahead, nobody waits for it.
        job.be_in(0, "forward", 100 * US)


def _an_item_while_the_device_works(job, _):
    job.busy()
    job.wait(0, operator="aten::item")  # 20 ms, in which the device works
    job.busy()


def _copies(job, _, memory="pageable"):
    for _ in range(2):
        job.busy(kernels=10)
        job.copy(0, 4 * MS, memory=memory)
        job.busy(kernels=10)


def _copies_of_a_few_bytes(job, _):
    for _ in range(10):
        job.busy(kernels=2)
        job.copy(0, 2 * US, size=8)


def _small_kernels(job, _):
    job.pause_ns = 10 * US
    job.busy()
    job.wait(0)
    job.launch(0, 2 * US, "aten::add_", count=1000)


def _slow_host(job, _):
    job.pause_ns = 55 * US
    job.launch(0, 20 * US, count=1000)


def _taking_memory_from_the_driver(job, _, call, operator):
    # The device has 2 ms of work left each time, and 0.1 ms is what the next launches take.
    for _ in range(4):
        job.busy(kernels=4)
        job.call(0, call, 3 * MS, operator)


def _late_while_waiting_for_another(job, _):
    job.launch(0, 1 * MS, count=10)
    job.launch(1, 1 * MS, count=40)
    job.meet()
    job.be_in(0, "thinking", 15 * MS)  # rank 0 waits for rank 1 for 30 ms
    job.launch(job.all, 1 * MS, count=2)


_ITEM = "cudaStreamSynchronize in aten::_local_scalar_dense"


def _copied(memory):
    copies = {"rank": 0, "direction": "HtoD", "host_memory": memory, "count": 8, "bytes": 8 << 24}
    return {"copies": [copies | {"total_ns": 32 * MS, "bandwidth_gbs": approx(4.194, rel=1e-3)}]}


_DATA, _LAUNCH, _SYNC, _CHURN = "data_loading", "host_launch_bound", "host_sync", "allocator_churn"
_FREE = partial(_taking_memory_from_the_driver, call="cudaFree", operator="aten::empty")
_PIN = partial(_taking_memory_from_the_driver, call="cudaHostAlloc", operator="aten::pin_memory")
_CALLS = {"calls": {"0": 4}}
_PINNED = partial(_copies, memory="pinned")


@pytest.mark.parametrize(
    ("step", "ranks", "cause", "on", "cost_ns", "severe", "event", "action", "evidence"),
    [
        (_loading, 2, _DATA, [0, 1], approx(30 * MS, rel=0.02), True, "data-loading", "num_workers", {}),
        (partial(_loading, ranks=[1]), 3, _DATA, [1], approx(30 * MS, rel=0.02), True, "data-loading", "", {}),
        (_loading_in_turns, 2, _DATA, [0, 1], approx(40 * MS, rel=0.02), True, "", "", {}),
        (_items, 1, _SYNC, [0], approx(20 * 107 * US, rel=0.1), False, _ITEM, ".item()", {"synchronizations": {"0": 20}}),
        (_copies, 1, "pageable_copy", [0], approx(8 * MS, rel=0.05), False, "", "", _copied("pageable")),
        (_PINNED, 1, "copy_bound", [0], approx(8 * MS, rel=0.05), False, "", "", _copied("pinned")),
        (_small_kernels, 1, "small_kernels", [0], approx(13 * MS, rel=0.1), False, "before aten::add_", "", {}),
        (_FREE, 1, _CHURN, [0], approx(4 * MS, rel=0.1), False, "cudaFree in aten::empty", "expandable_segments", _CALLS),
        (_PIN, 1, _CHURN, [0], approx(4 * MS, rel=0.1), False, "cudaHostAlloc in aten::pin_memory", "Pin buffers once", _CALLS),
        (_slow_host, 1, _LAUNCH, [0], approx(40 * MS, rel=0.05), True, "", "cuda_graph_impl", {}),
        (_late_while_waiting_for_another, 2, "straggler_compute", [1], approx(27 * MS, rel=0.05), False, "", "", {}),
    ],
)
def test_a_cause_is_found_with_its_cost_and_no_other(find, step, ranks, cause, on, cost_ns, severe, event, action, evidence):
    found = find(SimulatedJob(step, ranks))
    assert found.keys() - CONSEQUENCES == {cause}
    finding = found[cause]
    assert (finding.ranks, finding.recoverable_ns_per_iteration, finding.severe) == (on, cost_ns, severe)
    assert (finding.events[0].name.startswith(event), action in finding.action) == (True, True)
    assert finding.evidence.items() >= evidence.items()


@pytest.mark.parametrize(("kernels", "named"), [(1000, [0, 1]), (800, [0])])
def test_ranks_that_launch_as_many_small_kernels_are_named_together(find, kernels, named):
    def step(job, _):
        for rank, count, job.pause_ns in ((0, 1000, 30 * US), (1, kernels, 2 * US)):
            job.launch(rank, 2 * US, count=count)
        job.meet()

    assert find(SimulatedJob(step, 2), idle.small_kernels)["small_kernels"].ranks == named


def _even(job, _):
    job.busy()
    job.meet()


def _on_cpus(job, _):
    job.be_in(job.all, "aten::mm", 20 * MS, category="operator")


# The last but for a synchronization at the end of the iteration.
_ALONE = (_loading_while_the_device_works, _an_item_while_the_device_works, _copies_of_a_few_bytes, partial(_items, items=0))


@pytest.mark.parametrize(("step", "ranks"), [(_even, 2), (_on_cpus, 2), *((step, 1) for step in _ALONE)])
def test_what_costs_the_device_nothing_is_no_finding(find, step, ranks):
    assert find(SimulatedJob(step, ranks)).keys() <= {"dominant_kernel"}


def test_names_of_ranges_and_thresholds_decide_what_is_a_finding(find):
    # 13% of an iteration.
    job = SimulatedJob(lambda job, _: [job.be_in(0, "Nachschub", 3 * MS), job.busy()])
    for known, is_found in (({}, True), ({"data_loading": 0.2}, False)):
        assert ("data_loading" in find(job, thresholds=Thresholds(data_loading_ranges="^nachschub$", **known))) == is_found


def test_a_checkpoint_between_two_iterations(find):
    def step(job, number):
        if number == 12:
            job.be_in(job.all, "checkpoint", 50 * MS)
        _even(job, number)

    job = SimulatedJob(step, 2)
    for rank in job.all:
        job.rows[rank]["iterations"][2]["start_ns"] += 50 * MS
    found = find(job)["checkpoint_stall"]
    assert (found.ranks, found.evidence["iterations"]) == ([0, 1], [11])
    assert found.recoverable_ns_per_iteration == approx(50 * MS / 4, rel=0.02)
    assert "async_save" in found.action


def test_captures_without_marked_iterations_are_judged_as_wholes(find):
    job = SimulatedJob(None)
    _loading_while_the_device_works(job, None, took_ns=35 * MS)  # in 20 of which the device works
    found = find(job)["data_loading"]
    assert "of each capture" in found.title
    assert found.recoverable_ns_per_iteration == approx(15 * MS, rel=0.05)


def _loads(job, number, varies=False):
    job.be_in(0, "data-loading", (20 + 20 * (varies and number % 2)) * MS)
    job.busy()
    job.meet()


def _reads(job, _):
    for time in range(20):
        job.launch(0, 50 * US, count=20)
        job.wait(0, operator="aten::item")
        job.be_in(0, "data-loading" if time % 2 else "forward", 300 * US)


def _loads_and_copies(job, number):
    job.be_in(0, "data-loading", 40 * MS if number == 12 else 0)
    job.launch(0, 500 * US, count=20)
    job.copy(0, (40 if number == 12 else 10) * MS, memory="pinned")
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
        (_reads, 1, "host_sync", 3 * MS, 6 * MS),
        # All that one of four iterations has beyond its compute, and the copies of the others.
        (_loads_and_copies, 1, "copy_bound", (40 + 3 * 10) * MS / 4, (40 + 40 + 3 * 10) * MS / 4),
        # What rank 0 takes without waiting stays.
        (_computes_more, 2, "straggler_compute", 8 * MS, 8 * MS),
    ],
)
def test_what_goes_and_what_stays(find, step, ranks, cause, about_ns, at_most_ns):
    finding = find(SimulatedJob(step, ranks))[cause]
    assert finding.recoverable_ns_per_iteration == pytest.approx(about_ns, rel=0.05)
    assert finding.at_most_ns_per_iteration == pytest.approx(1.1 * at_most_ns, rel=0.05)


_GRADIENTS, _BF16, _CONVOLUTION = "DATA_PARALLEL_GROUP", "nvjet_sm90_tst", "aten::cudnn_convolution"
_PRODUCTS = [(500, "aten::bmm", _BF16), (1_000, "aten::_softmax", "softmax_warp_forward"), (500, "aten::bmm", _BF16)]
_LAYOUTS = [(1_500, _CONVOLUTION, "cudnn::ops::nchwToNhwcKernel"), (9, _CONVOLUTION, "fprop")]
_SWEEP = [(time, f"aten::{name}", name) for time in (12, 32) * 20 for name in ("mul_", "add_")]


def _launches(*each):
    """Kernels besides 20 ms of others: how long, the operator and the name."""
    return lambda job, _: [job.busy(), *(job.launch(0, us * US, operator, name=name) for us, operator, name in each)]


def _late_launches(times, took_ns):
    """Late launches after so many waits."""
    step = lambda job: [job.launch(0, took_ns), job.wait(0, "aten::item"), job.be_in(0, "forward", 180 * US)]  # noqa: E731
    return lambda job, _: [step(job) for _ in range(times)]


def _reduced(took_ns, **how):
    return lambda job, _: [job.busy(), job.meet(took_ns, group=_GRADIENTS, **how), job.launch(job.all, 100 * US)]


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
        (idle.host_sync, _late_launches(5, 2 * MS), 1, "cause", "saving", 2, None),
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
