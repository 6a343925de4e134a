"""Hosts that stop: for garbage collection, compilation, memory from the driver, or for no recorded reason."""

from functools import partial

import pytest

from bridge_profiling.analysis.findings import Confidence
from tests.analysis.findings.simulated_jobs import MS, US, SimulatedJob

approx = pytest.approx


def _stops(job, iteration, name, category="annotation", every=1, rank=0):
    job.busy(kernels=20)
    if iteration % every == 0:
        job.wait(rank)
        job.be_in(rank, name, 30 * MS, category=category)
    job.busy(kernels=20)
    if job.ranks > 1:
        job.meet()


@pytest.mark.parametrize(
    ("name", "category", "cause"),
    [
        ("garbage-collection 2", "annotation", "garbage_collection"),
        ("<built-in function collect>", "python", "garbage_collection"),
        ("_compile.compile_inner (dynamo_timed)", "annotation", "recompilation"),
        ("torch/_dynamo/convert_frame.py(1024): compile_inner", "python", "recompilation"),
    ],
)
def test_a_stop_is_named_by_the_range_that_shows_it(find, name, category, cause):
    found = find(SimulatedJob(partial(_stops, name=name, category=category)))
    assert found.keys() - {"low_device_busy", "dominant_kernel"} == {cause}
    assert found[cause].recoverable_us_per_iteration == approx(30_000, rel=0.01)
    assert found[cause].events[0].name == name


def test_a_stop_of_one_rank_in_some_iterations_says_how_often_and_how_long(find):
    step = partial(_stops, name="garbage-collection 2", every=3, rank=1)
    found = find(SimulatedJob(step, 2, iterations=6))
    finding = found["garbage_collection"]
    assert finding.ranks == [1]
    assert "for 30 ms in 2 of 6 iterations (mean 10 ms" in finding.title
    assert finding.occurrence.iterations == (12, 15)
    assert finding.evidence["collections"]["1"] == approx(2 / 6, abs=0.01)
    assert not found.keys() & {"straggler_host", "host_launch_bound", "host_pause"}


def test_a_stop_for_no_recorded_reason_is_a_pause(find):
    found = find(SimulatedJob(partial(_stops, name="step", every=3), iterations=6))
    assert found.keys() - {"low_device_busy", "dominant_kernel"} == {"host_pause"}
    pause = found["host_pause"]
    assert pause.recoverable_us_per_iteration == approx(10_000, rel=0.01)
    assert pause.confidence is Confidence.low
    assert "2 of 6" in pause.title
    assert "gc.disable" in pause.action


def test_a_compilation_in_an_iteration_that_does_not_count_is_still_named(find):
    step = partial(_stops, name="_compile.compile_inner (dynamo_timed)", every=5)
    found = find(SimulatedJob(step, 2, iterations=5, boundary=[10]))["recompilation"]
    assert found.ranks == [0]
    assert found.recoverable_us_per_iteration == approx(30_000 / 5, rel=0.01)
    assert "30 ms in 1 of 5 captured iterations" in found.title


@pytest.mark.parametrize(
    ("call", "operator", "advice"),
    [("cudaFree", "aten::empty", "expandable_segments"), ("cudaHostAlloc", "aten::pin_memory", "Pin buffers once")],
)
def test_memory_from_the_driver_holds_the_host(find, call, operator, advice):
    def step(job, _):
        for _ in range(4):
            job.busy(kernels=4)
            job.call(0, call, 3 * MS, operator)

    churn = find(SimulatedJob(step))["allocator_churn"]
    assert churn.events[0].name == f"{call} in {operator}"
    assert churn.evidence["calls"] == {"0": 4}
    # The device has 2 ms of work left each time, and 0.1 ms is what the next launches take.
    assert churn.recoverable_us_per_iteration == approx(4 * 1_000, rel=0.1)
    assert advice in churn.action


@pytest.mark.parametrize(
    ("call", "took_ns", "initializes"),
    [
        ("cudaLaunchKernel", 900 * MS, True),
        ("cudaFree", 900 * MS, True),
        ("cudaHostAlloc", 900 * MS, False),
        ("cudaFree", 9 * MS, False),
    ],
)
def test_a_capture_that_mostly_sets_up_libraries_says_so_and_nothing_else(find, call, took_ns, initializes):
    job = SimulatedJob(None)
    job.busy(kernels=1)
    job.wait(0)
    with job.within("aten::cudnn_convolution", "operator"):
        job.call(0, call, took_ns, "aten::cudnn_convolution")
    job.busy(kernels=10)
    found = find(job)
    assert ("initialization" in found) == initializes
    if initializes:
        assert found.keys() == {"initialization"}
        assert "The capture is mostly initialization" in found["initialization"].title
        assert found["initialization"].recoverable_us_per_iteration is None


@pytest.mark.parametrize(
    ("changed", "saves"),
    [
        ({}, True),
        ({"memory": "pinned"}, False),
        ({"size": 4}, False),
        ({"every": 1}, False),
        ({"computes": 1}, False),
        ({"name": "torch.save"}, True),
    ],
)
def test_states_copied_to_the_host_in_some_iterations_are_saved(find, changed, saves):
    known = {"memory": "pageable", "size": 1 << 18, "every": 4, "computes": 0, "name": "step"} | changed

    def step(job, iteration):
        job.busy(kernels=20)
        if iteration % known["every"] == 0:
            with job.within(known["name"]):
                for _ in range(12):
                    job.copy(0, 50 * US, memory=known["memory"], size=known["size"], out=True)
                    job.busy(kernels=known["computes"])
                job.wait(0)
                job.host_ns[0] += 40 * MS  # to write
        job.busy(kernels=20)

    found = find(SimulatedJob(step, iterations=8))
    assert ("checkpoint_stall" in found) == saves
    if saves:
        named = known["name"] != "step"
        assert found["checkpoint_stall"].recoverable_us_per_iteration == approx(2 * 40_600 / 8, rel=0.03)
        assert (found["checkpoint_stall"].confidence_reason.startswith("saving is inferred")) != named
        assert "host_pause" not in found


def test_a_full_queue_is_no_initialization(find):
    def step(job, _):
        job.busy(kernels=400)
        job.call(0, "cudaLaunchKernel", 200 * MS, "aten::mm")
        job.busy(kernels=10)

    assert "initialization" not in find(SimulatedJob(step))
