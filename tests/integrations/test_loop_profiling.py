"""A loop around a model of one process: which iterations are captured, however it ends, and that torch is left as it was."""

from __future__ import annotations

import io

import pytest
import torch

from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.integrations.ddp_fsdp import Profiling
from tests.integrations.captured import Captured

WINDOW = {"use_pytorch_profiler": True, "profile_step_start": 3, "profile_step_end": 5}
STEP = ["forward", "backward", "optimizer"]


class Loop:
    """A small training that writes below `folder`."""

    def __init__(self, folder):
        self.folder = folder / "profiles"
        self.captured = Captured(self.folder, "iter-3-5")
        torch.manual_seed(0)
        self.model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.losses = []

    def profiling(self, **settings):
        return Profiling(self.model, self.optimizer, output_dir=self.folder, **WINDOW | settings)

    def step(self, batch):
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item().hex())

    def train(self, after=lambda number: None, batches=8, **asked):
        """Eight iterations or as many as asked for; `after` is called with the number of the batch."""
        with self.profiling() as profiling:
            for number, batch in enumerate(profiling.steps(self.batches(batches), **asked)):
                self.step(batch)
                after(number)

    def batches(self, count=8):
        return torch.utils.data.DataLoader(torch.randn(count, 8), batch_size=1)


@pytest.fixture
def loop(tmp_path, monkeypatch):
    monkeypatch.delenv("BRIDGE_PROFILING_DIR", raising=False)
    return Loop(tmp_path)


def test_each_phase_is_a_range_of_its_iteration_once(loop):
    loop.train()
    assert loop.captured.phases() == {3: [*STEP, "data-loading"], 4: [*STEP, "data-loading"]}
    assert loop.captured.manifest()["framework"]["name"] == "torch"


def test_a_loop_of_its_own_form_has_the_same_ranges(loop):
    with loop.profiling() as profiling:
        for iteration in range(8):
            with profiling.step(iteration):
                with profiling.phase("data-loading"):
                    batch = torch.randn(1, 8)
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
    micro = ["forward", "backward"]
    one = [*micro, "data-loading", *micro, "optimizer", "data-loading"]
    assert loop.captured.phases() == {3: one, 4: one}
    durations = loop.captured.manifest()["durations_ns"]["iteration"]
    assert durations == [0, 1, 2, 3, 4, 5]


def test_epochs_count_on(loop):
    with loop.profiling() as profiling:
        for _ in range(3):
            for batch in profiling.steps(loop.batches(2)):
                loop.step(batch)
    manifest = loop.captured.manifest()
    assert (manifest["status"], manifest["captured"]["iterations"]) == ("complete", [3, 4])
    assert manifest["durations_ns"]["iteration"] == list(range(6))


def test_a_resumed_loop_captures_what_it_shares_with_the_window(loop):
    loop.train(start=4)
    manifest = loop.captured.manifest()
    assert (manifest["status"], manifest["captured"]["iterations"]) == ("partial", [4])


def test_an_exception_in_the_body_leaves_a_partial_capture_and_is_passed_on(loop):
    def fail(number):
        if number == 4:
            raise ValueError("no such token")

    with pytest.raises(ValueError, match="no such token"):
        loop.train(after=fail)
    manifest = loop.captured.manifest()
    assert (manifest["status"], manifest["captured"]["iterations"], manifest["interrupted"]) == ("partial", [3], [4])
    assert "ValueError: no such token" in manifest["reason"]
    assert loop.captured.phases()[3] == [*STEP, "data-loading"]


def test_an_exception_in_a_phase_ends_its_range(loop):
    def fail(number):
        # Raises when the phase has begun, and no hook tells that it has ended.
        if number == 3:
            loop.optimizer.register_step_pre_hook(lambda *_: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        loop.train(after=fail)
    assert loop.captured.manifest()["interrupted"] == [4]
    loop.optimizer = torch.optim.AdamW(loop.model.parameters())
    loop.train()
    assert Captured(loop.folder, "iter-3-5.1").phases() == {3: [*STEP, "data-loading"], 4: [*STEP, "data-loading"]}


def test_a_break_in_the_window_keeps_what_is_complete(loop):
    with loop.profiling() as profiling:
        for number, batch in enumerate(profiling.steps(loop.batches())):
            loop.step(batch)
            if number == 3:
                break
    manifest = loop.captured.manifest()
    assert (manifest["status"], manifest["captured"]["iterations"], manifest["interrupted"]) == ("partial", [3], [])


def test_batches_that_run_out_in_the_window_make_no_iteration_of_their_own(loop):
    loop.train(batches=4)
    manifest = loop.captured.manifest()
    assert (manifest["status"], manifest["captured"]["iterations"], manifest["interrupted"]) == ("partial", [3], [])
    assert manifest["durations_ns"]["iteration"] == [0, 1, 2, 3]


def test_losses_are_the_same_to_the_last_bit(tmp_path):
    losses = []
    for settings in ({}, {"use_pytorch_profiler": False}):
        loop = Loop(tmp_path / str(len(losses)))
        with loop.profiling(**settings) as profiling:
            for batch in profiling.steps(loop.batches()):
                loop.step(batch)
        losses.append(loop.losses)
        assert len(loop.losses) == 8
    assert losses[0] == losses[1]


def test_torch_is_left_as_it_was(loop):
    before = (torch.autograd.backward, torch.save, torch.utils.data.dataloader._BaseDataLoaderIter.__next__)
    with loop.profiling():
        assert torch.autograd.backward is not before[0]
    assert (torch.autograd.backward, torch.save, torch.utils.data.dataloader._BaseDataLoaderIter.__next__) == before
    assert not loop.model._forward_pre_hooks
    assert not loop.model._forward_hooks
    assert not loop.optimizer._optimizer_step_pre_hooks


def test_without_a_profiler_nothing_is_watched_and_nothing_written(loop):
    with loop.profiling(use_pytorch_profiler=False, on_demand=False) as profiling:
        assert not loop.model._forward_hooks
        assert len(list(profiling.steps(loop.batches()))) == 8
        with profiling.step(3), profiling.phase("forward"):
            pass
    assert not loop.folder.exists()


def test_a_setting_that_does_not_exist_is_refused(loop):
    with pytest.raises(ProfilingConfigError, match="profile_steps"):
        loop.profiling(profile_steps=3)
