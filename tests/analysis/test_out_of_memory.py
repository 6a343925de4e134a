"""An out-of-memory error: the request that failed and the line that made it, from what the reader found in a snapshot."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from bridge_profiling.analysis import Run

T0_US = 1_795_178_470_000_000
TORCH = {"name": "linear", "filename": "/venv/site-packages/torch/nn/functional.py", "line": 2319}
TRAIN = {"name": "forward_step", "filename": "/home/me/train.py", "line": 40}


def snapshot(path: Path, *history: dict[str, Any]) -> None:
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [list(history)]}))


def allocated(size: int, at: int) -> dict[str, Any]:
    return {"action": "alloc", "addr": 1 << 40, "size": size, "stream": 0, "time_us": T0_US + at, "frames": [TRAIN]}


def refused(size: int, free: int, at: int, *frames: dict[str, Any]) -> dict[str, Any]:
    return {"action": "oom", "size": size, "device_free": free, "stream": 0, "time_us": T0_US + at, "frames": list(frames)}


def test_the_request_that_failed_is_told_with_the_line_that_made_it(tmp_path: Path) -> None:
    snapshot(tmp_path / "oom-rank-1-1.pickle", allocated(512, 1), refused(1 << 30, 5000, 2, TORCH, TRAIN))
    with Run(tmp_path) as run:
        (row,) = run.out_of_memory().to_pylist()
    assert (row["rank"], row["device"], row["requested_bytes"], row["free_bytes"]) == (1, 0, 1 << 30, 5000)
    assert row["site"] == "forward_step /home/me/train.py:40"
    assert row["stack"].startswith("linear ")
    assert row["time_ns"] == (T0_US + 2) * 1000


def test_errors_come_by_rank_and_time(tmp_path: Path) -> None:
    snapshot(tmp_path / "rank-1.pickle", allocated(512, 1), refused(7, 0, 2), refused(8, 0, 3))
    snapshot(tmp_path / "rank-0.pickle", allocated(512, 1), refused(9, 0, 5))
    with Run(tmp_path) as run:
        rows = run.out_of_memory().to_pylist()
    assert [(row["rank"], row["requested_bytes"]) for row in rows] == [(0, 9), (1, 7), (1, 8)]
    assert {row["site"] for row in rows} == {"no call stack was recorded"}


def test_without_an_error_there_is_none(tmp_path: Path) -> None:
    snapshot(tmp_path / "rank-0.pickle", allocated(512, 1))
    with Run(tmp_path) as run:
        assert run.out_of_memory().num_rows == 0
