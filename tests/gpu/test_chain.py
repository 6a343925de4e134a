"""The whole chain on two GPUs, as a user types it: each trace holds exactly its window, losses stay, nsys and Kineto agree."""

import pytest

from tests.gpu.catalog import JOBS
from tests.gpu.kernels import COMPUTE, check_losses, check_same_kernels, check_window, kernels_of
from tests.planted.witness import differences

pytestmark = [pytest.mark.needs("gpus2", "megatron", "nemo_run", "nsys_on_path"), pytest.mark.timeout(900)]

#: Sizes by what a job's name begins with.
LAYOUTS = {"tp2": {"tp": 2, "pp": 1, "dp": 1}, "pp2": {"tp": 1, "pp": 2, "dp": 1}, "dp2": {"tp": 1, "pp": 1, "dp": 2}}

PROFILED = [name for name, spec in JOBS.items() if name.split("-")[0] in LAYOUTS and spec.profiler != "none"]
WITH_MEMORY = [name for name in PROFILED if "memory" in JOBS[name].sources]


def wanted(job):
    """The iterations that the job should have captured."""
    start, end = job.spec.window
    return list(range(max(start, job.spec.resumes_at or 0), end))


@pytest.mark.parametrize(("job", "reference"), [(name, name.split("-")[0]) for name in PROFILED], indirect=True)
def test_the_trace_holds_exactly_the_window_to_the_last_kernel_of_its_optimizer_and_losses_stay(job, reference):
    check_losses(job, reference)  # to the last bit
    resumed = job.spec.resumes_at is not None
    check_window(job, wanted(job), status="partial" if resumed else "complete")
    layout = LAYOUTS[job.name.split("-")[0]]
    for rank, tables in job.traces().items():
        manifest = job.manifests[rank]
        assert {name: place[1] for name, place in manifest["coordinates"].items() if name in layout} == layout
        assert tables["device_events"].num_rows > 500, f"rank {rank}"
        operations = set(tables["collectives"]["operation"].to_pylist())
        assert "all_reduce" in operations or "reduce_scatter" in operations, f"rank {rank}: {operations}"
        assert set(tables["device_events"]["backend"].to_pylist()) - {None} == {"nccl"}, f"rank {rank}"
        if resumed:
            assert "inside the window" in manifest["reason"]
    if resumed:
        assert f"resuming at iteration {job.spec.resumes_at}" in job.output
    # In a process' first step, megatron-core 0.19 agrees with the other ranks by one more all-reduce.
    kinds = [COMPUTE] if resumed else []
    check_same_kernels(job, wanted(job), *kinds)
    for rank, tables in job.traces().items():
        steps = kernels_of(tables, *kinds, phase="optimizer")
        assert set(steps) == set(wanted(job)), f"rank {rank}"
        assert sum(steps[wanted(job)[-1]].values()) > 5
        assert all(step == steps[wanted(job)[-1]] for step in steps.values()), f"rank {rank}"


@pytest.mark.parametrize("job", WITH_MEMORY, indirect=True)
def test_the_memory_history_is_readable_and_holds_more_than_weights(job):
    # 4 layers of 7.1 million parameters, split over two ranks, and half of the embedding: 2 bytes a weight, 4 a gradient.
    weights = 4 * 7_087_872 // 2 + (50304 * 768) // 2
    for rank in job.spec.selected:
        tables = job.tables(rank, "memory")
        stacks = [stack for stack in tables["allocations"]["stack"].to_pylist() if stack]
        for part in ("recipes/megatron/train.py", "megatron/core"):
            assert any(part in stack for stack in stacks), f"rank {rank}: {part}"
        allocations, segments = (tables[name].select(["bytes", "freed_ns"]).to_pylist() for name in ("allocations", "segments"))
        live, held = (sum(row["bytes"] for row in rows if row["freed_ns"] is None) for rows in (allocations, segments))
        assert 6 * weights < live < 80e9
        assert sum(row["bytes"] for row in allocations) > 2 * live, "activations come and go"
        assert held >= live


#: A job captured by Kineto, and one that trains the same and is captured by nsys.
WITNESSES = [("tp2-torch-shapes-memory", "tp2-nsys"), ("pp2-torch-memory", "pp2-nsys-shapes")]


@pytest.mark.parametrize(("job", "reference"), WITNESSES, indirect=True)
def test_both_profilers_saw_the_same_work_of_trainings_that_are_equal_to_the_last_bit(job, reference):
    assert job.losses, job.tail
    assert job.losses == reference.losses
    for rank in (0, 1):
        found = list(differences(job.tables(rank, "kineto"), reference.tables(rank, "nsys")))
        assert found == [], f"rank {rank}"
