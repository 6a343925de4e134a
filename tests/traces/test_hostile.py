"""Damaged and hostile files give one error that names the file, and what can be read of them is kept."""

import lzma
from random import Random

import pytest

from bridge_profiling.errors import TraceError
from bridge_profiling.traces import kineto
from bridge_profiling.traces.bounds import Bounds
from bridge_profiling.traces.kineto import stream
from bridge_profiling.traces.memory import snapshot as memory_snapshot
from bridge_profiling.traces.nsys import tables as nsys
from tests.traces.kineto_files import complete, kernel
from tests.traces.nsys_files import Report, small_report


@pytest.mark.parametrize(
    ("reader", "name"), [(kineto, "rank-1.json.xz"), (nsys, "rank-1.sqlite.xz"), (memory_snapshot, "rank-1.pickle.xz")]
)
def test_a_packed_file_that_is_cut_off_is_one_error_that_names_it(tmp_path, reader, name):
    (tmp_path / name).write_bytes(lzma.compress(bytes(100))[:-20])
    with pytest.raises(TraceError, match=f"{name} is cut off"):
        reader.read(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "damage", "rows", "said"),
    [
        ("rank-3.json.gz", lambda raw: raw[: len(raw) // 2], range(500, 1500), "is cut off"),
        ("rank-3.json.gz", lambda raw: raw[:-1] + bytes([raw[-1] ^ 0xFF]), [2000], "is damaged"),
        ("rank-3.json", lambda raw: raw[: len(raw) // 2], range(900, 1100), "is cut off"),
    ],
    ids=["gzip cut off", "wrong checksum", "JSON cut off"],
)
def test_a_damaged_trace_keeps_what_comes_before_the_damage(write_trace, name, damage, rows, said):
    random = Random(0)
    path = write_trace([kernel(f"k{random.random()}", 10 * number, 5) for number in range(2000)], name)
    path.write_bytes(damage(path.read_bytes()))
    tables = kineto.read(path)
    assert tables.device_events.num_rows in rows
    assert f"{path} {said}" in tables.info.error
    assert (tables.info.partial, tables.info.rank) == (True, 3)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[1, 2", b'{"traceEvents": [1, "x", null]}', b'[{"ph": "C"}]', b"\x1f\x8b\x08\x00junk", b"\xfd7zXZ\0junk",
     b"not json", b'{"traceEvents": 5}', b'[{"ph": "X", "cat": "kernel", "name": "k", "ts": null, "dur": 1}]',
     b'[{"ph": "X", "cat": "kernel", "name": "k", "ts": 1e300, "dur": 1}]', b"[" * 100_000, b"[" + b'{"a":' * 100_000],
)  # fmt: skip
def test_what_holds_no_event_is_one_error_that_names_the_file(tmp_path, content):
    path = tmp_path / "rank-0.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=str(path)):
        kineto.read(path)


def test_a_missing_file_and_a_directory_are_errors_that_name_them(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(TraceError, match=f"{path} cannot be read"):
            kineto.read(path)


def test_iterations_that_go_back_in_time_are_an_error(write_trace):
    path = write_trace([complete("user_annotation", f"ProfilerStep#{step}", 1000 - 100 * step, 90) for step in (1, 2)])
    with pytest.raises(TraceError, match=rf"{path}.*backwards"):
        kineto.read(path)


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({"KINETO": Bounds(max_bytes=1000)}, "is refused"),
        ({"PIECE_BYTES": 1 << 10, "MAX_PART_BYTES": 1 << 14}, "is not a trace: one event is larger"),
    ],
)
def test_a_trace_and_an_event_larger_than_the_limit_are_refused(write_trace, monkeypatch, limits, why):
    for name, limit in limits.items():
        monkeypatch.setattr(stream, name, limit)
    path = write_trace([kernel("k", 1, 1, text="x" * (1 << 16))], "rank-0.json")
    with pytest.raises(TraceError, match=f"{path} {why}"):
        kineto.read(path)


@pytest.mark.parametrize(
    ("report", "why"),
    [
        (Report().add("users", name="x", password=None), "holds no event"),
        (small_report().kernel("gemm", 1 << 61, (1 << 61) + 10), "cannot be read: its times are not nanoseconds"),
        (small_report().kernel("gemm", -(1 << 61), 10 - (1 << 61)), "cannot be read: its times are not nanoseconds"),
        (small_report().kernel("gemm", 1, 2, deviceId=1 << 40), "cannot be read"),
        (small_report().range("iteration_2", 9000, 9900), "cannot be read: its iterations do not follow"),
    ],
)
def test_a_report_that_no_nsys_writes_is_one_error_that_names_it(read_report, report, why):
    with pytest.raises(TraceError, match=f"rank-1.sqlite {why}"):
        read_report(report)
