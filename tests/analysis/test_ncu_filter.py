"""By which name ncu finds a kernel: real names of torch's profiler, against the names that NVIDIA's demangler gives them.

nsys writes names as ncu does, so captures of one training by both profilers hold the same kernels under both names.
"""

from __future__ import annotations

import functools
import re
from collections import Counter

import pytest

from bridge_profiling.analysis import Run
from bridge_profiling.analysis.findings.kernels import function_name, kernel_filter
from tests.analysis.findings.simulated_jobs import Here
from tests.planted.cases import CASES

PAIRS = ("data_loading_2", "straggler_compute_2")


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    """How often each kernel ran in a case, by its name."""

    @functools.cache
    def read(case: str) -> Counter[str]:
        with Run(CASES[case].folder, parquet=tmp_path_factory.mktemp(case), engine=Here()) as run:
            return Counter({row["name"]: row["count"] for row in run.kernels(by_rank=False).to_pylist()})

    return read


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN", "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN"),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
        (
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
        ),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, 11, false>(float*, int)", "softmax_warp_forward"),
        ("void at::native::<unnamed>::cunn_SoftMaxBackwardSmem<(int)4, float>(T2 *)", "cunn_SoftMaxBackwardSmem"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>(cutlass_80_tensorop_bf16_s16816gemm::Params)", "Kernel2"),
        ("std::enable_if<(4)>(2), void>::type fused::kernel<float>(float const*)", "kernel"),
        ("void scan<at::native::op<long>::operator<(long) const::{lambda(long)#1}, 2>(long*)", "scan"),
        ("void cut_off_kernel<at::native::BinaryFunctor<float, fl", "cut_off_kernel"),
        ("void plain(float const*, int) [clone .kd]", "plain"),
        ("", ""),
    ],
)
def test_the_functions_own_name(name, function):
    assert function_name(name) == function


def test_a_kernel_with_a_name_of_its_own_is_chosen_by_it():
    found = kernel_filter("void ns::softmax<float, 4>(float*)", ["void ns::other<float>(float*)"])
    assert (found.options, found.also) == (["--kernel-name", "softmax"], [])


def test_a_name_that_could_not_be_demangled_is_chosen_as_it_is():
    assert kernel_filter("_Z6kernelIfEvPT_", []).options == [
        "--kernel-name-base",
        "mangled",
        "--kernel-name",
        "_Z6kernelIfEvPT_",
    ]


def test_instances_that_differ_by_a_type_a_number_or_a_truth_are_told_apart():
    names = [
        "void k<float, 4, true>(float*)",
        "void k<float, 8, true>(float*)",
        "void k<float, 4, false>(float*)",
        "void k<c10::BFloat16, 4, true>(c10::BFloat16*)",
    ]
    for place, name in enumerate(names):
        found = kernel_filter(name, names)
        assert found.also == []
        # As ncu would write them.
        written = [
            "void k<float, (int)4, (bool)1>(T1 *)",
            "void k<float, (int)8, (bool)1>(T1 *)",
            "void k<float, (int)4, (bool)0>(T1 *)",
            "void k<c10::BFloat16, (int)4, (bool)1>(T1 *)",
        ]
        assert [chooses(found.options, each) for each in written] == [each == place for each in range(len(written))]


@pytest.mark.parametrize("function", ["f++", "a(b", "k)", "^x$", "k.1", "核[", "*", "a|b"])
def test_a_name_of_any_characters_is_no_expression(function):
    found = kernel_filter(f"{function}<float>", [f"{function}<int>"])
    assert re.compile(found.options[-1].removeprefix("regex:"))


def test_what_no_word_tells_apart_is_named():
    one, other = "void k<float>(float*)", "void k<float, 4>(float*)"
    assert kernel_filter(one, [other]).also == [other]
    assert kernel_filter(other, [one]).also == []


@pytest.mark.parametrize("case", PAIRS)
@pytest.mark.parametrize("backwards", [False, True])
def test_every_kernel_of_a_real_training_is_chosen_and_no_other(case, backwards, counts):
    traced, written = counts(case), counts(f"{case}_nsys")
    if backwards:
        traced, written = written, traced
    assert len(traced) > 50
    assert any(len(kernel_filter(name, list(traced)).options) > 2 for name in traced), "no template ran in several instances"
    for name, count in traced.items():
        found = kernel_filter(name, list(traced))
        chosen = [each for each in written if chooses(found.options, each)]
        # The same training launches each kernel as often: the one that is chosen is the one that was meant.
        assert (len(chosen), sum(written[each] for each in chosen)) == (1, count), (name, found.options, chosen)
        assert found.also == []


def chooses(options: list[str], written: str) -> bool:
    """What ncu does with the options, for a name as ncu has it."""
    base = options[options.index("--kernel-name-base") + 1] if "--kernel-name-base" in options else "function"
    wanted = options[options.index("--kernel-name") + 1]
    compared = function_name(written) if base == "function" else written
    return bool(re.search(wanted.removeprefix("regex:"), compared)) if wanted.startswith("regex:") else compared == wanted
