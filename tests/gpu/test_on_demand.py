"""A training on a GPU that was launched without a profiler, asked twice while it runs."""

from __future__ import annotations

import json
import os
import re
import statistics
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

#: Iterations before the first request, and after each.
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

    def trigger(self, *options: str) -> dict:
        command = [sys.executable, "-m", "bridge_profiling.cli", "trigger", str(self.profiles), *options, "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    def manifests(self) -> list[dict]:
        found = [json.loads(path.read_text()) for path in sorted(self.profiles.glob("manifest/*/rank-0.json"))]
        return sorted(found, key=lambda manifest: manifest["window"]["start"])


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """The training after it has been asked for two captures and ended by a SIGTERM."""
    running = Running(tmp_path_factory.mktemp("asked"))
    try:
        running.await_iteration(_CALM)
        for _ in range(2):
            running.trigger("--iterations", "3", "--profiler", "torch")
            captured = running.manifests()[-1]["window"]["end"]
            running.await_iteration(captured + _CALM)
        running.process.terminate()
        running.process.wait(60)
    finally:
        running.process.kill()
    return running


def test_both_requests_are_captured_whole(asked):
    """Matrix products: gradients are clipped in some iterations and not in others, by kernels of its own."""
    manifests = asked.manifests()
    assert [(one["status"], one["trigger"]["kind"]) for one in manifests] == [("complete", "request")] * 2, asked.output[-4000:]
    products = []
    for manifest in manifests:
        folder = asked.profiles / "torch" / f"iter-{manifest['window']['start']}-{manifest['window']['end']}"
        (capture,) = find_run(folder).captures
        kernels = kernels_of(load(capture, cached=False))
        assert sorted(kernels) == manifest["captured"]["iterations"]
        products += [matrix_products(kernels[iteration]) for iteration in sorted(kernels)]
    assert products[0] > 20
    assert products == [products[0]] * 6


def test_the_pace_is_told_before_between_and_after(asked, record_property):
    """No limit: a figure for the record, since steps of a few milliseconds on a shared machine differ."""
    timed = asked.manifests()[-1]["durations_ns"]
    durations = dict(zip(timed["iteration"], timed["duration_ns"], strict=True))
    first, second = (manifest["window"] for manifest in asked.manifests())
    parts = {
        "before": range(20, first["start"] - 1),
        "between": range(first["end"] + 20, second["start"] - 1),
        "after": range(second["end"] + 20, max(durations)),
    }
    medians = {name: statistics.median(durations[i] for i in part if i in durations) / 1e6 for name, part in parts.items()}
    assert all(median > 0 for median in medians.values())
    record_property("told", f"on demand, ms an iteration: {', '.join(f'{name} {ms:.2f}' for name, ms in medians.items())}")
