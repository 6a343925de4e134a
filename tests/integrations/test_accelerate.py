"""The hook in a loop around Accelerate: an iteration is what comes to an optimizer step, however it is looped over."""

from __future__ import annotations

import importlib
import os
import signal

import pytest
import torch

from bridge_profiling.errors import ProfilingConfigError
from tests.integrations.captured import Captured
from tests.integrations.example_run import ExampleRun

pytestmark = [pytest.mark.system, pytest.mark.needs("hugging_face")]

#: One batch of an iteration. A prepared loader moves a batch to the device while it fetches.
BATCH = ["data-loading", "host-to-device", "forward", "backward"]
STEP = [*BATCH, "optimizer"]


class Training:
    """Trainings of a small model on one CPU, which write below a folder."""

    def __init__(self, folder):
        self.folder = folder
        self.captured = Captured(folder / "profiles", "iter-3-5")
        self.losses = []

    def prepare(self, *, accumulation=1, batches=16, handlers=()):
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, kwargs_handlers=list(handlers))
        model = torch.nn.Linear(16, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader = torch.utils.data.DataLoader(torch.randn(4 * batches, 16), batch_size=4)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        return self

    def profiling(self, **settings):
        made = importlib.import_module("bridge_profiling.integrations.accelerate").AccelerateProfiling
        window = {"use_pytorch_profiler": True, "profile_step_start": 3, "profile_step_end": 5}
        return made(self.accelerator, **window | {"output_dir": self.folder / "profiles"} | settings)

    def step(self, batch):
        with self.accelerator.accumulate(self.model):
            loss = self.model(batch).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())

    def train(self, on_batch=lambda number: None, **settings):
        """The whole loop; `on_batch` is called after each batch's step."""
        with self.profiling(**settings) as profiling:
            for number, batch in enumerate(profiling.batches(self.loader)):
                self.step(batch)
                on_batch(number)


@pytest.fixture
def training(tmp_path):
    return Training(tmp_path)


def test_the_example_captures_its_window_on_each_rank_and_changes_no_loss(tmp_path):
    example = ExampleRun("accelerate_loop.py", tmp_path)
    example.check("accelerate", [*BATCH, *STEP])
    framework = example.captured.manifest()["framework"]
    assert (framework["strategy"], framework["gradient_accumulation"]) == ("MULTI_CPU", 2)


def test_an_epochs_end_begins_no_iteration_and_its_last_may_have_fewer_batches(training):
    training.prepare(accumulation=3, batches=5)
    with training.profiling() as profiling:
        for _ in range(3):
            for batch in profiling.batches(training.loader):
                training.step(batch)
    manifest = training.captured.manifest()
    assert (manifest["status"], manifest["interrupted"]) == ("complete", [])
    assert manifest["durations_ns"]["iteration"] == list(range(6))
    assert training.captured.phases() == {3: [*BATCH, *STEP], 4: [*BATCH, *BATCH, *STEP]}


@pytest.mark.parametrize("sized", [True, False])
def test_a_loader_that_is_not_prepared_will_do_and_may_not_know_its_length(training, sized):
    training.prepare()
    batches = [torch.randn(4, 16) for _ in range(2)]
    with training.profiling() as profiling:
        for _ in range(4):
            for batch in profiling.batches(batches if sized else iter(batches)):
                training.step(batch)
    manifest = training.captured.manifest()
    assert (manifest["status"], manifest["captured"]["iterations"]) == ("complete", [3, 4])
    assert manifest["durations_ns"]["iteration"] == list(range(8))
    assert manifest["interrupted"] == []
    assert sorted(training.captured.phases()[4]) == ["backward", "data-loading", "forward", "optimizer"]


def test_a_loop_without_a_loader_says_itself_what_a_batch_is_and_may_count_itself(training):
    training.prepare()
    with training.profiling() as profiling:
        for number in range(2, 6):
            with profiling.step(number):
                with profiling.range("data-loading"):
                    batch = torch.ones(4, 16)
                training.step(batch)
    assert training.captured.manifest()["durations_ns"]["iteration"] == [2, 3, 4, 5]
    step = [phase for phase in STEP if phase != "host-to-device"]
    assert training.captured.phases() == {3: step, 4: step}


@pytest.mark.parametrize(("first", "captured", "status"), [(2, [3, 4], "complete"), (4, [4], "partial"), (6, None, "missed")])
def test_a_resumed_training_counts_on_from_where_it_says_it_is(training, first, captured, status):
    training.prepare()
    with training.profiling(first_iteration=first) as profiling:
        for batch in profiling.batches(training.accelerator.skip_first_batches(training.loader, first)):
            training.step(batch)
    manifest = training.captured.manifest()
    assert (manifest["status"], (manifest["captured"] or {}).get("iterations")) == (status, captured)
    assert manifest["durations_ns"]["iteration"] == list(range(first, 16))


@pytest.mark.parametrize(("first", "interrupted"), [("work", []), ("break", [4])])
def test_a_break_counts_an_iteration_only_if_its_work_was_done(training, first, interrupted):
    training.prepare()
    with training.profiling() as profiling:
        for number, batch in enumerate(profiling.batches(training.loader)):
            if number == 4 and first == "break":
                break
            training.step(batch)
            if number == 3 and first == "work":
                break
    manifest = training.captured.manifest()
    assert (manifest["status"], manifest["captured"]["iterations"]) == ("partial", [3])
    assert manifest["interrupted"] == interrupted


def test_a_loop_that_goes_on_after_a_break_counts_on(training):
    training.prepare()
    with training.profiling() as profiling:
        for _ in range(3):
            for number, batch in enumerate(profiling.batches(training.loader)):
                training.step(batch)
                if number == 1:
                    break
    manifest = training.captured.manifest()
    assert (manifest["status"], manifest["interrupted"]) == ("complete", [])
    assert manifest["durations_ns"]["iteration"] == list(range(6))


def test_an_exception_leaves_what_was_captured_and_is_passed_on(training):
    def fail(number):
        if number == 4:
            raise ZeroDivisionError

    training.prepare()
    with pytest.raises(ZeroDivisionError):
        training.train(fail)
    manifest = training.captured.manifest()
    assert (manifest["status"], manifest["captured"]["iterations"], manifest["interrupted"]) == ("partial", [3], [4])
    assert "ZeroDivisionError" in manifest["reason"]
    assert not {"backward", "save_state"} & vars(training.accelerator).keys()


def test_a_sigterm_inside_the_window_writes_what_was_captured(training):
    def end(number):
        if number == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    training.prepare()
    with pytest.raises(SystemExit):
        training.train(end)
    assert training.captured.manifest()["captured"]["iterations"] == [3]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_saving_and_evaluating_in_the_loop_are_ranges(training):
    training.prepare()
    with training.profiling() as profiling:
        for number, batch in enumerate(profiling.batches(training.loader)):
            training.step(batch)
            if number == 3:
                training.accelerator.save_state(training.folder / "state")
                with profiling.range("evaluation"):
                    pass
    assert training.captured.phases() == {3: [*STEP, "checkpoint", "evaluation"], 4: STEP}


def test_accelerates_own_profiler_and_this_one_exclude_each_other(training):
    from accelerate.utils import ProfileKwargs

    training.prepare(handlers=[ProfileKwargs()])
    with pytest.raises(ProfilingConfigError, match="without ProfileKwargs"):
        training.profiling()


def test_an_accelerate_profiler_that_is_running_is_not_disturbed(training):
    training.prepare()
    with training.accelerator.profile() as theirs:
        training.train()
    assert any(event.key == "aten::linear" and event.count == 16 for event in theirs.key_averages())
    assert training.captured.manifest()["status"] == "failed"


def test_a_setting_that_does_not_exist_is_refused(training):
    training.prepare()
    with pytest.raises(ProfilingConfigError, match="profile_rank"):
        training.profiling(profile_rank=[0])


def test_losses_are_bit_identical_with_and_without(training):
    training.prepare()
    for batch in training.loader:
        training.step(batch)
    plain, training.losses = training.losses, []
    training.prepare().train(record_shapes=True)
    assert len(plain) == 16
    assert training.losses == plain


def test_without_a_profiler_nothing_is_written_and_the_loop_is_the_same(training, monkeypatch):
    monkeypatch.chdir(training.folder)
    training.prepare().train(use_pytorch_profiler=False, output_dir=None)
    assert len(training.losses) == 16
    assert list(training.folder.iterdir()) == []


def test_tensor_and_context_parallelism_of_a_parallelism_config_are_the_layout(training):
    layout_of = importlib.import_module("bridge_profiling.integrations.accelerate").layout_of
    from accelerate.parallelism_config import ParallelismConfig

    training.prepare()
    state = training.accelerator.state
    assert layout_of(state).coordinates(0) == dict.fromkeys(("tp", "cp", "dp", "pp", "ep"), (0, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bridge_profiling.integrations.accelerate.world_size", lambda: 8)
        state.parallelism_config = ParallelismConfig(dp_shard_size=4, tp_size=2)
        assert layout_of(state).coordinates(5) == {"tp": (1, 2), "cp": (0, 1), "dp": (2, 4), "pp": (0, 1), "ep": (0, 1)}
