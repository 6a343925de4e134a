"""The callback in Lightning's Trainer: the right iterations whatever they consist of, every phase, nothing lost."""

import pytest

from bridge_profiling.common.errors import ProfilingConfigError
from tests.frameworks.trainings import Lightning

pytestmark = [pytest.mark.system, pytest.mark.needs("lightning")]

#: One batch of an iteration: a step on the CPU.
BATCH = ["data-loading", "host-to-device", "forward", "backward"]
STEP = [*BATCH, "optimizer"]


@pytest.fixture
def training(tmp_path):
    return Lightning(tmp_path)


def test_both_packages_of_lightning_train_with_the_same_callback(tmp_path):
    training = Lightning(tmp_path, "pytorch_lightning")
    training.train()
    assert training.captured.manifest()["framework"]["name"] == "pytorch_lightning"
    assert training.captured.phases() == {3: STEP, 4: STEP}


def test_an_iteration_is_an_optimizer_step_of_several_batches_and_an_epochs_last_may_have_fewer(training):
    # 11 batches are 3 + 3 + 3 + 2.
    training.fit(accumulate_grad_batches=3, batches=11)
    assert training.captured.phases() == {3: [*BATCH * 2, "optimizer"], 4: [*BATCH * 3, "optimizer"], None: ["evaluation"]}
    assert training.ending() == ("complete", [3, 4], [])
    assert training.captured.manifest()["framework"]["gradient_accumulation"] == 3
    assert training.iterations() == list(range(8))


def test_validation_and_checkpoints_between_two_iterations_are_ranges(training):
    saving = training.package.callbacks.ModelCheckpoint(every_n_train_steps=4)
    training.fit(saving, val_check_interval=4, enable_checkpointing=True)
    found = training.captured.phases()
    assert sorted(found.pop(None)) == ["checkpoint", "evaluation"]
    assert found == {3: STEP, 4: STEP}


def test_with_manual_optimization_an_iteration_is_a_batch_however_many_optimizers_step(training):
    training.fit(model=training.model(optimizers=2), max_steps=16)
    steps = ["data-loading", "host-to-device", "backward", "optimizer", "backward", "optimizer"]
    assert training.captured.phases() == {3: steps, 4: steps}
    assert training.captured.manifest()["framework"]["iteration"] == "batch"
    assert training.iterations() == list(range(8))


def test_the_trainers_own_profiler_hears_everything_and_gets_its_methods_back(training):
    own = training.package.profilers.SimpleProfiler()
    training.fit(profiler=own)
    assert len(own.recorded_durations["run_training_batch"]) == 8
    assert not {"start", "stop"} & vars(own).keys()
    assert training.captured.manifest()["status"] == "complete"


@pytest.mark.parametrize(
    ("asked", "message"), [({"profiler": "pytorch"}, 'without profiler="pytorch"'), ({"max_steps": 4}, "max_steps=4")]
)
def test_what_cannot_work_with_this_trainer_is_refused_before_it_trains(training, asked, message):
    trainer = training.trainer(training.profiling(), **asked)
    with pytest.raises(ProfilingConfigError, match=message):
        trainer.fit(training.model(), training.batches())
    # Lightning made its profiler and never started it; deleting it raises where nothing can catch that.
    trainer.profiler.profiler = None
    assert training.losses == []
    assert not training.captured.root.exists()
