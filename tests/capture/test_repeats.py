"""Windows that repeat: each in a folder of its own, none twice, and a run that ends before the last one is no failure."""

import json
import logging
import pickle

import pytest

from bridge_profiling.analysis import Run
from bridge_profiling.capture.torch_profiler import TorchProfiler
from bridge_profiling.cli import main
from bridge_profiling.manifest import find_captures
from bridge_profiling.traces.discover import find_run


def folders(run):
    return sorted((path.name for path in (run.root / "manifest").iterdir()), key=lambda name: int(name.split("-")[1]))


def repeated(run, at_most=3, **more):
    return run.config(4, 6, profile_every=10, profile_at_most=at_most, **more)


def test_every_window_is_captured_exactly_and_says_what_asked_for_it(run):
    run.train(None, range(40))
    plain, run.losses = run.losses, []
    run.train(repeated(run), range(40))
    assert run.losses == plain
    assert folders(run) == ["iter-4-6", "iter-14-16", "iter-24-26"]
    for number, folder in enumerate(folders(run), 1):
        start = 10 * number - 6
        assert run.iterations(folder) == [start, start + 1]
        manifest = run.manifest(folder)
        assert (manifest["status"], manifest["reason"]) == ("complete", None)
        assert (manifest["trigger"]["kind"], manifest["trigger"]["number"]) == ("repeat", number)
        assert manifest["trigger"]["reason"] == f"one every 10 iterations, number {number} of at most 3"
        assert manifest["config"]["profile_step_start"] == start
        assert manifest["other_windows"] == [[at, at + 2] for at in (4, 14, 24) if at != start]


def test_one_window_alone_was_configured(run):
    run.train(run.config(1, 2), range(3))
    assert run.manifest("iter-1-2")["trigger"]["kind"] == "configured"


@pytest.mark.parametrize(
    ("first", "expected"),
    [(0, ["iter-4-6", "iter-14-16", "iter-24-26"]), (6, ["iter-14-16", "iter-24-26"]), (16, ["iter-24-26"])],
)
def test_a_resume_leaves_nothing_of_windows_that_are_past(run, first, expected):
    run.train(repeated(run), range(first, 40))
    assert folders(run) == expected
    assert all(run.manifest(folder)["status"] == "complete" for folder in expected)


def test_a_resume_inside_a_window_captures_the_rest_of_it_and_the_later_ones(run):
    run.train(repeated(run), range(15, 40))
    assert folders(run) == ["iter-14-16", "iter-24-26"]
    assert [run.manifest(folder)["status"] for folder in folders(run)] == ["partial", "complete"]
    assert run.iterations("iter-14-16") == [15]


def test_a_resume_past_all_of_them_says_so(run):
    run.train(repeated(run), range(50, 55))
    [folder] = folders(run)
    assert run.manifest(folder)["status"] == "missed"
    assert "training started at iteration 50" in run.manifest(folder)["reason"]


def test_a_run_that_ends_before_the_last_window_only_says_how_many_were_captured(run, caplog):
    caplog.set_level(logging.INFO)
    run.train(repeated(run), range(17))
    assert folders(run) == ["iter-4-6", "iter-14-16"]
    assert "captured 2 of at most 3 windows, one every 10 iterations" in caplog.text
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_windows_may_follow_each_other_without_an_iteration_between(run):
    run.train(run.config(2, 4, profile_every=2, profile_at_most=3), range(12))
    assert folders(run) == ["iter-2-4", "iter-4-6", "iter-6-8"]
    assert [run.iterations(folder) for folder in folders(run)] == [[2, 3], [4, 5], [6, 7]]


def test_a_window_that_follows_at_once_is_prepared_only_when_the_one_before_it_is_closed(run, monkeypatch):
    """A memory history is one for the process: closing the first window's would end the second's too."""
    calls = []
    for name in ("open", "close"):
        monkeypatch.setattr(TorchProfiler, name, noting(calls, name, getattr(TorchProfiler, name)))
    run.train(run.config(2, 4, profile_every=2, profile_at_most=3), range(12))
    assert calls == [(name, start) for start in (2, 4, 6) for name in ("open", "close")]


def noting(calls, name, real):
    def method(self):
        calls.append((name, self.files.window.start))
        real(self)

    return method


def test_a_second_run_into_the_same_directory_overwrites_none_of_them(run):
    run.train(repeated(run, at_most=2), range(20))
    run.train(repeated(run, at_most=2), range(20))
    assert sorted(path.name for path in (run.root / "torch").iterdir()) == [
        "iter-14-16",
        "iter-14-16.1",
        "iter-4-6",
        "iter-4-6.1",
    ]


def test_a_run_that_dies_inside_a_later_window_leaves_the_earlier_ones_complete(run):
    def fails(iteration):
        if iteration == 15:
            raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        run.train(repeated(run), range(40), on_iteration=fails)
    assert [run.manifest(folder)["status"] for folder in folders(run)] == ["complete", "partial"]
    assert run.iterations("iter-14-16") == [14]


def wait_for_writers(hook):
    for one in hook._schedule.windows:
        if one._writer is not None:
            one._writer.join()


def test_what_was_recorded_is_let_go_of_when_the_next_window_comes(run):
    held = []

    def look(iteration, hook):
        # What is not written yet is held on to.
        wait_for_writers(hook)
        held.append(sum(one.profilers[0]._profile is not None for one in hook._schedule.windows))

    run.train(repeated(run), range(40), between=look)
    assert max(held) == 1


# -- at the desk ---------------------------------------------------------------------------------------------------------


def test_the_window_written_last_is_shown_by_its_name_and_the_others_are_named(run):
    # On a busy machine an early window may be written after a late one.
    run.train(repeated(run), range(40), between=lambda iteration, hook: wait_for_writers(hook))
    found = find_run(run.root)
    assert [capture.path.parent.name for capture in found.captures] == ["iter-24-26"]
    [caveat] = found.caveats
    assert caveat.text == (
        "showing torch/iter-24-26, the newest; 2 older kineto captures skipped, in torch/iter-14-16, torch/iter-4-6."
        f" To read the next one, pass {run.root}/torch/iter-14-16"
    )


def test_the_report_says_of_which_window_it_is(run, monkeypatch, capsys):
    run.train(repeated(run, at_most=2), range(30))
    monkeypatch.setattr("sys.argv", ["bridge-profiling", "report", str(run.root), "-o", str(run.root / "report.html")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert "showing torch/iter-14-16, the newest; 1 older kineto capture skipped, in torch/iter-4-6" in capsys.readouterr().out


def test_a_windows_folder_is_read_with_its_manifest(run):
    run.train(repeated(run), range(40))
    found = find_run(run.root / "torch" / "iter-14-16")
    assert found.caveats == []
    assert [capture.manifest.captured for capture in found.captures] == [[14, 15]]


def test_windows_of_different_ranks_are_not_shown_as_one(run):
    run.train(run.config(1, 2, profile_ranks=[0]), range(4), rank=0, world_size=2)
    run.train(run.config(2, 3, profile_ranks=[1]), range(4), rank=1, world_size=2)
    found = find_run(run.root)
    assert [(capture.rank, capture.path.parent.name) for capture in found.captures] == [(1, "iter-2-3")]
    assert [each.code for each in found.caveats] == ["captures_skipped"]


def test_iterations_of_other_windows_are_not_taken_for_unprofiled_ones(run):
    run.train(repeated(run), range(40))
    for folder in folders(run):
        [capture] = find_captures(run.root, folder)
        disturbed = {0, 3, 4, 5, 6, 13, 14, 15, 16, 23, 24, 25, 26}
        assert set(capture.durations_by_iteration(profiled=False)) == set(range(40)) - disturbed


def test_a_memory_history_of_another_window_is_told_and_iterations_are_the_traces(run):
    run.train(run.config(1, 3), range(8))
    manifest = run.manifest("iter-1-3")
    snapshot = run.root / "memory" / "iter-5-6" / "rank-0.pickle"
    for path, content in (
        (snapshot, pickle.dumps({"segments": [], "device_traces": []})),
        (run.root / "manifest/iter-5-6/rank-0.json", b""),
    ):
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    manifest["window"], manifest["captured"]["iterations"] = {"start": 5, "end": 6}, [5]
    artifacts = [{"path": "memory/iter-5-6/rank-0.pickle", "bytes": 1}]
    manifest["profilers"] = [{"name": "memory", "status": "complete", "reason": None, "artifacts": artifacts}]
    (run.root / "manifest/iter-5-6/rank-0.json").write_text(json.dumps(manifest))
    [caveat] = find_run(run.root).caveats
    assert caveat.code == "several_windows"
    assert caveat.text.endswith("kineto from iter-1-3, memory from iter-5-6")
    with Run(run.root) as found:
        [shown] = found.manifests
    assert shown.captured == [1, 2]
