"""The callback in Lightning's Trainer: the right iterations whatever they consist of, every phase, nothing lost."""

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

pytestmark = [pytest.mark.system, pytest.mark.needs("lightning")]

#: One batch of an iteration: a step on the CPU.
BATCH = ["data-loading", "host-to-device", "forward", "backward"]


class Training:
    """Trainings of a small model in a folder, on one CPU."""

    def __init__(self, folder, package="lightning.pytorch"):
        self.folder = folder
        packages = {name: importlib.import_module(name) for name in ("lightning.pytorch", "pytorch_lightning")}
        self.package = packages[package]
        self.callback = importlib.import_module("bridge_profiling.integrations.lightning").ProfilingCallback
        self.captured = Captured(folder / "profiles", "iter-3-5")

    def profiling(self, **settings):
        window = {"use_pytorch_profiler": True, "profile_step_start": 3, "profile_step_end": 5}
        return self.callback(**window | {"output_dir": self.folder / "profiles"} | settings)

    def trainer(self, *callbacks, **asked):
        quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        quiet |= {"enable_checkpointing": False, "default_root_dir": self.folder, "max_steps": 8}
        return self.package.Trainer(callbacks=list(callbacks), **quiet | asked)

    def model(self, on_step=lambda step: None, optimizers=1, optimizer=torch.optim.AdamW):
        """One model; with two optimizers it is optimized by hand."""

        class Model(self.package.LightningModule):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.layers = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 1))
                self.automatic_optimization = optimizers == 1
                self.losses = []

            def training_step(self, batch):
                on_step(self.global_step)
                loss = self.layers(batch).square().mean()
                self.losses.append(loss.item())
                if not self.automatic_optimization:
                    for one in self.optimizers():
                        one.zero_grad()
                        self.manual_backward(self.layers(batch).square().mean())
                        one.step()
                return loss

            def validation_step(self, batch):
                self.layers(batch)

            def configure_optimizers(self):
                made = [optimizer(layer.parameters(), lr=0.01) for layer in self.layers]
                return made if optimizers == 2 else optimizer(self.parameters(), lr=0.01)

        return Model()

    @staticmethod
    def batches(count=8):
        torch.manual_seed(1)
        return torch.utils.data.DataLoader(torch.randn(4 * count, 16), batch_size=4)


@pytest.fixture
def training(tmp_path):
    return Training(tmp_path)


def test_the_example_captures_its_window_on_each_rank_of_ddp_and_changes_no_loss(tmp_path):
    example = ExampleRun("lightning_ddp.py", tmp_path)
    example.check("lightning", [*BATCH, "optimizer"])
    framework = example.captured.manifest()["framework"]
    assert (framework["strategy"], framework["precision"], framework["gradient_accumulation"]) == ("DDPStrategy", "32-true", 1)


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_both_packages_of_lightning_train_with_the_same_callback(tmp_path, package):
    training = Training(tmp_path, package)
    training.trainer(training.profiling()).fit(training.model(), training.batches())
    assert training.captured.manifest()["framework"]["name"] == package.partition(".")[0]
    assert training.captured.phases() == {3: [*BATCH, "optimizer"], 4: [*BATCH, "optimizer"]}


def test_an_iteration_is_an_optimizer_step_of_several_batches_and_an_epochs_last_may_have_fewer(training):
    trainer = training.trainer(training.profiling(), accumulate_grad_batches=3)
    trainer.fit(training.model(), training.batches(11))
    # 11 batches are 3 + 3 + 3 + 2.
    assert training.captured.phases() == {3: [*BATCH * 2, "optimizer"], 4: [*BATCH * 3, "optimizer"]}
    manifest = training.captured.manifest()
    assert (manifest["status"], manifest["framework"]["gradient_accumulation"]) == ("complete", 3)
    assert manifest["durations_ns"]["iteration"] == list(range(8))


@pytest.mark.parametrize(("steps", "captured", "status"), [(2, [3, 4], "complete"), (4, [4], "partial"), (6, None, "missed")])
def test_a_training_resumed_from_a_checkpoint_counts_on(training, steps, captured, status):
    trainer = training.trainer(max_steps=steps)
    trainer.fit(training.model(), training.batches())
    trainer.save_checkpoint(training.folder / "last.ckpt")
    resumed = training.trainer(training.profiling())
    resumed.fit(training.model(), training.batches(), ckpt_path=training.folder / "last.ckpt")
    manifest = training.captured.manifest()
    assert manifest["status"] == status
    assert (manifest["captured"] or {}).get("iterations") == captured
    assert manifest["durations_ns"]["iteration"] == list(range(steps, 8))


def test_an_exception_leaves_what_was_captured_and_is_passed_on(training):
    def fail(step):
        if step == 4:
            raise ValueError("no such token")

    with pytest.raises(ValueError, match="no such token"):
        training.trainer(training.profiling()).fit(training.model(fail), training.batches())
    manifest = training.captured.manifest()
    assert (manifest["status"], manifest["captured"]["iterations"], manifest["interrupted"]) == ("partial", [3], [4])
    assert "ValueError: no such token" in manifest["reason"]
    assert training.captured.phases()[3] == [*BATCH, "optimizer"]


def test_a_sigterm_is_lightnings_to_handle_and_leaves_what_was_captured(training):
    def end(step):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        training.trainer(training.profiling()).fit(training.model(end), training.batches())
    manifest = training.captured.manifest()
    assert (manifest["status"], manifest["captured"]["iterations"]) == ("partial", [3])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_training_that_is_told_to_stop_leaves_what_was_captured(training):
    def stop(step):
        trainer.should_stop = step == 3

    trainer = training.trainer(training.profiling(), min_epochs=0)
    trainer.fit(training.model(stop), training.batches())
    manifest = training.captured.manifest()
    assert (manifest["status"], manifest["captured"]["iterations"]) == ("partial", [3])
    assert "training ended after iteration 3" in manifest["reason"]


def test_validation_and_checkpoints_between_two_iterations_are_ranges(training):
    saving = training.package.callbacks.ModelCheckpoint(every_n_train_steps=4)
    trainer = training.trainer(training.profiling(), saving, val_check_interval=4, enable_checkpointing=True)
    trainer.fit(training.model(), training.batches(), training.batches(2))
    found = training.captured.phases()
    assert sorted(found.pop(None)) == ["checkpoint", "evaluation"]
    assert found == {3: [*BATCH, "optimizer"], 4: [*BATCH, "optimizer"]}


def test_with_manual_optimization_an_iteration_is_a_batch_however_many_optimizers_step(training):
    trainer = training.trainer(training.profiling(), max_steps=16)
    trainer.fit(training.model(optimizers=2), training.batches())
    steps = ["data-loading", "host-to-device", "backward", "optimizer", "backward", "optimizer"]
    assert training.captured.phases() == {3: steps, 4: steps}
    manifest = training.captured.manifest()
    assert manifest["framework"]["iteration"] == "batch"
    assert manifest["durations_ns"]["iteration"] == list(range(8))


def test_with_manual_optimization_the_batches_may_be_more_than_the_trainer_s_max_steps(training):
    model = training.model(optimizers=2)
    model.optimizers = lambda *_: []
    trainer = training.trainer(training.profiling(), max_steps=2, max_epochs=1)
    trainer.fit(model, training.batches())
    assert training.captured.manifest()["captured"]["iterations"] == [3, 4]


def test_two_callbacks_capture_two_windows(training):
    later = {"profile_step_start": 6, "profile_step_end": 7}
    trainer = training.trainer(training.profiling(), training.profiling(**later))
    trainer.fit(training.model(), training.batches())
    assert training.captured.manifest()["status"] == "complete"
    assert Captured(training.captured.root, "iter-6-7").phases() == {6: [*BATCH, "optimizer"]}


def test_a_search_for_a_learning_rate_is_no_iteration_of_the_training(training):
    searching = training.package.callbacks.LearningRateFinder(num_training_steps=5)
    window = {"profile_step_start": 0, "profile_step_end": 2}
    model = training.model()
    model.learning_rate = 0.01
    training.trainer(training.profiling(**window), searching).fit(model, training.batches())
    captured = Captured(training.captured.root, "iter-0-2")
    assert captured.phases() == {0: [*BATCH, "optimizer"], 1: [*BATCH, "optimizer"]}


def test_a_copy_in_the_window_shares_no_capture(training):
    def copied(step):
        if step == 3:
            copies.append(copy.deepcopy(trainer.callbacks[0]))

    copies = []
    trainer = training.trainer(training.profiling())
    trainer.fit(training.model(copied), training.batches())
    copies[0].on_train_end(trainer, None)
    assert training.captured.manifest()["status"] == "complete"


def test_a_script_is_tried_out_by_fast_dev_run_as_it_is(training):
    training.trainer(training.profiling(), fast_dev_run=True, max_steps=-1).fit(training.model(), training.batches())
    assert "training ended after iteration 0" in training.captured.manifest()["reason"]


def test_an_optimizer_that_computes_gradients_in_its_step_has_them_between_its_own_work(training):
    training.trainer(training.profiling()).fit(training.model(optimizer=torch.optim.LBFGS), training.batches())
    phases = training.captured.phases()[3]
    assert phases[:2] == ["data-loading", "host-to-device"]
    rounds = phases[2:]
    assert len(rounds) > 3
    assert rounds == ["forward", "backward", "optimizer"] * (len(rounds) // 3)


def test_losses_are_bit_identical_with_and_without_the_callback(training):
    plain, profiled = training.model(), training.model()
    training.trainer().fit(plain, training.batches())
    training.trainer(training.profiling(record_shapes=True)).fit(profiled, training.batches())
    assert len(plain.losses) == 8
    assert plain.losses == profiled.losses


def test_the_trainers_own_profiler_hears_everything_and_gets_its_methods_back(training):
    own = training.package.profilers.SimpleProfiler()
    training.trainer(training.profiling(), profiler=own).fit(training.model(), training.batches())
    assert len(own.recorded_durations["run_training_batch"]) == 8
    assert not {"start", "stop"} & vars(own).keys()
    assert training.captured.manifest()["status"] == "complete"


@pytest.mark.parametrize(
    ("asked", "message"), [({"profiler": "pytorch"}, 'without profiler="pytorch"'), ({"max_steps": 4}, "max_steps=4")]
)
def test_what_cannot_work_with_this_trainer_is_refused_before_it_trains(training, asked, message):
    model, trainer = training.model(), training.trainer(training.profiling(), **asked)
    with pytest.raises(ProfilingConfigError, match=message):
        trainer.fit(model, training.batches())
    # Lightning made its profiler and never started it; deleting it raises where nothing can catch that.
    trainer.profiler.profiler = None
    assert model.losses == []
    assert not training.captured.root.exists()


def test_a_setting_that_does_not_exist_is_refused_when_the_callback_is_made(training):
    with pytest.raises(ProfilingConfigError, match="profile_rank"):
        training.profiling(profile_rank=[0])


def test_without_a_profiler_nothing_is_written(training, monkeypatch):
    monkeypatch.chdir(training.folder)
    profiling = training.profiling(use_pytorch_profiler=False, output_dir=None)
    training.trainer(profiling).fit(training.model(), training.batches())
    assert list(training.folder.iterdir()) == []


def test_a_second_fit_of_one_callback_is_another_attempt(training):
    profiling = training.profiling()
    for _ in range(2):
        training.trainer(profiling).fit(training.model(), training.batches())
    assert training.captured.manifest()["status"] == "complete"
    assert Captured(training.captured.root, "iter-3-5.1").manifest()["status"] == "complete"
