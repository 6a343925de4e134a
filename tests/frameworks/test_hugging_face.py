"""The callback in Hugging Face's Trainer, and the hook in a loop around Accelerate: iterations, phases, nothing lost."""

import importlib

import pytest
import torch

from bridge_profiling.common.errors import ProfilingConfigError
from tests.frameworks.trainings import Accelerate, HuggingFace

pytestmark = [pytest.mark.system, pytest.mark.needs("hugging_face")]

#: An iteration of one batch. Its loader fetches one batch ahead, and moves the one before to the device while it does.
FETCH = ["data-loading", "host-to-device"]
WORK = ["forward", "backward", "optimizer"]
STEP = [*FETCH, *WORK]


@pytest.fixture
def training(tmp_path):
    return HuggingFace(tmp_path)


def test_an_epoch_of_unknown_length_ends_between_two_iterations(training):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([{"x": torch.ones(16)}] * 16)

    trainer = training.trainer(eval_strategy="epoch")
    trainer.train_dataset = Stream()
    with training.profiling(trainer):
        trainer.train()
    found = training.captured.phases()
    # The Trainer asks for batches that are not there, and evaluates: none of it is part of iteration 4.
    assert "evaluation" in found.pop(None)
    assert found == {3: STEP, 4: STEP}


def test_in_a_list_of_callbacks_it_sees_the_iterations(training):
    trainer = training.trainer()
    trainer.add_callback(training.profiling())
    trainer.train()
    assert training.ending() == ("complete", [3, 4], [])
    # What comes before an iteration's first callback is not seen.
    assert training.captured.phases() == {3: WORK, 4: WORK}


def test_what_the_trainer_does_between_two_iterations_are_ranges(training):
    every = {f"{name}_strategy": "steps" for name in ("logging", "save", "eval")}
    training.train(asked=every | {f"{name}_steps": 4 for name in ("logging", "save", "eval")})
    found = training.captured.phases()
    between = found.pop(None)
    assert [phase for phase in between if phase in ("logging", "evaluation", "checkpoint")][:2] == ["logging", "evaluation"]
    assert between[-1] == "checkpoint"
    assert "data-loading" not in between
    assert found == {3: STEP, 4: STEP}


def test_a_window_after_the_last_step_is_refused_and_leaves_the_trainer_alone(training):
    trainer = training.trainer()
    callbacks = [*trainer.callback_handler.callbacks]
    with pytest.raises(ProfilingConfigError, match="max_steps=8"):
        training.profiling(trainer, profile_step_end=20)
    assert trainer.callback_handler.callbacks == callbacks


@pytest.fixture
def loop(tmp_path):
    return Accelerate(tmp_path).prepare()


def test_an_epochs_end_begins_no_iteration_and_its_last_may_have_fewer_batches(loop):
    loop.prepare(accumulation=3, batches=5)
    with loop.profiling() as profiling:
        for _ in range(3):
            for batch in profiling.steps(loop.loader):
                loop.step(batch)
    assert loop.ending() == ("complete", [3, 4], [])
    assert loop.iterations() == list(range(6))
    found = loop.captured.phases()
    # The last fetch of an epoch finds no batch.
    assert found[3] == [*WORK[:2], *FETCH, *WORK, "data-loading"]
    assert found[4] == [*WORK[:2], *FETCH, *WORK[:2], *FETCH, *WORK, *FETCH]


def test_a_break_between_two_optimizer_steps_leaves_its_iteration_out(loop):
    loop.prepare(accumulation=2, batches=16)
    with loop.profiling() as profiling:
        for number, batch in enumerate(profiling.steps(loop.loader)):
            loop.step(batch)
            if number == 8:
                break
    assert loop.ending() == ("partial", [3], [4])


def test_tensor_and_context_parallelism_of_a_parallelism_config_are_the_layout(loop, monkeypatch):
    layout_of = importlib.import_module("bridge_profiling.frameworks.accelerate").layout_of
    from accelerate.parallelism_config import ParallelismConfig

    state = loop.accelerator.state
    assert layout_of(state).coordinates(0) == dict.fromkeys(("tp", "cp", "dp", "pp", "ep"), (0, 1))
    monkeypatch.setattr("bridge_profiling.frameworks.accelerate.world_size", lambda: 8)
    state.parallelism_config = ParallelismConfig(dp_shard_size=4, tp_size=2)
    assert layout_of(state).coordinates(5) == {"tp": (1, 2), "cp": (0, 1), "dp": (2, 4), "pp": (0, 1), "ep": (0, 1)}
