"""Events that no table has a place for are left out and counted in the limitations, and change nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bridge_profiling.errors import TraceError
from bridge_profiling.traces import kineto
from bridge_profiling.traces.kineto import stream
from bridge_profiling.traces.types import RankTables
from tests.traces.conftest import WriteTrace
from tests.traces.kineto_files import call, complete, document, kernel

READ = [
    complete("user_annotation", "ProfilerStep#5", 1000.0, 90.5, **{"External id": 1}),
    complete("cpu_op", "aten::mm", 1001.25, 9.5, **{"External id": 2, "Input Dims": [[4, 8], [2]]}),
    call("cudaLaunchKernel", 1002.001, 3.002, 11, **{"External id": 2}),
    kernel("gemm", 1006.003, 20.004, correlation=11, **{"External id": 2}),
    {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 100, "tid": 1, "ts": 1003.5,
     "args": {"Bytes": 512, "Addr": 64, "Device Id": -1, "Device Type": 0, "Ev Idx": 1}},
    {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 1095.0},
]  # fmt: skip


def _event(phase: str, category: str | None, name: str, start_us: float, **more: Any) -> dict[str, Any]:
    named = {"ph": phase, "name": name, "pid": 100, "tid": 1, "ts": start_us}
    return named | ({"cat": category} if category else {}) | more


#: As Kineto writes samples of hardware counters: the device in the process's name, the value under no name.
COUNTERS = [
    _event("C", "hardware_counters", name, 1010.0 + step, pid="GPU 0 Counters", args={"": 0.5 * step})
    for step in range(3)
    for name in ("dram__throughput.avg", "sm__cycles_active.avg")
]

#: What is left out, and how the limitations name it.
UNREAD = {
    "6 counter samples of the category 'hardware_counters' are left out": COUNTERS,
    "2 counter samples are left out": [
        _event("C", None, "aten::mm", 1002.0, dur=5.0, args={"queue": 3}),
        _event("C", None, "[memory]", 1002.0, args={"Bytes": 99, "Total Allocated": 99}),
    ],
    "2 events of the unknown category 'cuda_profiler_range' are left out": [
        complete("cuda_profiler_range", "smsp__warps_launched.avg", 1005.0, 50.0, device=0, stream=7, correlation=11),
        complete("cuda_profiler_range", "performance monitor", 1005.0, 50.0, **{"sm__cycles_active.avg": 12.5}),
    ],
    "1 events of the unknown category 'xpu_runtime' are left out": [
        complete("xpu_runtime", "zeLaunch", 1002.0, 9.0, correlation=11)
    ],
    "1 events of the unknown category 'mtia_insight' are left out": [
        complete("mtia_insight", "ProfilerStep#6", 1050.0, 20.0, pid=0, tid=7, device=0, stream=7)
    ],
    "1 events of the unknown category 'new_instants' are left out": [_event("i", "new_instants", "[future]", 1001.0, s="t")],
    "3 asynchronous events of the category 'cpu_op' are left out": [
        _event("b", "cpu_op", "request", 1001.0, id="0x1"),
        _event("n", "cpu_op", "request", 1002.0, id="0x1", args={"stream": "none"}),
        _event("e", "cpu_op", "request", 1003.0, id="0x1"),
    ],
    "2 begin and end events of the category 'kernel' are left out": [
        _event("B", "kernel", "gemm", 1040.0, args={"stream": 7, "device": 0}),
        _event("E", "kernel", "gemm", 1050.0),
    ],
    "3 object events are left out": [
        _event("N", None, "tensor", 1001.0, id="0x2"),
        _event("O", None, "tensor", 1002.0, id="0x2", args={"snapshot": {"ph": "X", "cat": "kernel", "ts": 1, "dur": 1}}),
        _event("D", None, "tensor", 1003.0, id="0x2"),
    ],
    "1 events of the phase '?' are left out": [_event("?", None, "future", 1001.0, dur=3.0)],
    "1 events could not be decoded and are left out": [_event("X", "kernel", "endless", 1060.0, args={"stream": 7})],
}  # fmt: skip


def _interleaved(unread: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those events in every gap between the others, each once."""
    found: list[dict[str, Any]] = []
    for place, event in enumerate(READ):
        found += [*unread[place :: len(READ)], event]
    return found


def _assert_only_unread(tables: RankTables, expected: RankTables, *said: str) -> None:
    assert {name: table.to_pylist() for name, table in tables.tables.items()} == {
        name: table.to_pylist() for name, table in expected.tables.items()
    }
    assert [each.text for each in tables.info.caveats if "left out" in each.text] == list(said)
    assert tables.info.error is None


@pytest.fixture
def expected(write_trace: WriteTrace) -> RankTables:
    tables = kineto.read(write_trace(READ, "expected.json"))
    assert [tables[name].num_rows for name in ("host_events", "device_events", "memory_events", "iterations")] == [3, 1, 1, 1]
    return tables


@pytest.mark.parametrize("said", UNREAD)
def test_each_kind_is_left_out_and_counted(write_trace: WriteTrace, expected: RankTables, said: str) -> None:
    _assert_only_unread(kineto.read(write_trace(_interleaved(UNREAD[said]))), expected, said)


@pytest.mark.parametrize("way", ["whole", "in pieces", "each event", "indented", "without operators"])
def test_all_of_them_at_once_however_the_file_is_read(
    write_trace: WriteTrace, expected: RankTables, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    text = json.dumps(document(_interleaved([event for events in UNREAD.values() for event in events])))
    if way == "in pieces":
        monkeypatch.setattr(stream, "PIECE_BYTES", 400)
    if way == "each event":
        # A piece with an event that fits no type is read event by event.
        text = text.replace('"traceEvents": [', '"traceEvents": [{"ph": ["M"], "name": {}, "args": []}, ')
    if way == "indented":
        text = json.dumps(json.loads(text), indent=2)
    tables = kineto.read(write_trace(text), operators=way != "without operators")
    if way == "without operators":
        assert tables.device_events.to_pylist() == expected.device_events.to_pylist()
        assert tables.iterations.to_pylist() == expected.iterations.to_pylist()
        return
    said = [
        "1 events could not be decoded and are left out",
        "2 events of the unknown category 'cuda_profiler_range' are left out",
        "1 events of the unknown category 'mtia_insight' are left out",
        "1 events of the unknown category 'new_instants' are left out",
        "6 counter samples of the category 'hardware_counters' are left out",
        "3 asynchronous events of the category 'cpu_op' are left out",
        "3 object events are left out",
        "6 events of further categories are left out",
    ]
    if way == "each event":
        said[-1] = "7 events of further categories are left out"
    _assert_only_unread(tables, expected, *said)


def test_times_as_text_leave_them_out_as_well(write_trace: WriteTrace) -> None:
    """torch 2.2 to 2.4 wrote times of 19 digits, which are read a second time as text."""
    text = json.dumps(document(_interleaved(COUNTERS))).replace('"ts": 1', '"ts": 1695835526341')
    tables = kineto.read(write_trace(text))
    assert tables.device_events["start_ns"].to_pylist() == [1695835526341006003]
    assert [each.text for each in tables.info.caveats if "left out" in each.text] == [next(iter(UNREAD))]


def test_a_trace_of_counters_alone_is_an_error_that_names_the_file(write_trace: WriteTrace) -> None:
    path = write_trace(COUNTERS)
    with pytest.raises(TraceError, match=str(path)):
        kineto.read(path)


def test_work_that_torch_moved_to_a_lane_keeps_the_stream_it_ran_on(write_trace: WriteTrace) -> None:
    """torch 2.15's export with graph_lanes="all": `stream` and the thread are a lane's, `original_stream` the device's."""
    moved = [
        kernel("gemm", 10.0, 5.0, stream=7, **{"original_stream": 1042, "graph node id": 3}),
        kernel("gemm", 12.0, 5.0, stream=7, **{"original_stream": 1043, "graph node id": 4}),
        kernel("gemm", 20.0, 5.0, stream=7),
    ]
    assert kineto.read(write_trace(moved)).device_events["stream"].to_pylist() == [1042, 1043, 7]
