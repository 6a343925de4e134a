"""What the callback for Megatron Bridge does with a config and with signals. `test_bridge_pretrain.py` has it trained."""

from __future__ import annotations

import logging
import signal
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.integrations.megatron_bridge import ProfilingCallback
from tests.integrations.captured import Captured


@dataclass(kw_only=True)
class Section:
    """The fields and defaults of `profiling` in Megatron Bridge 0.6, which test_bridge_keys.py compares, and one more."""

    use_nsys_profiler: bool = False
    use_pytorch_profiler: bool = True
    record_memory_history: bool = False
    profile_step_start: int = 4
    profile_step_end: int = 6
    profile_ranks: list[int] = field(default_factory=lambda: [0])
    memory_snapshot_path: str = "/nemo_run/snapshot.pickle"
    record_shapes: bool = False
    of_a_later_release: list[str] = field(default_factory=list)


class Training:
    """A config, and the calls that `pretrain` makes."""

    def __init__(self, section: Section | None, first: int = 0, skipped: int | None = None, **train: Any) -> None:
        sizes = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
        self.config = SimpleNamespace(
            profiling=section,
            train=SimpleNamespace(train_iters=8, **train),
            model=SimpleNamespace(**sizes),
            dist=SimpleNamespace(use_tp_pp_dp_mapping=False),
        )
        self._first, self._skipped = first, skipped
        self.handlers: list[Any] = []

    def run(self, callback: ProfilingCallback) -> None:
        state = SimpleNamespace(cfg=self.config, train_state=SimpleNamespace(step=self._first))
        context = SimpleNamespace(state=state)
        callback.on_train_start(context)
        while state.train_state.step < self.config.train.train_iters:
            if state.train_state.step != self._skipped:
                callback.on_train_step_start(context)
                self.handlers.append(signal.getsignal(signal.SIGTERM))
                callback.on_train_step_end(context)
            state.train_state.step += 1
        callback.on_train_end(context)


def captured(tmp_path) -> Captured:
    return Captured(tmp_path, "iter-4-6")


@pytest.mark.parametrize(
    ("section", "settings", "message"),
    [
        (Section(profile_step_end=4), {}, "window is empty"),
        (Section(profile_step_end=20), {}, "train_iters=8"),
        (Section(use_nsys_profiler=True), {}, "both on"),
        (Section(profile_ranks=[]), {}, "names no rank"),
        (Section(), {"profile_rank": [0]}, "profile_rank"),
    ],
)
def test_a_request_that_cannot_work_is_refused_and_changes_nothing(section, settings, message):
    with pytest.raises(ProfilingConfigError, match=message):
        ProfilingCallback(Training(section).config, **settings)
    assert section.use_pytorch_profiler


def test_the_built_in_profiling_is_switched_off_and_settings_win(tmp_path):
    section = Section(record_shapes=True)
    callback = ProfilingCallback(Training(section).config, output_dir=tmp_path, profile_ranks="all", record_shapes=False)
    assert not section.use_pytorch_profiler
    Training(section).run(callback)
    config = captured(tmp_path).manifest()["config"]
    assert (config["use_pytorch_profiler"], config["profile_ranks"], config["record_shapes"]) == (True, "all", False)


@pytest.mark.parametrize(
    ("path", "taken"),
    [("/nemo_run/snapshot.pickle", "snapshot.pickle"), ("/data/mine.pickle", "/data/mine.pickle")],
)
def test_a_snapshots_path_is_taken_over_where_the_user_has_set_it(tmp_path, path, taken):
    section = Section(memory_snapshot_path=path)
    Training(section).run(ProfilingCallback(Training(section).config, output_dir=tmp_path))
    assert captured(tmp_path).manifest()["config"]["memory_snapshot_path"] == taken


def test_a_field_that_is_set_and_not_known_is_named(tmp_path, caplog):
    ProfilingCallback(Training(Section()).config, output_dir=tmp_path)
    assert "has no effect" not in caplog.text
    ProfilingCallback(Training(Section(of_a_later_release=["x"])).config, output_dir=tmp_path)
    assert "profiling.of_a_later_release=['x'] has no effect" in caplog.text


def test_a_config_that_is_not_the_trainings_own_is_an_error_in_the_log(tmp_path, caplog):
    callback = ProfilingCallback(Training(Section()).config, output_dir=tmp_path / "profiles")
    Training(Section()).run(callback)
    assert "profiling.use_pytorch_profiler is on in the config that Megatron Bridge trains with" in caplog.text
    assert not (tmp_path / "profiles").exists()


def test_ranks_outside_the_world_end_the_profile_and_not_the_training(tmp_path, caplog):
    training = Training(Section(profile_ranks=[7]))
    training.run(ProfilingCallback(training.config, output_dir=tmp_path))
    assert "names 7, but the job has 1 ranks" in caplog.text
    assert len(training.handlers) == 8


def test_a_window_that_the_training_resumed_past_is_missed(tmp_path):
    training = Training(Section(), first=6)
    training.run(ProfilingCallback(training.config, output_dir=tmp_path))
    assert captured(tmp_path).manifest()["status"] == "missed"


@pytest.mark.parametrize(
    ("case", "iterations", "reason"),
    [
        ({"skipped": 4}, [5], "the training skipped iteration 4"),
        ({"skipped": 5}, [4], "iteration 6 came before the window 4-6 was complete"),
        ({"first": 5}, [5], "the run's first iteration was 5, inside the window 4-6"),
    ],
)
def test_the_manifest_says_why_a_part_of_the_window_is_missing(tmp_path, case, iterations, reason):
    training = Training(Section(), **case)
    training.run(ProfilingCallback(training.config, output_dir=tmp_path))
    manifest = captured(tmp_path).manifest()
    assert (manifest["captured"]["iterations"], manifest["reason"]) == (iterations, reason)


def test_sigterm_has_a_handler_in_the_training_and_its_default_after_it(tmp_path):
    training = Training(Section())
    training.run(ProfilingCallback(training.config, output_dir=tmp_path))
    assert signal.SIG_DFL not in training.handlers
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("exit_signal_handler", [False, True])
def test_a_handler_of_someone_else_is_left_alone(tmp_path, exit_signal_handler):
    """Megatron Bridge 0.6's own, for one, which it installs itself."""

    def mine(number, frame):
        raise AssertionError

    previous = signal.signal(signal.SIGTERM, mine)
    try:
        training = Training(Section(), exit_signal_handler=exit_signal_handler)
        training.run(ProfilingCallback(training.config, output_dir=tmp_path))
        assert set(training.handlers) == {mine}
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, previous)


@pytest.mark.parametrize("section", [None, Section(use_pytorch_profiler=False)])
def test_without_a_profiler_nothing_is_captured_and_no_signal_touched(tmp_path, caplog, section):
    caplog.set_level(logging.WARNING)
    training = Training(section)
    training.run(ProfilingCallback(training.config, output_dir=tmp_path))
    assert set(training.handlers) == {signal.SIG_DFL}
    # A directory was named, so the job says there that it may be asked for captures.
    assert [path.name for path in tmp_path.iterdir()] == ["on-demand"]
    assert caplog.text == ""
