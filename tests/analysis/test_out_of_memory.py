"""An out-of-memory error: the request that failed and the line that made it, from what the reader found in a snapshot."""

import pickle

T0_US = 1_795_178_470_000_000
TORCH = {"name": "linear", "filename": "/venv/site-packages/torch/nn/functional.py", "line": 2319}
TRAIN = {"name": "forward_step", "filename": "/home/me/train.py", "line": 40}


def snapshot(path, *refused):
    history = [{"action": "alloc", "addr": 1 << 40, "size": 512, "stream": 0, "time_us": T0_US, "frames": [TRAIN]}]
    history += [{"action": "oom", "device_free": 5000, "stream": 0, "frames": []} | each for each in refused]
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [history]}))


def test_requests_that_failed_come_by_rank_and_time_with_the_line_that_made_them(tmp_path, run_of):
    snapshot(tmp_path / "rank-1.pickle", {"size": 7, "time_us": T0_US + 2}, {"size": 8, "time_us": T0_US + 3})
    snapshot(tmp_path / "oom-rank-0-1.pickle", {"size": 1 << 30, "time_us": T0_US + 5, "frames": [TORCH, TRAIN]})
    snapshot(tmp_path / "rank-2.pickle")
    unknown = {"site": "no call stack was recorded", "stack": None, "free_bytes": 5000, "device": 0}
    first, *others = run_of().out_of_memory().to_pylist()
    assert first.pop("stack").startswith("linear ")
    assert [first, *others] == [
        {"rank": 0, "device": 0, "time_ns": (T0_US + 5) * 1000, "requested_bytes": 1 << 30, "free_bytes": 5000}
        | {"site": "forward_step /home/me/train.py:40"},
        unknown | {"rank": 1, "time_ns": (T0_US + 2) * 1000, "requested_bytes": 7},
        unknown | {"rank": 1, "time_ns": (T0_US + 3) * 1000, "requested_bytes": 8},
    ]
