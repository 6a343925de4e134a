"""Floating-point operations from shapes, counted by hand, and the speed that follows."""

import json
from math import prod

import pytest

from bridge_profiling.common.peaks import link_gbs, memory_gbs
from bridge_profiling.facts.products import matrix_products
from bridge_profiling.report.figures import roofline_figure
from bridge_profiling.traces.types import RankInfo
from tests.facts.ranks_in_hand import answer, rank, span, values, work

BF16, FP32 = "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN", "ampere_sgemm_128x64_tn"
Q = [2, 16, 512, 64]
IMAGE, FILTER, OUTPUT = [8, 3, 32, 32], [16, 3, 3, 3], [8, 16, 30, 30]


def _found(*calls, kernel=BF16, took_ns=1000):
    events, launched = [], []
    for place, (name, shapes) in enumerate(calls):
        at = place * 100
        events.append(span(name, at, at + 50, "operator", shapes=json.dumps(shapes)))
        for start, ran in ((at + 10, "copy"), (at + 20, kernel)):
            launched.append(work("compute", start, start + took_ns, start) | {"name": ran})
    return answer(rank(host_events=events, device_events=launched), "products")


@pytest.mark.parametrize(
    ("name", "shapes", "flops"),
    [
        ("aten::mm", [[4, 8], [8, 16]], 2 * 4 * 8 * 16),
        ("aten::bmm", [[3, 4, 8], [3, 8, 16]], 3 * 2 * 4 * 8 * 16),
        ("aten::_scaled_dot_product_flash_attention", [Q, Q, Q], 2 * 2 * 2 * 16 * 512 * 512 * 64),
        ("aten::_scaled_dot_product_flash_attention_backward", [Q, Q, Q, Q, Q], 5 * 2 * 2 * 16 * 512 * 512 * 64),
        ("aten::convolution_backward", [OUTPUT, IMAGE, FILTER], 2 * 2 * 8 * 16 * 30 * 30 * 3 * 3 * 3),
        ("aten::convolution", [IMAGE, FILTER, [16]], None),
        ("aten::mm", [[4, 8]], None),
        ("aten::mm", [["4", None], [10**200, 10**200]], None),
        ("aten::bmm", [[2**18, 2**18, 2**9], [2**18, 2**9, 2**9]], 2.0**55),
    ],
)
def test_flops_of_a_call(name, shapes, flops):
    assert values(_found((name, shapes)), "flops", "device_ns") == [(flops, 2000)]


def test_a_convolutions_output_is_known_from_its_backward_pass():
    found = _found(("aten::convolution", [IMAGE, FILTER]), ("aten::convolution_backward", [OUTPUT, IMAGE, FILTER]))
    flops, intensity = (dict(values(found, "operator", name)) for name in ("flops", "flops_per_byte"))
    assert flops["aten::convolution"] * 2 == flops["aten::convolution_backward"]
    # It reads the gradient, the input and the weight, and writes the gradients of both, two bytes each.
    moved = 2 * (prod(OUTPUT) + 2 * prod(IMAGE) + 2 * prod(FILTER))
    assert intensity["aten::convolution_backward"] == flops["aten::convolution_backward"] / moved
    backward = [("aten::convolution_backward", [output, IMAGE, FILTER]) for output in (OUTPUT, [8, 16, 15, 15])]
    ambiguous = _found(("aten::convolution", [IMAGE, FILTER]), *backward)
    assert dict(values(ambiguous, "operator", "flops"))["aten::convolution"] is None


@pytest.mark.parametrize(
    ("device", "kernel", "shapes", "precision", "peak", "roof"),
    [
        ("NVIDIA H100 80GB HBM3", BF16, [[4096, 4096], [4096, 4096]], "bf16", 989.4, 989.4),
        # Each matrix moves once, at 3.35 TB/s.
        ("NVIDIA H100 80GB HBM3", BF16, [[64, 1024], [1024, 1024]], "bf16", 989.4, 3.35 * 1024 * 64 / (128 + 1024)),
        ("NVIDIA H100 80GB HBM3", FP32, [[4096, 4096], [4096, 4096]], "fp32", 66.9, 66.9),
        ("NVIDIA H100 80GB HBM3", "unknown", [[64, 1024], [1024, 1024]], None, None, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", BF16, [[64, 1024], [1024, 1024]], "bf16", None, None),
    ],
)
def test_speed_is_a_share_of_the_peak_and_of_the_roof(device, kernel, shapes, precision, peak, roof):
    info = RankInfo(rank=0, rank_source="trace", source="kineto", files=[], devices={0: device})
    found = _found(*[("aten::mm", shapes)] * 3, kernel=kernel, took_ns=5000)
    (row,) = matrix_products(found.add_column(0, "rank", [[0]]), [info]).to_pylist()
    assert (row["count"], row["precision"], row["peak_tflops"]) == (3, precision, peak)
    assert row["tflops"] == pytest.approx(2 * shapes[0][0] * shapes[0][1] * shapes[1][1] / 10e-6 / 1e12)
    assert row["roof_tflops"] == (roof and pytest.approx(roof))
    assert row["share_of_peak"] == (peak and pytest.approx(row["tflops"] / peak))
    assert row["share_of_roof"] == (roof and pytest.approx(row["tflops"] / roof))
    figure = roofline_figure([row])
    assert (figure and (figure["data"][0]["y"][0], figure["data"][0]["y"][-1])) == (roof and (3.35, peak))


@pytest.mark.parametrize(
    ("device", "memory", "link"),
    [
        ("NVIDIA GH200 480GB", 4000, 450), ("NVIDIA GH200 144G HBM3e", 4900, 450), ("NVIDIA H20", 4000, 450),
        ("NVIDIA H100 PCIe", 2000, None), ("NVIDIA A100-SXM4-80GB", 2039, 300), ("NVIDIA A100 80GB PCIe", 1935, None),
        ("Tesla T4", 320, None), ("NVIDIA GeForce RTX 4090", None, None), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None),
    ],
)  # fmt: skip
def test_the_bandwidths_of_memory_and_link_are_those_of_the_device(device, memory, link):
    assert (memory_gbs(device), link_gbs(device)) == (memory, link)
