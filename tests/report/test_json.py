"""The JSON is the design's, field by field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge_profiling.run import Run
from tests.traces.conftest import WriteTrace
from tests.traces.kineto_files import kernel

OpenRun = Callable[..., Run]

DEVICE = {
    "span_us",
    "busy_us",
    "idle_us",
    "compute_us",
    "communication_us",
    "exposed_communication_us",
    "overlapped_communication_us",
    "memcpy_us",
    "memset_us",
    "kernel_count",
    "communication_kernel_count",
}
ITERATION = {
    "iteration",
    "duration_us",
    "compute_us",
    "communication_us",
    "exposed_communication_us",
    "idle_us",
    "launch_starved_us",
    "blocked_us",
    "dependency_stalled_us",
    "boundary",
}
KERNEL = {"name", "kind", "count", "total_us", "mean_us", "min_us", "max_us"}
COLLECTIVE = {"operation", "group", "size", "count", "bytes", "transfer_us", "wait_us", "bus_bandwidth_gbs"}


@pytest.fixture(scope="module")
def document(captures: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    with Run(captures / "kineto" / "tp2_dp2", parquet=tmp_path_factory.mktemp("parquet")) as run:
        return json.loads(run.to_json())


def test_the_top_level(document: dict) -> None:
    assert list(document) == [
        "schema_version",
        "ranks",
        "collectives",
        "memory",
        "pipeline",
        "bench",
        "findings",
        "limitations",
        "caveats",
    ]
    assert document["schema_version"] == 1
    assert isinstance(document["findings"], list)
    assert all(isinstance(sentence, str) for sentence in document["limitations"])
    assert all(set(caveat) == {"code", "text", "ranks", "file"} for caveat in document["caveats"])
    assert {tuple(each["ranks"]) for each in document["caveats"] if each["code"] == "few_iterations"} <= {(0, 1, 2, 3)}


def test_every_rank_has_its_fields(document: dict, captures: Path) -> None:
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1, 2, 3]
    for rank in document["ranks"]:
        assert set(rank) == {"rank", "source", "files", "coordinates", "device", "iterations", "kernels"}
        assert rank["source"] == "kineto"
        assert rank["files"] == [str(captures / "kineto" / "tp2_dp2" / f"rank-{rank['rank']}.json.gz")]
        assert rank["coordinates"] is None
        assert set(rank["device"]) == DEVICE
        assert [set(iteration) for iteration in rank["iterations"]] == [ITERATION, ITERATION]
        assert all(set(kernel) == KERNEL for kernel in rank["kernels"])
        assert len(rank["kernels"]) > 50
        assert sum(kernel["count"] for kernel in rank["kernels"]) == rank["device"]["kernel_count"]
        assert {kernel["kind"] for kernel in rank["kernels"]} == {"compute", "communication"}
        assert isinstance(rank["iterations"][0]["boundary"], bool)


def test_every_collective_has_its_fields(document: dict) -> None:
    assert document["collectives"]
    for collective in document["collectives"]:
        assert set(collective) >= COLLECTIVE
        assert collective["size"] == len(collective["ranks"])
        assert set(collective["wait_us"]) <= {str(rank) for rank in collective["ranks"]}
    tensor = [each for each in document["collectives"] if each["group"] == "TENSOR_MODEL_PARALLEL_GROUP"]
    assert {tuple(each["ranks"]) for each in tensor} == {(0, 1), (2, 3)}
    # Ranks 0 and 2 wait inside NCCL for 1 and 3, whose hosts launch late.
    for each in tensor:
        early, late = (each["wait_us"][str(rank)] for rank in each["ranks"])
        assert early > 3 * late


def test_memory_has_its_fields(captures: Path, tmp_path: Path, run_of: OpenRun) -> None:
    document = json.loads(run_of(captures / "memory" / "tp2_dp2", parquet=tmp_path).to_json())
    (row,) = document["memory"]
    assert {"rank", "peak_bytes", "growth_bytes_per_iteration"} <= set(row)
    assert row["peak_bytes"] > 2**30
    # A snapshot says nothing about device time: no rank is made up for it.
    assert document["ranks"] == []


def test_coordinates_come_from_the_manifest_or_the_trace(write_trace: WriteTrace, run_of: OpenRun) -> None:
    ours = {"rank": 3, "coordinates": {"tp": [1, 2], "pp": [0, 1]}}
    run = run_of(write_trace([kernel("gemm", 1, 2)], bridge_profiling=ours))
    assert json.loads(run.to_json())["ranks"][0]["coordinates"] == {"tp": [1, 2], "pp": [0, 1]}


def test_what_is_no_number_in_json_is_null(write_trace: WriteTrace, run_of: OpenRun) -> None:
    run = run_of(write_trace([kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL()", 1, 0)]))
    assert json.loads(run.to_json(), parse_constant=pytest.fail)["ranks"][0]["device"]["span_us"] == 0
