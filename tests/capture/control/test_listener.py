"""Listening for requests: they are carried out while training goes on, and no file there delays it."""

import errno
import os
import threading
from dataclasses import replace

import pytest

from bridge_profiling.capture import ProfilingHook
from bridge_profiling.capture.control import listener
from bridge_profiling.capture.control.planning import plan_capture
from bridge_profiling.capture.control.protocol import RequestDirectory
from bridge_profiling.capture.record import WindowPlan
from bridge_profiling.capture.window import NEVER
from bridge_profiling.manifest import Trigger
from tests.capture.conftest import at, raising
from tests.capture.control.conftest import STATUS, requested


def accepted(**more):
    planned = plan_capture(requested(id="one", ranks=[1], start=200), replace(STATUS, run="r"))
    return "accepted.json", replace(planned, **{"start": 30, "end": 32} | more)


def running(iteration=20):
    return "progress.json", replace(STATUS, run="r", iteration=iteration)


@pytest.mark.parametrize("hard_links", [True, False])
def test_a_request_is_carried_out_after_the_window_of_the_config(run, monkeypatch, hard_links):
    """Object stores that are mounted as file systems have no hard links."""
    if not hard_links:
        monkeypatch.setattr(os, "link", raising(OSError(errno.ENOTSUP, "Operation not supported")))
    unread = RequestDirectory(run.root / "unread")
    unread.path.mkdir(parents=True)
    assert unread.submit(requested())
    assert not unread.submit(requested(id="another"))
    run.listen(range(10**6), at(20, lambda: run.requests.submit(requested())), config=run.config(2, 4), until=run.done)
    first, second = run.folders()
    start = run.manifest(second)["window"]["start"]
    assert [run.manifest(folder)["trigger"]["kind"] for folder in (first, second)] == ["configured", "request"]
    assert [run.outcome(folder) for folder in (first, second)] == [("complete", [2, 3]), ("complete", [start, start + 1])]


def test_a_training_that_ends_before_the_iterations_asked_for_says_so(run):
    request = at(10, lambda: run.requests.submit(requested(start=10**6)))
    run.listen(range(10**5), request, until=(run.requests.path / "answers").exists)
    [folder] = run.folders()
    assert run.outcome(folder) == ("missed", None)
    assert "training ended after iteration" in run.manifest(folder)["reason"]
    assert "training ended" in run.done()[0]["ended"]


def test_requests_of_an_earlier_run_are_closed(run):
    run.requests.write(*accepted(id="old", ranks=[0], start=50, end=52))
    run.requests.submit(requested(start=60, id="unread"))
    run.listen(range(70))
    assert run.folders() == []
    [done] = run.done()
    assert (done["id"], done["ended"]) == ("old", "the job ended before it was done")
    assert "the job has completed 0 iterations" in run.requests.refusal("unread").refused


def test_a_name_used_before_is_refused(run):
    due = [lambda: True, run.done]

    def request(iteration):
        if iteration >= 20 and due and due[0]() and run.requests.submit(requested(id="mine")):
            del due[0]

    run.listen(range(10**5), request, until=run.refusals)
    assert len(run.folders()) == 1
    assert "an earlier request was called mine" in run.refusals()[0]


def test_a_request_made_while_the_job_ends_is_refused_under_its_own_name(run, monkeypatch):
    """The client expects the answer under that name."""
    monkeypatch.setattr(RequestDirectory, "pending", lambda self: None)
    run.listen(range(30), at(20, lambda: run.requests.submit(requested(id="late"))))
    assert "the job has ended: training ended" in run.requests.refusal("late").refused


@pytest.mark.parametrize(
    ("before", "iteration", "then", "answer"),
    [
        # Started by hand, an earlier run has the same launch id, and this rank polls before rank 0 has closed its capture.
        ([running(), accepted()], 0, [], None),
        # This rank starts later than rank 0.
        ([running(20), accepted(start=10**6, end=10**6 + 1)], 5, [running(21)], ("armed", None)),
        (
            [],
            40,
            [running(), accepted()],
            ("refused", "iteration {} runs already, and the window begins at 30; request a later --start"),
        ),
        ([], 5, [running(), accepted(launch="another job")], None),
        ([], 5, [running(), accepted(ranks=[0])], None),
    ],
)
def test_a_rank_carries_out_captures_of_its_launch_that_it_receives_in_time(run, no_launcher, before, iteration, then, answer):
    for message in before:
        run.requests.write(*message)
    tell = at(iteration, lambda: [run.requests.write(*message) for message in then])
    enough = (lambda: run.requests.answers("one")) if answer else (lambda: len(run.losses) == 60)
    run.listen(range(10**5), tell, until=enough, rank=1, world_size=2)
    answers = {rank: (one.status, one.reason) for rank, one in run.requests.answers("one").items()}
    if answer is None or answer[0] == "refused":
        assert run.folders() == []
    if answer is not None:
        status, reason = answer
        answer = (status, reason and reason.format(run.requests.answers("one")[1].iteration))
    assert answers == ({1: answer} if answer else {})


@pytest.mark.parametrize("what", ["a directory", "a pipe", "a link", "too long"])
def test_anything_but_a_regular_file_is_removed_and_never_blocks(run, tmp_path, what):
    path = run.requests.path / "request.json"
    (tmp_path / "secret").write_text('{"iterations": 1}')
    put = {
        "a directory": path.mkdir,
        "a pipe": lambda: os.mkfifo(path),
        "a link": lambda: path.symlink_to(tmp_path / "secret"),
        "too long": lambda: path.write_text('{"iterations": 1}' + " " * (1 << 17)),
    }
    run.listen(range(10**5), at(20, put[what]), until=run.refusals)
    assert sorted(path.name for path in run.requests.path.iterdir()) == ["progress.json", "refused"]
    assert run.folders() == []


def test_a_file_system_that_hangs_delays_no_iteration(run, monkeypatch):
    hangs, polls = threading.Event(), []

    def hang(self):
        polls.append(threading.current_thread() is threading.main_thread())
        hangs.wait(60)

    monkeypatch.setattr(RequestDirectory, "accepted", hang)
    monkeypatch.setattr(listener, "_STOP_SECONDS", 0.1)
    try:
        run.listen(range(50))
    finally:
        hangs.set()
    assert len(run.losses) == 50
    assert polls == [False]


def test_a_directory_that_cannot_be_written_is_logged_once_and_training_goes_on(run, tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    run.root = tmp_path / "file" / "profiles"
    run.listen(range(50))
    assert len(run.losses) == 50
    [error] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "no captures on demand" in error


def test_windows_posted_while_iterations_pass_are_all_captured(run):
    """Another thread posts, and the training's moves on in the same instant: none is lost."""
    # nsys is not around this process, so that each is closed as soon as the training takes it up.
    config = run.config(1, 2, on_demand=False, use_pytorch_profiler=False)
    with ProfilingHook(config, rank=0, output_dir=run.root) as hook:

        def post():
            for number in range(20):
                start = (hook._timer.running() or 0) + 2000 + number
                window = {"profile_step_start": start, "profile_step_end": start + 1, "use_nsys_profiler": True}
                hook._schedule.post(WindowPlan(replace(config, **window), Trigger(kind="request", request=f"r{number}"), 0))

        thread = threading.Thread(target=post)
        thread.start()
        for iteration in range(10**7):
            ended = not thread.is_alive()
            with hook.iteration(iteration):
                pass
            if ended:
                break
        assert len(hook._schedule.windows) == 20
        assert not hook._schedule.posted
        assert hook._edge == NEVER
