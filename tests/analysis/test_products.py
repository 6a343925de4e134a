"""Floating-point operations from shapes, counted by hand, and the speed that follows."""

import json

import pytest

from bridge_profiling.analysis.attribution.products import matrix_products
from bridge_profiling.report.products_view import roofline
from bridge_profiling.traces.types import RankInfo
from tests.analysis.ranks_in_hand import answer, rank, values, work

BF16, FP32 = "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN", "ampere_sgemm_128x64_tn"
Q = [2, 16, 512, 64]
IMAGE, FILTER, OUTPUT = [8, 3, 32, 32], [16, 3, 3, 3], [8, 16, 30, 30]


def _found(*calls, kernel=BF16, took_ns=1000):
    events, launched = [], []
    for place, (name, shapes) in enumerate(calls):
        at = place * 100
        events.append({"category": "operator", "name": name, "start_ns": at, "end_ns": at + 50, "shapes": json.dumps(shapes)})
        launched += [
            work("compute", at + each, at + each + took_ns, at + each) | {"name": name_of_kernel}
            for each, name_of_kernel in ((10, "copy"), (20, kernel))
        ]
    return answer(rank(host_events=events, device_events=launched), "products")


@pytest.mark.parametrize(
    ("name", "shapes", "flops"),
    [
        ("aten::mm", [[4, 8], [8, 16]], 2 * 4 * 8 * 16),
        ("aten::addmm", [[16], [4, 8], [8, 16], [], []], 2 * 4 * 8 * 16),
        ("aten::bmm", [[3, 4, 8], [3, 8, 16]], 3 * 2 * 4 * 8 * 16),
        ("aten::baddbmm", [[3, 4, 16], [3, 4, 8], [3, 8, 16]], 3 * 2 * 4 * 8 * 16),
        ("aten::_scaled_dot_product_flash_attention", [Q, Q, Q], 2 * 2 * 2 * 16 * 512 * 512 * 64),
        ("aten::_scaled_dot_product_flash_attention_backward", [Q, Q, Q, Q, Q], 5 * 2 * 2 * 16 * 512 * 512 * 64),
        ("aten::convolution_backward", [OUTPUT, IMAGE, FILTER], 2 * 2 * 8 * 16 * 30 * 30 * 3 * 3 * 3),
        ("aten::convolution", [IMAGE, FILTER, [16]], None),
        ("aten::convolution_backward", [1, 2, 3], None),
        ("aten::mm", [[4, 8]], None),
        ("aten::mm", [[-4, 8], [8, 16]], None),
        ("aten::mm", [["4", None], [10**200, 10**200]], None),
        ("aten::bmm", [[2**18, 2**18, 2**9], [2**18, 2**9, 2**9]], 2.0**55),
    ],
)
def test_flops_of_a_call(name, shapes, flops):
    assert values(_found((name, shapes)), "flops", "device_us") == [(flops, 2)]


def test_a_convolutions_output_is_known_from_its_backward_pass():
    found = _found(("aten::convolution", [IMAGE, FILTER]), ("aten::convolution_backward", [OUTPUT, IMAGE, FILTER]))
    flops = dict(values(found, "operator", "flops"))
    assert flops["aten::convolution"] * 2 == flops["aten::convolution_backward"]
    ambiguous = _found(
        ("aten::convolution", [IMAGE, FILTER]),
        *(("aten::convolution_backward", [output, IMAGE, FILTER]) for output in (OUTPUT, [8, 16, 15, 15])),
    )
    assert dict(values(ambiguous, "operator", "flops"))["aten::convolution"] is None


@pytest.mark.parametrize(
    ("kernel", "precision", "peak"), [(BF16, "bf16", 989.4), (FP32, "fp32", 66.9), ("unknown", None, None)]
)
def test_speed_is_a_share_of_the_devices_peak_for_the_kernels_precision(kernel, precision, peak):
    of_rank = _found(*[("aten::mm", [[1024, 1024], [1024, 1024]])] * 3, kernel=kernel, took_ns=5000)
    info = RankInfo(rank=0, rank_source="trace", source="kineto", files=[], devices={0: "NVIDIA H200"})
    table = matrix_products(of_rank.add_column(0, "rank", [[0]]), [info])
    (row,) = table.to_pylist()
    assert (row["count"], row["precision"], row["peak_tflops"]) == (3, precision, peak)
    assert row["tflops"] == pytest.approx(2 * 1024**3 / 10e-6 / 1e12)
    figure = roofline([row])
    assert (figure is None) == (peak is None)
    if figure is not None:
        limit, point = figure.variants["roofline"]["data"]
        assert limit["x"][1] == pytest.approx(peak * 1e3 / 4800)
        assert (limit["y"][0] / limit["x"][0], limit["y"][1:]) == (pytest.approx(4.8), [peak, peak])
        assert (point["x"], point["y"]) == ([round(row["flops_per_byte"], 3)], [round(row["tflops"], 4)])
    assert row["share_of_peak"] == (None if peak is None else pytest.approx(row["tflops"] / peak))
