"""Listening for requests: they are carried out while training goes on, and no file there delays it."""

import errno
import os
import re
import threading
import time
from dataclasses import replace

import pytest

from bridge_profiling.capture import ProfilingHook, hook, loop
from bridge_profiling.capture.control import listener
from bridge_profiling.capture.control.directory import RequestDirectory
from bridge_profiling.capture.control.planning import plan_capture
from bridge_profiling.capture.describe import Plan
from bridge_profiling.common.slow_iterations import COOL_DOWN
from bridge_profiling.manifest import Trigger
from tests.capture.conftest import at, raising
from tests.capture.control.conftest import STATUS, requested


def accepted(**more):
    planned = plan_capture(requested(id="one", ranks=[1], start=200), replace(STATUS, run="r"))
    window = {"start": 30, "end": 32} | more
    message = replace(planned, **window, iterations=window["end"] - window["start"])
    return f"accepted/{message.id}.json", message


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
    run.listen(range(10**6), at(20, run.request), config=run.config(2, 4, on_demand_seconds=0.03), until=run.done)
    first, second = run.folders()
    start = run.manifest(second)["window"]["start"]
    assert [run.manifest(folder)["trigger"]["kind"] for folder in (first, second)] == ["configured", "request"]
    assert [run.outcome(folder) for folder in (first, second)] == [("complete", [2, 3]), ("complete", [start, start + 1])]


def test_a_request_for_a_far_iteration_does_not_block_the_next(run):
    far = [at(20 + place, lambda start=start: run.request(start=start)) for place, start in enumerate((10**5, 10**6))]
    near = at(30, run.request)
    run.listen(range(10**5), lambda iteration: [act(iteration) for act in (*far, near)], until=run.done)
    assert [run.outcome(folder)[0] for folder in run.folders()] == ["complete", "missed", "missed"]
    assert sorted(one["ended"].partition(",")[0] for one in run.done())[0] == "done"


def test_a_request_that_is_called_off_before_its_capture_begins_is_dropped(run):
    steps = {
        20: lambda: run.request(id="gone", start=3000),
        21: lambda: run.request(id="kept", start=3500),
        40: lambda: run.requests.call_off("gone"),
    }
    stays = lambda: [each.id for each in run.requests.status().open] == ["kept"]  # noqa: E731
    run.listen(range(10**5), lambda iteration: steps.get(iteration, int)(), until=lambda: len(run.losses) > 60 and stays())
    assert run.requests.done("gone").withdrawn
    assert run.folders() == ["iter-3500-3502"], "a dropped window leaves no manifest"
    assert not list((run.requests.path / "withdrawn").iterdir())


def test_a_request_that_is_called_off_before_it_is_accepted_is_refused(run):
    run.requests.call_off("early")
    run.listen(range(10**5), at(20, lambda: run.request(id="early")), until=run.refusals)
    assert "it was withdrawn" in run.refusals()[0]


def test_requests_of_an_earlier_run_are_closed(run):
    run.requests.write(*accepted(id="old", ranks=[0], start=50, end=52))
    run.requests.submit(requested(start=60, id="unread"))
    run.listen(range(70))
    assert run.folders() == []
    [done] = run.done()
    assert (done["id"], done["ended"]) == ("old", "the job ended before it was done")
    assert "the job has completed 0 iterations" in run.requests.refusal("unread").refused


@pytest.mark.parametrize(
    ("before", "iteration", "then", "answer"),
    [
        # Started by hand, an earlier run has the same launch id, and this rank polls before rank 0 has closed its capture.
        ([running(), accepted()], 0, [], None),
        # This rank starts later than rank 0.
        ([running(20), accepted(start=10**6, end=10**6 + 1)], 5, [running(21)], "armed"),
        ([], 40, [running(), accepted()], "refused"),
        ([], 5, [running(), accepted(launch="another job")], None),
        ([], 5, [running(), accepted(ranks=[0])], None),
    ],
)
def test_a_rank_carries_out_captures_of_its_launch_that_it_receives_in_time(run, before, iteration, then, answer):
    for message in before:
        run.requests.write(*message)
    write = at(iteration, lambda: [run.requests.write(*message) for message in then])
    enough = (lambda: run.requests.answers("one")) if answer else (lambda: len(run.losses) == 60)
    run.listen(range(10**5), write, until=enough, rank=1, world_size=2)
    answers = run.requests.answers("one")
    assert {rank: one.status for rank, one in answers.items()} == ({1: answer} if answer else {})
    assert len(run.folders()) == (answer == "armed")
    if answer == "refused":
        assert f"{answers[1].iteration} runs already, and the window begins at 30; request a later" in answers[1].reason


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


def test_a_request_that_a_rank_receives_inside_its_window_is_the_reason(run):
    plan = Plan(run.config(4, 8), Trigger(kind="request", request="late"), 0)
    config = run.config(1, 2, on_demand=True, use_pytorch_profiler=False)
    run.train(config, range(10), between=lambda iteration, hook: iteration == 5 and hook._windows.post(plan))
    reason = "this rank received the request for the window 4-8 in iteration 6"
    assert (*run.outcome("iter-4-8"), run.manifest("iter-4-8")["reason"]) == ("partial", [6, 7], reason)


@pytest.fixture
def lose_time(monkeypatch):
    """Makes the running iteration longer than a busy machine would, on the hook's clock alone."""
    lost = []
    for module in (hook, loop):
        monkeypatch.setattr(module, "perf_counter", lambda: time.perf_counter() + sum(lost))
    return lambda: lost.append(10**6)


def test_a_slow_iteration_is_captured_once_with_its_reason(run, lose_time):
    """A second one comes well after the first one's capture, and one capture is what was allowed."""
    slow = [60]

    def on_iteration(iteration):
        if iteration in slow:
            lose_time()
        if run.done() and len(slow) == 1:
            slow.append(iteration + COOL_DOWN + 60)

    config = run.config(5, 7, use_pytorch_profiler=False, slow_iteration_factor=1e4, on_demand_seconds=0.1)
    run.listen(range(10**5), on_iteration, config=config, until=lambda: len(slow) == 2 and len(run.losses) > slow[1] + 60)
    [folder] = run.folders()
    assert run.outcome(folder)[0] == "complete"
    manifest = run.manifest(folder)
    assert manifest["window"]["end"] - manifest["window"]["start"] == 2
    assert manifest["window"]["start"] > 60
    assert (manifest["trigger"]["kind"], manifest["trigger"]["requested_by"]) == ("slow_iteration", "rank 0")
    reason = re.fullmatch(r"iteration 60 took ([\d.]+) ms, [\d.]+ x the median .* on rank 0", manifest["trigger"]["reason"])
    assert reason is not None
    assert float(reason[1]) >= 10**9


def test_a_checkpoint_or_an_evaluation_inside_an_iteration_does_not_make_it_slow(run, lose_time):
    config = run.config(use_pytorch_profiler=False, slow_iteration_factor=1e4, on_demand_seconds=0.03)
    with ProfilingHook(config, rank=0, output_dir=run.root) as opened:
        for iteration in range(60):
            with opened.iteration(iteration), opened.range({40: "checkpoint", 45: "evaluation"}.get(iteration, "")):
                time.sleep(0.004)
                if iteration in (40, 45):
                    lose_time()
        time.sleep(0.1)
    assert run.folders() == []
