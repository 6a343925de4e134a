"""On real H200 captures, figures agree with an independent reference, and every event with a slow reading of the same file."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from bridge_profiling.analysis.intervals import Intervals, union
from bridge_profiling.traces import kineto
from bridge_profiling.traces.types import RankTables

#: Milliseconds of device time over the whole capture, from the captures' README; their last digit is rounded.
REFERENCE = {
    ("tp2_dp2", 0): (454.0, 371.5, 145.3, 233.8, 221.7, 4.3, 7456),
    ("tp2_dp2", 1): (455.3, 184.9, 139.8, 40.8, 40.7, 4.2, 7406),
    ("tp2_dp2", 2): (453.8, 376.8, 144.0, 238.0, 228.1, 4.3, 7456),
    ("tp2_dp2", 3): (455.3, 208.3, 140.7, 65.5, 63.1, 4.2, 7406),
    ("plant_straggler", 2): (459.3, 282.5, 195.9, 84.7, 81.7, 4.3, 7776),
    ("plant_data", 0): (663.0, 164.5, 140.5, 19.7, 19.5, 4.3, 7456),
    ("pp2_dp2", 0): (227.6, 186.9, 121.2, 61.2, 61.2, 4.2, 3506),
}


def _of_kind(tables: RankTables, *kinds: str) -> Intervals:
    events = tables.device_events
    events = events.filter(pc.is_in(events["kind"].cast("string"), pa.array(kinds)))
    return union(events["start_ns"].to_numpy(), events["end_ns"].to_numpy())


@pytest.mark.parametrize(("capture", "rank"), REFERENCE)
def test_device_times_agree_with_the_reference(captures: Path, capture: str, rank: int) -> None:
    tables = kineto.read(captures / "kineto" / capture / f"rank-{rank}.json.gz")
    events = tables.device_events
    compute, communication = _of_kind(tables, "compute"), _of_kind(tables, "communication")
    copies = _of_kind(tables, "memcpy", "memset")
    span_ns = pc.max(events["end_ns"]).as_py() - pc.min(events["start_ns"]).as_py()
    found_ns = (
        span_ns,
        (compute | communication | copies).total_ns,
        compute.total_ns,
        communication.total_ns,
        (communication - (compute | copies)).total_ns,
        _of_kind(tables, "memcpy").total_ns,
    )
    *expected_ms, kernels = REFERENCE[capture, rank]
    assert [value / 1e6 for value in found_ns] == [pytest.approx(value, rel=1e-4, abs=0.05) for value in expected_ms]
    assert sum(events["kind"].to_pylist().count(kind) for kind in ("compute", "communication")) == kernels


def test_every_device_event_is_exact_to_the_nanosecond(captures: Path) -> None:
    path = captures / "kineto" / "pp2_dp2" / "rank-1.json.gz"
    slow = json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)
    base = slow["baseTimeNanoseconds"]
    expected = sorted(
        (
            base + int(event["ts"] * 1000),
            base + int((event["ts"] + event["dur"]) * 1000),
            event["name"],
            event["args"]["stream"],
        )
        for event in slow["traceEvents"]
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    events = kineto.read(path).device_events
    found = zip(*(events[name].to_pylist() for name in ("start_ns", "end_ns", "name", "stream")), strict=True)
    assert sorted(found) == expected


def test_every_host_event_is_there_with_its_thread(captures: Path) -> None:
    path = captures / "kineto" / "pp2_dp2" / "rank-3.json.gz"
    slow = json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)
    base = slow["baseTimeNanoseconds"]
    expected = sorted(
        (base + int(event["ts"] * 1000), base + int((event["ts"] + event["dur"]) * 1000), event["name"], event["tid"])
        for event in slow["traceEvents"]
        if event.get("cat") in ("cpu_op", "cuda_runtime", "cuda_driver", "user_annotation", "overhead")
    )
    events = kineto.read(path).host_events
    found = zip(*(events[name].to_pylist() for name in ("start_ns", "end_ns", "name", "thread")), strict=True)
    assert sorted(found) == expected


def test_both_iterations_are_there_and_none_is_at_the_boundary(captures: Path) -> None:
    for rank in range(4):
        iterations = kineto.read(captures / "kineto" / "tp2_dp2" / f"rank-{rank}.json.gz").iterations
        assert iterations["iteration"].to_pylist() == [9, 10]
        assert iterations["boundary"].to_pylist() == [False, False]


def test_every_kernel_has_its_launch_and_its_iteration(captures: Path) -> None:
    tables = kineto.read(captures / "kineto" / "tp2_dp2" / "rank-0.json.gz")
    events = tables.device_events
    assert events["launch_start_ns"].null_count == 0
    assert events["iteration"].null_count == 0
    # The capture's host and device clocks agree to some microseconds.
    assert (events["start_ns"].to_numpy() - events["launch_start_ns"].to_numpy()).min() > -10_000


def test_point_to_point_operations_of_both_stages_match(captures: Path) -> None:
    """Megatron issues them as a batch, and Kineto describes no kernel of a batch: the calls before it do."""
    sides = []
    for rank in (0, 2):
        tables = kineto.read(captures / "kineto" / "pp2_dp2" / f"rank-{rank}.json.gz")
        rows = [row for row in tables.collectives.to_pylist() if row["group"] == "PIPELINE_MODEL_PARALLEL_GROUP"]
        assert [row["sequence"] for row in sorted(rows, key=lambda row: row["launch_start_ns"])] == list(range(len(rows)))
        assert {row["peer"] for row in rows} == {2 - rank}
        sides.append({row["sequence"]: row for row in rows})
        assert not tables.info.caveats
    mirrored = {"send": "recv", "recv": "send", "send_recv": "send_recv"}
    assert {row: mirrored[each["operation"]] for row, each in sides[0].items()} == {
        row: each["operation"] for row, each in sides[1].items()
    }
    assert {each["message_bytes"] for side in sides for each in side.values()} == {2048 * 1 * 2048 * 2}


def test_collectives_of_one_group_have_the_same_sequence_on_its_ranks(captures: Path) -> None:
    rows = []
    for rank in (0, 1):
        table = kineto.read(captures / "kineto" / "tp2_dp2" / f"rank-{rank}.json.gz").collectives
        mine = [row for row in table.to_pylist() if row["group"] == "TENSOR_MODEL_PARALLEL_GROUP"]
        rows.append({row["sequence"]: (row["operation"], row["message_bytes"], row["dtype"]) for row in mine})
    assert rows[0] == rows[1]
    assert len(rows[0]) == 296
    assert np.all([size for _, size, _ in rows[0].values()])
