"""On real H200 reports, figures agree with an independent reference, and every event with a slow reading of the same file."""

from __future__ import annotations

import contextlib
import lzma
import os
import sqlite3
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from bridge_profiling.analysis.intervals import Intervals, union
from bridge_profiling.errors import TraceError
from bridge_profiling.traces.nsys import tables as nsys
from bridge_profiling.traces.types import RankTables
from tests.system.nsys_install import working_nsys


@pytest.fixture(scope="module")
def reports(captures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reports of four ranks, unpacked."""
    folder = tmp_path_factory.mktemp("nsys")
    for packed in sorted((captures / "nsys" / "tp2_dp2").glob("*.sqlite.xz")):
        (folder / packed.stem).write_bytes(lzma.decompress(packed.read_bytes()))
    return folder


@pytest.fixture(scope="module")
def nsys_program() -> Path:
    """A real nsys: the one on PATH, or one made of Debian's packages."""
    return working_nsys(Path(__file__).parents[2] / ".cache" / "nsys")


def rows(path: Path, query: str) -> list[tuple]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


def _of_kind(tables: RankTables, *kinds: str) -> Intervals:
    events = tables.device_events
    events = events.filter(pc.is_in(events["kind"].cast("string"), pa.array(kinds)))
    return union(events["start_ns"].to_numpy(), events["end_ns"].to_numpy())


def test_device_times_agree_with_the_reference(captures: Path) -> None:
    """Milliseconds over the whole capture, from the captures' README; their last digit is rounded."""
    tables = nsys.read(captures / "nsys" / "tp2_dp2" / "rank0.sqlite.xz")
    events = tables.device_events
    compute, communication = _of_kind(tables, "compute"), _of_kind(tables, "communication")
    copies = _of_kind(tables, "memcpy", "memset")
    found_ns = (
        pc.max(events["end_ns"]).as_py() - pc.min(events["start_ns"]).as_py(),
        (compute | communication | copies).total_ns,
        compute.total_ns,
        communication.total_ns,
        (communication - (compute | copies)).total_ns,
        _of_kind(tables, "memcpy").total_ns,
    )
    expected_ms = (361.5, 167.8, 141.1, 23.1, 22.1, 4.4)
    assert [value / 1e6 for value in found_ns] == [pytest.approx(value, rel=1e-4, abs=0.05) for value in expected_ms]
    assert sum(events["kind"].to_pylist().count(kind) for kind in ("compute", "communication")) == 7456


@pytest.mark.parametrize("rank", range(4))
def test_device_times_agree_with_a_slow_reading_to_the_nanosecond(reports: Path, rank: int) -> None:
    path = reports / f"rank{rank}.sqlite"
    names = dict(rows(path, "SELECT id, value FROM StringIds"))
    kernels = rows(path, "SELECT start, end, demangledName FROM CUPTI_ACTIVITY_KIND_KERNEL")
    slow = {
        "compute": [(start, end) for start, end, name in kernels if not names[name].startswith("nccl")],
        "communication": [(start, end) for start, end, name in kernels if names[name].startswith("nccl")],
        "memcpy": rows(path, "SELECT start, end FROM CUPTI_ACTIVITY_KIND_MEMCPY"),
        "memset": rows(path, "SELECT start, end FROM CUPTI_ACTIVITY_KIND_MEMSET"),
    }
    tables = nsys.read(path)
    for kind, intervals in slow.items():
        assert _of_kind(tables, kind).total_ns == _covered(intervals), kind
    assert tables.device_events.num_rows == sum(map(len, slow.values()))


def _covered(intervals: list[tuple[int, int]]) -> int:
    total, reached = 0, -(1 << 62)
    for start, end in sorted(intervals):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def test_every_device_event_is_as_sqlite_has_it(reports: Path) -> None:
    path = reports / "rank2.sqlite"
    ((base,),) = rows(path, "SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME")
    query = "SELECT start + {0}, end + {0}, streamId, correlationId, {1} FROM CUPTI_ACTIVITY_KIND_{2}"
    expected = [row for table in ("MEMCPY", "MEMSET") for row in rows(path, query.format(base, "bytes", table))]
    expected += rows(path, query.format(base, "NULL", "KERNEL"))
    events = nsys.read(path).device_events
    columns = ("start_ns", "end_ns", "stream", "correlation", "bytes")
    found = list(zip(*(events[name].to_pylist() for name in columns), strict=True))
    assert sorted(found, key=str) == sorted(expected, key=str)


def test_kernels_copies_and_memsets_have_the_names_that_kineto_gives_them(reports: Path) -> None:
    events = nsys.read(reports / "rank0.sqlite").device_events
    counts = {row["values"]: row["counts"] for row in pc.value_counts(events["name"].cast("string")).to_pylist()}
    copies = {name: count for name, count in counts.items() if name.startswith("Mem")}
    assert copies == {
        "Memcpy HtoD (Pageable -> Device)": 2,
        "Memcpy HtoD (Pinned -> Device)": 8,
        "Memcpy DtoH (Device -> Pinned)": 102,
        "Memcpy DtoD (Device -> Device)": 96,
        "Memset (Device)": 306,
    }


def test_rank_and_size_of_the_job_are_those_of_the_process_that_nsys_started(reports: Path) -> None:
    for rank in range(4):
        info = nsys.read(reports / f"rank{rank}.sqlite", rank=9).info
        assert (info.rank, info.rank_source, info.world_size) == (rank, "trace", 4)
        assert info.devices == {rank: "NVIDIA H200"}


def test_both_iterations_are_there_and_none_is_at_the_boundary(reports: Path) -> None:
    """The flush comes after them, and the initialization in the report is another process'."""
    for rank in range(4):
        iterations = nsys.read(reports / f"rank{rank}.sqlite").iterations
        assert iterations["iteration"].to_pylist() == [9, 10]
        assert iterations["boundary"].to_pylist() == [False, False]


def test_every_kernel_has_its_launch_its_operator_and_its_iteration(reports: Path) -> None:
    tables = nsys.read(reports / "rank0.sqlite")
    events = tables.device_events
    for name in ("launch_start_ns", "launch_thread", "iteration", "operator"):
        assert events[name].null_count == 0, name
    assert (events["start_ns"].to_numpy() - events["launch_start_ns"].to_numpy()).min() > -10_000


def test_the_operator_of_a_kernel_is_the_innermost_range_around_its_launch(reports: Path) -> None:
    tables = nsys.read(reports / "rank0.sqlite")
    host = [row for row in tables.host_events.to_pylist() if row["category"] in ("operator", "annotation")]
    for event in tables.device_events.to_pylist()[::97]:
        thread, time = event["launch_thread"], event["launch_start_ns"]
        around = [row for row in host if row["thread"] == thread and row["start_ns"] <= time < row["end_ns"]]
        assert event["operator"] == max(around, key=lambda row: (row["start_ns"], -row["end_ns"]))["operator"]


def test_torch_operators_lose_what_emit_nvtx_appends(reports: Path) -> None:
    host = nsys.read(reports / "rank0.sqlite").host_events
    names = set(host["name"].cast("string").to_pylist())
    assert {
        "aten::mm",
        "aten::split_with_sizes",
        "iteration_9",
        "forward-backward",
        "ncclAllReduce",
        "cudaLaunchKernel",
    } <= names
    assert not [name for name in names if "op_id" in name or "_v7000" in name]
    operators = host.filter(pc.equal(host["category"].cast("string"), "operator")).num_rows
    ((with_number,),) = rows(reports / "rank0.sqlite", "SELECT count(*) FROM NVTX_EVENTS WHERE text LIKE '%, op_id = %'")
    assert operators == with_number


def test_collectives_end_together_on_the_ranks_that_take_part(reports: Path) -> None:
    """Sessions start at different times; on the host's clock a tensor-parallel pair's all-reduces end within microseconds."""
    ends = []
    for rank in (0, 1):
        table = nsys.read(reports / f"rank{rank}.sqlite").collectives
        bf16 = table.filter(pc.equal(table["operation"].cast("string"), "all_reduce"))
        ends.append(bf16["end_ns"].to_numpy())
    assert len(ends[0]) == len(ends[1])
    assert np.median(np.abs(ends[0] - ends[1])) < 20_000


def test_what_nccl_did_not_record_is_null_with_a_caveat(reports: Path) -> None:
    tables = nsys.read(reports / "rank0.sqlite")
    assert tables.collectives["message_bytes"].null_count == tables.collectives.num_rows == 302
    assert set(tables.collectives["operation"].cast("string").to_pylist()) == {"all_reduce", "all_gather", "reduce_scatter"}
    assert any("message size of 302 of 302" in each.text for each in tables.info.caveats)


def test_streams_wait_for_the_latest_record_of_an_event(reports: Path) -> None:
    """This version has no eventSyncId, gives records no time, and numbers the kinds of waits otherwise than its own list."""
    path = reports / "rank0.sqlite"
    records = rows(path, "SELECT eventId, correlationId, streamId FROM CUPTI_ACTIVITY_KIND_CUDA_EVENT")
    waits = {row[0]: row[1] for row in rows(path, "SELECT correlationId, eventId FROM CUPTI_ACTIVITY_KIND_SYNCHRONIZATION")}
    table = nsys.read(path)["synchronizations"].to_pylist()
    kinds = [row["kind"] for row in table]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"stream_wait_event": 880, "stream": 104, "context": 1}
    resolved = 0
    for row in table:
        if row["kind"] != "stream_wait_event":
            assert row["producer_correlation"] is None
            continue
        before = [each for each in records if each[0] == waits[row["correlation"]] and each[1] < row["correlation"]]
        latest = max(before, key=lambda each: each[1], default=(None, None, None))
        assert (row["producer_correlation"], row["producer_stream"]) == latest[1:]
        resolved += latest[1] is not None
    assert resolved == 604


def test_a_report_without_nsys_says_what_to_install(captures: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TraceError, match=r"single_gpu.nsys-rep .*install Nsight Systems.*export_sqlite=True"):
        nsys.read(captures / "nsys" / "single_gpu.nsys-rep")


@pytest.mark.system
@pytest.mark.needs("nsys")
def test_a_report_is_exported_by_the_nsys_of_this_machine(
    captures: Path, nsys_program: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", f"{nsys_program.parent}:{os.environ['PATH']}")
    report = tmp_path / "single_gpu.nsys-rep"
    report.write_bytes((captures / "nsys" / "single_gpu.nsys-rep").read_bytes())
    tables = nsys.read(report)
    assert tables.info.files == [str(report)]
    assert tables.iterations["iteration"].to_pylist() == [8, 9]
    assert tables.device_events.num_rows == 3856 + 164 + 172
    assert list(tmp_path.iterdir()) == [report]


@pytest.mark.system
@pytest.mark.needs("nsys")
def test_a_cut_report_is_one_error_that_names_it(
    captures: Path, nsys_program: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", f"{nsys_program.parent}:{os.environ['PATH']}")
    report = tmp_path / "rank-3.nsys-rep"
    report.write_bytes((captures / "nsys" / "single_gpu.nsys-rep").read_bytes()[:200_000])
    with pytest.raises(TraceError, match=r"rank-3.nsys-rep cannot be exported by nsys: "):
        nsys.read(report)
