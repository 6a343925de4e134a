"""Every operation among three real processes: an odd number, so that one has no partner. And ranks that fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bridge_profiling.bench import ranks, requests
from bridge_profiling.bench.__main__ import main
from bridge_profiling.common.processes import OwnedProcess


@pytest.mark.integration
def test_every_operation_is_correct_and_its_bandwidths_follow_from_the_median_time(tmp_path):
    request = requests.CollectivesRequest(
        requests.OPERATIONS, (1 << 10, (1 << 10) + 1, 1 << 16), dtype="bfloat16", backend="gloo", processes=3, seconds=0.05
    )
    path = tmp_path / "result.json"
    command = [sys.executable, "-m", "bridge_profiling.bench", "collectives", requests.to_text(request), str(path)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert result["versions"]["torch"]
    names = ("world_size", "hosts", "ranks_per_host", "backend", "dtype", "device", "limitations")
    assert [result[name] for name in names] == [3, 1, 3, "gloo", "bfloat16", "cpu", []]
    # Of 512 and 32,768 elements each of three ranks has 170 and 10,922; 1,024 and 1,025 bytes round to the same message.
    sizes = [(operation, size) for operation in requests.OPERATIONS for size in (1020, 65532)]
    assert [(row["operation"], row["message_bytes"]) for row in result["rows"]] == sizes
    for row in result["rows"]:
        assert row["correct"]
        assert row["time_us"]["count"] >= 2
        speed = row["message_bytes"] / row["time_us"]["median"] / 1e3
        factor = {"all_reduce": 4 / 3, "send": 1, "send_recv": 1}.get(row["operation"], 2 / 3)
        assert row["algorithm_bandwidth_gbs"] == pytest.approx(speed, rel=1e-4)
        assert row["bus_bandwidth_gbs"] == pytest.approx(speed * factor, rel=1e-4)


@pytest.mark.parametrize(
    ("variables", "said"),
    [({"RANK": "0", "WORLD_SIZE": "1"}, "the launcher started only one rank"), ({"RANK": "0"}, "WORLD_SIZE is not set")],
)
def test_a_launcher_that_cannot_measure_is_refused(variables, said, tmp_path, monkeypatch, capsys):

    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    request = requests.CollectivesRequest(("all_reduce",), (1024,), backend="gloo")
    assert main(["collectives", requests.to_text(request), str(tmp_path / "result.json")]) == 2
    assert said in capsys.readouterr().err


#: Stands in for the benchmark: rank 1 fails at once, and rank 0 would run for minutes.
MODULE = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit("error: rank 1 of " + os.environ["WORLD_SIZE"])
print("waiting", file=sys.stderr, flush=True)
time.sleep(600)
"""


@pytest.mark.integration
def test_the_first_rank_that_fails_ends_the_others_and_is_reported(tmp_path, monkeypatch, capsys):
    package = tmp_path / "bridge_profiling" / "bench"
    package.mkdir(parents=True)
    (package / "__main__.py").write_text(MODULE)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    started = []
    monkeypatch.setattr(ranks, "OwnedProcess", lambda *a, **k: started.append(OwnedProcess(*a, **k)) or started[-1])
    assert ranks.run_locally([], 2, "gloo") == 1
    assert capsys.readouterr().err == "error: rank 1 of 2\n"
    assert started[0].returncode < 0
