"""A capture and benchmarks compared in words: on the terminal and on the page."""

import pyarrow as pa
import pytest

from bridge_profiling.analysis.compare.bench import AgainstBench
from bridge_profiling.report.bench_view import section

ROW = {"operation": "all_reduce", "count": 36, "compared_count": 36, "transfer_us": 60_000.0, "alone_us": 25_800.0}
ROW |= {"group": "TENSOR_MODEL_PARALLEL_GROUP", "group_name": "15", "group_ranks": "[0,1]", "group_size": 2}
ROW |= {"reached_share": 0.43, "bus_bandwidth_gbs": 43.0, "alone_bus_bandwidth_gbs": 100.0, "reason": None}
NOTHING = dict.fromkeys(name for name, value in ROW.items() if isinstance(value, float))
OTHER = ROW | NOTHING | {"compared_count": 0, "reason": "8 ranks were measured, and the group has 2"}


def compared(*rows, found=False, step=None, data_loader=None):
    empty = pa.table({"direction": pa.array([], pa.string())})
    return section(AgainstBench("bench.json", found, pa.Table.from_pylist(list(rows)), empty, step, data_loader))


FELL_SHORT = "all_reduce in group tensor model parallel on ranks 0-1 reached 43% of the benchmark's bandwidth (43 of 100 GB/s)."


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([ROW], FELL_SHORT),
        # Once, however many groups have it.
        ([OTHER, OTHER | {"group_name": "16"}], "Not compared: 8 ranks were measured, and the group has 2."),
        ([], "Nothing in it can be compared"),
    ],
)
def test_each_group_is_one_sentence_with_its_share_or_reason(rows, line):
    headline, said = compared(*rows, found=True).paragraphs
    assert "bench.json, found next to the captures" in headline
    assert line in said


def test_steps_and_loaders_are_compared_with_the_iteration():
    iteration = {"iteration_us": 12_000.0, "of": "captured iterations", "reason": None}
    step = {"subject": "train:make", "alone_us": 9_000.0}
    loader = {"subject": "train:data", "batch_us": 3_000.0}
    lines = compared(step=step | iteration, data_loader=loader | iteration).paragraphs
    assert "Step train:make takes 9.0 ms in the benchmark; an iteration here takes 12.0 ms" in lines[1]
    assert "Data loader train:data returns a batch every 3.0 ms at best; an iteration here takes 12.0 ms" in lines[2]
