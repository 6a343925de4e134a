"""A capture beside benchmarks in words: on the terminal and on the page."""

from __future__ import annotations

import pyarrow as pa

from bridge_profiling.analysis.compare.bench import AgainstBench
from bridge_profiling.report import bench_comparison

ROW = {
    "operation": "all_reduce",
    "group": "TENSOR_MODEL_PARALLEL_GROUP",
    "group_name": "15",
    "group_ranks": "[0,1]",
    "group_size": 2,
    "count": 36,
    "compared_count": 36,
    "transfer_us": 60_000.0,
    "alone_us": 25_800.0,
    "reached_share": 0.43,
    "bus_bandwidth_gbs": 43.0,
    "alone_bus_bandwidth_gbs": 100.0,
    "reason": None,
}
NOTHING = dict.fromkeys(("transfer_us", "alone_us", "reached_share", "bus_bandwidth_gbs", "alone_bus_bandwidth_gbs"))


def comparison(*rows, found=False, step=None, data_loader=None):
    empty = pa.table({"direction": pa.array([], pa.string())})
    return AgainstBench("bench.json", found, pa.Table.from_pylist(list(rows)), empty, step, data_loader)


def test_what_was_reached_is_one_sentence_with_both_bandwidths():
    (headline, line) = bench_comparison.sentences(comparison(ROW, found=True))
    assert headline == "Beside what was measured alone (bench.json, found beside the captures):"
    assert line.strip() == (
        "all_reduce of TENSOR_MODEL_PARALLEL_GROUP, ranks 0-1 reached 43% of what this link gave alone (43 of 100 GB/s)"
    )


def test_what_is_as_fast_as_alone_is_not_said_to_fall_short():
    (_, line) = bench_comparison.sentences(comparison(ROW | {"reached_share": 1.3, "alone_bus_bandwidth_gbs": 33.0}))
    assert "was as fast as this link is alone: 130% (43 of 33 GB/s)" in line


def test_a_reason_is_said_once_however_many_groups_have_it():
    other = ROW | NOTHING | {"compared_count": 0, "reason": "8 ranks were measured, but the group has 2"}
    lines = bench_comparison.sentences(comparison(other, other | {"group_name": "16"}))
    assert [line.strip() for line in lines[1:]] == ["not compared: 8 ranks were measured, but the group has 2"]


def test_a_file_with_nothing_that_fits_says_so():
    assert "nothing in it can be compared" in bench_comparison.sentences(comparison())[1]


def test_paces_are_beside_the_iteration():
    iteration = {"iteration_us": 12_000.0, "of": "captured iterations", "reason": None}
    step = {"subject": "train:make", "alone_us": 9_000.0}
    loader = {"subject": "train:data", "batch_us": 3_000.0}
    lines = bench_comparison.sentences(comparison(step=step | iteration, data_loader=loader | iteration))
    assert "step train:make takes 9.0 ms alone; an iteration here 12.0 ms" in lines[1]
    assert "data loader train:data gives a batch every 3.0 ms at its best; an iteration here takes 12.0 ms" in lines[2]


def test_the_page_has_a_row_for_each_group_and_why_it_is_not_compared():
    other = ROW | NOTHING | {"compared_count": 0, "reason": "gloo was measured, but nccl captured"}
    section = bench_comparison.page_section(comparison(ROW, other))
    assert [row[:3] for row in section["communication"].rows] == [
        ["all_reduce", "tensor model parallel group, ranks 0-1", share] for share in ("43%", "–")
    ]
    assert section["not_compared"] == ["gloo was measured, but nccl captured"]
    assert bench_comparison.page_section(None) == {}
