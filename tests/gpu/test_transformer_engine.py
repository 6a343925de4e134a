"""Transformer Engine's layers in our own recipe: exact windows, attributed kernels, unchanged losses."""

import re
from collections import Counter

import pytest

from tests.gpu.catalog import TE_UNDER_NSYS, TRANSFORMER_ENGINE
from tests.gpu.kernels import (
    COMPUTE,
    WINDOW,
    check_libraries,
    check_losses,
    check_same_kernels,
    check_window,
    launched_by,
    matrix_products,
)

pytestmark = [pytest.mark.needs("cuda", "megatron", "nemo_run", "transformer_engine"), pytest.mark.timeout(900)]

PROFILED = [f"{name}-torch" for name in TRANSFORMER_ENGINE] + [f"{name}-nsys" for name in TE_UNDER_NSYS]

#: Whose kernels a case shows in each iteration besides Transformer Engine's and cuDNN's, by a part of their names; else NCCL's.
KERNELS = {"te_fp8_delayed": ("nccl", "cast")}


@pytest.mark.parametrize(("job", "reference"), [(name, name.split("-")[0]) for name in PROFILED], indirect=True)
def test_the_window_is_exact_on_every_rank_each_iteration_shows_the_cases_libraries_and_losses_stay(job, reference):
    check_window(job)
    check_same_kernels(job, WINDOW, COMPUTE)
    parts = KERNELS.get(job.name.split("-")[0], ("nccl",))
    check_libraries(job, "transformer_engine", "cudnn", *(part for part in parts if part != "nccl" or job.spec.gpus > 1))
    # To the last bit.
    check_losses(job, reference)
    assert all(re.fullmatch(r"0x1\.[0-9a-f]+p[+-]\d+", loss) for loss in job.losses.values()), "a number, and no NaN"
    for one in (job, reference):
        assert "layers: Transformer Engine's" in one.output


@pytest.mark.parametrize("job", ["te_cuda_graphs-torch", "te_cuda_graphs-nsys"], indirect=True)
def test_transformer_engines_kernels_are_launched_with_their_graph(job):
    launched = Counter(launched_by(job.traces()[0], "cudaGraphLaunch"))
    assert matrix_products(launched) > 0
    assert any("transformer_engine" in name for name in launched)
