"""A capture is parsed once: the second time its tables come from Parquet, as long as it is the same file and engine."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import duckdb
import pytest

from bridge_profiling.traces import cache, kineto
from bridge_profiling.traces.cache import load
from bridge_profiling.traces.discover import Capture, find_run
from bridge_profiling.traces.types import RankTables
from tests.traces.conftest import WriteTrace
from tests.traces.kineto_files import kernel


def _never(path: Path, **_: object) -> RankTables:
    raise AssertionError("the capture was read again")


def _capture(path: Path) -> Capture:
    return Capture(path, "kineto", 0, "order")


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_a_second_load_reads_only_parquet(captures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = captures / "kineto" / "tp2_dp2" / "rank-1.json.gz"
    first = load(_capture(path), directory=tmp_path)
    monkeypatch.setattr(kineto, "read", _never)
    again = load(_capture(path), directory=tmp_path)
    assert again.info == first.info
    assert set(again.tables) == set(first.tables)
    for name in first.tables:
        assert again[name].schema.equals(first[name].schema)
        assert again[name].to_pylist() == first[name].to_pylist()


def test_parquet_is_at_most_a_fortieth_of_the_json(captures: Path, tmp_path: Path) -> None:
    for path in sorted((captures / "kineto").glob("*/rank-0.json.gz")):
        directory = tmp_path / path.parent.name
        load(_capture(path), directory=directory)
        assert _bytes(directory) * 40 <= len(gzip.decompress(path.read_bytes()))


def test_a_changed_file_is_read_again_and_its_old_tables_go(write_trace: WriteTrace, tmp_path: Path) -> None:
    path, directory = write_trace([kernel("old", 1, 1)]), tmp_path / "cache"
    load(_capture(path), directory=directory)
    write_trace([kernel("new one", 1, 1)])
    fresh = load(_capture(path), directory=directory)
    assert fresh.device_events["name"].to_pylist() == ["new one"]
    assert len(list(directory.iterdir())) == 1


def test_another_engine_reads_again(write_trace: WriteTrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_trace([kernel("k", 1, 1)])
    load(_capture(path), directory=tmp_path)
    monkeypatch.setattr(cache, "ENGINE_VERSION", cache.ENGINE_VERSION + 1)
    monkeypatch.setattr(kineto, "read", _never)
    with pytest.raises(AssertionError, match="read again"):
        load(_capture(path), directory=tmp_path)


def test_a_damaged_entry_is_read_again(write_trace: WriteTrace, tmp_path: Path) -> None:
    path, directory = write_trace([kernel("k", 1, 1)]), tmp_path / "cache"
    load(_capture(path), directory=directory)
    next(directory.glob("*/info.json")).write_text("{")
    assert load(_capture(path), directory=directory).info.rank == 3


def test_the_cache_is_next_to_the_capture_where_possible(write_trace: WriteTrace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cache.DIRECTORY_VARIABLE, raising=False)
    path = write_trace([kernel("k", 1, 1)])
    load(_capture(path))
    assert list(path.parent.glob(f"{cache.FOLDER}/*/device_events.parquet"))
    # And is no capture itself.
    assert [capture.path for capture in find_run(path.parent).captures] == [path]


def test_a_place_that_cannot_be_written_costs_only_time(write_trace: WriteTrace, tmp_path: Path) -> None:
    path = write_trace([kernel("k", 1, 1)])
    blocked = tmp_path / "blocked"
    blocked.write_text("a file, where a folder should be")
    assert load(_capture(path), directory=blocked).device_events.num_rows == 1


def test_a_damaged_capture_stays_damaged_in_the_cache(write_trace: WriteTrace, tmp_path: Path) -> None:
    path = write_trace([kernel("good", 1, 1), kernel("bad", 5, -1)])
    capture = find_run(path).captures[0]
    errors = [load(capture, directory=tmp_path / "cache").info.error for _ in range(2)]
    assert errors[0] == errors[1]
    assert str(path) in errors[0]


def test_many_ranks_are_queried_as_one(write_trace: WriteTrace, tmp_path: Path) -> None:
    for rank in range(3):
        path = write_trace([kernel("k", 1, rank + 1)], f"rank-{rank}.json.gz", distributedInfo={"rank": rank})
        load(_capture(path), directory=tmp_path / "cache")
    query = f"select rank, sum(end_ns - start_ns) from '{tmp_path}/cache/*/device_events.parquet' group by rank order by rank"
    assert duckdb.sql(query).fetchall() == [(0, 1000), (1, 2000), (2, 3000)]


def test_an_entry_is_whole_or_not_there(write_trace: WriteTrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    path, directory = write_trace([kernel("k", 1, 1)]), tmp_path / "cache"
    monkeypatch.setattr(os, "replace", full_disk)
    load(_capture(path), directory=directory)
    assert list(directory.iterdir()) == []
