"""What every integration does alike: resumes, failures, signals, and nothing where no profiler is asked for."""

from __future__ import annotations

import signal

import pytest

from bridge_profiling.errors import ProfilingConfigError
from tests.integrations.trainings import Accelerate, HuggingFace, Lightning, Loop

FRAMEWORKS = [
    Loop,
    pytest.param(Accelerate, marks=[pytest.mark.system, pytest.mark.needs("hugging_face")]),
    pytest.param(HuggingFace, marks=[pytest.mark.system, pytest.mark.needs("hugging_face")]),
    pytest.param(Lightning, marks=[pytest.mark.system, pytest.mark.needs("lightning")]),
]


@pytest.fixture(params=FRAMEWORKS)
def training(request, tmp_path):
    return request.param(tmp_path)


@pytest.mark.parametrize(("start", "ending"), [(2, ("complete", [3, 4], [])), (4, ("partial", [4], []))])
def test_a_resumed_training_counts_on_and_captures_what_it_shares_with_the_window(training, start, ending):
    training.train(start=start)
    assert training.ending() == ending
    assert training.iterations() == list(range(start, 8))


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


def test_a_setting_that_does_not_exist_is_refused_before_it_trains(training):
    with pytest.raises(ProfilingConfigError, match="profile_rank"):
        training.train(profile_rank=[0])
    assert training.losses == []
