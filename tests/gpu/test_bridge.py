"""Megatron Bridge's whole `pretrain` on one or two GPUs under our callback: torch, nsys, memory."""

import pytest

from tests.gpu.kernels import COMPUTE, WINDOW, check_libraries, check_losses, check_window, kernels_of, matrix_products

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
