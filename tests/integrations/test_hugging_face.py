"""The callback in Hugging Face's Trainer: the right iterations, every phase, nothing lost, the Trainer as it was."""

from __future__ import annotations

import copy
import importlib
import os
import signal

import pytest
import torch

from bridge_profiling.errors import ProfilingConfigError
from tests.integrations.captured import Captured
from tests.integrations.example_run import ExampleRun

pytestmark = [pytest.mark.system, pytest.mark.needs("hugging_face")]

#: An iteration of one batch. Its loader fetches one batch ahead, and moves the one before to the device while it does.
FETCH = ["data-loading", "host-to-device"]
STEP = [*FETCH, "forward", "backward", "optimizer"]


class Training:
    """Trainings of a small model on one CPU, which write below a folder."""

    def __init__(self, folder):
        self.folder = folder
        self.captured = Captured(folder / "profiles", "iter-3-5")
        self.losses = []

    def trainer(self, on_step=lambda step: None, **asked):
        import transformers

        losses = self.losses

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.layer = torch.nn.Linear(16, 1)

            def forward(self, x):
                if self.training:
                    on_step(trainer.state.global_step)
                loss = self.layer(x).square().mean()
                losses.append(loss.item())
                return {"loss": loss}

        quiet = {"max_steps": 8, "per_device_train_batch_size": 4, "use_cpu": True, "report_to": [], "disable_tqdm": True}
        quiet |= {"logging_strategy": "no", "save_strategy": "no", "dataloader_pin_memory": False}
        arguments = transformers.TrainingArguments(self.folder / "checkpoints", **quiet | asked)
        data = [{"x": row} for row in torch.ones(64, 16).cumsum(0)]
        trainer = transformers.Trainer(Model(), arguments, train_dataset=data, eval_dataset=data[:8])
        return trainer

    def profiling(self, *trainer, **settings):
        made = importlib.import_module("bridge_profiling.integrations.hugging_face").ProfilingCallback
        window = {"use_pytorch_profiler": True, "profile_step_start": 3, "profile_step_end": 5}
        return made(*trainer, **window | {"output_dir": self.folder / "profiles"} | settings)

    def train(self, trainer, *, resume=None, **settings):
        with self.profiling(trainer, **settings):
            trainer.train(resume_from_checkpoint=resume)


@pytest.fixture
def training(tmp_path):
    return Training(tmp_path)


def test_the_example_captures_its_window_on_each_rank_and_changes_no_loss(tmp_path):
    example = ExampleRun("hugging_face.py", tmp_path)
    # Two batches an iteration, fetched together.
    example.check(
        "transformers", ["data-loading", "host-to-device", "host-to-device", *["forward", "backward"] * 2, "optimizer"]
    )
    framework = example.captured.manifest()["framework"]
    assert (framework["strategy"], framework["gradient_accumulation"]) == ("MULTI_CPU", 2)


def test_an_epochs_last_iteration_may_have_fewer_batches(training):
    # 16 batches are 3 + 3 + 3 + 3 + 3 + 1, and the next epoch counts on.
    window = {"profile_step_start": 5, "profile_step_end": 7}
    training.train(training.trainer(gradient_accumulation_steps=3), **window)
    captured = Captured(training.captured.root, "iter-5-7")
    work = ["forward", "backward"]
    assert captured.manifest()["status"] == "complete"
    assert [[phase for phase in found if phase not in FETCH] for found in captured.phases().values()] == [
        [*work, "optimizer"],
        [*work * 3, "optimizer"],
    ]


def test_an_epoch_of_unknown_length_ends_between_two_iterations(training):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([{"x": torch.ones(16)}] * 16)

    trainer = training.trainer(eval_strategy="epoch")
    trainer.train_dataset = Stream()
    training.train(trainer)
    found = training.captured.phases()
    # The Trainer asks for batches that are not there, and evaluates: none of it is part of iteration 4.
    assert "evaluation" in found.pop(None)
    assert found == {3: STEP, 4: STEP}


def test_a_copy_in_the_window_shares_no_capture(training):
    def copied(step):
        if step == 3:
            copies.append(copy.deepcopy(profiling))

    copies = []
    trainer = training.trainer(copied)
    profiling = training.profiling()
    trainer.add_callback(profiling)
    trainer.train()
    copies[0].on_train_end(trainer.args, trainer.state, trainer.control)
    assert training.captured.manifest()["status"] == "complete"


@pytest.mark.parametrize(("steps", "captured", "status"), [(2, [3, 4], "complete"), (4, [4], "partial"), (6, None, "missed")])
def test_a_training_resumed_from_a_checkpoint_counts_on(training, steps, captured, status):
    training.trainer(max_steps=steps, save_strategy="steps", save_steps=steps).train()
    training.train(training.trainer(), resume=str(training.folder / "checkpoints" / f"checkpoint-{steps}"))
    manifest = training.captured.manifest()
    assert (manifest["status"], (manifest["captured"] or {}).get("iterations")) == (status, captured)
    assert manifest["durations_ns"]["iteration"] == list(range(steps, 8))


def test_an_exception_leaves_what_was_captured_and_is_passed_on(training):
    def fail(step):
        if step == 4:
            raise ValueError("no such token")

    trainer = training.trainer(fail)
    before = vars(trainer).keys() | vars(trainer.accelerator).keys()
    with pytest.raises(ValueError, match="no such token"):
        training.train(trainer)
    manifest = training.captured.manifest()
    assert (manifest["status"], manifest["captured"]["iterations"], manifest["interrupted"]) == ("partial", [3], [4])
    assert "ValueError: no such token" in manifest["reason"]
    assert not {"get_batch_samples", "compute_loss", "evaluate", "backward"} & (
        (vars(trainer).keys() | vars(trainer.accelerator).keys()) - before
    )
    assert not [one for one in trainer.callback_handler.callbacks if type(one).__name__ == "ProfilingCallback"]


def test_a_sigterm_inside_the_window_writes_what_was_captured(training):
    def end(step):
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        training.train(training.trainer(end))
    assert training.captured.manifest()["captured"]["iterations"] == [3]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_training_that_is_told_to_stop_leaves_what_was_captured(training):
    def stop(step):
        trainer.control.should_training_stop = step == 3

    trainer = training.trainer(stop)
    training.train(trainer)
    manifest = training.captured.manifest()
    assert (manifest["status"], manifest["captured"]["iterations"]) == ("partial", [3])
    assert "training ended after iteration 3" in manifest["reason"]


def test_what_the_trainer_does_between_two_iterations_are_ranges(training):
    every = {"logging_strategy": "steps", "logging_steps": 4, "save_strategy": "steps", "save_steps": 4}
    training.train(training.trainer(eval_strategy="steps", eval_steps=4, **every))
    found = training.captured.phases()
    between = found.pop(None)
    assert [phase for phase in between if phase in ("logging", "evaluation", "checkpoint")][:2] == ["logging", "evaluation"]
    assert between[-1] == "checkpoint"
    assert "data-loading" not in between
    assert found == {3: STEP, 4: STEP}


def test_in_a_list_of_callbacks_it_sees_the_iterations_and_not_what_comes_before_them(training):
    trainer = training.trainer()
    trainer.add_callback(training.profiling())
    trainer.train()
    manifest = training.captured.manifest()
    assert (manifest["status"], manifest["captured"]["iterations"]) == ("complete", [3, 4])
    assert training.captured.phases() == {3: ["forward", "backward", "optimizer"], 4: ["forward", "backward", "optimizer"]}


def test_losses_are_bit_identical_with_and_without_the_callback(training):
    training.trainer().train()
    plain, training.losses = training.losses, []
    training.train(training.trainer(), record_shapes=True)
    assert len(plain) == 8
    assert training.losses == plain


@pytest.mark.parametrize(
    ("settings", "message"), [({"profile_step_end": 20}, "max_steps=8"), ({"profile_rank": [0]}, "profile_rank")]
)
def test_a_request_that_cannot_work_is_refused_and_leaves_the_trainer_alone(training, settings, message):
    trainer = training.trainer()
    callbacks = list(trainer.callback_handler.callbacks)
    with pytest.raises(ProfilingConfigError, match=message):
        training.profiling(trainer, **settings)
    assert trainer.callback_handler.callbacks == callbacks


def test_without_a_profiler_nothing_is_written(training, monkeypatch):
    monkeypatch.chdir(training.folder)
    training.train(training.trainer(), use_pytorch_profiler=False, output_dir=None)
    assert not (training.folder / "profiles").exists()


def test_a_second_training_is_another_attempt(training):
    trainer = training.trainer()
    with training.profiling(trainer):
        trainer.train()
        trainer.train()
    assert training.captured.manifest()["status"] == "complete"
    assert Captured(training.captured.root, "iter-3-5.1").manifest()["status"] == "complete"
