"""Listening for requests: they are carried out while training goes on, and no file there delays it."""

import errno
import json
import os
import threading
from dataclasses import replace

import pytest

from bridge_profiling.capture import ProfilingHook
from bridge_profiling.capture.control.planning import plan_capture
from bridge_profiling.capture.control.protocol import RequestDirectory
from bridge_profiling.capture.window import NEVER
from tests.capture.conftest import Training
from tests.capture.control.conftest import STATUS, requested


def test_a_request_is_carried_out_after_the_window_of_the_config(tmp_path):
    training = Training(tmp_path, use_pytorch_profiler=True, profile_step_start=2, profile_step_end=4)

    def request(iteration):
        if iteration == 20:
            training.requests.submit(requested())

    training.run(range(10**6), on_iteration=request, until=training.done)
    first, second = training.manifests()
    assert [one["trigger"]["kind"] for one in (first, second)] == ["configured", "request"]
    assert [one["status"] for one in (first, second)] == ["complete", "complete"]
    assert second["captured"]["iterations"] == [second["window"]["start"], second["window"]["start"] + 1]


def test_it_works_where_there_are_no_hard_links(tmp_path, monkeypatch):
    """Object stores that are mounted as file systems have none."""

    def refuse(*paths):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    unread = RequestDirectory(tmp_path / "unread")
    unread.path.mkdir(parents=True)
    assert unread.submit(requested())
    assert not unread.submit(requested(id="another"))
    training = Training(tmp_path, use_pytorch_profiler=True, profile_step_start=2, profile_step_end=4)

    def request(iteration):
        if iteration == 20:
            assert training.requests.submit(requested())

    training.run(range(10**6), on_iteration=request, until=training.done)
    assert [one["status"] for one in training.manifests()] == ["complete", "complete"]


def test_a_training_that_ends_before_the_iterations_asked_for_says_so(tmp_path):
    training = Training(tmp_path)

    def request(iteration):
        if iteration == 10:
            training.requests.submit(requested(start=10**6))

    training.run(range(10**5), on_iteration=request, until=lambda: (training.requests.path / "answers").exists())
    [manifest] = training.manifests()
    assert manifest["status"] == "missed"
    assert "training ended after iteration" in manifest["reason"]
    [done] = (training.requests.path / "done").glob("*.json")
    assert "training ended" in json.loads(done.read_text())["ended"]


def test_requests_of_an_earlier_run_are_closed(tmp_path):
    training = Training(tmp_path)
    training.requests.write("accepted.json", accepted(id="old", ranks=[0], start=50, end=52))
    training.requests.submit(requested(start=60, id="unread"))
    training.run(range(100))
    assert not (tmp_path / "manifest").exists()
    assert json.loads((training.requests.path / "done" / "old.json").read_text())["ended"].startswith("the job ended")
    [refused] = (training.requests.path / "refused").glob("*.json")
    assert "the job has completed 0 iterations" in json.loads(refused.read_text())["refused"]


def test_a_name_used_before_is_refused(tmp_path):
    training = Training(tmp_path)
    due = [lambda: True, training.done]

    def request(iteration):
        if iteration >= 20 and due and due[0]() and training.requests.submit(requested(id="mine")):
            del due[0]

    refused = training.requests.path / "refused"
    training.run(range(10**5), request, until=lambda: list(refused.glob("*.json")))
    assert len(training.manifests()) == 1
    [answer] = refused.glob("*.json")
    assert "an earlier request was called mine" in json.loads(answer.read_text())["refused"]


def test_a_request_made_while_the_job_ends_is_refused_under_its_own_name(tmp_path, monkeypatch):
    """The client expects the answer under that name."""
    monkeypatch.setattr(RequestDirectory, "pending", lambda self: None)
    training = Training(tmp_path)

    def request(iteration):
        if iteration == 20:
            training.requests.submit(requested(id="late"))

    training.run(range(30), request)
    assert "the job has ended: training ended" in training.requests.refusal("late").refused


def test_a_rank_ignores_captures_of_an_earlier_run(tmp_path, no_launcher):
    """Started by hand, both runs have the same launch id, and this rank polls before rank 0 has closed it."""
    training = Training(tmp_path)
    training.requests.write("progress.json", running(20))
    training.requests.write("accepted.json", accepted(id="old", start=30, end=32))
    training.run(range(60), rank=1, world_size=2)
    assert not training.requests.answers("old")
    assert not (tmp_path / "manifest").exists()


def test_a_rank_that_starts_later_receives_an_accepted_capture(tmp_path, no_launcher):
    training = Training(tmp_path)
    training.requests.write("progress.json", running(20))
    training.requests.write("accepted.json", accepted(start=10**6, end=10**6 + 1))

    def go_on(iteration):
        if iteration == 5:
            training.requests.write("progress.json", running(21))

    training.run(range(10**5), go_on, lambda: training.requests.answers("one"), rank=1, world_size=2)
    assert training.requests.answers("one")[1].status == "armed"


@pytest.mark.parametrize("what", ["a directory", "a pipe", "a link", "too long"])
def test_anything_but_a_regular_file_is_removed_and_never_blocks(tmp_path, what):
    training = Training(tmp_path / "run")

    def put(iteration):
        if iteration != 20:
            return
        path = training.requests.path / "request.json"
        if what == "a directory":
            path.mkdir()
        elif what == "a pipe":
            os.mkfifo(path)
        elif what == "a link":
            (tmp_path / "secret").write_text('{"iterations": 1}')
            path.symlink_to(tmp_path / "secret")
        else:
            path.write_text('{"iterations": 1}' + " " * (1 << 17))

    refused = training.requests.path / "refused"
    training.run(range(10**5), put, until=lambda: list(refused.glob("*.json")))
    assert sorted(path.name for path in training.requests.path.iterdir()) == ["progress.json", "refused"]
    assert not (training.root / "manifest").exists()


def accepted(**more):
    planned = plan_capture(requested(id="one", ranks=[1], start=200), replace(STATUS, run="r"))
    return replace(planned, **{"start": 30, "end": 32} | more)


def running(iteration=20):
    return replace(STATUS, run="r", iteration=iteration)


def test_a_rank_that_receives_it_too_late_refuses_and_captures_nothing(tmp_path, no_launcher):
    training = Training(tmp_path)

    def plan(iteration):
        if iteration == 40:
            training.requests.write("progress.json", running())
            training.requests.write("accepted.json", accepted())

    training.run(range(10**5), plan, lambda: training.requests.answers("one"), rank=1, world_size=2)
    answer = training.requests.answers("one")[1]
    assert answer.status == "refused"
    assert "and the window begins at 30" in answer.reason
    assert not (tmp_path / "manifest").exists()


def test_a_rank_ignores_other_launches(tmp_path, no_launcher):
    training = Training(tmp_path)

    def plan(iteration):
        if iteration == 5:
            training.requests.write("progress.json", running())
            training.requests.write("accepted.json", accepted(launch="another job"))

    training.run(range(60), plan, rank=1, world_size=2)
    assert not training.requests.answers("one")
    assert not (tmp_path / "manifest").exists()


def test_a_file_system_that_hangs_delays_no_iteration(tmp_path, monkeypatch):
    hangs, polls = threading.Event(), []

    def accepted(self):
        polls.append(threading.current_thread() is threading.main_thread())
        hangs.wait(60)

    monkeypatch.setattr(RequestDirectory, "accepted", accepted)
    training = Training(tmp_path, seconds=0)
    try:
        training.run(range(1000))
    finally:
        hangs.set()
    assert len(training.losses) == 1000
    assert polls == [False]


def test_a_directory_that_cannot_be_written_is_logged_once_and_training_goes_on(tmp_path, caplog):
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    training = Training(blocker / "profiles")
    training.run(range(50))
    assert len(training.losses) == 50
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert "no captures on demand" in errors[0]


def test_windows_posted_while_iterations_pass_are_all_captured(run):
    """Another thread posts, and the training's moves on in the same instant: none is lost."""
    count, errors = 40, []
    config = run.config(1, 2, on_demand=True, use_pytorch_profiler=False)

    with ProfilingHook(config, rank=0, output_dir=run.root) as hook:
        from bridge_profiling.capture.record import WindowPlan
        from bridge_profiling.manifest import Trigger

        def post():
            try:
                for number in range(count):
                    start = (hook._timer.running() or 0) + 2000 + number
                    plan = replace(
                        config, profile_step_start=start, profile_step_end=start + 1, use_nsys_profiler=True, profile_ranks=[0]
                    )
                    hook._schedule.post(WindowPlan(plan, Trigger(kind="request", request=f"r{number}"), 0))
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=post)
        for iteration in range(10**7):
            with hook.iteration(iteration):
                if iteration == 5:
                    thread.start()
            if iteration > 5 and not thread.is_alive():
                break
        # nsys is not around this process, so that each is closed as soon as the training takes it up.
        with hook.iteration(iteration + 1):
            pass
        assert not errors
        assert len(hook._schedule.windows) == count
        assert not hook._schedule.posted
        assert hook._edge == NEVER
