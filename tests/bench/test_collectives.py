"""Every operation among three real processes: an odd number, so that one has no partner. And ranks that fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bridge_profiling.bench.__main__ import main

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "send_recv")
REQUEST = {"operations": OPERATIONS, "sizes": (1 << 10, (1 << 10) + 1, 1 << 16), "dtype": "bfloat16", "backend": "gloo"}


@pytest.fixture
def measure(tmp_path):
    """Runs the benchmark in a process of its own, which starts the ranks."""

    def measure(folder=None, **request):
        path = tmp_path / "result.json"
        command = [sys.executable, "-m", "bridge_profiling.bench", "collectives"]
        environment = os.environ | {"PYTHONPATH": str(folder or Path(__file__).parents[2])}
        request = REQUEST | {"nproc": 3, "seconds": 0.05} | request
        done = subprocess.run(
            [*command, json.dumps(request), str(path)], env=environment, capture_output=True, text=True, timeout=240
        )
        return done, json.loads(path.read_text()) if path.exists() else None

    return measure


@pytest.mark.integration
def test_every_operation_is_correct_and_its_bandwidths_follow_from_the_median_time(measure):
    done, result = measure()
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert result["versions"]["torch"]
    names = ("world_size", "hosts", "ranks_per_host", "backend", "dtype", "device", "limitations")
    assert [result[name] for name in names] == [3, 1, 3, "gloo", "bfloat16", "cpu", []]
    # Of 512 and 32,768 elements each of three ranks has 170 and 10,922; 1,024 and 1,025 bytes round to the same message.
    sizes = [(operation, size) for operation in OPERATIONS for size in (1020, 65532)]
    assert [(row["operation"], row["message_bytes"]) for row in result["rows"]] == sizes
    for row in result["rows"]:
        assert row["correct"]
        assert row["time_us"]["count"] >= 2
        speed = row["message_bytes"] / row["time_us"]["median"] / 1e3
        factor = {"all_reduce": 4 / 3, "send": 1, "send_recv": 1}.get(row["operation"], 2 / 3)
        assert row["algorithm_bandwidth_gbs"] == pytest.approx(speed, rel=1e-4)
        assert row["bus_bandwidth_gbs"] == pytest.approx(speed * factor, rel=1e-4)


@pytest.mark.integration
def test_a_rank_that_fails_ends_the_others_and_says_why(measure):
    done, result = measure(dtype="float31")
    assert (done.returncode, result) == (1, None)
    assert "has no attribute 'float31'" in done.stderr


@pytest.mark.parametrize(
    ("variables", "said"),
    [({"RANK": "0", "WORLD_SIZE": "1"}, "the launcher started only one rank"), ({"RANK": "0"}, "WORLD_SIZE is not set")],
)
def test_a_launcher_that_cannot_measure_is_refused(variables, said, tmp_path, monkeypatch, capsys):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["collectives", json.dumps(REQUEST | {"seconds": 1}), str(tmp_path / "result.json")]) == 2
    assert said in capsys.readouterr().err
