"""Every operation among three real processes: an odd number, so that one has no partner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bridge_profiling.bench import collectives, requests
from bridge_profiling.bench.__main__ import main
from bridge_profiling.bench.ranks import World, joined
from bridge_profiling.bench.results import MeasurementError, UnavailableError
from bridge_profiling.launch_env import LaunchEnv

ROOT = Path(__file__).parents[2]


def measured(request: requests.CollectivesRequest, path: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "bridge_profiling.bench", "collectives", requests.to_text(request), str(path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "result.json"
    request = requests.CollectivesRequest(
        requests.OPERATIONS, (1 << 10, (1 << 10) + 1, 1 << 16), dtype="bfloat16", backend="gloo", processes=3, seconds=0.05
    )
    done = measured(request, path)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


def test_every_operation_transfers_the_data_correctly(result):
    assert result["limitations"] == []
    assert [row["operation"] for row in result["rows"][::2]] == list(requests.OPERATIONS)
    assert all(row["correct"] for row in result["rows"])


def test_message_sizes_are_rounded_down_to_equal_parts_for_each_rank(result):
    sizes = {row["message_bytes"] for row in result["rows"]}
    # 512 and 32,768 elements are 170 and 10,922 for each of three ranks.
    assert sizes == {1020, 65532}
    # 1,024 and 1,025 bytes round to the same message.
    assert len(result["rows"]) == 2 * len(requests.OPERATIONS)


def test_bandwidths_follow_from_the_median_time_and_the_bus_factor(result):
    factors = {
        "all_reduce": 4 / 3,
        "all_gather": 2 / 3,
        "reduce_scatter": 2 / 3,
        "all_to_all": 2 / 3,
        "send": 1,
        "send_recv": 1,
    }
    for row in result["rows"]:
        speed = row["message_bytes"] / row["time_us"]["median"] / 1e3
        assert row["algorithm_bandwidth_gbs"] == pytest.approx(speed, rel=1e-4)
        assert row["bus_bandwidth_gbs"] == pytest.approx(speed * factors.get(row["operation"], 2 / 3), rel=1e-4)
        assert row["time_us"]["count"] >= 2


def test_the_result_records_where_it_was_measured(result):
    assert (result["world_size"], result["hosts"], result["ranks_per_host"]) == (3, 1, 3)
    assert (result["backend"], result["dtype"], result["device"]) == ("gloo", "bfloat16", "cpu")
    assert result["versions"]["torch"]


def test_a_lack_of_memory_is_a_one_line_error(tmp_path, monkeypatch):
    monkeypatch.setattr(collectives, "_row", lambda *_: torch.empty(1 << 62))
    request = requests.CollectivesRequest(("all_reduce",), (1 << 36,))
    with pytest.raises(MeasurementError, match="all_reduce of 68,719,476,736 bytes: RuntimeError: ") as raised:
        collectives._measure_in(World(0, 2, "gloo", torch.device("cpu"), ["here", "here"]), request)
    assert "\n" not in str(raised.value)


def test_a_launcher_with_one_rank_is_refused(tmp_path, monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    request = requests.CollectivesRequest(("all_reduce",), (1024,), backend="gloo")
    assert main(["collectives", requests.to_text(request), str(tmp_path / "result.json")]) == 2
    assert "the launcher started only one rank" in capsys.readouterr().err


def test_without_a_device_nccl_is_unavailable():
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(UnavailableError, match="unavailable"), joined(LaunchEnv(world_size=2), "nccl"):
        pytest.fail("it has joined")
