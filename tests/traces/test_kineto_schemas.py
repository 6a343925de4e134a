"""Every way in which torch, Kineto and ROCm have written traces since torch 1.8 is read, to the same tables."""

from __future__ import annotations

import gzip
import json
import lzma
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridge_profiling.traces import kineto
from bridge_profiling.traces.kineto import stream
from bridge_profiling.traces.kineto.columns import exact_ns
from bridge_profiling.traces.types import RankTables
from tests.traces.conftest import WriteTrace
from tests.traces.kineto_files import call, complete, document, kernel

EVENTS = [
    complete("user_annotation", "ProfilerStep#5", 1000.0, 90.5, **{"External id": 1}),
    complete("cpu_op", "aten::mm", 1001.25, 9.5, **{"External id": 2, "Input Dims": [[4, 8], [2]], "Call stack": "a.py(3): f"}),
    call("cudaLaunchKernel", 1002.001, 3.002, 11, **{"External id": 2}),
    {"ph": "s", "id": 11, "pid": 100, "tid": 1, "ts": 1002.001, "cat": "ac2g", "name": "ac2g"},
    kernel("gemm", 1006.003, 20.004, correlation=11, **{"External id": 2, "memory bandwidth (GB/s)": 1.5}),
    {"ph": "f", "id": 11, "pid": 0, "tid": 7, "ts": 1006.003, "cat": "ac2g", "name": "ac2g", "bp": "e"},
    complete("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 1030.5, 2.25, pid=0, tid=7, device=0, stream=7, bytes=4096),
]


def _rows(tables: RankTables, name: str = "device_events") -> list[dict[str, Any]]:
    return tables[name].to_pylist()


def _same(tables: RankTables, expected: RankTables) -> None:
    assert {name: tables[name].to_pylist() for name in expected.tables} == {
        name: expected[name].to_pylist() for name in expected.tables
    }
    assert tables.info.error is None


@pytest.fixture
def expected(write_trace: WriteTrace) -> RankTables:
    return kineto.read(write_trace(EVENTS, "expected.json"))


def test_a_trace_of_today(expected: RankTables) -> None:
    assert expected.info.rank == 3
    assert expected.info.rank_source == "trace"
    assert expected.info.world_size == 8
    first, copy = _rows(expected)
    assert first | {"start_ns": 1006003, "end_ns": 1026007, "launch_start_ns": 1002001, "launch_end_ns": 1005003} == first
    assert first | {"kind": "compute", "name": "gemm", "stream": 7, "operator": 2, "iteration": 5, "launch_thread": 1} == first
    assert copy | {"kind": "memcpy", "direction": "HtoD", "from_memory": "pageable", "to_memory": "device"} == copy
    assert copy["bytes"] == 4096
    operator = _rows(expected, "host_events")[1]
    assert operator | {"category": "operator", "shapes": "[[4,8],[2]]", "stack": "a.py(3): f"} == operator
    assert _rows(expected, "iterations") == [
        {"rank": 3, "iteration": 5, "start_ns": 1000000, "end_ns": 1090500, "boundary": False}
    ]


@pytest.mark.parametrize("indent", [None, 2, 4])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" , ", " : ")])
@pytest.mark.parametrize("first", [True, False])
def test_minified_or_indented_with_the_events_first_or_last(
    write_trace: WriteTrace, expected: RankTables, indent: int | None, separators: tuple[str, str], first: bool
) -> None:
    trace = document(EVENTS)
    events = trace.pop("traceEvents")
    trace = {"traceEvents": events, **trace} if first else {**trace, "traceEvents": events}
    _same(kineto.read(write_trace(json.dumps(trace, indent=indent, separators=separators))), expected)


@pytest.mark.parametrize(
    "packed",
    [
        lambda raw: raw,
        gzip.compress,
        lzma.compress,
        lambda raw: gzip.compress(raw[:300]) + gzip.compress(b"") + gzip.compress(raw[300:]),
        lambda raw: gzip.compress(raw) + b"\0" * 512,
    ],
    ids=["plain", "gzip", "xz", "members", "padded"],
)
def test_packed_in_any_way(write_trace: WriteTrace, expected: RankTables, packed: Any) -> None:
    raw = json.dumps(document(EVENTS)).encode()
    _same(kineto.read(write_trace(packed(raw), "packed")), expected)


def test_a_bare_array_of_events(write_trace: WriteTrace, expected: RankTables) -> None:
    tables = kineto.read(write_trace(json.dumps(EVENTS)), rank=3)
    _same(tables, expected)
    assert tables.info.rank_source == "order"


@pytest.mark.parametrize("broken", ["Infinity", "-Infinity", "NaN", "inf", "-inf", "nan"])
def test_numbers_that_are_none_do_no_harm(write_trace: WriteTrace, expected: RankTables, broken: str) -> None:
    text = json.dumps(document(EVENTS)).replace('"memory bandwidth (GB/s)": 1.5', f'"memory bandwidth (GB/s)": {broken}')
    assert broken in text
    _same(kineto.read(write_trace(text)), expected)


def test_words_like_infinity_inside_names_stay(write_trace: WriteTrace) -> None:
    tables = kineto.read(write_trace([kernel("a: nan, inf", 1, 1, bandwidth=float("inf"))]))
    assert _rows(tables)[0]["name"] == "a: nan, inf"


def test_invalid_utf8_and_raw_control_characters_are_shown_as_well_as_can_be(write_trace: WriteTrace) -> None:
    raw = json.dumps(document(EVENTS)).encode().replace(b'"gemm"', b'"ge\xff\x01m\\m"')
    assert _rows(kineto.read(write_trace(raw)))[0]["name"] == "ge� m\\m"


def test_torch_1_8_capitals_and_numbers_as_text(write_trace: WriteTrace) -> None:
    events = [
        {"ph": "X", "cat": "Operator", "name": "aten::mm", "pid": 24572, "tid": "24572", "ts": 1621401187223005, "dur": 300,
         "args": {"Device": 24572, "External id": 2, "Input dims": [[1], []], "Trace name": "PyTorch Profiler"}},
        {"ph": "X", "cat": "Runtime", "name": "cudaLaunchKernel", "pid": 24572, "tid": "24572", "ts": 1621401187223105,
         "dur": 5,
         "args": {"cbid": 211, "correlation": 7, "external id": 2}},
        {"ph": "X", "cat": "Kernel", "name": "gemm", "pid": 0, "tid": "stream 7", "ts": 1621401187223205, "dur": 17,
         "args": {"queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": 7, "external id": 2}},
        {"ph": "X", "cat": "Memcpy", "name": "Memcpy DtoD (Device -> Device)", "pid": 0, "tid": "stream 9",
         "ts": 1621401187223305, "dur": 1, "args": {"bytes": "128"}},
        {"ph": "X", "cat": "Memset", "name": "Memset (Device)", "pid": 0, "tid": "stream 9", "ts": 1621401187223405, "dur": 1},
    ]  # fmt: skip
    tables = kineto.read(write_trace({"schemaVersion": 1, "traceEvents": events}), rank=2, rank_source="file name")
    assert (tables.info.rank, tables.info.rank_source, tables.info.clock) == (2, "file name", "unix")
    first, copy, fill = _rows(tables)
    assert (first["start_ns"], first["end_ns"]) == (1621401187223205000, 1621401187223222000)
    assert (first["operator"], first["launch_start_ns"], first["launch_thread"]) == (2, 1621401187223105000, 24572)
    assert (copy["kind"], copy["bytes"], copy["direction"], copy["stream"], copy["device"]) == ("memcpy", 128, "DtoD", 9, 0)
    assert (fill["kind"], fill["stream"]) == ("memset", 9)
    assert _rows(tables, "host_events")[0]["shapes"] == "[[1],[]]"


def test_rocm_numbers_as_text_and_rccl(write_trace: WriteTrace) -> None:
    events = [
        complete("cuda_runtime", "hipLaunchKernel", 10, 2, correlation="5"),
        kernel("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", 14, 3, correlation="5"),
        complete("gpu_memcpy", "CopyHostToDevice", 20, 1, pid=2, tid=0, device="2", stream="0", bytes="4194304", correlation=6),
        kernel("hipBlasLt_gemm", 30, 4),
    ]
    reduced, copy, gemm = _rows(kineto.read(write_trace(events)))
    assert (reduced["kind"], reduced["backend"], reduced["launch_start_ns"]) == ("communication", "rccl", 10000)
    assert (copy["bytes"], copy["direction"], copy["device"], copy["stream"]) == (4194304, "HtoD", 2, 0)
    assert gemm["kind"] == "compute"


def test_a_trace_without_distributed_information_is_read(write_trace: WriteTrace, expected: RankTables) -> None:
    tables = kineto.read(write_trace({"traceEvents": EVENTS}), rank=3, rank_source="file name")
    _same(tables, expected)
    assert tables.info.rank_source == "file name"


def test_ids_that_are_correlations_name_no_operator(write_trace: WriteTrace) -> None:
    """In torch 1.13 a kernel's external id is its correlation, which an unrelated operator may have as its id."""
    events = [
        complete("cpu_op", "aten::mm", 1666149715364330, 58, **{"External id": 67247}),
        call("cudaLaunchKernel", 1666149715364374, 10, 2131433, **{"External id": 2131433}),
        kernel("gemm", 1666149715428509, 45, correlation=2131433, **{"External id": 2131433}),
        complete("cpu_op", "unrelated", 1666149715500000, 1, **{"External id": 2131433}),
    ]
    tables = kineto.read(write_trace(events))
    assert _rows(tables)[0]["operator"] is None
    assert _rows(tables)[0]["launch_start_ns"] == 1666149715364374000
    assert tables.host_events["operator"].to_pylist() == [67247, None, 2131433]


def test_events_that_name_no_thread_and_no_stream(write_trace: WriteTrace) -> None:
    bare = [{"cat": "kernel", "name": "gemm", "ts": 1, "dur": 2}, {"cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2}]
    tables = kineto.read(write_trace({"traceEvents": bare}))
    assert [(row["stream"], row["device"]) for row in _rows(tables)] == [(None, None)]
    assert [(row["thread"], row["process"]) for row in _rows(tables, "host_events")] == [(None, None)]


def test_times_since_1970_with_nanoseconds_are_exact(write_trace: WriteTrace) -> None:
    """torch 2.2 to 2.4 wrote 19 digits, of which a float holds 16."""
    text = json.dumps(document([kernel("gemm", 1.0, 2.25), call("launch", 3.0, 1.0, 5)]))
    text = text.replace('"ts": 1.0', '"ts": 1695835526343252.123').replace('"ts": 3.0', '"ts": 1695835526343252.999')
    tables = kineto.read(write_trace(text))
    assert _rows(tables)[0]["start_ns"] == 1695835526343252123
    assert _rows(tables)[0]["end_ns"] == 1695835526343254373
    assert _rows(tables, "host_events")[0]["start_ns"] == 1695835526343252999
    assert tables.info.clock == "unix"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(
    starts=st.lists(st.integers(0, 3_999_999_999_999_999_999), min_size=1, max_size=5),
    duration=st.integers(0, 10**12),
    whole=st.booleans(),
)
def test_any_time_is_exact(write_trace: WriteTrace, starts: list[int], duration: int, whole: bool) -> None:
    """Integer microseconds or three decimals, near zero, relative to a base, or since 1970."""
    if whole:
        starts = [start // 1000 * 1000 for start in starts]
    written = [str(start // 1000) if whole else f"{start // 1000}.{start % 1000:03}" for start in starts]
    lasting = f"{duration // 1000}.{duration % 1000:03}"
    events = ", ".join(f'{{"cat": "kernel", "name": "k", "ts": {start}, "dur": {lasting}}}' for start in written)
    tables = kineto.read(write_trace(f'{{"traceEvents": [{events}]}}'))
    assert tables.device_events["start_ns"].to_pylist() == sorted(starts)
    assert tables.device_events["end_ns"].to_pylist() == sorted(start + duration for start in starts)


@given(st.decimals(-(10**15), 10**15, places=3, allow_nan=False))
def test_exact_ns_is_decimal_arithmetic(microseconds: Decimal) -> None:
    assert exact_ns(str(microseconds)) == int(microseconds * 1000)
    assert exact_ns(f"{microseconds}e0") == int(microseconds * 1000)


def test_the_base_time_makes_times_those_of_the_host(write_trace: WriteTrace) -> None:
    tables = kineto.read(write_trace(EVENTS, baseTimeNanoseconds=1790857026000000000))
    assert _rows(tables)[0]["start_ns"] == 1790857026000000000 + 1006003
    assert (tables.info.clock, tables.info.clock_base_ns) == ("unix", 1790857026000000000)


def test_memory_instants(write_trace: WriteTrace) -> None:
    instant = {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 100, "tid": 1}
    events = [
        *EVENTS,
        instant | {"ts": 1003.5, "args": {"Total Reserved": 2097152, "Total Allocated": 512, "Bytes": 512, "Addr": 2**63 + 5,
                                          "Device Id": 0, "Device Type": 1, "Ev Idx": 1}},
        instant | {"ts": 1002.5, "args": {"Bytes": -64, "Addr": 94, "Device Id": -1, "Device Type": 0}},
    ]  # fmt: skip
    assert _rows(kineto.read(write_trace(events)), "memory_events") == [
        {"rank": 3, "time_ns": 1002500, "device_type": "cpu", "device": -1, "address": 94, "bytes": -64,
         "total_allocated_bytes": None, "total_reserved_bytes": None},
        {"rank": 3, "time_ns": 1003500, "device_type": "cuda", "device": 0, "address": 2**63 + 5, "bytes": 512,
         "total_allocated_bytes": 512, "total_reserved_bytes": 2097152},
    ]  # fmt: skip


def test_python_frames_and_the_profilers_own_work_have_their_categories(write_trace: WriteTrace) -> None:
    events = [complete("python_function", "train.py(3): step", 1, 9), complete("overhead", "Buffer Flush", 20, 5)]
    rows = _rows(kineto.read(write_trace(events)), "host_events")
    assert [(row["category"], row["name"]) for row in rows] == [("python", "train.py(3): step"), ("overhead", "Buffer Flush")]


def test_iterations_that_the_profiler_starts_or_flushes_in_are_boundaries(write_trace: WriteTrace) -> None:
    events = [complete("user_annotation", f"ProfilerStep#{step}", 100 * step, 100) for step in range(1, 5)]
    events += [
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "x", "ts": 150, "dur": 350},
        complete("overhead", "Buffer Flush", 310, 5),
    ]
    assert kineto.read(write_trace(events)).iterations["boundary"].to_pylist() == [True, False, True, False]


def test_versions_and_groups(write_trace: WriteTrace) -> None:
    group = {"pg_name": "15", "pg_desc": "TP", "backend_config": "cuda:nccl", "ranks": [2, 3]}
    keys = {"cuda_runtime_version": 12080, "distributedInfo": {"rank": 3, "nccl_version": "2.28.9", "pg_config": [group]}}
    info = kineto.read(write_trace(EVENTS, **keys)).info
    assert info.versions | {"cuda_runtime": "12.8", "nccl": "2.28.9"} == info.versions
    assert [(each.name, each.description, each.ranks) for each in info.groups] == [("15", "TP", (2, 3))]


def test_long_lists_of_ranks_come_from_the_groups_the_trace_lists(write_trace: WriteTrace) -> None:
    """Kineto shortens them in an event's arguments."""
    ranks = list(range(0, 320, 8))
    args = {"Collective name": "allreduce", "Process Group Name": "7", "Process Group Ranks": "[0, 8, ..., 312]",
            "dtype": "Half", "In msg nelems": 10, "Out msg nelems": 10, "Group size": 40}  # fmt: skip
    keys = {"distributedInfo": {"rank": 0, "pg_config": [{"pg_name": "7", "pg_desc": "DP", "ranks": ranks}]}}
    row = _rows(kineto.read(write_trace([kernel("ncclDevKernel_AllReduce_Sum", 1, 1, **args)], **keys)), "collectives")[0]
    assert json.loads(row["group_ranks"]) == ranks
    assert (row["group"], row["message_bytes"], row["group_size"]) == ("DP", 20, 40)


@pytest.mark.parametrize("piece_bytes", [64, 200, 1000])
@pytest.mark.parametrize(
    "nested",
    [
        {"Nested": [{"ph": 1}, {"ph": 2}, {"name": "x"}]},
        {"Nested": [{"ph": "X", "cat": "kernel", "name": "inner", "ts": 1, "dur": 1}] * 9},
        {"Text": '},{"ph": "X"', "Odd": "\\\" ]}"},
    ],
)  # fmt: skip
def test_pieces_are_cut_between_events_only(
    write_trace: WriteTrace, monkeypatch: pytest.MonkeyPatch, nested: dict[str, Any], piece_bytes: int
) -> None:
    events = [kernel(f'k{number} }},{{"ph":', 10 * number, 5, **nested) for number in range(40)]
    trailer = {"after": [{"ph": "X"}, {"name": "no event"}, {"ph": "X"}] * 20, "schemaVersion": 2}
    path = write_trace({"traceEvents": events, "distributedInfo": {"rank": 1}, **trailer})
    whole = kineto.read(path)
    assert whole.device_events["name"].to_pylist() == [event["name"] for event in events]
    monkeypatch.setattr(stream, "PIECE_BYTES", piece_bytes)
    _same(kineto.read(path), whole)
    assert kineto.read(path).info == whole.info


def test_without_operators_all_about_the_device_is_the_same(captures: Path) -> None:
    path = captures / "kineto" / "tp2_dp2" / "rank-0.json.gz"
    short, whole = kineto.read(path, operators=False), kineto.read(path)
    for name in ("device_events", "collectives", "iterations"):
        assert short[name].to_pylist() == whole[name].to_pylist()
    kept = [row for row in whole.host_events.to_pylist() if row["category"] != "operator"]
    assert short.host_events.to_pylist() == kept
    assert len(kept) > 10_000


def test_without_operators_torch_1_8_still_has_its_iterations(write_trace: WriteTrace) -> None:
    """It wrote them as operators."""
    events = [complete("Operator", "ProfilerStep#2", 0, 50), complete("Operator", "aten::mm", 1, 5), kernel("gemm", 9, 1)]
    tables = kineto.read(write_trace(events), operators=False)
    assert tables.iterations["iteration"].to_pylist() == [2]
    assert tables.device_events["iteration"].to_pylist() == [2]
    assert tables.host_events["name"].to_pylist() == ["ProfilerStep#2"]
