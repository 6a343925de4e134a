"""The frameworks' examples on two GPUs, as their first line says: each rank's trace holds the window, and NCCL in it."""

import importlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from bridge_profiling.run import Run
from bridge_profiling.traces.cache import load
from bridge_profiling.traces.discover import find_run

pytestmark = [pytest.mark.needs("gpus2"), pytest.mark.timeout(300)]

_EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

EXAMPLES = {
    "ddp.py": "torch",
    "fsdp.py": "torch",
    "fully_shard.py": "torch",
    "deepspeed_zero.py": "deepspeed",
    "lightning_ddp.py": "lightning",
    "hugging_face.py": "transformers",
    "accelerate_loop.py": "accelerate",
}


@pytest.fixture(scope="module")
def started(request, tmp_path_factory):
    """The examples of the chosen tests, side by side: starting takes most of their time."""
    named = [item.callspec.params["run"] for item in request.session.items if "started" in getattr(item, "fixturenames", ())]
    with ThreadPoolExecutor(len(EXAMPLES)) as pool:
        yield {
            name: pool.submit(_train, name, tmp_path_factory.mktemp(name.removesuffix(".py")))
            for name in EXAMPLES
            if name in named and _why_not(EXAMPLES[name]) is None
        }


@pytest.fixture(params=EXAMPLES)
def run(request, started):
    """The output directory that an example has left."""
    if missing := _why_not(EXAMPLES[request.param]):
        pytest.skip(missing)
    folder, done = started[request.param].result()
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "profiles"


def _why_not(package):
    if find_spec(package) is None:
        return f"{package} is not installed"
    if package == "deepspeed" and find_spec("nvtx"):
        nvtx = importlib.import_module("nvtx")
        if not hasattr(nvtx.get_domain("test"), "push_range"):
            return "DeepSpeed fails where nvtx is installed and older than 0.2.12"
    return None


def _train(example, folder):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", _EXAMPLES / example]
    variables = os.environ | {"OMP_NUM_THREADS": "4"}
    return folder, subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, env=variables)


def test_each_rank_captures_exactly_the_window(run):
    captures = [capture for capture in find_run(run).captures if capture.source == "kineto"]
    assert [capture.rank for capture in captures] == [0, 1]
    for rank, capture in enumerate(captures):
        manifest = json.loads((run / "manifest" / "iter-3-5" / f"rank-{rank}.json").read_text())
        assert (manifest["status"], manifest["reason"]) == ("complete", None)
        assert manifest["coordinates"]["dp"] == [rank, 2]
        tables = load(capture, cached=False)
        assert tables["iterations"]["iteration"].to_pylist() == [3, 4]
        assert {"compute", "communication"} <= set(tables["device_events"]["kind"].to_pylist())
        assert set(tables["device_events"]["backend"].to_pylist()) - {None} == {"nccl"}


def test_memory_of_phases_is_measured(run):
    framework = json.loads((run / "manifest" / "iter-3-5" / "rank-0.json").read_text())["framework"]
    if "phase_memory" not in framework:
        pytest.skip("this integration measures no memory of phases")
    memory = framework["phase_memory"]
    assert set(memory["iteration"]) == {3, 4}
    assert {"forward", "backward", "optimizer"} <= set(memory["phase"])
    for before, after, peak in zip(memory["before_bytes"], memory["after_bytes"], memory["peak_bytes"], strict=True):
        assert 0 < max(before, after) <= peak


def test_a_shard_of_a_model_is_gathered_and_reduced_by_the_unit(run):
    if run.parent.name.rstrip("0") not in ("fsdp", "fully_shard"):
        pytest.skip("only FSDP has units")
    units = Run(run).facts.units.to_pylist()
    assert {row["step"] for row in units} == {"all_gather", "reduce"}
    for row in units:
        # Two iterations: gathered for the forward and for the backward pass, reduced once.
        assert row["count"] == row["communication_count"] == (4 if row["step"] == "all_gather" else 2)
        assert row["device_ns"] > 0
