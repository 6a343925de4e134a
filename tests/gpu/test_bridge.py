"""Megatron Bridge's whole `pretrain` on one or two GPUs under our callback: torch, nsys, memory, trainings that end early."""

import pytest

from tests.gpu.kernels import (
    COMPUTE,
    WINDOW,
    check_libraries,
    check_losses,
    check_window,
    ended_by_sigterm,
    kernels_of,
    matrix_products,
)

pytestmark = [pytest.mark.needs("cuda", "megatron", "transformer_engine", "megatron_bridge"), pytest.mark.timeout(900)]

WHOLE = ["bridge-torch-memory", "bridge-nsys", "bridge_tp2-torch"]


@pytest.mark.parametrize(("job", "reference"), [(name, name.split("-")[0]) for name in WHOLE], indirect=True)
def test_losses_stay_to_the_last_bit_and_the_window_is_exact_with_the_libraries_kernels_in_every_iteration(job, reference):
    check_losses(job, reference)
    check_window(job)
    check_libraries(job, "transformer_engine", "cudnn", *(("nccl",) if job.spec.gpus > 1 else ()))
    for rank, tables in job.traces().items():
        computed = kernels_of(tables, COMPUTE)
        assert len({matrix_products(computed[iteration]) for iteration in WINDOW}) == 1, f"rank {rank}"


@pytest.mark.parametrize("job", ["bridge_terminated-torch"], indirect=True)
def test_a_training_that_is_terminated_inside_the_window_leaves_what_each_rank_captured_that_could_react(job):
    assert job.returncode not in (None, 0), job.tail
    for rank in ended_by_sigterm(job):
        manifest = job.manifests[rank]
        captured = manifest["captured"]["iterations"]
        assert (manifest["status"], captured) == ("partial", list(range(4, captured[-1] + 1)))
        assert matrix_products(kernels_of(job.tables(rank, "kineto"), COMPUTE)[4]) > 0, f"rank {rank}"
