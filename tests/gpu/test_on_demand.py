"""A training on a GPU that was launched without a profiler, asked for captures twice while it runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bridge_profiling.traces.cache import load
from bridge_profiling.traces.discover import find_run
from tests.gpu.kernels import kernels_of, matrix_products

pytestmark = [pytest.mark.needs("cuda", "megatron"), pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]

_SETTINGS = (
    "model.num_layers=2", "model.seq_length=512", "train.micro_batch_size=1", "train.global_batch_size=2",
    "train.train_iters=3000", "profiling.on_demand_seconds=0.2",
)  # fmt: skip

#: Iterations before each request.
_CALM = 100


class Running:
    """The training, and what is typed at it."""

    def __init__(self, folder: Path) -> None:
        self.profiles = folder / "profiles"
        self._output = folder / "output.txt"
        command = [sys.executable, str(ROOT / "launch" / "pretrain.py"), "--recipe", "gpt_125m", *_SETTINGS]
        command += [f"profiling.output_dir={self.profiles}"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        with open(self._output, "wb") as output:
            self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def await_iteration(self, wanted: int) -> None:
        deadline = time.monotonic() + 150
        while True:
            told = re.findall(r"iteration +(\d+)/", self.output)
            if told and int(told[-1]) >= wanted:
                return
            assert self.process.poll() is None, self.output[-4000:]
            assert time.monotonic() < deadline, self.output[-4000:]
            time.sleep(0.1)

    def trigger(self, *options: str) -> None:
        """Returns when the capture is written."""
        command = [sys.executable, "-m", "bridge_profiling.cli", "trigger", str(self.profiles), *options]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    def manifests(self) -> list[dict]:
        return [json.loads(path.read_text()) for path in self.profiles.glob("manifest/*/rank-0.json")]


def test_two_requests_to_a_running_training_are_captured_whole(tmp_path):
    """Matrix products: gradients are clipped in some iterations and not in others, by kernels of its own."""
    running, ends = Running(tmp_path), [0]
    try:
        for _ in range(2):
            running.await_iteration(ends[-1] + _CALM)
            running.trigger("--iterations", "3", "--profiler", "torch")
            ends.append(max(manifest["window"]["end"] for manifest in running.manifests()))
        running.process.terminate()
        running.process.wait(60)
    finally:
        running.process.kill()
    products = []
    for manifest in running.manifests():
        assert (manifest["status"], manifest["trigger"]["kind"]) == ("complete", "request"), running.output[-4000:]
        folder = running.profiles / "torch" / f"iter-{manifest['window']['start']}-{manifest['window']['end']}"
        (capture,) = find_run(folder).captures
        kernels = kernels_of(load(capture, cached=False))
        assert sorted(kernels) == manifest["captured"]["iterations"]
        products += [matrix_products(kernels[iteration]) for iteration in sorted(kernels)]
    assert products[0] > 20
    assert products == [products[0]] * 6
