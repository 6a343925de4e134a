"""CUDA graphs, activation recompute and compiled layers: the trace shows the work that was done, by torch and by nsys."""

from collections import Counter

import pytest

from tests.gpu.catalog import EXECUTION_MICROBATCHES, EXECUTIONS
from tests.gpu.kernels import COMPUTE, check_same_kernels, check_window, from_inductor, kernels_of, launched_by, matrix_products

pytestmark = [pytest.mark.needs("cuda", "megatron", "nemo_run", "nsys_on_path"), pytest.mark.timeout(900)]

ALL = [f"{execution}-{profiler}" for execution in EXECUTIONS for profiler in ("torch", "nsys")]

#: Forward products of a layer (query-key-value, scores, weighted values, projection, two of the MLP) and of its attention.
LAYER_PRODUCTS, ATTENTION_PRODUCTS = 6, 2


def compared(*executions):
    """A job and the eager one under the same profiler."""
    pairs = [(f"{execution}-{profiler}", f"eager-{profiler}") for execution in executions for profiler in ("torch", "nsys")]
    return pytest.mark.parametrize(("job", "reference"), pairs, indirect=True)


def computed(job):
    """The kernels of the last iteration that compute."""
    return kernels_of(job.traces()[0], COMPUTE)[11]


@pytest.mark.parametrize("job", ALL, indirect=True)
def test_every_iteration_of_the_window_has_the_same_kernels(job):
    assert job.returncode == 0, job.tail
    check_window(job)
    check_same_kernels(job)
    if job.name.startswith("eager-"):
        # Each forward product has two in the backward; the output layer is one more.
        assert matrix_products(computed(job)) == EXECUTION_MICROBATCHES * 3 * (LAYER_PRODUCTS + 1)


@compared("cuda_graphs")
def test_a_graphs_kernels_are_all_there_and_were_launched_with_their_graph(job, reference):
    assert matrix_products(computed(job)) == matrix_products(computed(reference))
    assert matrix_products(Counter(launched_by(job.traces()[0], "cudaGraphLaunch"))) > 0
    assert launched_by(reference.traces()[0], "cudaGraphLaunch") == []
    if job.spec.profiler == "nsys":
        # Kineto of torch 2.11 does not name the graph of each kernel.
        graphs = job.traces()[0]["device_events"]["graph"].drop_null().to_pylist()
        assert len(set(graphs)) >= 2, "a graph for the forward and one for the backward"
    assert max(job.losses) == 19, "training goes on after the window where graphs are replayed"
    assert all(float.fromhex(loss) == float.fromhex(loss) for loss in job.losses.values()), "no NaN"


@compared("full_recompute", "selective_recompute")
def test_recompute_shows_the_forward_of_each_layer_or_of_its_attention_twice(job, reference):
    again = LAYER_PRODUCTS if job.name.startswith("full") else ATTENTION_PRODUCTS
    assert matrix_products(computed(job)) - matrix_products(computed(reference)) == EXECUTION_MICROBATCHES * again


@compared("compiled")
def test_a_compiled_layer_shows_its_matrix_products_and_the_kernels_that_inductor_made(job, reference):
    compiled, eager = computed(job), computed(reference)
    assert matrix_products(compiled) == matrix_products(eager)
    # Eager layers have some too: megatron-core compiles what it fuses by itself.
    assert from_inductor(compiled) > 2 * from_inductor(eager)
    assert compiled.total() - from_inductor(compiled) < eager.total() - from_inductor(eager)
