"""Device work that a change of the program makes faster or needless: precision, fusion, layouts, recomputation."""

from functools import partial

import pytest

from bridge_profiling.findings import Confidence
from tests.findings.simulated_jobs import MS, US, SimulatedJob

approx = pytest.approx

_H100 = {0: "NVIDIA H100 80GB HBM3"}
_BF16 = "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN"
_FP32 = "cutlass_80_simt_sgemm_256x128_8x4_tn_align1"
_TF32 = "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_stage3"
_FP64 = "sm90_xmma_gemm_f64f64_f64f64_f64_tn_n_tilesize64x64x16_stage4_warpsize2x2x1_tensor16x8x8_execute_kernel__5x_cublas"
_ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >"
_SOFTMAX = "void (anonymous namespace)::softmax_warp_forward<float, float, float, 11, false, false>"
_LOSSES = (
    "void <unnamed>::softmax_warp_forward<float, float, float, (int)9, (bool)1, (bool)0>(T2 *)",
    "void cunn_SoftMaxForward<4, float, float, float, at::native::LogSoftMaxForwardEpilogue>",
)


def _products(job, _, name=_FP32, bf16=0):
    job.launch(job.all, 1 * MS, count=20, name=name)
    job.launch(job.all, 1 * MS, count=bf16, name=_BF16)
    job.launch(job.all, 100 * US, "aten::add", count=20, name=_ADD)


_IN_BF16 = 1 - 66.9 / 989.4


@pytest.mark.parametrize(
    ("name", "bf16", "devices", "saving_ns"),
    [
        (_FP32, 0, _H100, (20 * _IN_BF16 + 1) * MS),
        (_TF32, 0, _H100, 11 * MS),
        (_FP64, 0, _H100, (20 * _IN_BF16 + 1) * MS),
        # Element-wise kernels count by the share of products in FP32.
        (_FP32, 20, _H100, (20 * _IN_BF16 + 0.5) * MS),
        # With the A100's peaks, and less confidence.
        (_FP32, 0, {}, (20 * 15 / 16 + 1) * MS),
    ],
)
def test_products_in_fp32_save_what_bf16_takes_less(find, name, bf16, devices, saving_ns):
    found = find(SimulatedJob(partial(_products, name=name, bf16=bf16), 2), devices=devices)["full_precision_matmul"]
    assert found.recoverable_ns_per_iteration == approx(saving_ns, rel=1e-3)
    # All products and half of the rest, a tenth more, and no more than the iteration.
    assert found.at_most_ns_per_iteration == approx((23_100 if bf16 else 22_006) * US, rel=1e-3)
    assert (found.ranks, found.events[0].name) == ([0, 1], name)
    assert found.confidence is (Confidence.high if devices else Confidence.medium)
    share = approx(20 / (22 + bf16), abs=1e-4)
    assert found.evidence["share_of_compute"] == {"0": share, "1": share}


def _attention(job, _, softmax=_SOFTMAX, product="aten::bmm", softmax_us=500, linear=_BF16, batched=_BF16):
    for _ in range(4):
        job.launch(0, 2 * MS, count=4, name=linear)
        job.launch(0, 200 * US, product, name=batched)
        for operator, name in (("mul", "scale"), ("masked_fill", "mask"), ("_softmax", softmax)):
            job.launch(0, (softmax_us if name == softmax else 500) * US, f"aten::{operator}", name=name)
        job.launch(0, 200 * US, product, name=batched)


# As Kineto and as nsys write its name.
@pytest.mark.parametrize("softmax", [_SOFTMAX, _SOFTMAX.replace("(anonymous namespace)", "<unnamed>")])
@pytest.mark.parametrize("product", ["aten::bmm", None])
def test_attention_in_single_kernels_saves_all_but_its_products(find, softmax, product):
    found = find(SimulatedJob(partial(_attention, softmax=softmax, product=product)))["unfused_attention"]
    assert found.recoverable_ns_per_iteration == approx(4 * (1_500 + 0.7 * 400) * US, rel=1e-3)
    assert found.at_most_ns_per_iteration == approx(1.1 * 4 * 1_900 * US, rel=1e-3)  # with all of the products
    assert found.evidence["softmax_and_mask_ns"] == {"0": approx(6 * MS)}
    assert {event.name for event in found.events} == {"scale", "mask", softmax}


@pytest.mark.parametrize(("linear", "of_attention_us"), [(_BF16, 0.7 * 400), (_FP32, 0)])
def test_full_precision_of_attention_alone_is_for_fused_attention_to_remove(find, linear, of_attention_us):
    found = find(SimulatedJob(partial(_attention, linear=linear, batched=_FP32)))
    assert ("full_precision_matmul" in found) == (linear == _FP32)
    assert found["unfused_attention"].recoverable_ns_per_iteration == approx(4 * (1_500 + of_attention_us) * US, rel=1e-3)


def _optimizer(job, _, operators, range_=None, parameters=60, sizes=(12, 32), meets=0, busy=40):
    job.busy(kernels=busy)
    with job.within(range_ or "train", "operator"):
        for parameter in range(parameters):
            for operator in operators:
                job.launch(0, sizes[parameter % 2] * US, f"aten::{operator}", name=f"elementwise {operator}")
            [job.meet(10 * US) for _ in range(meets)]


_PASSES = ("aten::linear", "autograd::engine::evaluate_function: MulBackward0")
_ADAM = ("lerp_", "mul_", "addcmul_", "sqrt", "div", "add_", "addcdiv_")
_ADAFACTOR = ("square", "mean", "_to_copy", "rsqrt", "amax", "sub_")


@pytest.mark.parametrize(
    ("operators", "range_"),
    [
        (_ADAM, "Optimizer.step#AdamW.step"),
        (_ADAFACTOR, "Optimizer.step#Factored.step"),
        (("mul_", "add_"), None),
        (("linalg_vector_norm", "gt", "where"), None),
    ],
)
def test_kernels_for_each_parameter_save_what_one_for_all_takes_less(find, operators, range_):
    found = find(SimulatedJob(partial(_optimizer, operators=operators, range_=range_)))["unfused_optimizer"]
    kernels = 60 * len(operators)
    assert found.evidence["kernels"] == {"0": kernels}
    # Of each kernel's 22 us, 2 are its start, and a quarter of the others is left.
    assert found.recoverable_ns_per_iteration == approx(kernels * 17 * US, rel=0.02)
    assert found.at_most_ns_per_iteration == approx(1.1 * kernels * 22 * US, rel=0.02)


def test_a_loop_that_waits_for_each_parameter_loses_what_it_launches_to_its_waits(find):
    def step(job, _):
        job.busy()
        for parameter in range(100):
            for operator in ("linalg_vector_norm", "pow", "mul"):
                job.launch(0, (3 + parameter % 2) * US, f"aten::{operator}", name=f"elementwise {operator}")
            job.wait(0, "aten::_local_scalar_dense")

    found = find(SimulatedJob(step, pause_ns=40 * US))
    assert next(iter(found)) == "host_sync"
    assert found["host_sync"].recoverable_ns_per_iteration == approx(100 * (3 * 45 - 10) * US, rel=0.1)


@pytest.mark.parametrize(
    ("finding", "step"),
    [
        *(("unfused_attention", partial(_attention, softmax=name)) for name in _LOSSES),
        ("unfused_attention", partial(_attention, product=None, softmax_us=90)),  # a router's takes less than the products
        ("unfused_attention", partial(_attention, product="aten::mm")),  # a router between its layers
        ("unfused_optimizer", partial(_optimizer, operators=("add_",), parameters=200)),  # a model of many small operators
        ("unfused_optimizer", partial(_optimizer, operators=("mul_", "add_"), parameters=200, sizes=(20, 22))),  # of one size
        ("unfused_optimizer", partial(_optimizer, operators=_ADAM, parameters=5)),
        ("unfused_optimizer", partial(_optimizer, operators=("norm",), parameters=90, meets=1)),  # of gathered gradients
        ("unfused_optimizer", partial(_optimizer, operators=_ADAFACTOR)),
        ("unfused_optimizer", partial(_optimizer, operators=("_foreach_add_",), range_="Optimizer.step#AdamW.step")),
        # A recurrence that is a loop in Python.
        *(("unfused_optimizer", partial(_optimizer, operators=("mul_", "add_"), range_=name)) for name in _PASSES),
    ],
)
def test_other_kernels_are_neither_attention_nor_a_sweep_over_parameters(find, finding, step):
    assert finding not in find(SimulatedJob(step))


_TO_NHWC, _TO_NCHW = (f"void cudnn::ops::{name}Kernel<__half, __half, float>" for name in ("nchwToNhwc", "nhwcToNchw"))
_COPY = "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda> >"
_CONVOLUTION = "sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwc"


@pytest.mark.parametrize(
    ("before", "product", "after", "operator", "kernels", "confidence"),
    [
        (_TO_NHWC, _BF16, _TO_NCHW, "aten::cudnn_convolution", 20, Confidence.high),
        (_COPY, _CONVOLUTION, _COPY, "aten::copy_", 20, Confidence.medium),
        (_COPY, _CONVOLUTION, _ADD, "aten::copy_", 10, Confidence.medium),
        (_COPY, "dgrad2d_c1_k1_nhwc_specialized", _ADD, "aten::copy_", 10, Confidence.medium),  # of one channel each
        (_COPY, _CONVOLUTION, _COPY, "aten::cat", 0, None),
        (_COPY, _BF16, _COPY, "aten::copy_", 0, None),  # heads of attention
    ],
)
def test_conversions_between_layouts_save_their_time(find, before, product, after, operator, kernels, confidence):
    def step(job, _):
        for _ in range(10):
            for time, name in ((200 * US, before), (1 * MS, product), (200 * US, after)):
                job.launch(0, time, operator, name=name)

    found = find(SimulatedJob(step)).get("layout_conversion")
    assert (found and found.confidence) == confidence
    if found:
        assert found.recoverable_ns_per_iteration == approx(kernels * 200 * US, rel=1e-3)
        assert found.evidence["kernels"] == {"0": kernels}


def _backward(job, _, again=True):
    job.busy()
    for _ in range(4):
        with job.within("autograd::engine::evaluate_function: AddmmBackward0", "operator"):
            if again:
                with job.within("aten::layer_norm", "operator"):
                    job.launch(0, 100 * US, "aten::native_layer_norm", name="layer norm")
                with job.within("aten::linear", "operator"):
                    job.launch(0, 1 * MS, "aten::addmm", name=_BF16)
                job.launch(0, 100 * US, "aten::add", name=_ADD)
                with job.within("aten::gelu", "operator"):
                    job.launch(0, 100 * US, "aten::gelu", name="gelu")
            job.launch(0, 2 * MS, "aten::mm", name=_BF16)


def _compiled_backward(job, _, again=True):
    job.busy()
    for _ in range(4):
        with job.within("autograd::engine::evaluate_function: CompiledFunctionBackward", "operator"):
            with job.within("CompiledFunction" if again else "CompiledFunctionBackward", "operator"):
                for operator, took_ns, name in (("triton_red_norm", 100, "triton"), ("aten::addmm", 1_200, _BF16)):
                    job.launch(0, took_ns * US, operator, name=name)
            job.launch(0, 2 * MS, "aten::mm", name=_BF16)


@pytest.mark.parametrize("backward", [_backward, _compiled_backward])
def test_forward_work_in_the_backward_pass_is_recomputation(find, backward):
    found = find(SimulatedJob(backward))["recomputation"]
    assert found.recoverable_ns_per_iteration == approx(4 * 1_300 * US, rel=1e-3)
    assert found.at_most_ns_per_iteration == approx(1.1 * 4 * 1_300 * US, rel=1e-3)
    assert found.confidence is Confidence.low
    assert "recomputation" not in find(SimulatedJob(partial(backward, again=False)))
