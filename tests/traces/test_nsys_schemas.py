"""nsys' tables and columns change between versions: what is missing is null, with a caveat where it matters."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from bridge_profiling.traces.cache import load
from bridge_profiling.traces.discover import find_run
from bridge_profiling.traces.nsys import tables as nsys
from bridge_profiling.traces.nsys.report import ranks_in_report
from tests.traces.nsys_files import (
    COMMUNICATOR,
    EVENT,
    KERNEL,
    MEMCPY,
    MEMSET,
    PROCESS,
    RUNTIME,
    SESSION_START_NS,
    SYNCHRONIZATION,
    THREAD,
    Report,
    nccl_report,
    small_report,
)


def caveats(tables: object) -> dict[str, str]:
    return {each.code: each.text for each in tables.info.caveats}


def test_an_old_export_without_most_tables_and_columns_is_read(tmp_path: Path) -> None:
    """Before 2020.4: no globalPid, no session start, short names only."""
    report = Report()
    del report.rows["TARGET_INFO_SESSION_START_TIME"]
    name = report.string("ncclAllReduceRingLLKernel_sum_f32(ncclColl)")
    report.add(KERNEL, start=100, end=300, deviceId=0, contextId=1, streamId=7, correlationId=5, shortName=name)
    report.add(RUNTIME, start=40, end=60, globalTid=THREAD, correlationId=5, nameId=report.string("cudaLaunchKernel_v7000"))
    tables = nsys.read(report.write(tmp_path / "report.sqlite"), rank=2, rank_source="file name")
    (event,) = tables.device_events.to_pylist()
    assert (event["kind"], event["backend"], event["collective"]) == ("communication", "nccl", 0)
    assert (event["start_ns"], event["end_ns"], event["launch_start_ns"]) == (100, 300, 40)
    assert tables.collectives["operation"].to_pylist() == ["all_reduce"]
    assert (tables.info.rank, tables.info.rank_source, tables.info.clock) == (2, "file name", "unknown")
    assert {"clock_unknown", "no_iterations"} <= set(caveats(tables))


@pytest.mark.parametrize("table", [KERNEL, RUNTIME, "NVTX_EVENTS", "StringIds", "TARGET_INFO_SESSION_START_TIME"])
def test_any_one_table_can_be_missing(tmp_path: Path, table: str) -> None:
    report = small_report()
    if table == "StringIds":
        report.strings.clear()
    else:
        del report.rows[table]
    tables = nsys.read(report.write(tmp_path / "rank-1.sqlite"), rank=1)
    assert tables.device_events.num_rows == (0 if table == KERNEL else 2)
    assert tables.iterations.num_rows == (0 if table == "NVTX_EVENTS" else 2)
    assert ("launches_missing" in caveats(tables)) == (table == RUNTIME)
    assert ("no_device_work" in caveats(tables)) == (table == KERNEL)


@pytest.mark.parametrize("table", [KERNEL, RUNTIME, "NVTX_EVENTS"])
def test_any_one_column_can_be_missing(tmp_path: Path, table: str) -> None:
    for column in small_report().rows[table][0]:
        report = small_report()
        for row in report.rows[table]:
            del row[column]
        path = report.write(tmp_path / f"{column}.sqlite")
        tables = nsys.read(path)
        kept = table != KERNEL or column not in ("start", "end")
        assert tables.device_events.num_rows == (2 if kept else 0), column
        assert tables.device_events["stream"].null_count == (2 if column == "streamId" else 0), column


def test_times_are_the_sessions_start_and_the_events_own(tmp_path: Path) -> None:
    tables = nsys.read(small_report().write(tmp_path / "report.sqlite"))
    assert tables.info.clock == "unix"
    assert tables.device_events["start_ns"].to_pylist() == [SESSION_START_NS + 4400, SESSION_START_NS + 5400]
    assert tables.iterations["start_ns"].to_pylist() == [SESSION_START_NS + 4000, SESSION_START_NS + 5000]


def test_ranges_have_their_text_in_the_row_or_among_the_strings(tmp_path: Path) -> None:
    report = Report()
    report.range("iteration_3", 0, 100)
    report.add("NVTX_EVENTS", start=10, end=20, eventType=59, textId=report.string("forward"), globalTid=THREAD)
    report.add("NVTX_EVENTS", start=30, end=None, eventType=34, text="a mark", globalTid=THREAD)
    tables = nsys.read(report.write(tmp_path / "report.sqlite"))
    assert tables.host_events["name"].to_pylist() == ["iteration_3", "forward"]


def test_a_text_with_any_characters_is_one_name(tmp_path: Path) -> None:
    texts = ["a, seq = b", "x\x1fy", "line\nbreak", "", "Überlauf 東京", "f, op_id = 3", "a,b"]
    report = Report()
    for place, text in enumerate(texts):
        report.range(text, place * 10, place * 10 + 5)
    tables = nsys.read(report.write(tmp_path / "report.sqlite"))
    names = tables.host_events["name"].to_pylist()
    assert names == ["a, seq = b", "x y", "line\nbreak", "", "Überlauf 東京", "f", "a,b"]
    assert tables.host_events["category"].to_pylist().count("operator") == 1


def test_shapes_of_emit_nvtx_are_told_apart(tmp_path: Path) -> None:
    report = Report()
    report.range("aten::addmm, seq = 12, op_id = 7, sizes = [[32], [4, 8], []], input_op_ids = [[5, 0]]", 0, 9)
    report.range("aten::mm, op_id = 8", 10, 19)
    (first, second) = nsys.read(report.write(tmp_path / "report.sqlite")).host_events.to_pylist()
    assert (first["name"], first["category"], first["shapes"]) == ("aten::addmm", "operator", "[[32],[4,8],[]]")
    assert (second["name"], second["category"], second["shapes"]) == ("aten::mm", "operator", None)


@pytest.mark.parametrize(
    ("names", "numbers"),
    [
        (["iteration_9", "iteration_10"], [9, 10]),
        (["ProfilerStep#9", "ProfilerStep#10"], [9, 10]),
        (["Iteration 9", "Iteration 10"], [9, 10]),
        (["train_step 9", "train_step 10"], [9, 10]),
        (["iteration_9", "step_0"], [9]),
        (["stepwise_9", "iteration_9_of_10"], []),
    ],
)
def test_iterations_are_told_from_the_names_that_loops_give_them(tmp_path: Path, names: list[str], numbers: list[int]) -> None:
    report = Report()
    for place, name in enumerate(names):
        report.range(name, place * 100, place * 100 + 90)
    tables = nsys.read(report.write(tmp_path / "report.sqlite"))
    assert tables.iterations["iteration"].to_pylist() == numbers


def test_an_iteration_that_the_capture_cuts_off_is_a_boundary_one(tmp_path: Path) -> None:
    report = small_report().range("iteration_6", 6000, None).kernel("gemm", 6100, 6500)
    tables = nsys.read(report.write(tmp_path / "report.sqlite"))
    assert tables.iterations["boundary"].to_pylist() == [False, False, True]
    assert tables.iterations["end_ns"].to_pylist()[-1] == SESSION_START_NS + 6500
    assert caveats(tables)["ranges_open"].startswith("1 NVTX ranges")


def test_an_iteration_with_a_flush_in_it_is_a_boundary_one(tmp_path: Path) -> None:
    report = small_report()
    flush = report.string("CUPTI Buffer flush")
    report.add("PROFILER_OVERHEAD", start=5100, end=5200, globalTid=THREAD, nameId=flush)
    report.add("PROFILER_OVERHEAD", start=4100, end=4200, globalTid=THREAD, nameId=report.string("TLS allocation"))
    tables = nsys.read(report.write(tmp_path / "report.sqlite"))
    assert tables.iterations["boundary"].to_pylist() == [False, True]
    assert tables.host_events["category"].to_pylist().count("overhead") == 2


def test_a_kernel_belongs_to_the_iteration_that_launched_it(tmp_path: Path) -> None:
    report = small_report()
    report.call("cudaLaunchKernel_v7000", 4850, 4890, correlation=99).kernel("late", 5050, 5100, correlation=99)
    events = nsys.read(report.write(tmp_path / "report.sqlite")).device_events.to_pylist()
    assert {event["name"]: event["iteration"] for event in events}["late"] == 4


def test_copies_are_read_by_the_reports_own_numbers_of_memories(tmp_path: Path) -> None:
    report = small_report()
    for number, kind in ((9, "PAGEABLE"), (8, "DEVICE")):
        report.add("ENUM_CUDA_MEM_KIND", id=number, name=f"CUDA_MEMOPR_MEMORY_KIND_{kind}", label=kind)
    shared = {"deviceId": 0, "streamId": 7, "globalPid": PROCESS}
    report.add(MEMCPY, start=1, end=2, bytes=64, copyKind=1, srcKind=9, dstKind=8, correlationId=1, **shared)
    report.add(MEMSET, start=3, end=4, bytes=16, memKind=8, correlationId=2, **shared)
    copy, memset = nsys.read(report.write(tmp_path / "report.sqlite")).device_events.to_pylist()[:2]
    assert (copy["name"], copy["direction"], copy["from_memory"], copy["to_memory"], copy["bytes"]) == (
        "Memcpy HtoD (Pageable -> Device)", "HtoD", "pageable", "device", 64,
    )  # fmt: skip
    assert (memset["kind"], memset["name"], memset["bytes"], memset["direction"]) == ("memset", "Memset (Device)", 16, None)


def test_kernels_of_cuda_graphs_name_their_graph(tmp_path: Path) -> None:
    report = small_report()
    report.call("cudaGraphLaunch_v10000", 6000, 6050, correlation=70)
    for node in (1, 2):
        report.kernel("in a graph", 6100 * node, 6100 * node + 50, correlation=70, graphNodeId=(12 << 32) + node)
    events = nsys.read(report.write(tmp_path / "report.sqlite")).device_events.to_pylist()
    assert [event["graph"] for event in events] == [None, None, 12, 12]
    assert {event["launch_start_ns"] for event in events[2:]} == {SESSION_START_NS + 6000}


def test_a_graph_that_was_recorded_as_a_whole_is_busy_time_with_a_caveat(tmp_path: Path) -> None:
    report = small_report()
    shared = {"deviceId": 0, "streamId": 7, "globalPid": PROCESS, "correlationId": 70}
    report.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=6100, end=6900, graphId=12, graphExecId=13, **shared)
    tables = nsys.read(report.write(tmp_path / "report.sqlite"))
    event = tables.device_events.to_pylist()[-1]
    assert (event["kind"], event["name"], event["graph"], event["end_ns"] - event["start_ns"]) == (
        "compute",
        "CUDA graph 12",
        12,
        800,
    )
    assert "graphs_whole" in caveats(tables)


def test_waits_are_joined_on_event_sync_id_where_there_is_one(tmp_path: Path) -> None:
    """The same eventId was recorded twice, last on stream 30; the wait is for the first record. Records have time 0."""
    report = small_report()
    for correlation, stream, number in ((10, 20, 501), (12, 30, 502)):
        report.add(
            EVENT, start=0, end=0, deviceId=0, streamId=stream, correlationId=correlation, globalPid=PROCESS, eventId=3,
            eventSyncId=number,
        )  # fmt: skip
    wait = {"deviceId": 0, "globalPid": PROCESS, "eventId": 3}
    report.add(SYNCHRONIZATION, start=50, end=60, streamId=7, correlationId=14, syncType=2, eventSyncId=501, **wait)
    report.add(SYNCHRONIZATION, start=70, end=80, streamId=(1 << 32) - 1, correlationId=15, syncType=1, eventSyncId=502, **wait)
    first, second = nsys.read(report.write(tmp_path / "report.sqlite"))["synchronizations"].to_pylist()
    assert (first["kind"], first["stream"], first["producer_stream"], first["producer_correlation"]) == (
        "stream_wait_event", 7, 20, 10,
    )  # fmt: skip
    assert (second["kind"], second["stream"], second["producer_stream"]) == ("event", None, 30)


def test_asking_for_an_event_is_no_synchronization(tmp_path: Path) -> None:
    report = small_report()
    report.call("cudaEventQuery_v3020", 50, 60, correlation=14)
    row = {"deviceId": 0, "globalPid": PROCESS, "eventId": 3, "streamId": (1 << 32) - 1, "syncType": 1}
    report.add(SYNCHRONIZATION, start=52, end=58, correlationId=14, **row)
    assert nsys.read(report.write(tmp_path / "report.sqlite"))["synchronizations"].num_rows == 0


def test_sampled_counters_have_their_names_and_devices(tmp_path: Path) -> None:
    report = small_report()
    kind = (1 << 56) + 3
    report.add("TARGET_INFO_GPU_METRICS", typeId=kind, metricId=7, metricName="SMs Active [Throughput %]")
    report.add("GPU_METRICS", timestamp=200, typeId=kind, metricId=7, value=80)
    report.add("GPU_METRICS", timestamp=100, typeId=kind, metricId=8, value=5)
    first, second = nsys.read(report.write(tmp_path / "report.sqlite"))["gpu_metrics"].to_pylist()
    assert (first["metric"], first["value"], first["device"]) == ("metric 8", 5.0, 3)
    assert (second["metric"], second["value"], second["time_ns"]) == ("SMs Active [Throughput %]", 80.0, SESSION_START_NS + 200)


@pytest.mark.parametrize("blobs", [True, False], ids=["binary", "json"])
def test_what_nccl_says_of_a_message_describes_its_kernel(tmp_path: Path, blobs: bool) -> None:
    tables = nsys.read(nccl_report(blobs=blobs).write(tmp_path / "report.sqlite"))
    gather, exchange = tables.collectives.to_pylist()
    assert (gather["operation"], gather["message_bytes"], gather["group_size"]) == ("all_gather", 4 * 1000, 4)
    assert gather["group"] == gather["group_name"] == exchange["group_name"] == f"NCCL {COMMUNICATOR:#018x}"
    assert (exchange["operation"], exchange["message_bytes"], exchange["sequence"]) == ("send_recv", 64, 1)
    assert exchange["peer"] is None  # in the communicator's numbering, which is not the job's
    assert "message_size_unknown" not in caveats(tables)


def test_a_share_without_the_number_of_ranks_is_no_message_size(tmp_path: Path) -> None:
    report = nccl_report(blobs=True)
    report.rows["NVTX_EVENTS"] = [row for row in report.rows["NVTX_EVENTS"] if row["start"] != 0]
    tables = nsys.read(report.write(tmp_path / "report.sqlite"))
    assert tables.collectives["message_bytes"].to_pylist() == [None, 64]
    assert "message size of 1 of 2" in caveats(tables)["message_size_unknown"]


def started(report: Report, rank: int, process: int = PROCESS) -> Report:
    """nsys started the process with RANK in its environment."""
    report.add("DIAGNOSTIC_EVENT", text="Process was launched by the profiler, see …", globalPid=process, severity=1)
    for name, value in (("RANK", rank), ("WORLD_SIZE", 64), ("LOCAL_RANK", 0), ("GROUP_RANK", 3)):
        report.add("META_DATA_CAPTURE", name="PROCESS_0:ENVIRONMENT_VARIABLE", value=f'{name}="{value}"')
    return report


def test_a_launchers_rank_is_no_ranks_rank(tmp_path: Path) -> None:
    """Under Kubeflow, torchrun itself has RANK, the node's; the process with kernels is its child."""
    report = started(small_report(), 3, process=PROCESS + (100 << 24))
    info = nsys.read(report.write(tmp_path / "report.sqlite"), rank=25, rank_source="file name").info
    assert (info.rank, info.rank_source, info.world_size) == (25, "file name", None)


def two_processes() -> Report:
    report, other = small_report(), Report(PROCESS + (1 << 24))
    other.strings = report.strings
    other.range("iteration_4", 4000, 4950).kernel("other", 4100, 4300, correlation=4, deviceId=1)
    other.call("cudaLaunchKernel_v7000", 4050, 4060, correlation=4)
    for table, rows in other.rows.items():
        if table != "TARGET_INFO_SESSION_START_TIME":
            report.rows.setdefault(table, []).extend(rows)
    return report


def test_processes_in_one_report_are_kept_apart(tmp_path: Path) -> None:
    """They share correlation numbers; each rank has its own events and launches only."""
    path = two_processes().write(tmp_path / "report.sqlite")
    assert ranks_in_report(path) == [0, 1]
    first, second = (nsys.read(path, rank=rank) for rank in (0, 1))
    assert first.device_events["name"].to_pylist() == ["gemm", "gemm"]
    assert second.device_events["name"].to_pylist() == ["other"]
    assert second.device_events["launch_start_ns"].to_pylist() == [SESSION_START_NS + 4050]
    assert second.iterations["iteration"].to_pylist() == [4]
    assert (second.info.rank, second.info.rank_source) == (1, "order")
    assert "2 processes" in caveats(second)["processes_unnamed"]


def test_mpi_names_the_ranks_of_processes(tmp_path: Path) -> None:
    report = two_processes()
    for process, rank in ((PROCESS, 6), (PROCESS + (1 << 24), 7)):
        report.add("MPI_RANKS", globalTid=process + 15279, rank=rank)
    path = report.write(tmp_path / "report.sqlite")
    assert ranks_in_report(path) == [6, 7]
    tables = nsys.read(path, rank=7)
    assert tables.device_events["name"].to_pylist() == ["other"]
    assert (tables.info.rank, tables.info.rank_source) == (7, "trace")


def test_a_packed_export_is_read(tmp_path: Path) -> None:
    packed = tmp_path / "rank-2.sqlite.xz"
    packed.write_bytes(lzma.compress(small_report().write(tmp_path / "plain").read_bytes()))
    tables = nsys.read(packed)
    assert tables.device_events.num_rows == 2
    assert tables.info.files == [str(packed)]


def test_more_rows_than_are_read_at_a_time(tmp_path: Path) -> None:
    report = Report()
    for place in range((1 << 17) + 3):
        report.kernel("gemm" if place % 2 else "ncclDevKernel_AllReduce_Sum_f32", place * 10, place * 10 + 5)
    events = nsys.read(report.write(tmp_path / "report.sqlite")).device_events
    assert events.num_rows == (1 << 17) + 3
    assert events["start_ns"].to_pylist() == [SESSION_START_NS + place * 10 for place in range((1 << 17) + 3)]


def test_a_report_of_several_ranks_is_a_capture_of_each(tmp_path: Path) -> None:
    two_processes().write(tmp_path / "report_node0.sqlite")
    captures = find_run(tmp_path).captures
    assert [(capture.rank, capture.rank_source) for capture in captures] == [(0, "order"), (1, "order")]
    assert [load(capture, cached=False).device_events.num_rows for capture in captures] == [2, 1]
