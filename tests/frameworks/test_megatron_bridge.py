"""What the callback for Megatron Bridge does with a config and with signals. `test_bridge_pretrain.py` has it trained."""

import signal
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from bridge_profiling.common.errors import ProfilingConfigError
from bridge_profiling.frameworks.megatron_bridge import ProfilingCallback
from tests.frameworks.captured import Captured


@dataclass(kw_only=True)
class Section:
    """The fields and defaults of `profiling` in Megatron Bridge 0.6, which test_bridge_pretrain.py compares."""

    use_nsys_profiler: bool = False
    use_pytorch_profiler: bool = True
    record_memory_history: bool = False
    profile_step_start: int = 4
    profile_step_end: int = 6
    profile_ranks: list[int] = field(default_factory=lambda: [0])
    memory_snapshot_path: str = "/nemo_run/snapshot.pickle"
    record_shapes: bool = False


def config_of(section: Section | None, **train: Any) -> SimpleNamespace:
    return SimpleNamespace(
        profiling=section,
        train=SimpleNamespace(train_iters=8, **train),
        model=SimpleNamespace(tensor_model_parallel_size=1, pipeline_model_parallel_size=1),
        dist=SimpleNamespace(use_tp_pp_dp_mapping=False),
    )


@pytest.fixture
def run(tmp_path):
    """Makes the calls of `pretrain`; returns the handler of SIGTERM in each iteration."""

    def run(section, *, settings=None, trained_with=None, first=0, skipped=None, **train):
        config = config_of(section, **train)
        callback = ProfilingCallback(config, output_dir=tmp_path, **settings or {})
        state = SimpleNamespace(cfg=trained_with or config, train_state=SimpleNamespace(step=first))
        context, handlers = SimpleNamespace(state=state), []
        callback.on_train_start(context)
        for state.train_state.step in range(first, 8):
            if state.train_state.step != skipped:
                callback.on_train_step_start(context)
                handlers.append(signal.getsignal(signal.SIGTERM))
                callback.on_train_step_end(context)
        callback.on_train_end(context)
        return handlers

    return run


@pytest.fixture
def manifest(tmp_path):
    return lambda: Captured(tmp_path, "iter-4-6").manifest()


@pytest.mark.parametrize(
    ("section", "settings", "message"),
    [(Section(profile_step_end=20), {}, "train_iters=8"), (Section(), {"profile_rank": [0]}, "profile_rank")],
)
def test_a_request_that_cannot_work_is_refused_and_changes_nothing(section, settings, message):
    with pytest.raises(ProfilingConfigError, match=message):
        ProfilingCallback(config_of(section), **settings)
    assert section.use_pytorch_profiler


@pytest.mark.parametrize(
    ("path", "taken"), [("/nemo_run/snapshot.pickle", "snapshot.pickle"), ("/data/mine.pickle", "/data/mine.pickle")]
)
def test_the_built_in_profiling_is_switched_off_and_settings_win(run, manifest, path, taken):
    """A snapshot's path is taken over where the user has set it."""
    section = Section(record_shapes=True, memory_snapshot_path=path)
    run(section, settings={"profile_ranks": "all", "record_shapes": False})
    assert not section.use_pytorch_profiler
    expected = {"use_pytorch_profiler": True, "profile_ranks": "all", "record_shapes": False, "memory_snapshot_path": taken}
    assert expected.items() <= manifest()["config"].items()


def test_a_config_that_is_not_the_trainings_own_is_an_error_in_the_log(run, tmp_path, caplog):
    run(Section(), trained_with=config_of(Section()))
    assert "profiling.use_pytorch_profiler is on in the config that Megatron Bridge trains with" in caplog.text
    assert not (tmp_path / "torch").exists()


@pytest.mark.parametrize(("case", "iterations"), [({"skipped": 4}, [5]), ({"skipped": 5}, [4]), ({"first": 5}, [5])])
def test_an_incomplete_window_is_captured_as_far_as_it_was_trained(run, manifest, case, iterations):
    handlers = run(Section(), **case)
    assert (manifest()["status"], manifest()["captured"]["iterations"]) == ("partial", iterations)
    # In the training alone.
    assert signal.SIG_DFL not in handlers
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_of_someone_else_is_left_alone(run):
    """Megatron Bridge 0.6's own, for one, which it installs itself."""
    mine = lambda number, frame: None  # noqa: E731
    previous = signal.signal(signal.SIGTERM, mine)
    try:
        assert {*run(Section(), exit_signal_handler=True), signal.getsignal(signal.SIGTERM)} == {mine}
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_nsys_is_off_with_megatron_bridges_fault_tolerance(caplog):
    config = config_of(Section(use_pytorch_profiler=False, use_nsys_profiler=True))
    config.ft = SimpleNamespace(enable_ft_package=True)
    callback = ProfilingCallback(config)
    assert (callback._session.config.enabled, config.profiling.use_nsys_profiler) == (False, False)
    assert "Nsys not supported with the FaultTolerancePlugin" in caplog.text


@pytest.mark.parametrize("section", [None, Section(use_pytorch_profiler=False)])
def test_without_a_profiler_nothing_is_captured_and_no_signal_touched(run, tmp_path, caplog, section):
    assert {*run(section)} == {signal.SIG_DFL}
    # A directory was named, so the job says there that it may be asked for captures.
    assert [path.name for path in tmp_path.iterdir()] == ["on-demand"]
    assert not [record for record in caplog.records if record.levelname != "INFO"]
