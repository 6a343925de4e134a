"""The trace holds exactly the iterations that the window and the run have in common; windows that repeat are one each."""

from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest

from bridge_profiling.capture import ProfilingHook
from bridge_profiling.capture.torch_profiler import TorchProfiler
from bridge_profiling.common.errors import ProfilingConfigError
from bridge_profiling.layout import ParallelLayout
from bridge_profiling.manifest import find_captures
from bridge_profiling.settings.profiling import ProfilingConfig
from tests.capture.conftest import at, raising


@pytest.mark.parametrize(
    ("window", "ran", "status", "captured", "reason"),
    [
        ((0, 4), range(4), "complete", [0, 1, 2, 3], None),
        # A resume; with iteration 3 the profiler warms up before the window.
        ((4, 7), range(3, 10), "complete", [4, 5, 6], None),
        ((4, 7), range(4, 10), "complete", [4, 5, 6], None),
        ((4, 7), range(5, 10), "partial", [5, 6], "the run's first iteration was 5, inside the window 4-7"),
        ((4, 7), range(7, 10), "missed", None, "training started at iteration 7, past the window 4-7"),
        # The end of training
        ((4, 6), range(0), "missed", None, "training ended before its first iteration, before the window 4-6"),
        ((4, 6), range(4), "missed", None, "training ended after iteration 3, before the window 4-6"),
        ((4, 9), range(6), "partial", [4, 5], "training ended after iteration 5, inside the window 4-9"),
        # Loops that skip iterations, or go back
        ((2, 5), [0, 2, 3, 4, 5], "complete", [2, 3, 4], None),
        ((2, 5), [0, 3, 4, 5], "partial", [3, 4], "the training skipped iterations 1 to 2"),
        ((2, 5), [1, 3, 4, 5], "partial", [3, 4], "the training skipped iteration 2"),
        ((2, 5), [0, 1, 2, 3, 2, 3, 4, 5], "partial", [2, 3, 2, 3, 4], "the training went back from iteration 3 to 2"),
        ((2, 5), [0, 1, 2, 2, 3, 4], "partial", [2, 2, 3, 4], "the training went back from iteration 2 to 2"),
        ((2, 5), [0, 1, 2, 3, 0, 1], "partial", [2, 3], "iteration 0 came before the window 2-5 was complete"),
        ((2, 5), [0, 1, 2, 3, 4, 1, 2, 3, 4], "complete", [2, 3, 4], None),
        ((2, 5), [0, 1, 7], "missed", None, "the training went from iteration 1 to 7, past the window 2-5"),
        ((4, 7), [3, 4, 9], "partial", [4], "iteration 9 came before the window 4-7 was complete"),
    ],
)
def test_a_capture_is_what_the_window_and_the_run_have_in_common(run, window, ran, status, captured, reason):
    run.train(run.config(*window), ran)
    [folder] = run.folders()
    assert folder == f"iter-{window[0]}-{window[1]}"
    assert (*run.outcome(folder), run.manifest(folder)["reason"]) == (status, captured, reason)
    if captured is not None:
        assert sum(event["name"] == "aten::linear" for event in run.trace(folder)) == len(captured)


@pytest.mark.parametrize(
    ("window", "strikes_in", "error", "status", "captured", "reason"),
    [
        ((4, 8), 6, ZeroDivisionError("injected"), "partial", [4, 5], "training raised ZeroDivisionError: injected"),
        ((0, 2), 0, ValueError("injected"), "partial", [], "training raised ValueError: injected before its first iteration"),
        ((2, 6), 4, KeyboardInterrupt(), "partial", [2, 3], "training was interrupted from the keyboard"),
        ((4, 6), 3, ValueError("injected"), "missed", None, "training raised ValueError: injected"),
    ],
)
def test_an_exception_propagates_and_leaves_the_iterations_done(run, window, strikes_in, error, status, captured, reason):
    with pytest.raises(type(error)):
        run.train(run.config(*window), range(10), on_iteration=at(strikes_in, raising(error)))
    [folder] = run.folders()
    manifest = run.manifest(folder)
    after = f" after iteration {strikes_in - 1}" if strikes_in else ""
    where = "before" if captured is None else "inside"
    assert run.outcome(folder) == (status, captured)
    assert manifest["reason"] == f"{reason}{after}, {where} the window {window[0]}-{window[1]}"
    assert manifest["interrupted"] == ([] if captured is None else [strikes_in])
    if captured is not None:
        names = {event["name"] for event in run.trace(folder)}
        assert f"interrupted ProfilerStep#{strikes_in}" in names


@pytest.mark.parametrize(
    ("end", "breaks_in", "reason"),
    [(4, None, "iteration 1 was interrupted"), (5, 3, "training ended after iteration 3, inside the window 1-5")],
)
def test_a_loop_that_skips_a_batch_or_breaks_off_inside_an_iteration_keeps_its_capture(run, end, breaks_in, reason):
    with ProfilingHook(run.config(1, end), rank=0, output_dir=run.root) as hook:
        for iteration in range(6):
            with suppress(ValueError), hook.iteration(iteration):
                if iteration == 1:
                    raise ValueError("skipped batch")
                if iteration == breaks_in:
                    break
    [folder] = run.folders()
    assert (*run.outcome(folder), run.manifest(folder)["reason"]) == ("partial", [2, 3], reason)


@pytest.mark.parametrize(("ranks", "expected"), [([1], [1]), ("all", [0, 1]), ("pp", [0])])
def test_only_the_ranks_asked_for_write(run, ranks, expected):
    for rank in (0, 1):
        run.train(run.config(1, 2, profile_ranks=ranks), range(3), rank=rank, world_size=2)
    written = [f"rank-{rank}.{kind}" for rank in expected for kind in ("json", "pt.trace.json.gz")]
    assert sorted(path.name for path in run.root.rglob("rank-*")) == written


def wait_for_writers(iteration, hook):
    """On a busy machine an early window may be written after a late one."""
    for one in hook._windows.all:
        if one._writer is not None:
            one._writer.join()


def test_every_window_is_captured_exactly_and_says_what_asked_for_it(run):
    config = run.config(4, 6, profile_every=10, profile_at_most=3, record_shapes=True, pytorch_profiler_collect_callstack=True)
    run.train(config, range(40), between=wait_for_writers)
    assert run.folders() == ["iter-4-6", "iter-14-16", "iter-24-26"]
    for number, folder in enumerate(run.folders(), 1):
        start, manifest = 10 * number - 6, run.manifest(folder)
        assert run.outcome(folder) == ("complete", [start, start + 1])
        reason = f"one every 10 iterations, number {number} of at most 3"
        assert [manifest["trigger"][key] for key in ("kind", "number", "reason")] == ["repeat", number, reason]
        assert manifest["config"]["profile_step_start"] == start
        assert manifest["other_windows"] == [[at, at + 2] for at in (4, 14, 24) if at != start]
        # Their iterations are not taken for unprofiled ones.
        [capture] = find_captures(run.root, folder)
        undisturbed = {*range(40)} - {0, 3, 4, 5, 6, 13, 14, 15, 16, 23, 24, 25, 26}
        assert set(capture.durations_by_iteration(profiled=False)) == undisturbed


@pytest.mark.parametrize(
    ("every", "ran", "expected"),
    [
        # A resume leaves nothing of windows that are past.
        (10, range(6, 40), {"iter-14-16": ("complete", [14, 15]), "iter-24-26": ("complete", [24, 25])}),
        (10, range(15, 40), {"iter-14-16": ("partial", [15]), "iter-24-26": ("complete", [24, 25])}),
        (10, range(50, 55), {"iter-24-26": ("missed", None)}),
        # Of windows that touch, the one that begins where the run resumes is whole.
        (2, range(8, 12), {"iter-8-10": ("complete", [8, 9])}),
    ],
)
def test_a_resume_captures_the_windows_that_are_left(run, every, ran, expected):
    run.train(run.config(4, 6, profile_every=every, profile_at_most=3), ran)
    assert {folder: run.outcome(folder) for folder in run.folders()} == expected


def test_a_window_that_follows_at_once_is_prepared_only_when_the_one_before_it_is_closed(run, monkeypatch):
    """A memory history is one for the process: closing the first window's would end the second's too."""
    calls = []
    for real in (TorchProfiler.open, TorchProfiler.close):

        def noted(self, real=real):
            calls.append((real.__name__, self.files.window.start))
            real(self)

        monkeypatch.setattr(TorchProfiler, real.__name__, noted)
    run.train(run.config(2, 4, profile_every=2, profile_at_most=3), range(12))
    assert calls == [(name, start) for start in (2, 4, 6) for name in ("open", "close")]
    assert [run.outcome(folder)[1] for folder in run.folders()] == [[2, 3], [4, 5], [6, 7]]


def test_a_recording_is_freed_when_the_next_window_comes(run):
    held = []

    def count(iteration, hook):
        # Recordings that are not written yet stay.
        wait_for_writers(iteration, hook)
        held.append(sum(one.profilers[0]._profile is not None for one in hook._windows.all))

    run.train(run.config(4, 6, profile_every=10, profile_at_most=3), range(40), between=count)
    assert max(held) == 1


@pytest.mark.parametrize(
    ("passed", "joined", "same"),
    [
        ({"rank": 0}, (1, 2), False),
        ({"rank": 0, "world_size": 2}, (1, 2), False),
        ({"rank": 0, "layout": ParallelLayout(world_size=2)}, (1, 2), False),
        ({"rank": 1, "world_size": 2}, (1, 2), True),
        ({"rank": 3, "world_size": 4}, (1, 2), True),  # a world of each node
        ({"rank": 3, "world_size": 4}, (0, 1), True),
        ({"rank": 1, "world_size": 2}, None, True),
    ],
)
def test_a_rank_that_torch_distributed_contradicts_is_refused(tmp_path, monkeypatch, passed, joined, same):
    world = None if joined is None else SimpleNamespace(get_rank=lambda: joined[0], get_world_size=lambda: joined[1])
    monkeypatch.setattr("bridge_profiling.capture.hook.initialized_distributed", lambda: world)
    refused = pytest.raises(ProfilingConfigError, match=r"rank=0 is not this process's rank, .* is 1 of 2")
    with nullcontext() if same else refused:
        ProfilingHook(ProfilingConfig(), output_dir=tmp_path, **passed)
    ProfilingHook(None, **passed)
    assert not any(tmp_path.iterdir())
