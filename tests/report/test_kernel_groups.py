"""Kernels by what they do, from their names."""

import pytest

from bridge_profiling.common.errors import ProfilingConfigError
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
        # Inductor names all operators that a kernel fuses; only its templates compute products.
        ("triton_poi_fused_addmm_gelu_5", "elementwise"),
        ("triton_red_fused_addmm_native_layer_norm_3", "normalization"),
        ("triton_per_fused__softmax_bmm_4", "softmax"),
        ("triton_poi_fused__scaled_dot_product_flash_attention_clone_2", "elementwise"),
        ("triton_tem_fused_addmm_7", "matrix product"),
        # Of MIOpen and Composable Kernel.
        ("igemm_wrw_gtcx2_nhwc_bf16_bx0_ex1_bt256x128x16", "convolution"),
        ("void ck::kernel_grouped_conv_fwd_multiple_abd_xdl_cshuffle<ck::bhalf_t>()", "convolution"),
        ("fused_moe_kernel", "matrix product"),
        ("spin(long)", "other"),
    ],
)
def test_a_name_says_what_a_kernel_does(name, group):
    assert group_of(name, "compute") == group
    assert group_of("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL()", "communication").endswith("reduce_scatter")


_FP64 = "sm90_xmma_gemm_f64f64_f64f64_f64_tn_n_tilesize64x64x16_stage4_warpsize2x2x1_tensor16x8x8_execute_kernel__5x_cublas"


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("cutlass_80_simt_sgemm_256x128_8x4_tn_align1", "fp32"),
        ("void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>", "fp32"),
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention)", "fp32"),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_stage3", "tf32"),
        ("cutlass_80_tensorop_s1688gemm_128x256_16x3_nt_align4", "tf32"),
        (_FP64, "fp64"),
        ("ampere_dgemm_64x64_nn", "fp64"),
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN", "bf16"),
        ("void gemvNSP_kernel<__nv_bfloat16, __nv_bfloat16, float, float, 1, 32, 4, 1024>", "bf16"),
        ("Cijk_Ailk_Bljk_HHS_BH_MT128x128x32", "fp16"),
        ("Cijk_Ailk_Bjlk_SB_MT64x64x16", "fp32"),
        ("Cijk_Alik_Bljk_F8B8HS_BH_MT256x256x64", "fp8"),
        ("igemm_fwd_gtcx3_nhwc_fp16_bx0_ex1", "fp16"),
        ("triton_poi_fused_addmm_gelu_bf16_5", None),
        ("gemm_kernel", None),
    ],
)
def test_the_precision_of_a_product_is_in_its_name_or_unknown(name, precision):
    assert names.product_precision(name) == precision


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
