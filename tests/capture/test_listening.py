"""Listening for requests: they are carried out beside the training, and whatever lies there never holds it up."""

import errno
import json
import os
import threading
from dataclasses import replace

import pytest

from bridge_profiling.capture import ProfilingHook
from bridge_profiling.capture.control.coordinator import RequestDecider
from bridge_profiling.capture.control.mailbox import Mailbox
from bridge_profiling.capture.control.request import CaptureRequest
from bridge_profiling.capture.window import NEVER
from tests.capture.conftest import Training


def asked(**request):
    return CaptureRequest(**{"iterations": 2, **request})


def test_a_request_is_carried_out_beside_the_window_of_the_config(tmp_path):
    training = Training(tmp_path, use_pytorch_profiler=True, profile_step_start=2, profile_step_end=4)

    def request(iteration):
        if iteration == 20:
            training.mailbox.file(asked().as_json())

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
    training = Training(tmp_path, use_pytorch_profiler=True, profile_step_start=2, profile_step_end=4)

    def request(iteration):
        if iteration == 20:
            assert training.mailbox.file(asked().as_json())
            assert not training.mailbox.file(asked(id="another").as_json())

    training.run(range(10**6), on_iteration=request, until=training.done)
    assert [one["status"] for one in training.manifests()] == ["complete", "complete"]


def test_a_training_that_ends_before_the_iterations_asked_for_says_so(tmp_path):
    training = Training(tmp_path)

    def request(iteration):
        if iteration == 10:
            training.mailbox.file(asked(start=10**6).as_json())

    training.run(range(10**5), on_iteration=request, until=lambda: (training.mailbox.directory / "answers").exists())
    [manifest] = training.manifests()
    assert manifest["status"] == "missed"
    assert "training ended after iteration" in manifest["reason"]
    [done] = (training.mailbox.directory / "done").glob("*.json")
    assert "training ended" in json.loads(done.read_text())["ended"]


def test_what_an_earlier_run_left_open_is_laid_aside(tmp_path):
    training = Training(tmp_path)
    training.mailbox.write("accepted.json", {"id": "old", "launch": "", "ranks": [0], "start": 50, "end": 52})
    training.mailbox.file(asked(start=60, id="unread").as_json())
    training.run(range(100))
    assert not (tmp_path / "manifest").exists()
    assert json.loads((training.mailbox.directory / "done" / "old.json").read_text())["ended"].startswith("the job ended")
    [refused] = (training.mailbox.directory / "refused").glob("*.json")
    assert "before this run of the job began" in json.loads(refused.read_text())["refused"]


def test_a_name_that_was_given_before_is_refused_since_ranks_would_take_it_for_done(tmp_path):
    training = Training(tmp_path)
    due = [lambda: True, training.done]

    def request(iteration):
        if iteration >= 20 and due and due[0]() and training.mailbox.file(asked(id="mine").as_json()):
            del due[0]

    refused = training.mailbox.directory / "refused"
    training.run(range(10**5), request, until=lambda: list(refused.glob("*.json")))
    assert len(training.manifests()) == 1
    [answer] = refused.glob("*.json")
    assert "another request was called mine" in json.loads(answer.read_text())["refused"]


def test_who_asks_while_the_job_ends_is_answered_by_the_name_of_the_request(tmp_path, monkeypatch):
    """The answer lies where whoever asked looks for it."""
    monkeypatch.setattr(RequestDecider, "_read", lambda self: None)
    training = Training(tmp_path)

    def request(iteration):
        if iteration == 20:
            training.mailbox.file(asked(id="late").as_json())

    training.run(range(30), request)
    assert "the job has ended: training ended" in training.mailbox.refusal("late")


def test_a_rank_heeds_nothing_that_an_earlier_run_was_asked_for(tmp_path, no_launcher):
    """Started by hand, both runs are called the same; and this rank looks before rank 0 has cleared up."""
    training = Training(tmp_path)
    training.mailbox.write("progress.json", {"run": "r", "iteration": 20})
    training.mailbox.write("accepted.json", accepted(id="old", start=30, end=32))
    training.run(range(60), rank=1, world_size=2)
    assert not training.mailbox.answers("old")
    assert not (tmp_path / "manifest").exists()


def test_a_rank_that_began_later_hears_what_was_accepted_before(tmp_path, no_launcher):
    training = Training(tmp_path)
    training.mailbox.write("progress.json", {"run": "r", "iteration": 20})
    training.mailbox.write("accepted.json", accepted(start=10**6, end=10**6 + 1))

    def go_on(iteration):
        if iteration == 5:
            training.mailbox.write("progress.json", {"run": "r", "iteration": 21})

    training.run(range(10**5), go_on, lambda: training.mailbox.answers("one"), rank=1, world_size=2)
    assert training.mailbox.answers("one")[1]["status"] == "armed"


@pytest.mark.parametrize("what", ["a directory", "a pipe", "a link", "too long"])
def test_what_is_no_file_of_a_request_is_cleared_away_and_never_waited_for(tmp_path, what):
    training = Training(tmp_path / "run")

    def put(iteration):
        if iteration != 20:
            return
        path = training.mailbox.directory / "request.json"
        if what == "a directory":
            path.mkdir()
        elif what == "a pipe":
            os.mkfifo(path)
        elif what == "a link":
            (tmp_path / "secret").write_text('{"iterations": 1}')
            path.symlink_to(tmp_path / "secret")
        else:
            path.write_text('{"iterations": 1}' + " " * (1 << 17))

    refused = training.mailbox.directory / "refused"
    training.run(range(10**5), put, until=lambda: list(refused.glob("*.json")))
    assert sorted(path.name for path in training.mailbox.directory.iterdir()) == ["progress.json", "refused"]
    assert not (training.root / "manifest").exists()


def accepted(**more):
    plan = {"id": "one", "launch": "", "run": "r", "start": 30, "end": 32, "ranks": [1], "profilers": ["torch"]}
    plan |= {"shapes": False, "stacks": False, "kind": "request", "reason": None, "requested_at": "now", "requested_by": None}
    return plan | {"attempt": 0} | more


@pytest.fixture
def no_launcher(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TORCHELASTIC_", "MASTER_", "BRIDGE_PROFILING")):
            monkeypatch.delenv(name)


def test_a_rank_that_hears_too_late_says_so_and_captures_nothing(tmp_path, no_launcher):
    training = Training(tmp_path)

    def plan(iteration):
        if iteration == 40:
            training.mailbox.write("progress.json", {"run": "r"})
            training.mailbox.write("accepted.json", accepted())

    training.run(range(10**5), plan, lambda: training.mailbox.answers("one"), rank=1, world_size=2)
    answer = training.mailbox.answers("one")[1]
    assert answer["status"] == "refused"
    assert "when it heard of a window that begins at 30" in answer["reason"]
    assert not (tmp_path / "manifest").exists()


def test_a_rank_obeys_no_other_launch(tmp_path, no_launcher):
    training = Training(tmp_path)

    def plan(iteration):
        if iteration == 5:
            training.mailbox.write("progress.json", {"run": "r"})
            training.mailbox.write("accepted.json", accepted(launch="another job"))

    training.run(range(60), plan, rank=1, world_size=2)
    assert not training.mailbox.answers("one")
    assert not (tmp_path / "manifest").exists()


def test_a_file_system_that_hangs_holds_up_no_iteration(tmp_path, monkeypatch):
    hangs, looks = threading.Event(), []

    def names(self):
        looks.append(threading.current_thread() is threading.main_thread())
        hangs.wait(60)
        return set()

    monkeypatch.setattr(Mailbox, "names", names)
    training = Training(tmp_path, seconds=0)
    try:
        training.run(range(1000))
    finally:
        hangs.set()
    assert len(training.losses) == 1000
    assert looks == [False]


def test_a_directory_that_cannot_be_written_is_said_once_and_training_goes_on(tmp_path, caplog):
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
        from bridge_profiling.capture.window import WindowPlan
        from bridge_profiling.manifest import Trigger

        def post():
            try:
                for number in range(count):
                    start = (hook.running_iteration or 0) + 2000 + number
                    plan = replace(
                        config, profile_step_start=start, profile_step_end=start + 1, use_nsys_profiler=True, profile_ranks=[0]
                    )
                    hook.schedule(WindowPlan(plan, Trigger(kind="request", request=f"r{number}"), 0))
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
