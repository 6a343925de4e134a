"""Transformer Engine's layers in our own recipe: exact windows, attributed kernels, unchanged losses."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.gpu.catalog import JOBS, TE_UNDER_NSYS, TE_WITH_MEMORY, TRANSFORMER_ENGINE
from tests.gpu.jobs import NO_MULTICAST, check_multicast
from tests.gpu.kernels import COMMUNICATION, COMPUTE, difference, kernels_of, launched_by, launched_outside, matrix_products

pytestmark = pytest.mark.timeout(900)
on_gpus = pytest.mark.needs("cuda", "megatron", "nemo_run", "transformer_engine")

WINDOW = [8, 9, 10, 11]
UNDER_TORCH = [f"{name}-torch" for name in TRANSFORMER_ENGINE]
UNDER_NSYS = [f"{name}-nsys" for name in TE_UNDER_NSYS]
PROFILED = UNDER_TORCH + UNDER_NSYS

#: Whose kernels a case must show in each iteration, by a part of their names.
KERNELS = {
    "te_bf16": ("transformer_engine", "cudnn", "nccl"),
    "te_fp8_delayed": ("transformer_engine", "cudnn", "nccl", "cast"),
    "te_fp8_current": ("transformer_engine", "cudnn", "cast"),
    "te_sequence_parallel": ("transformer_engine", "cudnn", "nccl"),
    "te_context_parallel": ("transformer_engine", "cudnn", "nccl"),
    "te_comm_overlap": ("transformer_engine", "cudnn", "userbuffers"),
    "te_cuda_graphs": ("transformer_engine", "cudnn"),
}

trained = pytest.mark.parametrize("job", [*TRANSFORMER_ENGINE, *PROFILED], indirect=True)
profiled = pytest.mark.parametrize("job", PROFILED, indirect=True)


def case(job):
    """The case that a job is of."""
    return job.name.split("-")[0]


def traces(job):
    """Every rank's trace."""
    (source,) = [source for source in job.spec.sources if source != "memory"]
    return {rank: job.tables(rank, source) for rank in job.spec.selected}


@on_gpus
@trained
def test_it_trains_with_transformer_engines_layers_to_its_end(job):
    assert job.returncode == 0, job.tail
    assert "layers: Transformer Engine's" in job.output
    assert max(job.losses) == 19
    assert all(re.fullmatch(r"0x1\.[0-9a-f]+p[+-]\d+", loss) for loss in job.losses.values()), "a number, and no NaN"


@on_gpus
@profiled
def test_the_window_is_exact_on_every_rank(job):
    assert sorted(job.manifests) == sorted(job.spec.selected), job.tail
    for rank, tables in traces(job).items():
        manifest = job.manifests[rank]
        assert manifest["status"] == "complete", manifest["reason"]
        assert manifest["captured"]["iterations"] == WINDOW
        assert tables.iterations["iteration"].to_pylist() == WINDOW


@on_gpus
@profiled
def test_every_kernel_belongs_to_one_of_the_windows_iterations(job):
    for rank, tables in traces(job).items():
        assert launched_outside(tables) == [], f"rank {rank}"
        assert set(kernels_of(tables)) == set(WINDOW), f"rank {rank}"


@on_gpus
@profiled
def test_every_iteration_has_the_same_compute_kernels(job):
    for rank, tables in traces(job).items():
        kernels = kernels_of(tables, COMPUTE)
        for iteration in WINDOW[:-1]:
            assert kernels[iteration] == kernels[11], (rank, iteration, difference(kernels[iteration], kernels[11]))


@on_gpus
@profiled
def test_each_iteration_shows_the_libraries_that_the_case_is_about(job):
    for rank, tables in traces(job).items():
        for iteration, kernels in kernels_of(tables, COMPUTE, COMMUNICATION).items():
            expected = [part for part in KERNELS[case(job)] if part != "nccl" or job.spec.gpus > 1]
            missing = [part for part in expected if not any(part in name.lower() for name in kernels)]
            assert missing == [], (rank, iteration, sorted(kernels))
            assert matrix_products(kernels) > 0


@on_gpus
@pytest.mark.parametrize(("job", "reference"), [(name, name.split("-")[0]) for name in PROFILED], indirect=True)
def test_losses_are_the_same_to_the_last_bit_with_and_without_profiling(job, reference):
    assert len(reference.losses) == 20, reference.tail
    assert job.losses == reference.losses


@on_gpus
@pytest.mark.parametrize(("job", "reference"), [(f"{name}-torch", f"{name}-nsys") for name in TE_UNDER_NSYS], indirect=True)
def test_torch_and_nsys_see_the_same_matrix_products(job, reference):
    for rank in job.spec.selected:
        one, other = (traces(each)[rank] for each in (job, reference))
        assert matrix_products(kernels_of(one, COMPUTE)[11]) == matrix_products(kernels_of(other, COMPUTE)[11])


@on_gpus
@pytest.mark.parametrize("job", ["te_cuda_graphs-torch", "te_cuda_graphs-nsys"], indirect=True)
def test_transformer_engines_kernels_are_launched_with_their_graph(job):
    launched = Counter(launched_by(traces(job)[0], "cudaGraphLaunch"))
    assert matrix_products(launched) > 0
    assert any("transformer_engine" in name for name in launched)


@on_gpus
@pytest.mark.parametrize("job", [f"{TE_WITH_MEMORY}-torch"], indirect=True)
def test_the_memory_history_names_transformer_engines_allocations(job):
    for rank in job.spec.selected:
        allocations = job.tables(rank, "memory")["allocations"]
        stacks = [stack for stack in allocations["stack"].to_pylist() if stack]
        assert any("transformer_engine/pytorch" in stack for stack in stacks), f"rank {rank}"
        assert sum(allocations["bytes"].to_pylist()) > 4 * 7_087_872 * 2, "more than the layers' weights"


def test_communication_overlap_is_refused_where_it_would_use_multicast():
    """Runs anywhere: it is what keeps the next one from doing harm."""
    spec = JOBS["te_comm_overlap"]
    assert spec.environment[NO_MULTICAST] == "1"
    check_multicast(spec, spec.environment)
    for environment in ({}, {NO_MULTICAST: "0"}):
        with pytest.raises(RuntimeError, match="multicast"):
            check_multicast(spec, environment)
