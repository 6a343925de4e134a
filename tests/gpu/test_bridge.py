"""Megatron Bridge's whole `pretrain` on one or two GPUs under our callback: torch, nsys, memory, trainings that end early."""

from __future__ import annotations

import pytest

from tests.gpu.jobs import left_running
from tests.gpu.kernels import COMPUTE, kernels_of, launched_outside, matrix_products

pytestmark = [
    pytest.mark.needs("cuda", "megatron", "transformer_engine", "megatron_bridge"),
    pytest.mark.timeout(900),
]

WINDOW = [8, 9, 10, 11]
WHOLE = ["bridge-torch-memory", "bridge-nsys", "bridge_tp2-torch", "bridge_evaluation-torch"]
CUT = ["bridge_exit-torch", "bridge_terminated-torch"]

whole = pytest.mark.parametrize("job", WHOLE, indirect=True)


def traces(job):
    """Both ranks' traces."""
    (source,) = [source for source in job.spec.sources if source != "memory"]
    return {rank: job.tables(rank, source) for rank in job.spec.selected}


@whole
def test_it_trains_to_its_end_and_the_window_is_exact_on_every_rank(job):
    assert job.returncode == 0, job.tail
    assert max(job.losses) == 19
    assert sorted(job.manifests) == list(job.spec.selected), job.tail
    for rank, tables in traces(job).items():
        assert job.manifests[rank]["status"] == "complete", job.manifests[rank]["reason"]
        assert job.manifests[rank]["captured"]["iterations"] == WINDOW
        assert tables.iterations["iteration"].to_pylist() == WINDOW


@whole
def test_kernels_of_the_libraries_are_in_every_iteration(job):
    for rank, tables in traces(job).items():
        kernels = kernels_of(tables)
        assert launched_outside(tables) == [], f"rank {rank}"
        for iteration in WINDOW:
            names = [name.lower() for name in kernels[iteration]]
            for library in ("transformer_engine", "cudnn", *(("nccl",) if job.spec.gpus > 1 else ())):
                assert any(library in name for name in names), (rank, iteration, library, sorted(names))


@whole
def test_every_iteration_has_as_many_matrix_products(job):
    for rank, tables in traces(job).items():
        kernels = kernels_of(tables, COMPUTE)
        assert len({matrix_products(kernels[iteration]) for iteration in WINDOW}) == 1, f"rank {rank}"
        assert matrix_products(kernels[11]) > 0


@pytest.mark.parametrize(("job", "reference"), [(name, name.split("-")[0]) for name in WHOLE], indirect=True)
def test_losses_are_the_same_to_the_last_bit_with_and_without_profiling(job, reference):
    assert len(reference.losses) == 20, reference.tail
    assert job.losses == reference.losses


@pytest.mark.parametrize("job", ["bridge_evaluation-torch"], indirect=True)
def test_an_evaluation_inside_the_window_is_a_range_of_its_own(job):
    for rank, tables in traces(job).items():
        names = tables.host_events["name"].to_pylist()
        assert names.count("evaluation") == 1, f"rank {rank}"


@pytest.mark.parametrize("job", ["bridge-torch-memory"], indirect=True)
def test_the_memory_history_names_transformer_engines_allocations(job):
    for rank in job.spec.selected:
        allocations = job.tables(rank, "memory")["allocations"]
        stacks = [stack for stack in allocations["stack"].to_pylist() if stack]
        assert any("transformer_engine/pytorch" in stack for stack in stacks), f"rank {rank}"


@pytest.mark.parametrize(("job", "captured", "returncode"), [("bridge_exit-torch", [8, 9], 0)], indirect=["job"])
def test_an_exit_interval_inside_the_window_leaves_what_was_captured(job, captured, returncode):
    assert job.returncode == returncode, job.tail
    for rank in job.spec.selected:
        assert job.manifests[rank]["status"] == "partial"
        assert job.manifests[rank]["captured"]["iterations"] == captured


@pytest.mark.parametrize("job", ["bridge_terminated-torch"], indirect=True)
def test_sigterm_inside_the_window_leaves_what_every_rank_captured(job):
    assert job.returncode not in (None, 0), job.tail
    for rank in job.spec.selected:
        manifest = job.manifests[rank]
        assert manifest["status"] == "partial"
        assert "the process exited (code 143)" in manifest["reason"]
        captured = manifest["captured"]["iterations"]
        assert captured == list(range(4, captured[-1] + 1))


@pytest.mark.parametrize("job", CUT, indirect=True)
def test_a_capture_that_was_cut_can_be_read_and_nothing_is_left_running(job):
    for rank, tables in traces(job).items():
        assert matrix_products(kernels_of(tables, COMPUTE)[job.spec.window[0]]) > 0, f"rank {rank}"
    assert left_running(job.folder) == []
