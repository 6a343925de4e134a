"""What a job makes of requests, rule by rule; and that listening for them never holds a training up."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch

from bridge_profiling import ProfilingConfig, ProfilingConfigError
from bridge_profiling.capture import ProfilingHook
from bridge_profiling.capture.admission import JobState, admit
from bridge_profiling.capture.asking import ask, mailbox_of
from bridge_profiling.capture.mailbox import Mailbox
from bridge_profiling.capture.request import CaptureRequest, check_request
from bridge_profiling.capture.slow_iterations import COOL_DOWN, SlowWatch
from bridge_profiling.capture.window_capture import NEVER
from bridge_profiling.config import Window

STATE = JobState(
    run="run-1",
    launch="",
    job_id=None,
    host="elsewhere",
    pid=1,
    iteration=100,
    completed=100,
    fastest_ns=500_000_000,
    median_ns=600_000_000,
    poll_seconds=1.0,
    world_size=8,
    pipeline_ranks=[0, 4],
    profile_ranks=[0],
    profilers=["torch"],
    train_iters=1000,
    windows=[],
    records_memory=False,
    cuda=True,
    under_nsys=False,
    nsys_captures_left=0,
)


def asked(**request):
    return check_request(CaptureRequest(**{"iterations": 2, **request}))


# -- what is admitted ----------------------------------------------------------------------------------------------------


def test_the_nearest_start_leaves_every_rank_four_looks_to_hear_of_it():
    # Four seconds are eight iterations of half a second, and two more: ranks apart, and the warm-up.
    assert STATE.nearest == 110
    assert admit(asked(), STATE).window == Window(110, 112)
    assert admit(asked(start=110), STATE).window == Window(110, 112)


def test_a_start_that_some_rank_may_not_hear_of_is_refused_with_one_that_all_will():
    with pytest.raises(ProfilingConfigError, match=r"iteration 109 is too near.*until 110.*Type --start 112 or later"):
        admit(asked(start=109), STATE)


def test_ranks_are_the_jobs_own_or_what_is_asked_for():
    assert admit(asked(), STATE).ranks == [0]
    assert admit(asked(ranks="all"), STATE).ranks == list(range(8))
    assert admit(asked(ranks="pp"), STATE).ranks == [0, 4]
    assert admit(asked(ranks=[3, 1, 3]), STATE).ranks == [3, 1]


def test_a_start_left_to_the_job_keeps_out_of_the_windows_that_it_was_launched_with():
    busy = replace(STATE, windows=[[114, 116], [111, 113]])
    assert admit(asked(), busy).window == Window(117, 119)
    # One that begins right after a window would warm up inside it.
    with pytest.raises(ProfilingConfigError, match=r"iterations 116 to 117 meet the window 114-116.*--start 117"):
        admit(asked(start=116), busy)
    assert admit(asked(start=117), busy).window == Window(117, 119)


def test_what_the_training_would_not_reach_is_refused():
    with pytest.raises(ProfilingConfigError, match="its last iteration is 999"):
        admit(asked(start=999), STATE)
    assert admit(asked(start=998), STATE).window.end == 1000
    assert admit(asked(start=10**9), replace(STATE, train_iters=None)).window.start == 10**9


@pytest.mark.parametrize(
    ("state", "request_", "told"),
    [
        ({"completed": 2}, {}, "has completed 2 iterations.*Ask again then"),
        ({"iteration": None, "completed": 0, "fastest_ns": None}, {"start": 50}, "has completed 0 iterations"),
        ({"under_nsys": True}, {}, "torch profiler cannot be started in this job.*launched for nsys"),
        ({"under_nsys": True}, {"profilers": ["nsys"]}, "nsys makes no further capture"),
        (
            {"under_nsys": True, "nsys_captures_left": 2},
            {"profilers": ["nsys"], "ranks": [1]},
            "rank 1 does not run under nsys",
        ),
        ({"records_memory": True}, {"profilers": ["memory"]}, "being recorded already"),
        ({"ended": "training ended"}, {}, "the job has ended: training ended"),
        ({}, {"run": "run-0"}, "made for another run"),
    ],
)
def test_what_the_job_cannot_do_is_refused(state, request_, told):
    with pytest.raises(ProfilingConfigError, match=told):
        admit(asked(**request_), replace(STATE, **state))


def test_nsys_is_admitted_where_it_was_told_to_make_more_captures():
    armed = replace(STATE, under_nsys=True, nsys_captures_left=1, profilers=["nsys"])
    assert admit(asked(), armed).profilers == ["nsys"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"iterations": True},
        {"iterations": 10**6},
        {"start": -1},
        {"start": 2.0},
        {"ranks": []},
        {"ranks": "every"},
        {"profilers": []},
        {"profilers": "torch,nsys"},
        {"shapes": "yes"},
        {"id": "../../etc"},
        {"reason": 3},
        {"kind": "configured"},
    ],
)
def test_what_is_no_request_is_refused(wrong):
    with pytest.raises(ProfilingConfigError):
        asked(**wrong)


# -- asking --------------------------------------------------------------------------------------------------------------


def published(root, **state):
    mailbox = Mailbox(root)
    mailbox.write("progress.json", replace(STATE, **state).as_json())
    return mailbox


def test_a_directory_in_which_no_job_listens_is_refused(tmp_path):
    with pytest.raises(ProfilingConfigError, match=r"no job listens in .*Name the output directory"):
        mailbox_of(tmp_path)
    with pytest.raises(ProfilingConfigError, match="is no directory"):
        mailbox_of(tmp_path / "nowhere")


def test_a_job_that_is_gone_without_a_word_is_told_apart_from_one_that_is_silent(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here = os.uname().nodename
    with pytest.raises(ProfilingConfigError, match=rf"ended without a word; its rank 0, process {gone.pid}, is gone"):
        ask(published(tmp_path, host=here, pid=gone.pid), asked())
    mailbox = published(tmp_path, host=here, pid=os.getpid())
    os.utime(mailbox.directory / "progress.json", (time.time() - 300,) * 2)
    with pytest.raises(ProfilingConfigError, match="does not answer: it was heard of 300 s ago"):
        ask(mailbox, asked())
    assert [path.name for path in mailbox.directory.iterdir()] == ["progress.json"]


def test_a_request_that_nobody_reads_is_withdrawn(tmp_path):
    mailbox = published(tmp_path)
    with pytest.raises(ProfilingConfigError, match=r"did not read the request .*withdrawn"):
        ask(mailbox, asked(), wait=0.1)
    assert [path.name for path in mailbox.directory.iterdir()] == ["progress.json"]


def test_a_request_never_takes_anothers_place(tmp_path):
    mailbox = published(tmp_path)
    first = ask(mailbox, asked(), wait=0)
    with pytest.raises(ProfilingConfigError, match="a request is open already: it has not been read yet"):
        ask(mailbox, asked(), wait=0)
    assert mailbox.read("request.json")["id"] == first.request.id


def test_a_directory_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    def refuse(self, request):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Mailbox, "file", refuse)
    with pytest.raises(ProfilingConfigError, match=r"cannot be written; .*Ask as the user who runs the job"):
        ask(published(tmp_path), asked(), wait=0)


# -- in the job ----------------------------------------------------------------------------------------------------------


class Training:
    """A small training of one rank in this process, which looks for requests a hundred times a second."""

    def __init__(self, root, *, seconds=0.004, **settings):
        self.config = ProfilingConfig(output_dir=str(root), on_demand_seconds=0.01, **settings)
        self.mailbox, self.root, self.seconds = Mailbox(root), root, seconds
        self.losses: list[str] = []

    def run(self, iterations, on_iteration=lambda i: None, until=None, rank=0, world_size=1):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        deadline = time.monotonic() + 240
        with ProfilingHook(self.config, rank=rank, world_size=world_size) as hook:
            for iteration in iterations:
                with hook.iteration(iteration):
                    loss = model(torch.full((4, 8), float(iteration % 7))).square().mean()
                    loss.backward()
                    self.losses.append(loss.item().hex())
                    time.sleep(self.seconds)
                    on_iteration(iteration)
                if until is not None and until():
                    break
                assert time.monotonic() < deadline, "it never happened"
        return hook

    def done(self, count=1):
        return len(list((self.mailbox.directory / "done").glob("*.json"))) >= count

    def manifests(self):
        found = [json.loads(path.read_text()) for path in (self.root / "manifest").glob("*/rank-0.json")]
        return sorted(found, key=lambda manifest: manifest["window"]["start"])


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
            training.mailbox.write("accepted.json", accepted())

    training.run(range(10**5), plan, lambda: training.mailbox.answers("one"), rank=1, world_size=2)
    answer = training.mailbox.answers("one")[1]
    assert answer["status"] == "refused"
    assert "when it heard of a window that begins at 30" in answer["reason"]
    assert not (tmp_path / "manifest").exists()


def test_a_rank_obeys_no_other_launch(tmp_path, no_launcher):
    training = Training(tmp_path)
    training.mailbox.write("accepted.json", accepted(launch="another job"))
    training.run(range(60), rank=1, world_size=2)
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
        from bridge_profiling.capture.window_capture import Trigger, WindowPlan

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
        assert len(hook._agenda.captures) == count
        assert not hook._agenda.posted
        assert hook._edge == NEVER


# -- what is slow --------------------------------------------------------------------------------------------------------


def durations(count, nanoseconds=10_000_000):
    return tuple((iteration, nanoseconds) for iteration in range(count))


def test_an_iteration_is_slow_against_the_median_of_those_before_it():
    watch = SlowWatch(2.0, lambda iteration: False)
    assert watch.threshold(durations(10)) == NEVER
    assert watch.threshold(durations(11)) == 20_000_000
    watch.saw(60, 23_000_000)
    told = watch.take().told(3)
    assert told == "iteration 60 took 23.0 ms, 2.3 x the median 10.0 ms of the 10 iterations before it, on rank 3"
    assert watch.take() is None


def test_iterations_that_paid_for_something_else_are_neither_slow_nor_in_the_median():
    watch = SlowWatch(2.0, lambda iteration: iteration < 30)
    assert watch.threshold(durations(40)) == 20_000_000
    assert watch.threshold(durations(39)) == NEVER
    watch.saw(29, 10**9)
    assert watch.take() is None


def test_after_a_capture_it_cools_down():
    watch = SlowWatch(2.0, lambda iteration: False)
    watch.threshold(durations(60))
    watch.be_quiet_before(100)
    watch.saw(99, 10**9)
    assert watch.take() is None
    watch.saw(100, 10**9)
    assert watch.take().iteration == 100


def test_a_slow_iteration_is_captured_once_with_its_reason(tmp_path):
    """Two are planted, the second well after the first one's capture, and one capture is what was allowed."""
    training = Training(tmp_path, slow_iteration_factor=100.0, profile_step_start=5, profile_step_end=7)
    planted = [60]

    def slow(iteration):
        if iteration in planted:
            time.sleep(1.5)
        if training.done() and len(planted) == 1:
            planted.append(iteration + COOL_DOWN + 60)

    training.run(range(10**5), slow, lambda: len(planted) == 2 and len(training.losses) > planted[1] + 100)
    [manifest] = training.manifests()
    assert manifest["status"] == "complete"
    assert len(manifest["captured"]["iterations"]) == 2
    assert manifest["trigger"]["kind"] == "slow_iteration"
    assert manifest["trigger"]["reason"].startswith("iteration 60 took 15")
    assert "x the median" in manifest["trigger"]["reason"]
    assert manifest["trigger"]["requested_by"] == "rank 0"
    assert manifest["window"]["start"] > 60
    assert training.losses[:100] == plain_losses(100)


def plain_losses(count):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    losses = []
    for iteration in range(count):
        loss = model(torch.full((4, 8), float(iteration % 7))).square().mean()
        loss.backward()
        losses.append(loss.item().hex())
    return losses


@pytest.mark.parametrize("phase", ["checkpoint", "evaluation"])
def test_a_checkpoint_or_an_evaluation_inside_an_iteration_does_not_make_it_slow(tmp_path, phase):
    training = Training(tmp_path, slow_iteration_factor=100.0)
    with ProfilingHook(training.config, rank=0) as hook:
        for iteration in range(60):
            with hook.iteration(iteration):
                time.sleep(training.seconds)
                if iteration == 40:
                    with hook.range(phase):
                        time.sleep(1.5)
        time.sleep(0.1)
    assert not (tmp_path / "manifest").exists()
