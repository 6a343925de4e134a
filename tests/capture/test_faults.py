"""What is captured survives whatever ends a training, and no fault of a profiler reaches the training."""

import json
import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

from bridge_profiling.capture import ProfilingHook
from bridge_profiling.capture.torch_profiler import TorchProfiler


def raise_at(wanted, error):
    def on_iteration(iteration):
        if iteration == wanted:
            raise error

    return on_iteration


def test_an_exception_inside_the_window_leaves_the_iterations_done_and_propagates(run):
    with pytest.raises(ZeroDivisionError, match="planted"):
        run.train(run.config(4, 8), range(10), on_iteration=raise_at(6, ZeroDivisionError("planted")))
    assert run.iterations("iter-4-8") == [4, 5]
    manifest = run.manifest("iter-4-8")
    assert manifest["status"] == "partial"
    assert manifest["captured"]["iterations"] == [4, 5]
    assert manifest["interrupted"] == [6]
    assert "ZeroDivisionError: planted" in manifest["reason"]


def test_the_interrupted_iteration_is_in_the_trace_under_a_name_of_its_own(run):
    with pytest.raises(ValueError, match="planted"):
        run.train(run.config(4, 8), range(10), on_iteration=raise_at(6, ValueError("planted")))
    names = {event.get("name") for event in run.trace("iter-4-8")["traceEvents"]}
    assert "interrupted ProfilerStep#6" in names
    assert "ProfilerStep#6" not in names


def test_an_exception_in_the_windows_first_iteration_leaves_a_readable_trace(run):
    with pytest.raises(ValueError, match="planted"):
        run.train(run.config(0, 2), range(4), on_iteration=raise_at(0, ValueError("planted")))
    assert run.iterations("iter-0-2") == []
    assert run.manifest("iter-0-2")["status"] == "partial"


def test_an_early_break_leaves_the_iterations_done(run):
    def until_five():
        yield from range(6)

    run.train(run.config(4, 9), until_five())
    assert run.iterations("iter-4-9") == [4, 5]
    manifest = run.manifest("iter-4-9")
    assert manifest["status"] == "partial"
    assert "training ended after iteration 5, inside the window 4-9" in manifest["reason"]


def test_a_break_in_the_middle_of_an_iteration_writes_too(run):
    with ProfilingHook(run.config(1, 5), rank=0, output_dir=run.root) as hook:
        for iteration in range(10):
            with hook.iteration(iteration):
                if iteration == 2:
                    break
    assert run.manifest("iter-1-5")["status"] == "partial"
    assert 1 in run.iterations("iter-1-5")


def test_system_exit_inside_the_window_is_written_and_propagates(run):
    with pytest.raises(SystemExit):
        run.train(run.config(2, 6), range(8), on_iteration=raise_at(4, SystemExit(143)))
    assert run.iterations("iter-2-6") == [2, 3]
    assert "code 143" in run.manifest("iter-2-6")["reason"]


def test_an_exception_before_the_window_leaves_a_manifest_that_says_so(run):
    with pytest.raises(ValueError, match="planted"):
        run.train(run.config(4, 6), range(8), on_iteration=raise_at(3, ValueError("planted")))
    manifest = run.manifest("iter-4-6")
    assert manifest["status"] == "missed"
    assert "planted" in manifest["reason"]


def test_a_loop_that_retries_an_iteration_keeps_its_capture(run):
    with ProfilingHook(run.config(1, 3), rank=0, output_dir=run.root) as hook:
        for iteration in (0, 1, 2):
            try:
                with hook.iteration(iteration):
                    if iteration == 1:
                        raise ValueError("skipped batch")
            except ValueError:
                pass
    manifest = run.manifest("iter-1-3")
    assert manifest["status"] == "partial"
    assert manifest["captured"]["iterations"] == [2]
    assert "iteration 1 was interrupted" in manifest["reason"]


@pytest.mark.parametrize("method", ["open", "warm_up", "start", "stop"])
def test_a_profiler_that_fails_leaves_the_losses_alone(run, monkeypatch, caplog, method):
    run.train(None, range(8))
    plain, run.losses = run.losses, []

    def fail(self, *arguments):
        raise RuntimeError("the profiler broke")

    monkeypatch.setattr(TorchProfiler, method, fail)
    run.train(run.config(2, 5), range(8))
    assert run.losses == plain
    manifest = run.manifest("iter-2-5")
    assert manifest["status"] == "failed"
    assert "the profiler broke" in manifest["reason"]
    assert "the profiler broke" in caplog.text
    assert not torch.autograd._profiler_enabled()


def test_a_profiler_of_the_users_own_is_left_alone(run):
    with torch.profiler.profile() as theirs:
        run.train(run.config(1, 3), range(5))
    assert any(event.key == "aten::linear" for event in theirs.key_averages())
    manifest = run.manifest("iter-1-3")
    assert manifest["status"] == "failed"
    assert "another profiler" in manifest["reason"]


def test_ranges_that_are_open_when_the_training_starts_a_profiler_of_its_own_end_before_it(tmp_path):
    """torch writes their ends to freed memory otherwise, and this process crashes in one of these windows."""
    many_ranges(
        tmp_path,
        f"""
        for window in range(10):
            config = ProfilingConfig(use_pytorch_profiler=True, profile_step_start=1, profile_step_end=3)
            with ProfilingHook(config, rank=0, output_dir={str(tmp_path / "profiles")!r}) as hook:
                theirs = torch.profiler.profile()
                for iteration in range(4):
                    with hook.iteration(iteration), contextlib.ExitStack() as ranges:
                        for number in range(3000 if iteration == 1 else 1):
                            ranges.enter_context(hook.range(f"ours {{number}}"))
                        if iteration == 1:
                            theirs.start()
                        compute()
                theirs.stop()
        theirs.export_chrome_trace({str(tmp_path / "theirs.json")!r})
        """,
    )
    names = {event["name"] for event in json.loads((tmp_path / "theirs.json").read_text())["traceEvents"]}
    assert "aten::add" in names
    assert not [name for name in names if name.startswith(("ours", "ProfilerStep#"))]
    manifests = [json.loads(path.read_text()) for path in (tmp_path / "profiles" / "manifest").rglob("rank-0.json")]
    assert [(one["status"], "another profiler" in one["reason"]) for one in manifests] == [("failed", True)] * 10


def test_ranges_that_are_open_when_a_window_closes_end_with_it(tmp_path, run):
    """As above, with the next window's profiler in the other's place."""
    many_ranges(
        tmp_path,
        f"""
        config = ProfilingConfig(
            use_pytorch_profiler=True, profile_step_start=1, profile_step_end=2, profile_every=2, profile_at_most=8
        )
        ranges = contextlib.ExitStack()
        with ProfilingHook(config, rank=0, output_dir={str(run.root)!r}) as hook:
            for iteration in range(17):
                with hook.iteration(iteration):
                    compute()
                    if iteration % 2:
                        ranges.close()
                        for number in range(3000):
                            ranges.enter_context(hook.range(f"ours {{number}}"))
                    compute()
        ranges.close()
        """,
    )
    for start in range(1, 17, 2):
        assert run.manifest(f"iter-{start}-{start + 1}")["status"] == "complete"
    # The oldest windows' ranges and the last one's: all of them are there, and whole.
    for folder in ("iter-1-2", "iter-15-16"):
        events = [one for one in run.trace(folder)["traceEvents"] if one["name"].startswith("ours ") and one["ph"] == "X"]
        assert {one["name"] for one in events} == {f"ours {number}" for number in range(3000)}
        assert all(one["args"].get("finished", True) for one in events)


def many_ranges(tmp_path, loop):
    """Run a loop in a process of its own, which must live."""
    prelude = """
        import contextlib, torch
        from bridge_profiling import ProfilingConfig
        from bridge_profiling.capture import ProfilingHook

        def compute():
            for _ in range(50):
                torch.ones(3) + 1
        """
    run_script(tmp_path, textwrap.dedent(prelude) + textwrap.dedent(loop), code=0)


def run_script(tmp_path, source, *, code):
    """Run a script in a process of its own, which must end with this exit code."""
    script = tmp_path / "train.py"
    script.write_text(source)
    done = subprocess.run([sys.executable, str(script)], env=os.environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr


def test_an_output_directory_that_cannot_be_made_is_one_line_and_training_goes_on(tmp_path, run, caplog):
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    run.root = blocker / "profiles"
    run.train(run.config(1, 3), range(5))
    assert len(run.losses) == 5
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert "Training goes on" in errors[0].getMessage()


def test_an_output_directory_that_vanishes_fails_the_capture_alone(run, caplog):
    def block(iteration):
        if iteration == 2:
            (run.root / "torch").write_text("in the way")

    run.train(run.config(1, 3), range(5), on_iteration=block)
    assert len(run.losses) == 5
    assert run.manifest("iter-1-3")["status"] == "failed"


def test_a_killed_process_leaves_a_manifest_that_is_true(tmp_path):
    manifest = child(tmp_path, "os._exit(9) if iteration == 2 else None", code=9)
    assert manifest["status"] == "failed"
    assert "died inside the window" in manifest["reason"]


def test_a_process_killed_before_the_window_leaves_a_manifest_that_is_true(tmp_path):
    manifest = child(tmp_path, "os._exit(9) if iteration == 0 else None", code=9)
    assert manifest["status"] == "missed"
    assert "before it reached iteration 1" in manifest["reason"]


def test_a_loop_that_never_leaves_the_hook_writes_at_exit(tmp_path):
    """The interpreter would crash with a live trace; the hook's last resort writes it."""
    manifest = child(tmp_path, "sys.exit(3) if iteration == 2 else None", code=3, leave=False)
    assert manifest["status"] == "partial"
    assert manifest["captured"]["iterations"] == [1]


def child(tmp_path, statement, *, code, leave=True):
    """Train in a process of its own, in which `statement` runs in every iteration; return its manifest."""
    source = f"""
        import os, sys, torch
        from bridge_profiling import ProfilingConfig
        from bridge_profiling.capture import ProfilingHook
        config = ProfilingConfig(use_pytorch_profiler=True, profile_step_start=1, profile_step_end=5)
        hook = ProfilingHook(config, rank=0, output_dir={str(tmp_path / "profiles")!r})
        hook.__enter__()
        try:
            for iteration in range(8):
                with hook.iteration(iteration):
                    torch.ones(3).sum()
                    {statement}
        finally:
            if {leave}:
                hook.__exit__(*sys.exc_info())
        """
    run_script(tmp_path, textwrap.dedent(source), code=code)
    return json.loads((tmp_path / "profiles" / "manifest" / "iter-1-5" / "rank-0.json").read_text())


@pytest.mark.parametrize("left", [True, False])
def test_a_process_that_the_training_forked_ends_without_a_word_about_the_capture(run, left):
    """It has captured nothing and missed nothing: the manifest is the training's."""
    hook = ProfilingHook(run.config(1, 3), rank=0, output_dir=run.root)
    with hook:
        for iteration in range(5):
            with hook.iteration(iteration):
                pass
        hook._schedule.windows[0]._writer.join()
        before = run.manifest("iter-1-3")
        child = os.fork()
        if child == 0:
            try:
                hook.__exit__(None, None, None) if left else hook._close("the process exited without leaving the hook")
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert run.manifest("iter-1-3") == before
    assert run.manifest("iter-1-3")["status"] == "complete"


def test_a_process_that_can_start_no_thread_writes_its_trace_itself(run, monkeypatch, caplog):
    """From Python 3.12 on an interpreter that exits starts none: so it is where nobody left the hook."""

    def refuse(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    run.train(run.config(1, 3), range(5))
    monkeypatch.undo()
    assert run.manifest("iter-1-3")["status"] == "complete"
    assert run.iterations("iter-1-3") == [1, 2]
    assert [record.getMessage().partition(":")[2] for record in caplog.records if record.levelname == "ERROR"] == [
        " no captures on demand: RuntimeError: can't create new thread at interpreter shutdown. Training goes on."
    ]
