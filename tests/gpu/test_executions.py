"""CUDA graphs, activation recompute and compiled layers: the trace shows the work that was done, by torch and by nsys."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.gpu.catalog import EXECUTION_MICROBATCHES, EXECUTIONS
from tests.gpu.kernels import COMPUTE, difference, from_inductor, kernels_of, launched_by, launched_outside, matrix_products

pytestmark = [pytest.mark.needs("cuda", "megatron", "nemo_run", "nsys_on_path"), pytest.mark.timeout(900)]

WINDOW = [8, 9, 10, 11]
ALL = [f"{execution}-{profiler}" for execution in EXECUTIONS for profiler in ("torch", "nsys")]
every = pytest.mark.parametrize("job", ALL, indirect=True)

#: Forward products of a layer (query-key-value, scores, weighted values, projection, two of the MLP) and of its attention.
LAYER_PRODUCTS, ATTENTION_PRODUCTS = 6, 2


def beside(execution):
    """A job and the eager one under the same profiler."""
    pairs = [(f"{execution}-{profiler}", f"eager-{profiler}") for profiler in ("torch", "nsys")]
    return pytest.mark.parametrize(("job", "reference"), pairs, indirect=True)


def trace(job):
    (source,) = job.spec.sources
    return job.tables(0, source)


@every
def test_it_trains_and_the_capture_is_complete(job):
    assert job.returncode == 0, job.tail
    assert job.manifests[0]["status"] == "complete", job.manifests[0]["reason"]


@every
def test_every_kernel_belongs_to_one_of_the_windows_iterations(job):
    tables = trace(job)
    assert tables.iterations["iteration"].to_pylist() == WINDOW
    assert launched_outside(tables) == []
    assert set(kernels_of(tables)) == set(WINDOW)


@every
def test_every_iteration_has_the_same_kernels(job):
    kernels = kernels_of(trace(job))
    for iteration in WINDOW[:-1]:
        assert kernels[iteration] == kernels[WINDOW[-1]], (iteration, difference(kernels[iteration], kernels[WINDOW[-1]]))


@pytest.mark.parametrize("job", ["eager-torch", "eager-nsys"], indirect=True)
def test_a_layer_and_the_output_layer_show_as_many_matrix_products_as_they_are(job):
    # Each forward product has two in the backward; the output layer is one more.
    expected = EXECUTION_MICROBATCHES * 3 * (LAYER_PRODUCTS + 1)
    assert matrix_products(kernels_of(trace(job), COMPUTE)[11]) == expected


@beside("cuda_graphs")
def test_a_graphs_kernels_are_all_there_and_were_launched_with_their_graph(job, reference):
    graphed, eager = trace(job), trace(reference)
    products = matrix_products(kernels_of(graphed, COMPUTE)[11])
    assert products == matrix_products(kernels_of(eager, COMPUTE)[11])
    assert matrix_products(Counter(launched_by(graphed, "cudaGraphLaunch"))) > 0
    assert launched_by(eager, "cudaGraphLaunch") == []


@pytest.mark.parametrize("job", ["cuda_graphs-nsys"], indirect=True)
def test_nsys_names_the_graph_of_each_kernel(job):
    # Kineto of torch 2.11 does not.
    graphs = trace(job).device_events["graph"].drop_null().to_pylist()
    assert len(set(graphs)) >= 2, "a graph for the forward and one for the backward"


@pytest.mark.parametrize("job", ["cuda_graphs-torch", "cuda_graphs-nsys"], indirect=True)
def test_training_goes_on_after_the_window_where_graphs_are_replayed(job):
    assert max(job.losses) == 19
    assert all(float.fromhex(loss) == float.fromhex(loss) for loss in job.losses.values()), "no NaN"


@beside("full_recompute")
def test_full_recompute_shows_each_layers_forward_twice(job, reference):
    eager = matrix_products(kernels_of(trace(reference), COMPUTE)[11])
    again = matrix_products(kernels_of(trace(job), COMPUTE)[11])
    assert again - eager == EXECUTION_MICROBATCHES * LAYER_PRODUCTS


@beside("selective_recompute")
def test_selective_recompute_shows_the_attention_twice(job, reference):
    eager = matrix_products(kernels_of(trace(reference), COMPUTE)[11])
    again = matrix_products(kernels_of(trace(job), COMPUTE)[11])
    assert again - eager == EXECUTION_MICROBATCHES * ATTENTION_PRODUCTS


@beside("compiled")
def test_a_compiled_layer_shows_its_matrix_products_and_the_kernels_that_inductor_made(job, reference):
    compiled, eager = kernels_of(trace(job), COMPUTE)[11], kernels_of(trace(reference), COMPUTE)[11]
    assert matrix_products(compiled) == matrix_products(eager)
    # Eager layers have some too: megatron-core compiles what it fuses by itself.
    assert from_inductor(compiled) > 2 * from_inductor(eager)
    assert compiled.total() - from_inductor(compiled) < eager.total() - from_inductor(eager)


@pytest.mark.parametrize(
    ("job", "reference"), [(f"{execution}-torch", f"{execution}-nsys") for execution in EXECUTIONS], indirect=True
)
def test_torch_and_nsys_see_the_same_matrix_products(job, reference):
    assert matrix_products(kernels_of(trace(job), COMPUTE)[11]) == matrix_products(kernels_of(trace(reference), COMPUTE)[11])
