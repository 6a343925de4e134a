"""The one capture that slow iterations lead to."""

import re
import time

import pytest
import torch

from bridge_profiling.capture import ProfilingHook
from bridge_profiling.slow_iterations import COOL_DOWN
from tests.capture.conftest import Training


def test_a_slow_iteration_is_captured_once_with_its_reason(tmp_path):
    """Two are planted, the second well after the first one's capture, and one capture is what was allowed."""
    training = Training(tmp_path, slow_iteration_factor=100.0, profile_step_start=5, profile_step_end=7)
    planted = [60]

    def slow(iteration):
        if iteration in planted:
            time.sleep(1.5)
        if training.done() and len(planted) == 1:
            planted.append(iteration + COOL_DOWN + 60)

    training.run(range(10**5), slow, lambda: len(planted) == 2 and len(training.losses) > planted[1] + 100)
    [manifest] = training.manifests()
    assert manifest["status"] == "complete"
    assert len(manifest["captured"]["iterations"]) == 2
    assert manifest["trigger"]["kind"] == "slow_iteration"
    # It sleeps for 1.5 s, and a loaded machine may let it sleep longer.
    milliseconds = re.match(r"iteration 60 took ([\d.]+) ms", manifest["trigger"]["reason"])
    assert milliseconds is not None
    assert float(milliseconds[1]) >= 1500
    assert "x the median" in manifest["trigger"]["reason"]
    assert manifest["trigger"]["reason"].endswith("on rank 0")
    assert manifest["trigger"]["requested_by"] == "rank 0"
    assert manifest["window"]["start"] > 60
    assert training.losses[:100] == plain_losses(100)


def plain_losses(count):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    losses = []
    for iteration in range(count):
        loss = model(torch.full((4, 8), float(iteration % 7))).square().mean()
        loss.backward()
        losses.append(loss.item().hex())
    return losses


@pytest.mark.parametrize("phase", ["checkpoint", "evaluation"])
def test_a_checkpoint_or_an_evaluation_inside_an_iteration_does_not_make_it_slow(tmp_path, phase):
    training = Training(tmp_path, slow_iteration_factor=100.0)
    with ProfilingHook(training.config, rank=0) as hook:
        for iteration in range(60):
            with hook.iteration(iteration):
                time.sleep(training.seconds)
                if iteration == 40:
                    with hook.range(phase):
                        time.sleep(1.5)
        time.sleep(0.1)
    assert not (tmp_path / "manifest").exists()
