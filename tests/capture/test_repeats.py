"""Windows that repeat: each in a folder of its own, none twice, and a run that ends before the last one is no failure."""

import logging

import pytest

from bridge_profiling.capture.torch_profiler import TorchProfiler
from bridge_profiling.manifest import find_captures
from bridge_profiling.traces.discover import find_run


def repeated(run, every=10):
    return run.config(4, 6, profile_every=every, profile_at_most=3)


def wait_for_writers(iteration, hook):
    """On a busy machine an early window may be written after a late one."""
    for one in hook._schedule.windows:
        if one._writer is not None:
            one._writer.join()


def test_every_window_is_captured_exactly_and_says_what_asked_for_it(run):
    run.train(None, range(40))
    plain, run.losses = run.losses, []
    config = run.config(4, 6, profile_every=10, profile_at_most=3, record_shapes=True, pytorch_profiler_collect_callstack=True)
    run.train(config, range(40), between=wait_for_writers)
    assert run.losses == plain
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
        disturbed = {0, 3, 4, 5, 6, 13, 14, 15, 16, 23, 24, 25, 26}
        assert set(capture.durations_by_iteration(profiled=False)) == set(range(40)) - disturbed
    # The window written last is the one that an analysis shows; a window's folder is read with its own manifest.
    found, one = find_run(run.root), find_run(run.root / "torch" / "iter-14-16")
    assert [capture.path.parent.name for capture in found.captures] == ["iter-24-26"]
    assert "; 2 older kineto captures skipped, in torch/iter-14-16, torch/iter-4-6." in found.caveats[0].text
    assert (one.caveats, [capture.manifest.captured for capture in one.captures]) == ([], [[14, 15]])


@pytest.mark.parametrize(
    ("every", "ran", "expected"),
    [
        (
            10,
            range(5, 40),
            {"iter-4-6": ("partial", [5]), "iter-14-16": ("complete", [14, 15]), "iter-24-26": ("complete", [24, 25])},
        ),
        # A resume leaves nothing of windows that are past.
        (10, range(6, 40), {"iter-14-16": ("complete", [14, 15]), "iter-24-26": ("complete", [24, 25])}),
        (10, range(15, 40), {"iter-14-16": ("partial", [15]), "iter-24-26": ("complete", [24, 25])}),
        (10, range(16, 40), {"iter-24-26": ("complete", [24, 25])}),
        (10, range(50, 55), {"iter-24-26": ("missed", None)}),
        # Of windows that touch, the one that begins where the run resumes is whole.
        (2, range(8, 12), {"iter-8-10": ("complete", [8, 9])}),
    ],
)
def test_a_resume_captures_the_windows_that_are_left(run, every, ran, expected):
    run.train(repeated(run, every), ran)
    assert {folder: run.outcome(folder) for folder in run.folders()} == expected


def test_a_run_that_ends_before_the_last_window_only_says_how_many_were_captured(run, caplog):
    caplog.set_level(logging.INFO)
    for _ in range(2):
        run.train(repeated(run), range(17))
    # The second run has overwritten none of them.
    folders = ("iter-4-6", "iter-4-6.1", "iter-14-16", "iter-14-16.1")
    assert {folder: run.outcome(folder)[0] for folder in run.folders()} == dict.fromkeys(folders, "complete")
    assert "captured 2 of at most 3 windows, one every 10 iterations" in caplog.text
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_a_window_that_follows_at_once_is_prepared_only_when_the_one_before_it_is_closed(run, monkeypatch):
    """A memory history is one for the process: closing the first window's would end the second's too."""
    calls = []

    def noting(name, real):
        def noted(self):
            calls.append((name, self.files.window.start))
            real(self)

        return noted

    for name in ("open", "close"):
        monkeypatch.setattr(TorchProfiler, name, noting(name, getattr(TorchProfiler, name)))
    run.train(run.config(2, 4, profile_every=2, profile_at_most=3), range(12))
    assert calls == [(name, start) for start in (2, 4, 6) for name in ("open", "close")]
    assert [run.outcome(folder)[1] for folder in run.folders()] == [[2, 3], [4, 5], [6, 7]]


def test_a_recording_is_freed_when_the_next_window_comes(run):
    held = []

    def count(iteration, hook):
        # Recordings that are not written yet stay.
        wait_for_writers(iteration, hook)
        held.append(sum(one.profilers[0]._profile is not None for one in hook._schedule.windows))

    run.train(repeated(run), range(40), between=count)
    assert max(held) == 1
