"""A training on a GPU that was launched without a profiler, asked for captures twice while it runs."""

import os
import re
import subprocess
import sys

import pytest

from bridge_profiling.traces.cache import load
from bridge_profiling.traces.discover import find_run
from tests.gpu.kernels import kernels_of, matrix_products
from tests.system.jobs import ROOT, cli, end_tree, environment, manifests, wait_until

pytestmark = [pytest.mark.needs("cuda", "megatron"), pytest.mark.timeout(300)]

_SETTINGS = (
    "model.num_layers=2", "model.seq_length=512", "train.micro_batch_size=1", "train.global_batch_size=2",
    "train.train_iters=3000", "profiling.on_demand_seconds=0.2",
)  # fmt: skip


def test_two_requests_to_a_running_training_are_captured_whole(tmp_path):
    """Matrix products: gradients are clipped in some iterations and not in others, by kernels of its own."""
    profiles, output = tmp_path / "profiles", tmp_path / "output.txt"
    command = [sys.executable, ROOT / "launch" / "pretrain.py", "--recipe", "gpt_125m", *_SETTINGS]
    command.append(f"profiling.output_dir={profiles}")
    job = environment(PYTHONPATH=f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")
    with output.open("wb") as file:
        process = subprocess.Popen(command, cwd=tmp_path, env=job, stdout=file, stderr=subprocess.STDOUT)

    def has_trained_for_a_while():
        assert process.poll() is None, output.read_text()[-4000:]
        return re.search(r"iteration +1\d\d/", output.read_text(errors="replace"))

    try:
        wait_until(has_trained_for_a_while, 150)
        for _ in range(2):
            cli("trigger", profiles, "--iterations", 3, "--profiler", "torch", "--wait")
    finally:
        end_tree(process)
    products = []
    for folder in profiles.glob("torch/*"):
        manifest = manifests(profiles, folder.name)[0]
        assert (manifest["status"], manifest["trigger"]["kind"]) == ("complete", "request")
        (capture,) = find_run(folder).captures
        kernels = kernels_of(load(capture, cached=False))
        assert sorted(kernels) == manifest["captured"]["iterations"]
        products += [matrix_products(kernels[iteration]) for iteration in sorted(kernels)]
    assert products[0] > 20
    assert products == [products[0]] * 6
