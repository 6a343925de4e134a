"""Every way in which torch, Kineto and ROCm have written traces since torch 1.8 is read, to the same tables.

tools/kineto_traces.py makes the traces of torch 2.11, 2.13 and 2.15 on a CPU.
"""

import gzip
import json
import lzma
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridge_profiling.traces import kineto
from bridge_profiling.traces.tables import SCHEMAS
from tests.planted.cases import CASES
from tests.traces.conftest import contents, values
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
RAW = json.dumps(document(EVENTS)).encode()


FOLDER = Path(__file__).parent / "torch_versions"
VERSIONS = {"hook": "2.11.0 2.13.0 2.15.0", "plain": "2.11.0 2.13.0 2.15.0", "python_export": "2.13.0 2.15.0"}

#: Tables, what an event's place is called there, and the categories of their events.
PLACES = [
    ("host_events", "thread", "cpu_op user_annotation python_function cuda_runtime cuda_driver overhead"),
    ("device_events", "stream", "kernel gpu_memcpy gpu_memset"),
]


@pytest.mark.parametrize("kind", [*VERSIONS, "cuda"])
def test_every_event_is_in_its_table_exact_to_the_nanosecond(kind):
    # Recorded by torch 2.11 with CUDA 13.0 on an H200.
    cuda = CASES["witness_pp2_dp2"].folder / "torch/iter-5-7/rank-0.pt.trace.json"
    for path in [FOLDER / f"{kind}-{version}.json.xz" for version in VERSIONS[kind].split()] if kind in VERSIONS else [cuda]:
        text = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        written = json.loads(text, parse_float=Decimal)
        tables, base, events = kineto.read(path), written.get("baseTimeNanoseconds", 0), written["traceEvents"]
        for table, place, categories in PLACES:
            expected = []
            for event in events:
                if event["ph"] == "X" and event.get("cat") in categories.split():
                    times = (base + int(time * 1000) for time in (event["ts"], event["ts"] + event["dur"]))
                    expected.append((*times, event["name"], event["args"]["stream"] if place == "stream" else event["tid"]))
            assert sorted(values(tables[table], "start_ns", "end_ns", "name", place)) == sorted(expected)
        memory = tables["memory_events"].num_rows if "memory_events" in tables.tables else 0
        assert memory == sum(event["name"] == "[memory]" for event in events)
        assert all(tables[name].schema.equals(SCHEMAS[name]) for name in tables.tables)
        assert not [caveat for caveat in tables.info.caveats if "left out" in caveat.text]


@pytest.fixture
def expected(read_trace):
    return read_trace(EVENTS, "expected.json")


def test_a_trace_of_today(expected):
    assert (expected.info.rank, expected.info.rank_source, expected.info.world_size) == (3, "trace", 8)
    first, copy = expected["device_events"].to_pylist()
    assert first | {"start_ns": 1006003, "end_ns": 1026007, "launch_start_ns": 1002001, "launch_end_ns": 1005003} == first
    assert first | {"kind": "compute", "name": "gemm", "stream": 7, "operator": 2, "iteration": 5, "launch_thread": 1} == first
    assert (
        copy | {"kind": "memcpy", "direction": "HtoD", "from_memory": "pageable", "to_memory": "device", "bytes": 4096} == copy
    )
    assert ("operator", "[[4,8],[2]]", "a.py(3): f") in values(expected["host_events"], "category", "shapes", "stack")
    assert values(expected["iterations"], "iteration", "start_ns", "end_ns", "boundary") == [(5, 1000000, 1090500, False)]


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(lzma.compress(RAW), id="xz"),
        pytest.param(gzip.compress(RAW[:300]) + gzip.compress(b"") + gzip.compress(RAW[300:]), id="gzip members"),
        pytest.param(json.dumps(document(EVENTS), separators=(",", ":")).encode(), id="minified"),
        pytest.param(json.dumps({"traceEvents": EVENTS} | document(EVENTS), indent=2).encode(), id="indented, events first"),
        pytest.param(json.dumps(document(EVENTS), indent=4, separators=(" , ", " : ")).encode(), id="wide"),
        *(pytest.param(RAW.replace(b"1.5}", b"%s}" % number), id=number.decode()) for number in (b"Infinity", b"-inf", b"NaN")),
    ],
)
def test_written_and_packed_in_any_way(read_trace, expected, raw):
    assert contents(read_trace(raw, "any")) == contents(expected)


@pytest.mark.parametrize(("written", "source"), [(EVENTS, "order"), ({"traceEvents": EVENTS}, "file name")])
def test_a_bare_array_and_a_trace_without_distributed_information(write_trace, expected, written, source):
    tables = kineto.read(write_trace("\ufeff" + json.dumps(written)), rank=3, rank_source=source)
    assert contents(tables) == contents(expected)
    assert (tables.info.rank_source, tables.info.error) == (source, None)


def test_names_are_shown_as_well_as_can_be(read_trace):
    """Words like NaN stay, invalid UTF-8, control characters and bad escapes become printable."""
    for written, name in ((b'"a: nan, inf"', "a: nan, inf"), (b'"ge\xff\x01m\\m"', "ge� m\\m")):
        raw = RAW.replace(b'"gemm"', written).replace(b"1.5}", b"Infinity}")
        assert values(read_trace(raw)["device_events"], "name")[0] == name


def test_torch_1_8_capitals_and_numbers_as_text(write_trace):
    """It wrote iterations as operators: they are there without operators, too."""
    began, host, device = 1621401187223000, {"pid": 24572, "tid": "24572"}, {"pid": 0, "tid": "stream 9"}
    shapes, work = {"External id": 2, "Input dims": [[1], []]}, {"correlation": 7, "external id": 2}
    events = [
        complete("Operator", "ProfilerStep#2", began, 250, **host),
        complete("Operator", "aten::mm", began + 5, 300, **host, Device=24572, **shapes),
        complete("Runtime", "cudaLaunchKernel", began + 105, 5, **host, **work),
        complete("Kernel", "gemm", began + 205, 17, pid=0, tid="stream 7", device=0, stream=7, **work),
        complete("Memcpy", "Memcpy DtoD (Device -> Device)", began + 305, 1, **device, bytes="128"),
        complete("Memset", "Memset (Device)", began + 405, 1, **device),
    ]
    path = write_trace({"schemaVersion": 1, "traceEvents": events})
    tables = kineto.read(path, rank=2, rank_source="file name")
    assert (tables.info.rank, tables.info.rank_source, tables.info.clock) == (2, "file name", "unix")
    assert values(tables["device_events"], "kind", "device", "stream", "bytes", "direction", "iteration") == [
        ("compute", 0, 7, None, None, 2),
        ("memcpy", 0, 9, 128, "DtoD", None),
        ("memset", 0, 9, None, None, None),
    ]
    row = (1621401187223205000, 1621401187223222000, 2, 1621401187223105000, 24572)
    assert values(tables["device_events"], "start_ns", "end_ns", "operator", "launch_start_ns", "launch_thread")[0] == row
    assert values(tables["host_events"], "shapes") == [None, "[[1],[]]", None]
    assert values(tables["iterations"], "iteration") == [2]


def test_rocm_numbers_as_text_and_rccl(read_trace):
    events = [
        complete("cuda_runtime", "hipLaunchKernel", 10, 2, correlation="5"),
        kernel("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", 14, 3, correlation="5"),
        complete("gpu_memcpy", "CopyHostToDevice", 20, 1, pid=2, tid=0, device="2", stream="0", bytes="4194304", correlation=6),
        kernel("hipBlasLt_gemm", 30, 4),
    ]
    columns = ("kind", "backend", "launch_start_ns", "bytes", "direction", "device", "stream")
    assert values(read_trace(events)["device_events"], *columns) == [
        ("communication", "rccl", 10000, None, None, 0, 7),
        ("memcpy", None, None, 4194304, "HtoD", 2, 0),
        ("compute", None, None, None, None, 0, 7),
    ]


def test_ids_that_are_correlations_name_no_operator(read_trace):
    """In torch 1.13 a kernel's external id is its correlation, which an unrelated operator may have as its id."""
    events = [
        complete("cpu_op", "aten::mm", 1666149715364330, 58, **{"External id": 67247}),
        call("cudaLaunchKernel", 1666149715364374, 10, 2131433, **{"External id": 2131433}),
        kernel("gemm", 1666149715428509, 45, correlation=2131433, **{"External id": 2131433}),
        complete("cpu_op", "unrelated", 1666149715500000, 1, **{"External id": 2131433}),
    ]
    tables = read_trace(events)
    assert values(tables["device_events"], "operator", "launch_start_ns") == [(None, 1666149715364374000)]
    assert values(tables["host_events"], "operator") == [67247, None, 2131433]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(st.lists(st.integers(1000, 4 * 10**18 - 1), min_size=1, max_size=5), st.integers(0, 10**12), st.booleans())
def test_any_time_is_exact(read_trace, starts, duration, whole):
    """Integer microseconds or three decimals, near zero, relative to a base, or since 1970."""
    starts = [start // 1000 * 1000 if whole else start for start in starts]
    written = [f"{start // 1000}" if whole else f"{start // 1000}.{start % 1000:03}" for start in starts]
    lasting = f"{duration // 1000}.{duration % 1000:03}"
    events = ", ".join(f'{{"cat": "kernel", "name": "k", "ts": {start}, "dur": {lasting}}}' for start in written)
    found = values(read_trace(f'{{"traceEvents": [{events}]}}')["device_events"], "start_ns", "end_ns")
    assert found == [(start, start + duration) for start in sorted(starts)]


def test_a_trace_names_its_base_time_versions_and_groups(read_trace):
    group = {"pg_name": "15", "pg_desc": "TP", "backend_config": "cuda:nccl", "ranks": [2, 3]}
    keys = {"cuda_runtime_version": 12080, "distributedInfo": {"rank": 3, "nccl_version": "2.28.9", "pg_config": [group]}}
    tables = read_trace(EVENTS, baseTimeNanoseconds=1790857026000000000, **keys)
    info = tables.info
    assert values(tables["device_events"], "start_ns")[0] == 1790857026000000000 + 1006003
    assert (info.clock, info.clock_base_ns) == ("unix", 1790857026000000000)
    assert info.versions | {"cuda_runtime": "12.8", "nccl": "2.28.9"} == info.versions
    assert [(each.name, each.description, each.ranks) for each in info.groups] == [("15", "TP", (2, 3))]


def test_long_lists_of_ranks_come_from_the_groups_the_trace_lists(read_trace):
    """Kineto shortens them in an event's arguments."""
    ranks = list(range(0, 320, 8))
    args = {"Collective name": "allreduce", "Process Group Name": "7", "Process Group Ranks": "[0, 8, ..., 312]",
            "dtype": "Half", "In msg nelems": 10, "Out msg nelems": 10, "Group size": 40}  # fmt: skip
    keys = {"distributedInfo": {"rank": 0, "pg_config": [{"pg_name": "7", "pg_desc": "DP", "ranks": ranks}]}}
    tables = read_trace([kernel("ncclDevKernel_AllReduce_Sum", 1, 1, **args)], **keys)
    columns = ("group", "message_bytes", "group_size", "group_ranks")
    assert values(tables["collectives"], *columns) == [("DP", 20, 40, json.dumps(ranks, separators=(",", ":")))]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (1, [("all_reduce", "0", "[0,1]"), ("all_to_all", "0", "[0,1]")]),
        (2, [("all_reduce", None, None), ("send_recv", None, None)]),
    ],
)
def test_without_operators_kernels_are_collectives_of_the_only_group_that_the_trace_lists(read_trace, groups, expected):
    listed = [{"pg_name": str(name), "backend_config": "cuda:nccl", "ranks": [0, 1]} for name in range(groups)]
    names = ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)", "ncclDevKernel_SendRecv(args)")
    calls = [call("cudaLaunchKernelExC", 10 * place, 2, place + 1) for place in range(2)]
    events = [*calls, *(kernel(name, 10 * place + 3, 4, correlation=place + 1) for place, name in enumerate(names))]
    tables = read_trace(events, distributedInfo={"rank": 0, "world_size": 2, "pg_config": listed})
    assert values(tables["collectives"], "operation", "group_name", "group_ranks") == expected
