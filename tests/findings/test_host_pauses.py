"""Hosts that stop, in all iterations or some: for garbage collection, compilation, memory from the driver, or unknown."""

from functools import partial

import pytest

from tests.findings.simulated_jobs import MS, US, SimulatedJob

approx = pytest.approx

_COLLECTING, _COMPILING = "garbage-collection 2", "_compile.compile_inner (dynamo_timed)"


def _stops(job, iteration, name, category="annotation", every=1, rank=0):
    job.busy(kernels=20)
    if iteration % every == 0:
        job.wait(rank)
        job.be_in(rank, name, 30 * MS, category=category)
    job.busy(kernels=20)
    if job.ranks > 1:
        job.meet()


_FRAME = "torch/_dynamo/convert_frame.py(1024): compile_inner"


@pytest.mark.parametrize(
    ("name", "category", "cause"),
    [(_COLLECTING, "annotation", "garbage_collection"), (_FRAME, "python", "recompilation")],
)
def test_a_stop_is_named_by_the_range_that_shows_it(find, name, category, cause):
    found = find(SimulatedJob(partial(_stops, name=name, category=category)))
    assert found.keys() - {"low_device_busy", "dominant_kernel"} == {cause}
    assert found[cause].recoverable_ns_per_iteration == approx(30 * MS, rel=0.01)
    assert found[cause].events[0].name == name


@pytest.mark.parametrize(
    ("name", "every", "rank", "job", "cause", "saving_ns", "title"),
    [
        (_COLLECTING, 3, 1, {"ranks": 2}, "garbage_collection", 10 * MS, "for 30 ms in 2 of 6 iterations (mean 10 ms"),
        # In an iteration that does not count.
        (_COMPILING, 6, 0, {"ranks": 2, "boundary": [12]}, "recompilation", 5 * MS, "30 ms in 1 of 6 captured iterations"),
    ],
)
def test_a_stop_in_some_iterations_says_how_often_and_how_long(find, name, every, rank, job, cause, saving_ns, title):
    found = find(SimulatedJob(partial(_stops, name=name, every=every, rank=rank), iterations=6, **job))
    assert not found.keys() & {"straggler_host", "host_launch_bound", "host_pause"}
    assert (title in found[cause].title, found[cause].ranks) == (True, [rank])
    assert found[cause].recoverable_ns_per_iteration == approx(saving_ns, rel=0.01)
    if cause == "garbage_collection":
        assert found[cause].occurrence.iterations == (12, 15)
        assert found[cause].evidence["collections"]["1"] == approx(2 / 6, abs=0.01)


@pytest.mark.parametrize(
    ("call", "took_ns", "initializes"),
    [("cudaLaunchKernel", 900 * MS, True), ("cudaHostAlloc", 900 * MS, False), ("cudaFree", 9 * MS, False)],
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
        assert found["initialization"].recoverable_ns_per_iteration is None


@pytest.mark.parametrize(
    ("changed", "saves"),
    [
        ({}, True),
        ({"memory": "pinned"}, True),  # as torch.distributed.checkpoint copies
        ({"size": 4}, False),
        ({"every": 1}, False),
        ({"every": 2, "iterations": 5}, False),  # in most of them
        ({"computes": 1}, False),
        ({"name": "torch.save"}, True),
        ({"written_in": "torch.save"}, True),  # copied before it
        ({"opened_ms": 30}, True),  # a file, or the first memory to copy to
    ],
)
def test_states_copied_to_the_host_in_some_iterations_are_saved(find, changed, saves):
    known = {"memory": "pageable", "size": 1 << 18, "every": 4, "computes": 0, "name": "step", "iterations": 8, "opened_ms": 0}
    known |= changed
    written_in = known.get("written_in", "step")

    def step(job, iteration):
        job.busy(kernels=20)
        if iteration % known["every"] == 0:
            with job.within(known["name"]):
                job.wait(0)
                job.be_in(0, "step", known["opened_ms"] * MS)
                for _ in range(8):
                    job.copy(0, 50 * US, memory=known["memory"], size=known["size"], out=True)
                    job.busy(kernels=known["computes"])
                job.wait(0)
                job.be_in(0, written_in, 40 * MS)
        job.busy(kernels=20)

    found = find(SimulatedJob(step, iterations=known["iterations"]))
    assert ("checkpoint_stall" in found) == saves
    if saves:
        named = {known["name"], written_in} != {"step"}
        assert found["checkpoint_stall"].recoverable_ns_per_iteration == approx(
            (40.4 + known["opened_ms"]) * MS / known["every"], rel=0.03
        )
        assert (found["checkpoint_stall"].confidence_reason.startswith("saving is inferred")) != named
        assert "host_pause" not in found


def test_a_captured_iteration_that_medians_leave_out_is_named(find):
    def step(job, number):
        job.be_in(1, "something", {12: 900, 10: 30}.get(number, 0) * MS)  # each takes 20 ms without that
        job.busy()
        job.meet()

    job = SimulatedJob(step, 2, 6)
    for rank in job.all:
        for place in (0, 2):  # the profiler starts in the first, and flushes in the third
            job.rows[rank]["iterations"][place]["boundary"] = True
    found = find(job)
    slow = found["slow_iterations"]
    assert (slow.evidence["iterations"], slow.ranks) == ([12], [1])
    assert slow.recoverable_ns_per_iteration == approx(900 * MS / 6, rel=0.02)
    assert "host_pause" not in found


def test_iterations_in_which_all_ranks_compute_more_are_named(find):
    def found(extra_ms, numbers, ranks=2, also=None):
        def step(job, number):
            job.busy()
            job.launch(job.all, int(number in numbers) * extra_ms * MS)
            if also and number in numbers:
                job.wait(job.all)
                [job.copy(rank, 15 * MS) for rank in job.all]

        findings = find(SimulatedJob(step, ranks, iterations=6))
        return findings.get("slow_iterations") if also is None or also in findings else None

    for ranks in (1, 2):
        slow = found(15, (11, 14), ranks)
        assert slow.title == "Iterations 11, 14 compute more than the others, by 15 ms in 2 of 6 iterations (mean 5 ms, 20%)"
        assert (slow.ranks, slow.evidence["iterations"]) == ([*range(ranks)], [11, 14])
        assert slow.at_most_ns_per_iteration > slow.recoverable_ns_per_iteration == approx(5 * MS, rel=0.01)
    # What is copied then, and strikes the same iterations, is another loss.
    assert found(15, (11, 14), also="pageable_copy").recoverable_ns_per_iteration == approx(5 * MS, rel=0.01)
    assert found(15, (10, 12, 13, 15)) is None, "most iterations are not the others"
    assert found(6, (11, 14)) is None
