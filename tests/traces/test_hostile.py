"""Damaged and hostile files give one error that names the file, and what can be read of them is kept."""

import gzip
import json
import lzma
from random import Random

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bridge_profiling.errors import TraceError
from bridge_profiling.traces import kineto
from bridge_profiling.traces.bounds import Bounds
from bridge_profiling.traces.kineto import stream
from bridge_profiling.traces.memory import snapshot as memory_snapshot
from bridge_profiling.traces.nsys import tables as nsys
from tests.traces.conftest import values
from tests.traces.kineto_files import call, complete, document, kernel
from tests.traces.nsys_files import KERNEL, Report, nccl_report, small_report


@pytest.fixture(scope="module")
def bomb():
    """100 MB in 15 kB."""
    packer = lzma.LZMACompressor(preset=0)
    pieces = [packer.compress(text) for text in (b'{"traceEvents": [', b" " * (100 << 20))]
    return b"".join([*pieces, packer.flush()])


@pytest.mark.parametrize(
    ("reader", "name", "ratio"),
    [(kineto, "rank-1.json.xz", 200), (nsys, "rank-1.sqlite.xz", 200), (memory_snapshot, "rank-1.pickle.xz", 200)],
)
def test_a_packed_file_that_is_cut_off_or_a_bomb_is_one_error_that_names_it(tmp_path, bomb, reader, name, ratio):
    cut = lzma.compress(bytes(100))[:-20]
    for content, why in ((cut, "is cut off"), (bomb, f"is refused: it unpacks to more than {ratio} times its size")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TraceError, match=f"{name} {why}"):
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


def test_events_that_end_before_they_start_are_left_out_and_make_the_rank_partial(read_trace, read_report):
    trace = read_trace([kernel("good", 5, 2), kernel("bad", 5, -2), call("bad", 9, -1, 1)])
    report = read_report(small_report().kernel("bad", 500, 400).call("cudaFree_v3020", 90, 80, correlation=77))
    for tables, names in ((trace, ["good"]), (report, ["gemm", "gemm"])):
        assert values(tables.device_events, "name") == names
        assert f"{tables.info.files[0]} holds 2 events that end before they start" in tables.info.error
        assert tables.info.partial


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


EVENTS = [
    call("launch", 10, 2, 1),
    kernel("k", 13, 5),
    complete("cpu_op", "a\\b", 1, 2, **{"Input Dims": [[1]], "v": float("inf")}),
]
TEXT = json.dumps(document(EVENTS * 3)).encode()
STARTS = [TEXT, TEXT, b"", b"\x1f\x8b", b'{"traceEvents": [', gzip.compress(b'{"traceEvents": [')]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=120)
@given(
    start=st.sampled_from(STARTS),
    edits=st.lists(st.tuples(st.integers(0, len(TEXT)), st.integers(0, 12), st.binary(max_size=6)), max_size=4),
    cut=st.integers(0, 199),
    packed=st.booleans(),
    piece_bytes=st.sampled_from([100, 1 << 22]),
)
@example(start=TEXT, edits=[(len(TEXT) - 30, 0, b"]")], cut=0, packed=False, piece_bytes=100)
@example(start=TEXT, edits=[], cut=0, packed=False, piece_bytes=100)
def test_any_damage_gives_tables_or_one_trace_error(tmp_path, start, edits, cut, packed, piece_bytes):
    raw = bytearray(start)
    for place, length, text in edits:
        raw[place : place + length] = text
    del raw[max(len(raw) - cut, 0) :]
    path = tmp_path / "fuzzed.json"
    path.write_bytes(gzip.compress(raw) if packed else raw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "PIECE_BYTES", piece_bytes)
        try:
            tables = kineto.read(path)
            error, rows = tables.info.error, values(tables.device_events, "start_ns", "end_ns")
        except TraceError as refused:
            error, rows = str(refused), []
    assert str(path) in (error or str(path))
    assert all(start <= end for start, end in rows)


@pytest.mark.parametrize(
    ("report", "why"),
    [
        (Report().add("users", name="x", password=None), "holds no event"),
        (small_report().kernel("gemm", "1; DROP TABLE", 20), f"cannot be read: {KERNEL}.start holds something other"),
        (small_report().kernel("gemm", 1 << 61, (1 << 61) + 10), "cannot be read: its times are not nanoseconds"),
        (small_report().kernel("gemm", -(1 << 61), 10 - (1 << 61)), "cannot be read: its times are not nanoseconds"),
        (small_report().kernel("gemm", 1, 2, deviceId=1 << 40), "cannot be read"),
        (small_report().range("iteration_2", 9000, 9900), "cannot be read: its iterations do not follow"),
    ],
)
def test_a_report_that_no_nsys_writes_is_one_error_that_names_it(read_report, report, why):
    with pytest.raises(TraceError, match=f"rank-1.sqlite {why}"):
        read_report(report)


def test_a_damaged_database_is_one_error_that_names_it(tmp_path):
    whole = small_report().write(tmp_path / "whole.sqlite").read_bytes()
    pieces = [whole[:50], whole[:4096], whole[: len(whole) // 2], whole[:4096] + b"\xff" * (len(whole) - 4096)]
    contents = dict.fromkeys(pieces, "cannot be read") | dict.fromkeys([b"", b"no database"], "is not an SQLite file")
    for content, why in contents.items():
        (tmp_path / "rank-1.sqlite").write_bytes(content)
        with pytest.raises(TraceError, match=f"rank-1.sqlite {why}"):
            nsys.read(tmp_path / "rank-1.sqlite")


def test_a_database_with_any_bytes_changed_is_read_or_is_one_error(tmp_path):
    whole = nccl_report(blobs=True).write(tmp_path / "whole.sqlite").read_bytes()
    path, random = tmp_path / "rank-1.sqlite", Random(5)
    refused = []
    for _ in range(80):
        damaged = bytearray(whole)
        for _ in range(random.randint(1, 40)):
            damaged[random.randrange(len(damaged))] = random.randrange(256)
        path.write_bytes(damaged)
        try:
            nsys.read(path)
        except TraceError as error:
            refused.append(str(error))
    assert 0 < len(refused) < 80
    assert all("rank-1.sqlite" in said for said in refused)
