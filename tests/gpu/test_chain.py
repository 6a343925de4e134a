"""The whole chain on two and four GPUs, as a user types it: each trace holds exactly its window, losses stay as they were."""

from __future__ import annotations

import pytest

from tests.gpu.catalog import JOBS
from tests.gpu.kernels import difference, in_phase, kernels_of, launched_outside

pytestmark = [pytest.mark.needs("gpus2", "megatron", "nemo_run", "nsys_on_path"), pytest.mark.timeout(900)]

#: Sizes by what a job's name has in it.
LAYOUTS = {
    "tp2_dp2": {"tp": 2, "pp": 1, "dp": 2},
    "pp2_dp2": {"tp": 1, "pp": 2, "dp": 2},
    "tp4": {"tp": 4, "pp": 1, "dp": 1},
    "tp2": {"tp": 2, "pp": 1, "dp": 1},
    "pp2": {"tp": 1, "pp": 2, "dp": 1},
}

CHAIN = [name for name in JOBS if LAYOUTS.keys() & name.split("-")]
PROFILED = [name for name in CHAIN if JOBS[name].profiler != "none"]
WHOLE = [name for name in PROFILED if JOBS[name].resumes_at is None]
WITH_MEMORY = [name for name in PROFILED if "memory" in JOBS[name].sources]
RESUMED = [name for name in PROFILED if JOBS[name].resumes_at is not None]

#: A profiled training, and the same without a profiler.
COMPARED = [(name, name.split("-")[0]) for name in PROFILED if name.split("-")[0] in CHAIN]

all_jobs = pytest.mark.parametrize("job", CHAIN, indirect=True)
profiled = pytest.mark.parametrize("job", PROFILED, indirect=True)


def wanted(job):
    """The iterations that the job should have captured."""
    start, end = job.spec.window
    return list(range(max(start, job.spec.resumes_at or 0), end))


def traces(job):
    """Every selected rank's trace."""
    (source,) = [source for source in job.spec.sources if source != "memory"]
    return {rank: job.tables(rank, source) for rank in job.spec.selected}


@all_jobs
def test_the_job_trains_to_its_end(job):
    assert job.returncode == 0, job.tail
    last = int(next(text for text in job.spec.overrides if text.startswith("train.train_iters=")).partition("=")[2]) - 1
    assert max(job.losses) == last


@profiled
def test_the_ranks_asked_for_wrote_and_no_other_wrote_anything(job):
    assert sorted(job.manifests) == sorted(job.spec.selected), job.tail
    expected = {f"manifest/{{}}/rank-{rank}.json" for rank in job.spec.selected}
    for rank in job.spec.selected:
        for source in job.spec.sources:
            expected |= {
                "kineto": {f"torch/{{}}/rank-{rank}.pt.trace.json.gz"},
                "nsys": {f"nsys/{{}}/rank-{rank}.nsys-rep", f"nsys/{{}}/rank-{rank}.sqlite"},
                "memory": {f"memory/{{}}/rank-{rank}.pickle"},
            }[source]
    folder = f"iter-{job.spec.window[0]}-{job.spec.window[1]}"
    # Rank 0's, profiled or not: the folder's name, for the others, and where the job is, for whoever asks it for a capture.
    of_the_job = {f"manifest/{folder}/attempt.json", "on-demand/progress.json"}
    assert job.files - of_the_job == {name.format(folder) for name in expected}


@pytest.mark.parametrize("job", WHOLE, indirect=True)
def test_the_manifests_are_complete_and_name_the_ranks_place(job):
    (layout,) = [sizes for name, sizes in LAYOUTS.items() if name in job.name.split("-")]
    for rank in job.spec.selected:
        manifest = job.manifests[rank]
        assert manifest["status"] == "complete", manifest["reason"]
        assert manifest["captured"]["iterations"] == wanted(job)
        assert {name: place[1] for name, place in manifest["coordinates"].items() if name in layout} == layout


@profiled
def test_the_trace_holds_exactly_the_window(job):
    for rank, tables in traces(job).items():
        assert tables.info.error is None
        assert tables.iterations["iteration"].to_pylist() == wanted(job), f"rank {rank}"


@profiled
def test_everything_on_the_device_was_launched_inside_the_window_and_belongs_to_an_iteration(job):
    for rank, tables in traces(job).items():
        assert tables.device_events.num_rows > 500, f"rank {rank}"
        assert launched_outside(tables) == [], f"rank {rank}"
        assert set(kernels_of(tables)) == set(wanted(job)), f"rank {rank}"


@profiled
def test_the_last_iteration_has_every_kernel_that_the_others_have(job):
    for rank, tables in traces(job).items():
        by_iteration = kernels_of(tables)
        last = by_iteration[wanted(job)[-1]]
        for iteration in wanted(job):
            assert by_iteration[iteration] == last, (rank, iteration, difference(by_iteration[iteration], last))


@profiled
def test_the_optimizer_of_the_last_iteration_is_in_the_trace_to_its_last_kernel(job):
    for rank, tables in traces(job).items():
        steps = in_phase(tables, "optimizer")
        assert set(steps) == set(wanted(job)), f"rank {rank}"
        assert sum(steps[wanted(job)[-1]].values()) > 5
        for iteration in wanted(job):
            assert steps[iteration] == steps[wanted(job)[-1]], (rank, iteration)


@profiled
def test_ranks_talk_in_the_window_by_nccl(job):
    for rank, tables in traces(job).items():
        operations = set(tables.collectives["operation"].to_pylist())
        assert "all_reduce" in operations or "reduce_scatter" in operations, f"rank {rank}: {operations}"
        backends = set(tables.device_events["backend"].to_pylist()) - {None}
        assert backends == {"nccl"}, f"rank {rank}"


@pytest.mark.parametrize(("job", "reference"), COMPARED, indirect=True)
def test_losses_are_the_same_to_the_last_bit_with_and_without_profiling(job, reference):
    assert job.losses, job.tail
    assert job.losses == {iteration: reference.losses[iteration] for iteration in job.losses}
    if job.spec.resumes_at is None:
        assert len(job.losses) == len(reference.losses)


@pytest.mark.parametrize("job", RESUMED, indirect=True)
def test_resumed_inside_the_window_the_rest_of_it_is_captured_and_called_partial(job):
    assert f"resuming at iteration {job.spec.resumes_at}" in job.output
    assert min(job.losses) == job.spec.resumes_at
    for rank in job.spec.selected:
        manifest = job.manifests[rank]
        assert manifest["status"] == "partial"
        assert manifest["captured"]["iterations"] == [10, 11]
        assert "inside the window" in manifest["reason"]


@pytest.mark.parametrize("job", WITH_MEMORY, indirect=True)
def test_the_memory_history_is_readable_and_holds_more_than_weights(job):
    for rank in job.spec.selected:
        tables = job.tables(rank, "memory")
        allocations, segments = tables["allocations"], tables["segments"]
        live = allocations.filter(allocations["freed_ns"].is_null())
        # 4 layers of 7.1 million parameters, split over two ranks, and half of the embedding: 2 bytes a weight, 4 a gradient.
        weights = 4 * 7_087_872 // 2 + (50304 * 768) // 2
        assert 6 * weights < sum(live["bytes"].to_pylist()) < 80e9
        assert sum(allocations["bytes"].to_pylist()) > 2 * sum(live["bytes"].to_pylist()), "activations come and go"
        held = segments.filter(segments["freed_ns"].is_null())
        assert sum(held["bytes"].to_pylist()) >= sum(live["bytes"].to_pylist())
        stacks = [stack for stack in allocations["stack"].to_pylist() if stack]
        assert any("recipes/megatron/train.py" in stack for stack in stacks)
        assert any("megatron/core" in stack for stack in stacks)
