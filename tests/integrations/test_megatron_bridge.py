"""The callback in Megatron Bridge's own loop: the right window, nothing lost, and no second profiler beside it."""

from __future__ import annotations

import ast
import os
import signal
import sys

import pytest
import torch

from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.integrations.megatron_bridge import ProfilingCallback

pytestmark = pytest.mark.system

WINDOW = {"use_pytorch_profiler": True, "profile_step_start": 4, "profile_step_end": 6}


def train(run, training, **settings):
    with ProfilingCallback(training.config, output_dir=run.root, **settings) as profiling:
        training.train([profiling])
    return training


def test_the_window_of_the_config_is_captured_exactly(run):
    training = train(run, run.training(profiling=WINDOW))
    assert training.steps == list(range(8))
    assert run.iterations("iter-4-6") == [4, 5]
    manifest = run.manifest("iter-4-6")
    assert (manifest["status"], manifest["captured"]["iterations"]) == ("complete", [4, 5])
    operators = [event for event in run.trace("iter-4-6")["traceEvents"] if event.get("name") == "aten::linear"]
    assert len(operators) == 2


def test_megatron_bridges_own_profiler_misses_that_window_and_does_not_run_beside_ours(run, tmp_path, monkeypatch):
    def mark(iteration):
        with torch.profiler.record_function(f"iteration {iteration}"):
            return False

    monkeypatch.chdir(tmp_path)
    run.training(profiling=WINDOW, on_step=mark).train(None)
    (own,) = (tmp_path / "tensorboard").iterdir()
    assert [i for i in range(8) if f'"iteration {i}"' in own.read_text()] == [3, 4]
    own.unlink()
    train(run, run.training(profiling=WINDOW, on_step=mark))
    assert list((tmp_path / "tensorboard").iterdir()) == []
    assert [i for i in range(8) if f'"iteration {i}"' in str(run.trace("iter-4-6")).replace("'", '"')] == [4, 5]


@pytest.mark.parametrize(("first", "captured", "status"), [(4, [4, 5], "complete"), (5, [5], "partial"), (105, None, "missed")])
def test_a_resumed_training_captures_what_it_shares_with_the_window(run, first, captured, status):
    train(run, run.training(profiling=WINDOW, first=first, train_iters=first + 4))
    manifest = run.manifest("iter-4-6")
    assert manifest["status"] == status
    assert (manifest["captured"] or {}).get("iterations") == captured
    if captured:
        assert run.iterations("iter-4-6") == captured


def test_a_resume_keeps_global_iteration_numbers(run):
    window = {"use_pytorch_profiler": True, "profile_step_start": 105, "profile_step_end": 107}
    train(run, run.training(profiling=window, first=100, train_iters=110))
    assert run.iterations("iter-105-107") == [105, 106]


@pytest.mark.parametrize(("skipped", "captured"), [([1, 3], [4, 5]), ([4], [5]), ([5], [4]), ([4, 5], None)])
def test_iterations_that_megatron_bridge_skips_do_not_lose_the_capture(run, skipped, captured):
    training = train(run, run.training(profiling=WINDOW, iterations_to_skip=skipped))
    assert not set(skipped) & set(training.steps)
    manifest = run.manifest("iter-4-6")
    assert manifest["status"] == ("complete" if captured == [4, 5] else "partial" if captured else "missed")
    if captured:
        assert run.iterations("iter-4-6") == captured


def test_an_exception_in_a_step_leaves_what_was_captured_and_is_passed_on(run):
    def fail(iteration):
        if iteration == 5:
            raise ValueError("no such token")

    with pytest.raises(ValueError, match="no such token"):
        train(run, run.training(profiling=WINDOW, on_step=fail))
    assert 4 in run.iterations("iter-4-6")
    manifest = run.manifest("iter-4-6")
    assert (manifest["status"], manifest["captured"]["iterations"], manifest["interrupted"]) == ("partial", [4], [5])
    assert "ValueError: no such token" in manifest["reason"]


@pytest.mark.parametrize("early", [{"exit_interval": 5}, {"on_step": lambda iteration: iteration == 4}])
def test_an_early_exit_which_no_callback_hears_of_leaves_what_was_captured(run, early):
    with pytest.raises(SystemExit):
        train(run, run.training(profiling=WINDOW, **early))
    assert run.iterations("iter-4-6") == [4]
    manifest = run.manifest("iter-4-6")
    assert manifest["status"] == "partial"
    assert "told to exit (code 0)" in manifest["reason"]


@pytest.mark.parametrize("end", [{"exit_interval": 5}, {"end": {"raise": 5}}])
def test_without_a_with_the_capture_is_written_when_the_process_ends(run, end):
    done = run.process(profiling=WINDOW, bare=True, **end)
    assert (done.returncode, "a step went wrong" in done.stderr) == ((1, True) if "end" in end else (0, False))
    assert 4 in run.iterations("iter-4-6")
    assert (run.manifest("iter-4-6")["status"], run.manifest("iter-4-6")["captured"]["iterations"]) == ("partial", [4])


def test_a_sigterm_inside_the_window_writes_the_partial_trace(run):
    done = run.process(profiling=WINDOW, end={"signal": 5})
    assert done.returncode == 128 + signal.SIGTERM
    assert run.manifest("iter-4-6")["captured"]["iterations"] == [4]
    assert 4 in run.iterations("iter-4-6")


def test_with_the_exit_handler_megatron_bridge_finishes_the_iteration_it_is_in(run):
    done = run.process(profiling=WINDOW, exit_signal_handler=True, end={"signal": 4}, train_iters=20)
    assert done.returncode == 0, done.stderr
    assert "initiating graceful stop" in done.stdout
    assert run.iterations("iter-4-6") == [4]
    assert "told to exit (code 0)" in run.manifest("iter-4-6")["reason"]


def test_the_release_makes_its_exit_handler_and_never_installs_it(wheel):
    """Why the callback does. Once a release does it itself, the callback finds a handler and leaves it alone."""
    assert "DistributedSignalHandler(self.cfg.train.exit_signal)" in wheel.source("megatron/bridge/training/state.py")
    for name in ("state", "train", "pretrain", "setup", "initialize"):
        assert "signal_handler.__enter__" not in wheel.source(f"megatron/bridge/training/{name}.py")


def test_a_handler_of_someone_else_is_left_alone(run):
    def mine(number, frame):
        raise AssertionError

    previous = signal.signal(signal.SIGTERM, mine)
    try:
        seen = []
        training = run.training(profiling=WINDOW, on_step=lambda i: seen.append(signal.getsignal(signal.SIGTERM)))
        train(run, training)
        assert set(seen) == {mine}
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, previous)


@pytest.mark.parametrize("exit_signal_handler", [False, True])
def test_the_exit_signals_default_is_back_after_the_training(run, exit_signal_handler):
    during = []
    training = run.training(
        profiling=WINDOW,
        exit_signal_handler=exit_signal_handler,
        on_step=lambda iteration: during.append(signal.getsignal(signal.SIGTERM)),
    )
    train(run, training)
    assert signal.SIG_DFL not in during
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_evaluation_inside_the_window_is_a_range(run):
    train(run, run.training(profiling=WINDOW, eval_interval=1))
    names = [event["name"] for event in run.trace("iter-4-6")["traceEvents"] if event.get("cat") == "user_annotation"]
    assert names.count("evaluation") == 1
    assert run.iterations("iter-4-6") == [4, 5]


def test_a_training_started_anew_in_the_process_is_another_attempt(run):
    def fail(iteration):
        if iteration == 5:
            raise ZeroDivisionError

    training = run.training(profiling=WINDOW, on_step=fail)
    with ProfilingCallback(training.config, output_dir=run.root) as profiling:
        with pytest.raises(ZeroDivisionError):
            training.train([profiling])
        training.on_step, training.state.train_state.step = lambda iteration: None, 3
        training.train([profiling])
    assert run.manifest("iter-4-6")["status"] == "partial"
    assert "started anew" in run.manifest("iter-4-6")["reason"]
    assert run.manifest("iter-4-6.1")["status"] == "complete"
    assert run.iterations("iter-4-6.1") == [4, 5]


def test_losses_are_bit_identical_with_and_without_the_callback(run):
    plain = run.training(profiling=None)
    plain.train(None)
    assert train(run, run.training(profiling={**WINDOW, "record_shapes": True})).losses == plain.losses


@pytest.mark.parametrize("profiling", [None, {}])
def test_without_a_profiler_nothing_is_written_and_no_signal_touched(run, profiling):
    seen = []
    train(run, run.training(profiling=profiling, on_step=lambda i: seen.append(signal.getsignal(signal.SIGTERM))))
    assert set(seen) == {signal.SIG_DFL}
    # A directory was named, so the job says there that it may be asked for captures.
    assert [path.name for path in run.root.iterdir()] == ["on-demand"]


def test_settings_that_megatron_bridge_does_not_know_win(run):
    train(run, run.training(profiling=WINDOW), profile_ranks="all", pytorch_profiler_profile_memory=True)
    assert run.manifest("iter-4-6")["config"]["profile_ranks"] == "all"
    assert any(event.get("name") == "[memory]" for event in run.trace("iter-4-6")["traceEvents"])


def test_the_layout_of_the_config_is_in_the_manifest(run):
    train(run, run.training(profiling=WINDOW))
    assert run.manifest("iter-4-6")["coordinates"] == {name: [0, 1] for name in ("tp", "cp", "dp", "pp", "ep")}


@pytest.mark.parametrize(
    ("profiling", "settings", "message"),
    [
        ({**WINDOW, "profile_step_end": 4}, {}, "window is empty"),
        ({**WINDOW, "profile_step_end": 20}, {}, "train_iters=8"),
        ({**WINDOW, "use_nsys_profiler": True}, {}, "both on"),
        ({**WINDOW, "profile_ranks": []}, {}, "names no rank"),
        (WINDOW, {"profile_rank": [0]}, "profile_rank"),
    ],
)
def test_a_request_that_cannot_work_is_refused_before_training_and_changes_nothing(run, profiling, settings, message):
    training = run.training(profiling=profiling)
    with pytest.raises(ProfilingConfigError, match=message):
        ProfilingCallback(training.config, **settings)
    assert training.config.profiling.use_pytorch_profiler


def test_a_config_that_is_not_the_trainings_own_is_an_error_in_the_log_and_not_a_second_profiler(
    run, caplog, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    training = run.training(profiling=WINDOW)
    with ProfilingCallback(run.training(profiling=WINDOW).config, output_dir=run.root) as profiling:
        training.train([profiling])
    assert "profiling.use_pytorch_profiler is on in the config that Megatron Bridge trains with" in caplog.text
    assert not run.root.exists()
    assert training.steps == list(range(8))


def test_ranks_outside_the_world_end_the_profile_and_not_the_training(run, caplog):
    training = train(run, run.training(profiling={**WINDOW, "profile_ranks": [7]}))
    assert "names 7, but the job has 1 ranks" in caplog.text
    assert training.steps == list(range(8))


def test_under_torchrun_only_the_ranks_asked_for_write(run):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = run.process(launcher=torchrun, profiling={**WINDOW, "profile_ranks": [1]})
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in run.root.rglob("rank-*")) == ["rank-1.json", "rank-1.pt.trace.json.gz"]
    assert run.iterations("iter-4-6", rank=1) == [4, 5]
    assert run.manifest("iter-4-6", rank=1)["coordinates"]["dp"] == [1, 2]


# -- what of the release this relies on ------------------------------------------------------------------------------


def test_the_callback_listens_to_events_that_exist_and_only_where_something_happens(wheel):
    callbacks = wheel.module("megatron/bridge/training/callbacks.py")
    listened = {name for name in dir(ProfilingCallback) if name.startswith("on_")}
    assert listened <= callbacks.VALID_EVENTS
    manager = callbacks.normalize_callbacks([ProfilingCallback.__new__(ProfilingCallback)])
    assert {event for event in callbacks.VALID_EVENTS if manager.has_callbacks(event)} == listened
    # No event tells of an exception or an early exit, which is why the callback is a context manager.
    assert not {event for event in callbacks.VALID_EVENTS if "exception" in event or "exit" in event or "error" in event}


def test_events_come_around_the_step_and_before_the_iteration_is_counted(wheel):
    train = next(node for node in wheel.tree("megatron/bridge/training/train.py").body if getattr(node, "name", "") == "train")
    lines = {}
    for node in ast.walk(train):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "fire":
            lines[node.args[0].value] = node.lineno
            assert {keyword.arg for keyword in node.args[1].keywords} >= {"state", "model", "user_state"}
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
            "wrapped_train_step",
            "_should_skip_and_handle_iteration",
        ):
            lines[node.func.id] = node.lineno
        elif isinstance(node, ast.AugAssign) and ast.unparse(node.target) == "global_state.train_state.step":
            lines["counted"] = node.lineno
    order = ["on_train_start", "_should_skip_and_handle_iteration", "on_train_step_start", "wrapped_train_step"]
    order += ["on_train_step_end", "counted", "on_train_end"]
    assert sorted(lines, key=lines.get) == order


def test_the_built_in_profiling_reads_its_switches_after_the_callback_was_made(wheel):
    """They are looked at in `train` and in the metrics log, nowhere at import or in the config's own making."""
    readers = set()
    for name in wheel.names("megatron/bridge/training/"):
        for node in ast.walk(wheel.tree(name)):
            if isinstance(node, ast.Attribute) and node.attr in (
                "use_nsys_profiler",
                "use_pytorch_profiler",
                "record_memory_history",
            ):
                readers.add(os.path.basename(name))
    assert readers == {"config.py", "profiling.py", "train.py", "train_utils.py"}
