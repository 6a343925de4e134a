"""Benchmarks on real devices: communication where there are two, and a step."""

import json
import os
import sys

import pytest

from bridge_profiling.bench.step import measure_step
from tests.system.jobs import ended_well

pytestmark = [pytest.mark.needs("cuda"), pytest.mark.timeout(300)]


@pytest.mark.needs("gpus2")
def test_every_operation_arrives_over_nccl_and_large_messages_are_faster(tmp_path):
    operations = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "send_recv")
    path = tmp_path / "result.json"
    request = {"operations": operations, "sizes": (1 << 12, 1 << 26), "dtype": "bfloat16", "backend": None, "seconds": 0.3}
    # As the command line starts it.
    command = [sys.executable, "-m", "bridge_profiling.bench", "collectives", json.dumps(request | {"nproc": 2}), path]
    ended_well(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    result = json.loads(path.read_text())
    assert (result["backend"], result["world_size"], result["hosts"]) == ("nccl", 2, 1)
    assert result["limitations"] == []
    assert result["device"].startswith("NVIDIA")
    assert "1" in result["link"]["peer_access"]
    for small, large in zip(result["rows"][::2], result["rows"][1::2], strict=True):
        assert (small["correct"], large["correct"]) == (True, True)
        assert large["bus_bandwidth_gbs"] > 10 * small["bus_bandwidth_gbs"]
        # Not what it takes the host to launch it: no device of ours moves 4 KiB in less than a microsecond.
        assert 1 < small["time_us"]["median"] < 1000


def test_a_step_is_timed_by_the_device():
    import torch

    one = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    timing = measure_step(lambda: one @ one, warmup=10, iterations=50)
    assert timing.device == "cuda"
    # 137 billion operations: between 50 and 2,500 TFLOP/s of any device that has bf16.
    assert 55e-6 < timing.seconds.median < 2750e-6
    assert timing.seconds.low <= timing.seconds.median <= timing.seconds.high
