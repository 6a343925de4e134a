"""nsys' tables and columns change between versions: what is missing is null, with a caveat where it matters."""

import pytest

from bridge_profiling.traces import nsys
from bridge_profiling.traces.cache import load
from bridge_profiling.traces.discover import find_run
from bridge_profiling.traces.nsys.report import ranks_in_report
from tests.traces import nsys_files as files
from tests.traces.conftest import caveats, values
from tests.traces.nsys_files import PROCESS, SESSION_START_NS, THREAD, Report, nccl_report, small_report

#: Columns of a row of device work, or of a wait, on stream 7 of the process.
PLACE = {"deviceId": 0, "streamId": 7, "globalPid": PROCESS}


def test_an_old_export_without_most_tables_and_columns_is_read(read_report):
    """Before 2020.4: no globalPid, no session start, short names only."""
    report = Report()
    del report.rows["TARGET_INFO_SESSION_START_TIME"]
    name = report.string("ncclAllReduceRingLLKernel_sum_f32(ncclColl)")
    report.add(files.KERNEL, start=100, end=300, deviceId=0, contextId=1, streamId=7, correlationId=5, shortName=name)
    report.call("cudaLaunchKernel_v7000", 40, 60, 5)
    tables = read_report(report, rank=2, rank_source="file name")
    columns = ("kind", "backend", "collective", "start_ns", "end_ns", "launch_start_ns")
    assert values(tables["device_events"], *columns) == [("communication", "nccl", 0, 100, 300, 40)]
    assert values(tables["collectives"], "operation") == ["all_reduce"]
    assert (tables.info.rank, tables.info.rank_source, tables.info.clock) == (2, "file name", "unknown")
    assert {"clock_unknown", "no_iterations"} <= set(caveats(tables))


@pytest.mark.parametrize("table", [files.KERNEL, files.RUNTIME, "NVTX_EVENTS"])
def test_any_one_column_can_be_missing_but_a_kernels_time_and_name(read_report, table):
    needed = {"start", "end", "demangledName"} if table == files.KERNEL else set()
    for column in small_report().rows[table][0].keys() - needed:
        report = small_report()
        for row in report.rows[table]:
            del row[column]
        events = read_report(report)["device_events"]
        assert events.num_rows == 2, column
        assert events["stream"].null_count == (2 if column == "streamId" else 0), column


ENVIRONMENT = {"name": "PROCESS_0:ENVIRONMENT_VARIABLE", "value": 'RANK="3"'}
STARTED = {"text": "Process was launched by the profiler, see /tmp/nvidia", "globalPid": PROCESS, "severity": 1}

#: Tables of a report without CUDA or ranges; its system calls, its rank, and a caveat.
ON_A_CPU = {
    "system calls of a process and its child": ({}, ["read", "poll"], (1, "order"), "processes_unnamed"),
    "of a rank": ({"META_DATA_CAPTURE": ENVIRONMENT, "DIAGNOSTIC_EVENT": STARTED}, ["read"], (3, "trace"), "no_iterations"),
    "CPU samples": ({"COMPOSITE_EVENTS": {"id": 1, "start": 5}, "OSRT_API": None}, [], (1, "order"), "unread_tables"),
    "context switches": ({"SCHED_EVENTS": {"start": 5, "cpu": 0}, "OSRT_API": None}, [], (1, "order"), "unread_tables"),
}


@pytest.mark.parametrize(("tables", "calls", "rank", "code"), ON_A_CPU.values(), ids=ON_A_CPU)
def test_a_report_of_a_cpu_alone_is_read(read_report, tables, calls, rank, code):
    report = Report()
    for name, process in (("read", PROCESS), ("poll", PROCESS + (1 << 24))):
        report.add("OSRT_API", start=10, end=20, globalTid=process + 7, nameId=report.string(name))
    for table, row in tables.items():
        if row is None:
            del report.rows[table]
        else:
            report.add(table, **row)
    found = read_report(report, rank=1)
    assert values(found["system_calls"], "name") == calls
    assert (found.info.rank, found.info.rank_source, found.info.error) == (*rank, None)
    assert {code, "no_device_work"} <= set(caveats(found))


def test_a_ranges_text_is_one_name_and_what_emit_nvtx_appends_is_taken_off(read_report):
    report = Report()
    texts = ["a, seq = b", "x\x1fy", "line\nbreak", "", "東京", "f, op_id = 3"]
    texts.append("aten::mm, seq = 12, op_id = 7, sizes = [[32], [4, 8], []], input_op_ids = [[5, 0]]")
    for place, text in enumerate(texts):
        report.range(text, place * 10, place * 10 + 5)
    report.add("NVTX_EVENTS", start=100, end=120, eventType=59, textId=report.string("among the strings"), globalTid=THREAD)
    report.add("NVTX_EVENTS", start=130, end=None, eventType=34, text="a mark", globalTid=THREAD)
    found = values(read_report(report)["host_events"], "name", "category", "shapes", "sequence")
    assert [row[0] for row in found] == [
        "a, seq = b",
        "x\x1fy",
        "line\nbreak",
        "",
        "東京",
        "f",
        "aten::mm",
        "among the strings",
    ]
    operators = [("f", "operator", None, None), ("aten::mm", "operator", "[[32],[4,8],[]]", 12)]
    assert [row for row in found if row[1] == "operator"] == operators


def test_iterations_without_any_range_are_periods_of_the_kernels(read_report):
    report = Report()
    for place, name in enumerate([*map(str, range(70)), "FusedAdam"] * 2):
        report.call("cudaLaunchKernel_v7000", 10 * place, 10 * place + 2, place + 1)
        report.kernel(name, 10 * place + 3, 10 * place + 7, correlation=place + 1)
    assert [end - start for start, end in values(read_report(report)["iterations"], "start_ns", "end_ns")] == [702, 710]


def test_loops_name_their_iterations_in_several_ways(read_report):
    for names, numbers in {
        ("iteration_9", "iteration_10"): [9, 10],
        ("ProfilerStep#9", "ProfilerStep#10"): [9, 10],
        ("train_step 9", "train_step 10"): [9, 10],
        ("iteration_9", "step_0"): [9],
        ("stepwise_9", "iteration_9_of_10"): [],
    }.items():
        report = Report().range(names[0], 0, 90).range(names[1], 100, 190)
        assert values(read_report(report)["iterations"], "iteration") == numbers


def test_an_iteration_that_the_capture_cuts_off_or_with_a_flush_in_it_is_a_boundary_one(read_report):
    report = small_report().range("iteration_6", 6000, None).kernel("gemm", 6100, 6500)
    report.call("cudaLaunchKernel_v7000", 4850, 4890, correlation=99).kernel("launched in 4", 5050, 5100, correlation=99)
    for name, start in (("CUPTI Buffer flush", 5100), ("TLS allocation", 4100)):
        report.add("PROFILER_OVERHEAD", start=start, end=start + 100, globalTid=THREAD, nameId=report.string(name))
    tables = read_report(report)
    assert values(tables["iterations"], "iteration", "boundary") == [(4, False), (5, True), (6, True)]
    assert values(tables["iterations"], "end_ns") == [SESSION_START_NS + time for time in (4900, 5900, 6500)]
    assert caveats(tables)["ranges_open"].startswith("1 NVTX ranges")
    assert values(tables["host_events"], "category").count("overhead") == 2
    assert ("launched in 4", 4) in values(tables["device_events"], "name", "iteration")


def test_copies_are_read_by_the_reports_own_numbers_of_memories(read_report):
    report = small_report()
    for number, kind in ((9, "PAGEABLE"), (8, "DEVICE")):
        report.add("ENUM_CUDA_MEM_KIND", id=number, name=f"CUDA_MEMOPR_MEMORY_KIND_{kind}", label=kind)
    report.add(files.MEMCPY, start=1, end=2, bytes=64, copyKind=1, srcKind=9, dstKind=8, correlationId=1, **PLACE)
    report.add(files.MEMSET, start=3, end=4, bytes=16, memKind=8, correlationId=2, **PLACE)
    columns = ("kind", "name", "direction", "from_memory", "to_memory", "bytes")
    assert values(read_report(report)["device_events"], *columns)[:2] == [
        ("memcpy", "Memcpy HtoD (Pageable -> Device)", "HtoD", "pageable", "device", 64),
        ("memset", "Memset (Device)", None, None, None, 16),
    ]


LAUNCH = {"gridX": 132, "gridY": 8, "gridZ": 1, "blockX": 256, "blockY": 1, "blockZ": 1, "registersPerThread": 96}


def test_a_kernels_launch_is_its_grid_block_registers_and_shared_memory(read_report):
    shared = {"staticSharedMemory": 1024, "dynamicSharedMemory": 2048}
    report = Report().kernel("a", 0, 9, **LAUNCH, **shared).kernel("b", 10, 19, **LAUNCH, **shared)
    report.kernel("c", 20, 29, **LAUNCH).kernel("d", 30, 39).kernel("e", 40, 49, **LAUNCH | {"gridX": -1}, **shared)
    report.add(files.MEMSET, start=50, end=60, bytes=16, memKind=2, correlationId=2, **PLACE)
    whole = "[[132,8,1],[256,1,1],96,3072]"
    found = values(read_report(report)["device_events"], "configuration")
    assert found == [whole, whole, "[[132,8,1],[256,1,1],96,null]", None, None, None]


def test_kernels_of_cuda_graphs_name_their_graph_and_one_recorded_as_a_whole_is_busy_time_with_a_caveat(read_report):
    report = small_report().call("cudaGraphLaunch_v10000", 6000, 6050, correlation=70)
    for node in (1, 2):
        report.kernel("in a graph", 6100 * node, 6100 * node + 50, correlation=70, graphNodeId=(12 << 32) + node)
    report.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=20_000, end=20_800, graphId=13, correlationId=70, **PLACE)
    tables = read_report(report)
    assert values(tables["device_events"], "kind", "name", "graph", "launch_start_ns")[2:] == [
        ("compute", name, graph, SESSION_START_NS + 6000)
        for name, graph in (("in a graph", 12), ("in a graph", 12), ("CUDA graph 13", 13))
    ]
    assert "graphs_whole" in caveats(tables)


def test_waits_are_joined_on_event_sync_id_where_there_is_one_and_a_query_is_none(read_report):
    """The same eventId was recorded twice, last on stream 30; the wait is for the first record. Records have time 0."""
    report, none = small_report(), (1 << 32) - 1
    for correlation, stream, number in ((10, 20, 501), (12, 30, 502)):
        record = {"correlationId": correlation, "streamId": stream, "eventSyncId": number}
        report.add(files.EVENT, start=0, end=0, eventId=3, **PLACE | record)
    for start, stream, correlation, number in ((50, 7, 14, 501), (70, none, 15, 502), (90, none, 16, None)):
        wait = {"streamId": stream, "correlationId": correlation, "eventId": 3, "eventSyncId": number}
        report.add(files.SYNCHRONIZATION, start=start, end=start + 10, syncType=2, **PLACE | wait)
    report.call("cudaEventQuery_v3020", 88, 99, correlation=16)
    columns = ("kind", "stream", "producer_stream", "producer_correlation")
    waits = [("stream_wait_event", 7, 20, 10), ("event", None, 30, 12)]
    assert values(read_report(report)["synchronizations"], *columns) == waits


@pytest.mark.parametrize("blobs", [True, False], ids=["binary", "json"])
def test_nccls_description_of_a_message_describes_its_kernel(read_report, blobs):
    tables = read_report(nccl_report(blobs=blobs))
    group = (f"NCCL {files.COMMUNICATOR:#018x}",) * 2
    # The peer is in the communicator's numbering, which is not the job's.
    columns = ("operation", "message_bytes", "group_size", "sequence", "peer", "group", "group_name")
    rows = [("all_gather", 4 * 1000, 4, 0, None, *group), ("send_recv", 64, 4, 1, None, *group)]
    assert values(tables["collectives"], *columns) == rows
    assert "message_size_unknown" not in caveats(tables)


def test_a_message_size_is_known_with_the_number_of_ranks_and_an_operation_with_one_kind_of_calls(read_report):
    report = nccl_report(blobs=True)
    report.rows["NVTX_EVENTS"] = [row for row in report.rows["NVTX_EVENTS"] if row["start"] != 0]
    for named, unnamed in (("ncclDevKernel_AllGather_RING_LL", "ncclKernel_1"), ("ncclDevKernel_SendRecv", "ncclKernel_2")):
        report.strings = {text.replace(named, unnamed): number for text, number in report.strings.items()}
    tables = read_report(report)
    assert values(tables["collectives"], "operation", "message_bytes") == [("all_gather", None), (None, None)]
    assert "message size of 2 of 2" in caveats(tables)["message_size_unknown"]


def test_a_launchers_rank_is_no_ranks_rank(read_report):
    """Under Kubeflow, torchrun itself has RANK, the node's; the process with kernels is its child."""
    report, text = small_report(), "Process was launched by the profiler, see …"
    report.add("DIAGNOSTIC_EVENT", text=text, globalPid=PROCESS + (100 << 24), severity=1)
    for name, value in (("RANK", 3), ("WORLD_SIZE", 64), ("LOCAL_RANK", 0), ("GROUP_RANK", 3)):
        report.add("META_DATA_CAPTURE", name="PROCESS_0:ENVIRONMENT_VARIABLE", value=f'{name}="{value}"')
    info = read_report(report, rank=25, rank_source="file name").info
    assert (info.rank, info.rank_source, info.world_size) == (25, "file name", None)


def test_processes_in_one_report_are_kept_apart_and_mpi_names_their_ranks(tmp_path):
    """They share correlation numbers."""
    other_process = PROCESS + (1 << 24)
    report, other = small_report(), Report(other_process)
    other.strings = report.strings
    other.range("iteration_4", 4000, 4950).kernel("other", 4100, 4300, correlation=4, deviceId=1)
    other.call("cudaLaunchKernel_v7000", 4050, 4060, correlation=4)
    del other.rows["TARGET_INFO_SESSION_START_TIME"]
    for table, rows in other.rows.items():
        report.rows[table] += rows
    path = report.write(tmp_path / "report_node0.sqlite")
    assert ranks_in_report(path) == [0, 1]
    captures = find_run(tmp_path).captures
    assert [(capture.rank, capture.rank_source) for capture in captures] == [(0, "order"), (1, "order")]
    first, second = (load(capture, cached=False) for capture in captures)
    assert values(first["device_events"], "name") == ["gemm", "gemm"]
    assert values(second["device_events"], "name", "launch_start_ns") == [("other", SESSION_START_NS + 4050)]
    assert "2 processes" in caveats(second)["processes_unnamed"]
    for process, rank in ((PROCESS, 6), (other_process, 7)):
        report.add("MPI_RANKS", globalTid=process + 15279, rank=rank)
    path = report.write(tmp_path / "report.sqlite")
    assert ranks_in_report(path) == [6, 7]
    tables = nsys.read(path, rank=7)
    assert (tables.info.rank, tables.info.rank_source) == (7, "trace")
    assert values(tables["device_events"], "name") == ["other"]
