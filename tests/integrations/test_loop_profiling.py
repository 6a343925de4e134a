"""A loop around a model of one process: which iterations are captured, however it ends, and that torch is left as it was."""

from __future__ import annotations

import io

import pytest
import torch

from tests.integrations.trainings import Loop

STEP = ["forward", "backward", "optimizer"]
LOADED = [*STEP, "data-loading"]


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


def test_batches_that_are_accumulated_share_an_iteration(loop):
    with loop.profiling() as profiling:
        for number, batch in enumerate(profiling.steps(loop.batches(11), micro_batches=2)):
            loop.model(batch).sum().backward()
            if number % 2:
                loop.optimizer.step()
    one = [*STEP[:2], "data-loading", *LOADED]
    assert loop.captured.phases() == {3: one, 4: one}
    assert loop.captured.manifest()["framework"]["name"] == "torch"
    assert loop.iterations() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("epochs", "ending"), [(3, ("complete", [3, 4], [])), (2, ("partial", [3], []))])
def test_epochs_count_on_and_batches_that_run_out_make_no_iteration(loop, epochs, ending):
    with loop.profiling() as profiling:
        for _ in range(epochs):
            for batch in profiling.steps(loop.batches(2)):
                loop.step(batch)
    assert loop.ending() == ending
    assert loop.iterations() == list(range(2 * epochs))


def test_torch_is_left_as_it_was(loop):
    def patched():
        return torch.autograd.backward, torch.save, torch.utils.data.dataloader._BaseDataLoaderIter.__next__

    before = patched()
    with loop.profiling():
        assert patched()[0] is not before[0]
    assert patched() == before
    assert not loop.model._forward_pre_hooks
    assert not loop.model._forward_hooks
    assert not loop.optimizer._optimizer_step_pre_hooks
