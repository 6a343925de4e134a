"""What operators cost, and how fast copies are."""

from __future__ import annotations

from typing import Any

import pytest

from bridge_profiling.analysis.attribution.device import copies
from bridge_profiling.analysis.attribution.operators import operators
from tests.analysis.ranks_in_hand import answer, rank, table, work


def _operator(name: str, start_ns: int, end_ns: int, **known: Any) -> dict[str, Any]:
    return {"category": "operator", "name": name, "start_ns": start_ns, "end_ns": end_ns, **known}


def test_own_time_is_without_operators_inside() -> None:
    events = [
        _operator("aten::linear", 0, 10_000, operator=1),
        _operator("aten::mm", 2000, 8000, operator=2),
        _operator("aten::mm", 0, 1000, operator=3, thread=2),
        {"category": "runtime", "name": "cudaLaunchKernel", "start_ns": 3000, "end_ns": 4000, "operator": 2},
    ]
    launched = [work("compute", 5000, 9000, operator=2), work("compute", 9000, 9500, operator=3), work("compute", 9500, 9600)]
    rows = answer(rank(host_events=events, device_events=launched), "operators").to_pylist()
    found = {row["name"]: (row["count"], row["self_us"], row["total_us"], row["device_us"]) for row in rows}
    assert found == {"aten::mm": (2, 7, 7, 4.5), "aten::linear": (1, 4, 10, 0)}
    assert [row["name"] for row in rows] == ["aten::mm", "aten::linear"]


def test_shapes_and_call_stacks_tell_calls_apart_when_asked() -> None:
    shapes, stack = "[[2,3],[3,4]]", "forward model.py:7\nmain train.py:3"
    events = [
        _operator("aten::mm", 0, 1000, shapes=shapes, stack=stack),
        _operator("aten::mm", 2000, 3000, shapes="[[9,9],[9,9]]", stack=stack),
        _operator("aten::mm", 4000, 5000),
    ]
    host, device = table("host_events", events), table("device_events", [])
    assert operators(host, device)["count"].to_pylist() == [3]
    by_shape = operators(host, device, shapes=True).to_pylist()
    assert {row["shapes"]: row["count"] for row in by_shape} == {shapes: 1, "[[9,9],[9,9]]": 1, None: 1}
    by_stack = operators(host, device, stacks=True).to_pylist()
    assert {row["stack"]: row["count"] for row in by_stack} == {stack: 2, None: 1}


def test_annotations_and_calls_can_be_asked_for() -> None:
    events = [
        {"category": "annotation", "name": "dataloader", "start_ns": 0, "end_ns": 5000},
        _operator("aten::mm", 1000, 2000),
        {"category": "runtime", "name": "cudaLaunchKernel", "start_ns": 1200, "end_ns": 1500},
    ]
    host, device = table("host_events", events), table("device_events", [])
    assert operators(host, device, category="annotation")["self_us"].to_pylist() == [5]
    assert operators(host, device, category="runtime")["name"].to_pylist() == ["cudaLaunchKernel"]
    assert operators(host, device, category="python").num_rows == 0


def test_copies_by_direction_and_memory_with_their_bandwidth() -> None:
    def copy(direction: str, source: str, target: str, start_ns: int, size: int | None) -> dict[str, Any]:
        known = {"direction": direction, "from_memory": source, "to_memory": target, "bytes": size}
        return work("memcpy", start_ns, start_ns + 1000, **known)

    events = [
        copy("HtoD", "pageable", "device", 0, 4000),
        copy("HtoD", "pageable", "device", 2000, 6000),
        copy("HtoD", "pageable", "device", 3000, None),
        copy("HtoD", "pinned", "device", 4000, 50_000),
        copy("DtoD", "device", "device", 6000, 900_000),
        work("compute", 0, 500),
        work("memset", 0, 500, bytes=7),
    ]
    found = {(row["direction"], row["from_memory"]): row for row in copies(table("device_events", events)).to_pylist()}
    assert set(found) == {("HtoD", "pageable"), ("HtoD", "pinned"), ("DtoD", "device")}
    pageable = found["HtoD", "pageable"]
    assert (pageable["count"], pageable["bytes"], pageable["total_us"], pageable["host_memory"]) == (3, 10_000, 3, "pageable")
    # The copy whose bytes are unknown takes no part in the bandwidth.
    assert pageable["bandwidth_gbs"] == pytest.approx(5.0)
    assert found["HtoD", "pinned"]["bandwidth_gbs"] == pytest.approx(50.0)
    assert found["DtoD", "device"]["host_memory"] is None


def test_no_copies_are_an_empty_table() -> None:
    assert copies(table("device_events", [])).num_rows == 0
