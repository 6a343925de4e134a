"""Damaged and hostile files give one error that names the file, and what can be read of them is kept."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bridge_profiling.errors import TraceError
from bridge_profiling.traces import kineto
from bridge_profiling.traces.bounds import Bounds
from bridge_profiling.traces.kineto import stream
from bridge_profiling.traces.types import RankTables
from tests.traces.conftest import WriteTrace
from tests.traces.kineto_files import call, complete, document, kernel

EVENTS = [
    event for number in range(400) for event in (call("launch", 10 * number, 2, number + 1), kernel("k", 10 * number + 3, 5))
]


def test_a_cut_gzip_keeps_what_comes_before_the_cut(write_trace: WriteTrace) -> None:
    path = write_trace([kernel(f"k{random.Random(number).random()}", 10 * number, 5) for number in range(2000)])
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    tables = kineto.read(path)
    assert 500 < tables.device_events.num_rows < 1500
    assert str(path) in tables.info.error
    assert "cut off" in tables.info.error
    assert tables.info.partial


def test_a_damaged_gzip_keeps_what_comes_before_the_damage(write_trace: WriteTrace) -> None:
    path = write_trace([kernel(f"k{random.Random(number).random()}", 10 * number, 5) for number in range(2000)])
    raw = bytearray(path.read_bytes())
    raw[-4] ^= 0xFF
    path.write_bytes(raw)
    tables = kineto.read(path)
    assert tables.device_events.num_rows == 2000
    assert str(path) in tables.info.error


def test_cut_json_keeps_whole_events(write_trace: WriteTrace) -> None:
    text = json.dumps(document(EVENTS))
    path = write_trace(text[: len(text) // 2])
    tables = kineto.read(path)
    assert 150 < tables.device_events.num_rows < 250
    assert f"{path} is cut off" in tables.info.error
    assert tables.info.rank == 3


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 100, b"\n", b"{}", b"[]", b"[1, 2", b'{"traceEvents": []}', b'{"traceEvents": [1, "x", null]}', b"\x1f\x8b",
     b"\x1f\x8b\x08\x00junk", b"\xfd7zXZ\0junk", b"not json", b'{"traceEvents": 5}', b'{"traceEvents": [{"name": {}}]}',
     b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": null, "dur": 1}]}',
     b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1e300, "dur": 1}]}',
     b"[" * 100_000, b'{"traceEvents": [' + b'{"a":' * 100_000],
)  # fmt: skip
def test_what_holds_no_event_is_one_error_that_names_the_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rank-0.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=str(path)):
        kineto.read(path)


def test_a_missing_file_and_a_directory_are_errors_that_name_them(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(TraceError, match=str(path)):
            kineto.read(path)


def test_a_trace_of_one_event_is_read(write_trace: WriteTrace) -> None:
    tables = kineto.read(write_trace([kernel("only", 5, 2)]))
    assert tables.device_events["name"].to_pylist() == ["only"]
    assert tables.info.error is None


def test_negative_durations_are_an_error_and_left_out(write_trace: WriteTrace) -> None:
    path = write_trace([kernel("good", 5, 2), kernel("bad", 5, -2), call("bad", 9, -1, 1)])
    tables = kineto.read(path)
    assert tables.device_events["name"].to_pylist() == ["good"]
    assert f"{path} holds 2 events that end before they start" in tables.info.error


def test_iterations_that_go_back_in_time_are_an_error(write_trace: WriteTrace) -> None:
    path = write_trace([complete("user_annotation", f"ProfilerStep#{step}", 1000 - 100 * step, 90) for step in (1, 2)])
    with pytest.raises(TraceError, match=rf"{path}.*backwards"):
        kineto.read(path)


def test_one_odd_event_does_not_cost_the_others(write_trace: WriteTrace) -> None:
    odd = [
        {"name": {}},
        {"ph": "X", "cat": ["kernel"], "name": 7, "ts": 1, "dur": 1},
        5,
        kernel("odd", 3, 1, stream=[7], bytes={}),
    ]
    tables = kineto.read(write_trace([kernel("a", 1, 1), *odd, kernel("b", 5, 1)]))
    assert tables.device_events["name"].to_pylist() == ["a", "odd", "b"]


def test_a_decompression_bomb_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.json.gz"
    with gzip.open(path, "wb", compresslevel=9) as bomb:
        bomb.write(b'{"traceEvents": [')
        for _ in range(80):
            bomb.write(b" " * (1 << 20))
    with pytest.raises(TraceError, match=rf"{path} is refused.*200 times"):
        kineto.read(path)


def test_more_json_than_the_limit_is_refused(write_trace: WriteTrace, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_trace(EVENTS, "rank-0.json")
    monkeypatch.setattr(stream, "BOUNDS", Bounds(max_bytes=1000, max_ratio=200))
    with pytest.raises(TraceError, match=f"{path} is refused"):
        kineto.read(path)


def test_an_event_larger_than_the_limit_is_refused(write_trace: WriteTrace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PIECE_BYTES", 1 << 10)
    monkeypatch.setattr(stream, "MAX_PART_BYTES", 1 << 14)
    path = write_trace([kernel("k", 1, 1, text="x" * (1 << 16))])
    with pytest.raises(TraceError, match=f"{path} is not a trace"):
        kineto.read(path)


def _read(path: Path) -> tuple[RankTables | None, str | None]:
    """Tables, if there are any, and the error, if there is one. Any other exception is a fault of the reader."""
    try:
        tables = kineto.read(path)
    except TraceError as error:
        return None, str(error)
    return tables, tables.info.error


_TEXT = json.dumps(
    document([*EVENTS[:6], complete("cpu_op", "a\\b", 1, 2, **{"Input Dims": [[1]], "v": float("inf")})])
).encode()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)
@given(
    edits=st.lists(st.tuples(st.integers(0, len(_TEXT)), st.integers(0, 12), st.binary(max_size=6)), max_size=4),
    cut=st.integers(0, len(_TEXT)),
    packed=st.booleans(),
    piece_bytes=st.sampled_from([100, 1 << 22]),
)
@example(edits=[(len(_TEXT) - 30, 0, b"]")], cut=0, packed=False, piece_bytes=100)
def test_any_damage_gives_tables_or_one_trace_error(
    tmp_path: Path, edits: list[tuple[int, int, bytes]], cut: int, packed: bool, piece_bytes: int
) -> None:
    raw = bytearray(_TEXT)
    for place, length, text in edits:
        raw[place : place + length] = text
    del raw[len(raw) - cut % 200 :]
    path = tmp_path / "fuzzed.json"
    path.write_bytes(gzip.compress(raw) if packed else raw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "PIECE_BYTES", piece_bytes)
        tables, error = _read(path)
    assert error is None or str(path) in error
    if tables is not None:
        assert (tables.device_events["end_ns"].to_numpy() >= tables.device_events["start_ns"].to_numpy()).all()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=100)
@given(st.binary(max_size=400), st.sampled_from([b"", b"\x1f\x8b", b'{"traceEvents": [', gzip.compress(b'{"traceEvents": [')]))
def test_any_bytes_give_tables_or_one_trace_error(tmp_path: Path, content: bytes, start: bytes) -> None:
    path = tmp_path / "junk.json"
    path.write_bytes(start + content)
    error = _read(path)[1]
    assert error is None or str(path) in error
