"""Exports of nsys that are damaged, or none at all: read as far as they are sound, or refused in one error that names them."""

from __future__ import annotations

import lzma
from pathlib import Path
from random import Random

import pytest

from bridge_profiling.errors import TraceError
from bridge_profiling.traces.nsys import tables as nsys
from tests.traces.nsys_files import KERNEL, Report, nccl_report, small_report


def test_a_file_that_is_no_sqlite_file_is_one_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "rank-1.sqlite"
    path.write_bytes(b"not a database at all")
    with pytest.raises(TraceError, match=r"rank-1.sqlite is not an SQLite file"):
        nsys.read(path)


def test_an_empty_file_is_one_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "rank-1.sqlite"
    path.touch()
    with pytest.raises(TraceError, match=r"rank-1.sqlite is not an SQLite file"):
        nsys.read(path)


def test_a_damaged_database_is_one_error_that_names_it(tmp_path: Path) -> None:
    whole = small_report().write(tmp_path / "whole.sqlite").read_bytes()
    path = tmp_path / "rank-1.sqlite"
    for kept in (50, 4096, len(whole) // 2):
        path.write_bytes(whole[:kept])
        with pytest.raises(TraceError, match=r"rank-1.sqlite cannot be read"):
            nsys.read(path)
    path.write_bytes(whole[:4096] + b"\xff" * (len(whole) - 4096))
    with pytest.raises(TraceError, match=r"rank-1.sqlite cannot be read"):
        nsys.read(path)


def test_a_database_with_any_bytes_changed_is_read_or_is_one_error(tmp_path: Path) -> None:
    whole = nccl_report(blobs=True).write(tmp_path / "whole.sqlite").read_bytes()
    path, random = tmp_path / "rank-1.sqlite", Random(5)
    refused = []
    for _ in range(200):
        damaged = bytearray(whole)
        for _ in range(random.randint(1, 40)):
            damaged[random.randrange(len(damaged))] = random.randrange(256)
        path.write_bytes(damaged)
        try:
            nsys.read(path)
        except TraceError as error:
            refused.append(str(error))
    assert 0 < len(refused) < 200
    assert [said for said in refused if "rank-1.sqlite" not in said] == []


def test_another_programs_database_is_one_error_that_names_it(tmp_path: Path) -> None:
    report = Report().add("users", name="x", password=None)
    with pytest.raises(TraceError, match=r"rank-1.sqlite holds no event"):
        nsys.read(report.write(tmp_path / "rank-1.sqlite"))


def test_a_text_where_numbers_belong_is_one_error_that_names_the_column(tmp_path: Path) -> None:
    report = small_report().kernel("gemm", "1; DROP TABLE", 20)  # type: ignore[arg-type]
    with pytest.raises(TraceError, match=rf"rank-1.sqlite cannot be read: {KERNEL}.start holds something other than integers"):
        nsys.read(report.write(tmp_path / "rank-1.sqlite"))


@pytest.mark.parametrize("start", [1 << 61, -(1 << 61)])
def test_times_beyond_a_session_are_one_error_that_names_the_file(tmp_path: Path, start: int) -> None:
    report = small_report().kernel("gemm", start, start + 10)
    with pytest.raises(TraceError, match=r"rank-1.sqlite cannot be read: its times are not nanoseconds"):
        nsys.read(report.write(tmp_path / "rank-1.sqlite"))


def test_events_that_end_before_they_start_are_left_out_and_make_the_rank_partial(tmp_path: Path) -> None:
    report = small_report().kernel("backwards", 500, 400).call("cudaFree_v3020", 90, 80, correlation=77)
    tables = nsys.read(report.write(tmp_path / "rank-1.sqlite"))
    assert tables.device_events["name"].to_pylist() == ["gemm", "gemm"]
    assert tables.info.partial
    assert "rank-1.sqlite holds 2 events that end before they start" in tables.info.error


def test_iterations_whose_clock_goes_backwards_are_one_error_that_names_the_file(tmp_path: Path) -> None:
    report = small_report().range("iteration_2", 9000, 9900)
    with pytest.raises(TraceError, match=r"rank-1.sqlite cannot be read: its iterations do not follow"):
        nsys.read(report.write(tmp_path / "rank-1.sqlite"))


def test_numbers_beyond_a_column_are_one_error_that_names_the_file(tmp_path: Path) -> None:
    report = small_report().kernel("gemm", 1, 2, deviceId=1 << 40)
    with pytest.raises(TraceError, match=r"rank-1.sqlite cannot be read"):
        nsys.read(report.write(tmp_path / "rank-1.sqlite"))


def test_a_decompression_bomb_is_refused_before_it_fills_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "rank-1.sqlite.xz"
    packer = lzma.LZMACompressor(preset=0)
    pieces = [packer.compress(bytes(1 << 24)) for _ in range(8)]
    path.write_bytes(b"".join([*pieces, packer.flush()]))
    with pytest.raises(TraceError, match=r"rank-1.sqlite.xz is refused: it unpacks to more than 200 times its size"):
        nsys.read(path)


def test_a_cut_packed_export_is_one_error_that_names_it(tmp_path: Path) -> None:
    packed = lzma.compress(small_report().write(tmp_path / "plain").read_bytes())
    path = tmp_path / "rank-1.sqlite.xz"
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(TraceError, match=r"rank-1.sqlite.xz is cut off"):
        nsys.read(path)
