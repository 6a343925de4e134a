"""Kernels by what they do, from their names."""

import pytest

from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.facts import names
from bridge_profiling.facts.names import VARIABLE, group_of

ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<8, at::native::{}, std::array<char*, 2ul> >(int)"


@pytest.fixture(autouse=True)
def _fresh():
    yield
    for function in (group_of, names._more):
        function.cache_clear()


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN", "matrix product"),
        ("sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64", "convolution"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 32, 4> >(Flash_fwd_params)", "attention"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>(float*)", "loss"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16>(int)", "normalization"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<1>>()", "optimizer"),
        (ELEMENTWISE.format("bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)"), "copy"),
        (ELEMENTWISE.format("GeluCUDAKernelImpl(at::TensorIteratorBase&)"), "elementwise"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>()", "reduction"),
        ("void at::native::(anonymous namespace)::embedding_backward_feature_kernel<c10::BFloat16>()", "indexing"),
        ("spin(long)", "other"),
    ],
)
def test_a_name_says_what_a_kernel_does(name, group):
    assert group_of(name, "compute") == group
    assert group_of("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL()", "communication").endswith("reduce_scatter")


def test_groups_of_all_ranks_add_up_and_a_reader_can_name_more(made, monkeypatch, tmp_path):
    run = made()
    (row,) = run.facts.kernel_groups.to_pylist()
    assert (row["group"], row["count"], row["total_ns"], row["share"]) == ("matrix product", 2, 500_000, 1)
    more = tmp_path / "groups.toml"
    monkeypatch.setenv(VARIABLE, str(more))
    for text, expected in (('[groups]\n"my own" = "^my_"', "my own"), ("[groups]\nx = 1", None), ("groups", None)):
        more.write_text(text)
        names._more.cache_clear()
        group_of.cache_clear()
        if expected:
            assert group_of("my_gemm_kernel", "compute") == expected
        else:
            with pytest.raises(ProfilingConfigError, match=VARIABLE):
                group_of("my_gemm_kernel", "compute")
