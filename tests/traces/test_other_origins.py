"""Files that others wrote: which process and cycle a trace is of, and what a file is that no reader reads."""

import json
import os
import pickle
import sqlite3

import pytest

from bridge_profiling.common.errors import TraceError
from bridge_profiling.traces import memory, nsys
from bridge_profiling.traces.discover import find_run
from tests.facts.ranks_in_hand import answer, rank, span, values, work
from tests.traces.conftest import caveats
from tests.traces.kineto_files import complete, document


def _exported(folder, name, process, *steps):
    """A trace as `on_trace_ready` exports it: without a rank, and without a time in its name."""
    events = [complete("user_annotation", f"ProfilerStep#{step}", 1000 * step, 900) | {"pid": process} for step in steps]
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(document(events, distributedInfo={})))


@pytest.mark.parametrize(
    ("exported", "shown"),
    [
        ([("trace_4.json", 7, 2, 3), ("trace_8.json", 7, 6, 7), ("trace_12.json", 7, 10, 11)], [(0, "trace_12.json")]),
        # Two processes, or two containers in which each has the same number.
        ([("trace_0.json", 7, 2, 3), ("trace_1.json", 8, 6, 7)], [(0, "trace_0.json"), (1, "trace_1.json")]),
        ([("trace_0.json", 7, 2, 3), ("trace_1.json", 7, 2, 3)], [(0, "trace_0.json"), (1, "trace_1.json")]),
        ([("rank0_4.json", 7, 2, 3), ("rank1_4.json", 8, 2, 3)], [(0, "rank0_4.json"), (1, "rank1_4.json")]),
    ],
    ids=["cycles of one process", "two processes", "two containers", "named ranks"],
)
def test_numbers_in_names_are_steps_where_one_process_wrote_all(tmp_path, exported, shown):
    for each in exported:
        _exported(tmp_path / "run", *each)
    assert [(each.rank, each.path.name) for each in find_run(tmp_path / "run").captures] == shown


@pytest.mark.parametrize("layout", ["step{}/rank{}.pickle", "rank{1}_step{0}.pickle", "iteration_{}/rank{}_snapshot.pickle"])
def test_the_largest_numbers_are_the_newest_whatever_a_copy_did_to_the_times(tmp_path, layout):
    for age, step in enumerate((10, 5, 1)):
        for number in (0, 1):
            path = tmp_path / layout.format(step, number)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"")
            os.utime(path, (age, age))
    shown = sorted(str(each.path.relative_to(tmp_path)) for each in find_run(tmp_path).captures)
    assert shown == sorted(layout.format(10, number) for number in (0, 1))


OTHERS = {
    "report.ncu-rep": (b"NVR", "Nsight Compute"),
    "host.xplane.pb": (b"\n", "JAX or TensorFlow"),
    "events.out.tfevents.17.h": (b"x", "a log of TensorBoard"),
    "job.qdstrm": (b"x", "QdstrmImporter --input-file"),
    "trace.pftrace": (b"x", "export_chrome_trace"),
    "traces.tar.gz": (b"x", "unpack it"),
    "rank-0.pt.trace.zip": (b"PK\x03\x04", "unpack it"),
    "rank-0.arrow": (b"ARROW1", "--type sqlite"),
    "rank-0.json": (b'{"Type": 80, "NvtxEvent": {}}\n{"Type": 79}', "--type sqlite"),
    "trace_view.json": (b'[{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "CANN"}}]', "Ascend"),
    "trace.json": (b"", "is empty"),
}


@pytest.mark.parametrize(("name", "content"), OTHERS.items(), ids=OTHERS)
@pytest.mark.parametrize("named", [True, False])
def test_a_file_of_another_tool_is_named_with_what_to_do(tmp_path, name, content, named):
    (tmp_path / name).write_bytes(content[0])
    with pytest.raises(TraceError, match=content[1]) as refused:
        find_run(tmp_path / name if named else tmp_path)
    assert name in str(refused.value)


def test_a_folder_of_parquet_that_nsys_exported_is_named(tmp_path):
    (tmp_path / "rank-0_pqtdir").mkdir()
    (tmp_path / "rank-0_pqtdir" / "NVTX_EVENTS.parquet").write_bytes(b"PAR1")
    with pytest.raises(TraceError, match="rank-0_pqtdir is an export of nsys"):
        find_run(tmp_path)


@pytest.mark.parametrize("versions", [("_V3",), ("_V2", "_V10")])
def test_tables_of_nsys_with_a_version_in_their_names_are_read(tmp_path, versions):
    from tests.traces.nsys_files import Report

    report = Report()
    report.range("iteration_4", 1_000, 9_000)
    report.call("cudaLaunchKernel", 2_000, 2_100, 1)
    report.kernel("my_gemm_kernel", 3_000, 5_000, correlation=1)
    path = report.write(tmp_path / "rank-0.sqlite")
    newest = max(versions, key=lambda each: int(each[2:]))
    with sqlite3.connect(path) as database:
        for table in ("NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"):
            database.execute(f"ALTER TABLE {table} RENAME TO {table}{newest}")
            for older in set(versions) - {newest}:
                database.execute(f"CREATE TABLE {table}{older} AS SELECT * FROM {table}{newest} WHERE 0")
    database.close()
    tables = nsys.read(path)
    assert [tables[name].num_rows for name in ("iterations", "device_events")] == [1, 1]


def test_torch_says_itself_that_a_history_lost_entries(tmp_path):
    entry = {"action": "alloc", "addr": 1 << 20, "size": 512, "stream": 0, "time_us": 1, "frames": []}
    snapshot = {"segments": [], "device_traces": [[entry], [entry]], "trace_alloc_overflowed": [False, True]}
    (tmp_path / "rank0.pickle").write_bytes(pickle.dumps(snapshot))
    said = caveats(memory.read(tmp_path / "rank0.pickle"))["history_overwritten"]
    assert said.startswith("the history on device 1 was full with 1 entries")


@pytest.mark.parametrize("marked", [True, False])
def test_without_operators_autograd_is_another_thread_than_the_loops(marked):
    """Where no range shows the loop's thread, no thread is autograd's."""
    events = [
        work("compute", 10 * number, 10 * number + 5, 10 * number) | {"launch_thread": 1 + number % 2} for number in range(6)
    ]
    ranges = [span("iteration_3", 0, 100, "annotation", thread=1)] if marked else [span("cudaLaunchKernel", 0, 1, "runtime")]
    found = answer(rank(device_events=events, host_events=ranges), "phases")
    assert values(found, "name", "kernel_count", "device_ns")[-1:] == ([("autograd", 3.0, 15)] if marked else [])
