"""A capture is parsed once: the second time its tables come from Parquet, as long as it is the same file and engine."""

import os

import pytest

from bridge_profiling.traces import cache
from bridge_profiling.traces.cache import load
from bridge_profiling.traces.discover import Capture, find_run
from tests.traces.kineto_files import kernel


def kineto_capture(path):
    return Capture(path, "kineto", 0, "order")


@pytest.fixture
def capture(write_trace):
    return kineto_capture(write_trace([kernel("k", 1, 1)]))


def test_the_cache_is_next_to_the_capture_where_possible_and_no_capture_itself(capture, monkeypatch):
    monkeypatch.delenv(cache.DIRECTORY_VARIABLE, raising=False)
    load(capture)
    assert list(capture.path.parent.glob(f"{cache.FOLDER}/*/device_events.parquet"))
    assert [each.path for each in find_run(capture.path.parent).captures] == [capture.path]


def test_a_damaged_capture_stays_damaged_in_the_cache(write_trace, tmp_path):
    path = write_trace([kernel("good", 1, 1), kernel("bad", 5, -1)])
    first, second = [load(kineto_capture(path), directory=tmp_path / "cache").info.error for _ in range(2)]
    assert first == second
    assert str(path) in first


def test_an_entry_is_whole_or_not_there(capture, tmp_path, monkeypatch):
    def full_disk(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    load(capture, directory=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
