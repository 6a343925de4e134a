"""TensorBoard's PyTorch plugin opens our folders: its own reader finds each rank and its views."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.planted.cases import CASES
from tests.system.jobs import ended_well

#: What the plugin does for a run in its folder; it reads each rank in a process of its own.
READER = """
import json, sys
from torch_tb_profiler import io
from torch_tb_profiler.profiler import RunLoader

run = RunLoader("run", sys.argv[1], io.Cache()).load()
found = {}
for (worker, span), profile in run.profiles.items():
    found[worker] = {"views": [view.display_name for view in profile.views]}
    if worker == "All":
        found[worker]["nodes"] = {node: len(processes) for node, processes in profile.gpu_info["data"].items()}
        continue
    found[worker]["steps"] = [row[0] for row in profile.overview["steps"]["rows"]]
    found[worker]["kernels"] = [row[0] for row in profile.kernel_table["data"]["rows"]]
print(json.dumps(found))
"""

pytestmark = pytest.mark.integration


def read(folder: Path) -> dict[str, Any]:
    return json.loads(ended_well([sys.executable, "-c", READER, folder]).stdout.splitlines()[-1])


def test_ranks_of_gpus_also_have_kernels(tmp_path: Path) -> None:
    """Captured by the hook on two GPUs, and recompressed for this repository."""
    pytest.importorskip("tensorboard")
    pytest.importorskip("torch_tb_profiler")
    profiles = tmp_path / "profiles"
    for kind in ("manifest", "torch"):
        (profiles / kind / "iter-5-8").mkdir(parents=True)
    run = CASES["clean_2"].folder
    for rank in (0, 1):
        manifest = f"manifest/iter-5-8/rank-{rank}.json"
        (profiles / manifest).write_text((run / manifest).read_text().replace(".trace.json", ".trace.json.gz"))
        name = f"torch/iter-5-8/rank-{rank}.pt.trace.json"
        (profiles / f"{name}.gz").write_bytes(gzip.compress((run / name).read_bytes(), 1))
    found = read(profiles / "torch" / "iter-5-8")
    for rank in ("rank-0", "rank-1"):
        assert found[rank]["views"] == ["Overview", "Operator", "Kernel", "Trace"]
        assert found[rank]["steps"] == ["5", "6", "7"]
        assert all(any(part in name for name in found[rank]["kernels"]) for part in ("nccl", "at::native"))
    assert found["All"] == {"views": ["Distributed"], "nodes": {"rank-0": 1, "rank-1": 1}}
