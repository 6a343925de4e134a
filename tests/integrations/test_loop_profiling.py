"""A loop around a model of one process: which iterations are captured, however it ends, and that torch is left as it was."""

from __future__ import annotations

import io

import pytest
import torch

from tests.integrations.trainings import Loop

STEP = ["forward", "backward", "optimizer"]


@pytest.fixture
def loop(tmp_path, monkeypatch):
    monkeypatch.delenv("BRIDGE_PROFILING_DIR", raising=False)
    return Loop(tmp_path)


def test_a_loop_of_its_own_form_has_the_same_ranges(loop):
    with loop.profiling() as profiling:
        for iteration in range(8):
            with profiling.step(iteration):
                with profiling.phase("data-loading"):
                    batch = torch.randn(1, 16)
                loop.step(batch)
                if iteration == 4:
                    torch.save(loop.model.state_dict(), io.BytesIO())
    assert loop.captured.phases() == {3: ["data-loading", *STEP], 4: ["data-loading", *STEP, "checkpoint"]}


@pytest.mark.parametrize(
    ("epochs", "batches", "accumulated", "ending", "iterations"),
    [
        (3, 2, 1, ("complete", [3, 4], []), 6),
        # Batches that run out make no iteration.
        (2, 2, 1, ("partial", [3], []), 4),
        (1, 11, 2, ("complete", [3, 4], []), 6),
    ],
)
def test_epochs_count_on_and_accumulated_batches_share_an_iteration(loop, epochs, batches, accumulated, ending, iterations):
    before = torch.autograd.backward, torch.save, torch.utils.data.dataloader._BaseDataLoaderIter.__next__
    with loop.profiling() as profiling:
        for _ in range(epochs):
            for batch in profiling.steps(loop.batches(batches), micro_batches=accumulated):
                loop.step(batch)
    assert loop.ending() == ending
    assert loop.iterations() == list(range(iterations))
    assert loop.captured.manifest()["framework"]["name"] == "torch"
    assert loop.captured.phases()[3][: 4 * accumulated] == [*STEP, "data-loading"] * accumulated
    # Torch is left as it was.
    assert (torch.autograd.backward, torch.save, torch.utils.data.dataloader._BaseDataLoaderIter.__next__) == before
    assert not loop.model._forward_pre_hooks
    assert not loop.optimizer._optimizer_step_pre_hooks
