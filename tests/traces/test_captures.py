"""On real H200 captures, figures agree with an independent reference, and every event with a slow reading of the same file."""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import lzma
import os
import sqlite3
from collections import Counter
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from bridge_profiling.analysis.intervals import union
from bridge_profiling.errors import TraceError
from bridge_profiling.traces.nsys import tables as nsys
from tests.system.nsys_install import working_nsys
from tests.traces.conftest import caveats, values

#: Milliseconds of device time over the whole capture, from the captures' README; their last digit is rounded.
REFERENCE = {
    "tp2_dp2/rank-0": (454.0, 371.5, 145.3, 233.8, 221.7, 4.3, 7456),
    "tp2_dp2/rank-1": (455.3, 184.9, 139.8, 40.8, 40.7, 4.2, 7406),
    "plant_data/rank-0": (663.0, 164.5, 140.5, 19.7, 19.5, 4.3, 7456),
    "pp2_dp2/rank-0": (227.6, 186.9, 121.2, 61.2, 61.2, 4.2, 3506),
    "nsys": (361.5, 167.8, 141.1, 23.1, 22.1, 4.4, 7456),
}


@pytest.fixture(scope="module")
def reports(captures, tmp_path_factory):
    """The nsys reports of two ranks, unpacked."""
    folder = tmp_path_factory.mktemp("nsys")
    for packed in sorted((captures / "nsys" / "tp2_dp2").glob("rank[01].sqlite.xz")):
        (folder / packed.stem).write_bytes(lzma.decompress(packed.read_bytes()))
    return folder


@pytest.fixture(scope="module")
def report(reports):
    """The tables of a rank's report, which is read once. Its own rank is not the one that the reader is given."""
    return functools.cache(lambda rank: nsys.read(reports / f"rank{rank}.sqlite", rank=9))


def rows(path, query):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


def of_kind(tables, *kinds):
    events = tables.device_events
    events = events.filter(pc.is_in(events["kind"].cast("string"), pa.array(kinds)))
    return union(events["start_ns"].to_numpy(), events["end_ns"].to_numpy())


@pytest.mark.parametrize("name", REFERENCE)
def test_device_times_agree_with_the_reference(decoded, report, name):
    tables = report(0) if name == "nsys" else decoded(name)
    events, kinds = tables.device_events, Counter(values(tables.device_events, "kind"))
    compute, communication = of_kind(tables, "compute"), of_kind(tables, "communication")
    copies = of_kind(tables, "memcpy", "memset")
    found_ns = (
        pc.max(events["end_ns"]).as_py() - pc.min(events["start_ns"]).as_py(),
        (compute | communication | copies).total_ns,
        compute.total_ns,
        communication.total_ns,
        (communication - (compute | copies)).total_ns,
        of_kind(tables, "memcpy").total_ns,
    )
    *expected_ms, kernels = REFERENCE[name]
    assert [value / 1e6 for value in found_ns] == [pytest.approx(value, rel=1e-4, abs=0.05) for value in expected_ms]
    assert kinds["compute"] + kinds["communication"] == kernels


@pytest.mark.parametrize(
    ("table", "place", "categories"),
    [
        ("device_events", "stream", ("kernel", "gpu_memcpy", "gpu_memset")),
        ("host_events", "thread", ("cpu_op", "cuda_runtime", "cuda_driver", "user_annotation", "overhead")),
    ],
)
def test_every_event_of_kineto_is_exact_to_the_nanosecond(captures, decoded, table, place, categories):
    path = captures / "kineto" / "pp2_dp2" / "rank-0.json.gz"
    slow = json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)
    base = slow["baseTimeNanoseconds"]
    expected = [
        (
            base + int(event["ts"] * 1000),
            base + int((event["ts"] + event["dur"]) * 1000),
            event["name"],
            event["args"]["stream"] if place == "stream" else event["tid"],
        )
        for event in slow["traceEvents"]
        if event.get("cat") in categories
    ]
    assert sorted(values(decoded("pp2_dp2/rank-0")[table], "start_ns", "end_ns", "name", place)) == sorted(expected)


def test_every_device_event_of_nsys_is_as_sqlite_has_it(reports, report):
    path = reports / "rank0.sqlite"
    ((base,),) = rows(path, "SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME")
    names = dict(rows(path, "SELECT id, value FROM StringIds"))
    query = "SELECT start + {0}, end + {0}, streamId, correlationId, {1} FROM CUPTI_ACTIVITY_KIND_{2}"
    expected = []
    for kind in ("memcpy", "memset"):
        expected += [(*row, kind) for row in rows(path, query.format(base, "bytes", kind.upper()))]
    for *row, name in rows(path, query.format(base, "demangledName", "KERNEL")):
        expected.append((*row, None, "communication" if names[name].startswith("nccl") else "compute"))
    found = values(report(0).device_events, "start_ns", "end_ns", "stream", "correlation", "bytes", "kind")
    assert sorted(found, key=str) == sorted(expected, key=str)


def test_kernels_copies_and_memsets_of_nsys_have_the_names_that_kineto_gives_them(report):
    counts = Counter(values(report(0).device_events, "name"))
    assert {name: count for name, count in counts.items() if name.startswith("Mem")} == {
        "Memcpy HtoD (Pageable -> Device)": 2,
        "Memcpy HtoD (Pinned -> Device)": 8,
        "Memcpy DtoH (Device -> Pinned)": 102,
        "Memcpy DtoD (Device -> Device)": 96,
        "Memset (Device)": 306,
    }


def test_rank_and_size_of_the_job_are_those_of_the_process_that_nsys_started(report):
    for rank in (0, 1):
        info = report(rank).info
        assert (info.rank, info.rank_source, info.world_size, info.devices) == (rank, "trace", 4, {rank: "NVIDIA H200"})


def test_both_iterations_are_there_and_none_is_at_the_boundary(decoded, report):
    """In nsys' report the flush comes after them, and the initialization is another process'."""
    for tables in (decoded("tp2_dp2/rank-0"), decoded("tp2_dp2/rank-1"), report(0), report(1)):
        assert values(tables.iterations, "iteration", "boundary") == [(9, False), (10, False)]


def test_every_kernel_has_its_launch_and_its_iteration(decoded, report):
    for tables in (decoded("tp2_dp2/rank-0"), report(0)):
        events = tables.device_events
        assert [events[name].null_count for name in ("launch_start_ns", "launch_thread", "iteration")] == [0, 0, 0]
        # The capture's host and device clocks agree to some microseconds.
        assert (events["start_ns"].to_numpy() - events["launch_start_ns"].to_numpy()).min() > -10_000
    assert report(0).device_events["operator"].null_count == 0


def test_the_operator_of_a_kernel_is_the_innermost_range_around_its_launch(report):
    host = [row for row in report(0).host_events.to_pylist() if row["category"] in ("operator", "annotation")]
    for event in report(0).device_events.to_pylist()[::397]:
        thread, time = event["launch_thread"], event["launch_start_ns"]
        around = [row for row in host if row["thread"] == thread and row["start_ns"] <= time < row["end_ns"]]
        assert event["operator"] == max(around, key=lambda row: (row["start_ns"], -row["end_ns"]))["operator"]


def test_torch_operators_lose_what_emit_nvtx_appends(reports, report):
    host = values(report(0).host_events, "name", "category")
    names = {name for name, _ in host}
    assert {
        "aten::mm",
        "aten::split_with_sizes",
        "iteration_9",
        "forward-backward",
        "ncclAllReduce",
        "cudaLaunchKernel",
    } <= names
    assert not [name for name in names if "op_id" in name or "_v7000" in name]
    ((with_number,),) = rows(reports / "rank0.sqlite", "SELECT count(*) FROM NVTX_EVENTS WHERE text LIKE '%, op_id = %'")
    assert sum(category == "operator" for _, category in host) == with_number


def test_point_to_point_operations_of_both_stages_match(decoded):
    """Megatron issues them as a batch, and Kineto describes no kernel of a batch: the calls before it do."""
    sides = []
    for rank in (0, 2):
        tables = decoded(f"pp2_dp2/rank-{rank}")
        mine = [row for row in tables.collectives.to_pylist() if row["group"] == "PIPELINE_MODEL_PARALLEL_GROUP"]
        assert [row["sequence"] for row in sorted(mine, key=lambda row: row["launch_start_ns"])] == list(range(len(mine)))
        assert {(row["peer"], row["message_bytes"]) for row in mine} == {(2 - rank, 2048 * 1 * 2048 * 2)}
        sides.append({row["sequence"]: row["operation"] for row in mine})
        assert not tables.info.caveats
    mirrored = {"send": "recv", "recv": "send", "send_recv": "send_recv"}
    assert {sequence: mirrored[operation] for sequence, operation in sides[0].items()} == sides[1]


def test_collectives_of_one_group_have_the_same_sequence_on_its_ranks(decoded):
    columns = ("sequence", "operation", "message_bytes", "dtype", "group")
    first, second = (
        sorted(row for row in values(decoded(f"tp2_dp2/rank-{rank}").collectives, *columns) if row[4].startswith("TENSOR"))
        for rank in (0, 1)
    )
    assert first == second
    assert len(first) == 296
    assert all(size for _, _, size, *_ in first)


def test_collectives_end_together_on_the_ranks_that_take_part(report):
    """Sessions start at different times; on the host's clock a tensor-parallel pair's all-reduces end within microseconds."""
    first, second = (
        [end for end, operation in values(report(rank).collectives, "end_ns", "operation") if operation == "all_reduce"]
        for rank in (0, 1)
    )
    assert len(first) == len(second)
    assert np.median(np.abs(np.array(first) - np.array(second))) < 20_000


def test_what_nccl_did_not_record_is_null_with_a_caveat(report):
    found = values(report(0).collectives, "operation", "message_bytes")
    assert len(found) == 302
    assert set(found) == {("all_reduce", None), ("all_gather", None), ("reduce_scatter", None)}
    assert "message size of 302 of 302" in caveats(report(0))["message_size_unknown"]


def test_streams_wait_for_the_latest_record_of_an_event(reports, report):
    """This version has no eventSyncId, gives records no time, and numbers the kinds of waits otherwise than its own list."""
    path = reports / "rank0.sqlite"
    records = rows(path, "SELECT eventId, correlationId, streamId FROM CUPTI_ACTIVITY_KIND_CUDA_EVENT")
    waits = dict(rows(path, "SELECT correlationId, eventId FROM CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"))
    found = values(report(0)["synchronizations"], "kind", "correlation", "producer_correlation", "producer_stream")
    assert Counter(kind for kind, *_ in found) == {"stream_wait_event": 880, "stream": 104, "context": 1}
    assert sum(producer is not None for _, _, producer, _ in found) == 604
    for kind, wait, *producer in found[::7]:
        before = [tuple(each[1:]) for each in records if each[0] == waits[wait] and each[1] < wait]
        assert tuple(producer) == max(before if kind == "stream_wait_event" else (), default=(None, None))


def test_a_report_without_nsys_says_what_to_install(captures, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TraceError, match=r"single_gpu.nsys-rep .*install Nsight Systems.*export_sqlite=True"):
        nsys.read(captures / "nsys" / "single_gpu.nsys-rep")


@pytest.mark.system
@pytest.mark.needs("nsys")
def test_a_report_is_exported_by_the_nsys_of_this_machine_and_a_cut_one_is_an_error(captures, monkeypatch, tmp_path):
    program = working_nsys(Path(__file__).parents[2] / ".cache" / "nsys")
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    whole, report = (captures / "nsys" / "single_gpu.nsys-rep").read_bytes(), tmp_path / "rank-3.nsys-rep"
    report.write_bytes(whole)
    tables = nsys.read(report)
    assert tables.info.files == [str(report)]
    assert values(tables.iterations, "iteration") == [8, 9]
    assert tables.device_events.num_rows == 3856 + 164 + 172
    assert list(tmp_path.iterdir()) == [report]
    report.write_bytes(whole[:200_000])
    with pytest.raises(TraceError, match=r"rank-3.nsys-rep cannot be exported by nsys: "):
        nsys.read(report)
