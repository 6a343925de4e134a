"""What every integration does alike: resumes, failures, signals, and nothing where no profiler is asked for."""

import copy
import io
import signal
from pathlib import Path

import pytest
import torch

from bridge_profiling.frameworks.parallel_layout import size_of_model
from bridge_profiling.frameworks.session import Session, config_from, loader_facts
from tests.frameworks.captured import Captured
from tests.frameworks.trainings import WINDOW, Accelerate, HuggingFace, Lightning, Loop

OTHERS = ((Accelerate, "hugging_face"), (HuggingFace, "hugging_face"), (Lightning, "lightning"))
FRAMEWORKS = [Loop, *(pytest.param(one, marks=[pytest.mark.system, pytest.mark.needs(name)]) for one, name in OTHERS)]


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield 1


class Hostile:
    @property
    def batch_size(self):
        raise SystemExit("not yet")

    dataset = batch_sampler = batch_size


@pytest.fixture(params=FRAMEWORKS)
def training(request, tmp_path):
    return request.param(tmp_path)


@pytest.mark.parametrize(("start", "ending"), [(2, ("complete", [3, 4], [])), (4, ("partial", [4], []))])
def test_a_resumed_training_counts_on_and_captures_what_it_shares_with_the_window(training, start, ending):
    training.train(start=start)
    assert training.ending() == ending
    assert training.iterations() == list(range(start, 8))


#: Parameters of each training's model, samples of a batch, and samples of the data.
SIZES = {Loop: (16 * 17, 1, 8), Accelerate: (17, 4, 32), HuggingFace: (17, 4, 64), Lightning: (16 * 17 + 17, 4, 32)}


def test_the_manifest_has_the_sizes_of_the_model_and_the_data(training):
    training.train()
    parameters, batch, samples = SIZES[type(training)]
    expected = {"parameters": parameters, "trainable_parameters": parameters, "batch_size": batch, "dataset_size": samples}
    assert expected.items() <= training.captured.manifest()["framework"].items()


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (torch.utils.data.DataLoader(range(12), batch_size=4), {"batch_size": 4, "dataset_size": 12}),
        (torch.utils.data.DataLoader(range(12), batch_sampler=[[1, 2], [3]]), {"dataset_size": 12}),
        (iter(torch.utils.data.DataLoader(range(12), batch_size=4)), {"batch_size": 4, "dataset_size": 12}),
        (torch.utils.data.DataLoader(Endless(), batch_size=4), {"batch_size": 4}),
        ([torch.ones(4)], {}),
        (None, {}),
        (Hostile(), {}),
    ],
)
def test_a_loader_says_its_batch_and_dataset_as_far_as_it_knows(loader, expected):
    assert loader_facts(loader) == expected


def test_frozen_parameters_are_not_trainable():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, bias=False))
    model[0].requires_grad_(False)
    assert size_of_model(model) == {"parameters": 36, "trainable_parameters": 16}


def test_an_exception_leaves_what_was_captured_and_is_passed_on(training):
    def fail(number):
        if number == 4:
            raise ValueError("no such token")

    with pytest.raises(ValueError, match="no such token"):
        training.train(fail)
    assert training.ending() == ("partial", [3], [4])
    assert "ValueError: no such token" in training.captured.manifest()["reason"]
    assert {"forward", "backward", "optimizer"} <= {*training.captured.phases()[3]}
    assert not training.still_watched()


def test_a_sigterm_inside_the_window_writes_what_was_captured(training):
    with pytest.raises(SystemExit):
        training.train(lambda number: signal.raise_signal(signal.SIGTERM) if number == training.sigterm_in else None)
    assert training.ending()[:2] == ("partial", [3])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_without_a_profiler_nothing_is_written(training, monkeypatch):
    monkeypatch.chdir(training.folder)
    training.train(use_pytorch_profiler=False, output_dir=None)
    assert len(training.losses) == 8
    assert {path.name for path in training.folder.iterdir()} <= {"checkpoints"}


STEP = ["forward", "backward", "optimizer"]


@pytest.fixture
def loop(tmp_path):
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


def test_a_break_ends_its_iteration(loop):
    with loop.profiling() as profiling:
        for number, batch in enumerate(profiling.steps(loop.batches())):
            loop.step(batch)
            if number == 4:
                break
    assert loop.ending() == ("complete", [3, 4], [])


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(config_from("Test", WINDOW), tmp_path)


def test_a_failure_of_an_adapter_is_logged_and_an_iteration_that_is_open_at_the_end_does_not_count(
    session: Session, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert session.open(watch=lambda phases: phases.function(None, "missing", "forward"))
    assert "AttributeError" in caplog.text
    copied = copy.deepcopy(session)
    assert (copied.config, copied.hook) == (session.config, None)
    for iteration in range(5):
        session.begin_iteration(iteration)
    session.close()
    manifest = Captured(tmp_path, "iter-3-5").manifest()
    assert (manifest["captured"]["iterations"], manifest["interrupted"]) == ([3], [4])


def test_a_training_that_starts_again_in_the_process_is_another_attempt(session: Session, tmp_path: Path) -> None:
    for _ in range(2):
        assert session.open()
        for iteration in range(5):
            session.begin_iteration(iteration)
    session.close()
    first, second = (Captured(tmp_path, folder).manifest() for folder in ("iter-3-5", "iter-3-5.1"))
    assert (first["captured"]["iterations"], first["interrupted"], second["captured"]["iterations"]) == ([3], [4], [3])
    assert "the training was started again in the same process" in first["reason"]
