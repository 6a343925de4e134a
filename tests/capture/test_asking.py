"""What a job makes of requests, rule by rule, and what is told whoever asks for what it cannot do."""

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from bridge_profiling import ProfilingConfigError
from bridge_profiling.capture.control.client import ask, mailbox_of
from bridge_profiling.capture.control.mailbox import Mailbox
from bridge_profiling.capture.control.planning import JobState, admit
from bridge_profiling.capture.control.request import CaptureRequest, check_request
from bridge_profiling.config import Window
from bridge_profiling.processes import pid_space

STATE = JobState(
    run="run-1",
    launch="",
    job_id=None,
    host="elsewhere",
    pid=1,
    pid_space=None,
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
    with pytest.raises(ProfilingConfigError, match=rf"ended without a word; its rank 0, process {gone.pid}, is gone"):
        ask(published(tmp_path, pid=gone.pid, pid_space=pid_space()), asked())
    # The same number means nothing where processes are counted anew, as in a container that is called as its machine is.
    (tmp_path / "container").mkdir()
    elsewhere = published(tmp_path / "container", host=os.uname().nodename, pid=gone.pid, pid_space="another")
    assert ask(elsewhere, asked(), wait=0).accepted is None
    mailbox = published(tmp_path, pid=os.getpid(), pid_space=pid_space())
    os.utime(mailbox.directory / "progress.json", (time.time() - 300,) * 2)
    with pytest.raises(ProfilingConfigError, match="does not answer: it was heard of 300 s ago"):
        ask(mailbox, asked())
    assert [path.name for path in mailbox.directory.iterdir()] == ["progress.json"]


def test_a_request_that_nobody_reads_is_withdrawn(tmp_path):
    mailbox = published(tmp_path)
    with pytest.raises(ProfilingConfigError, match=r"did not read the request .*withdrawn"):
        ask(mailbox, asked(), wait=0.1)
    assert [path.name for path in mailbox.directory.iterdir()] == ["progress.json"]


@pytest.mark.parametrize(("taken", "said"), [(False, "is withdrawn"), (True, "the job has the request already")])
def test_whoever_stops_waiting_hears_what_becomes_of_the_request(tmp_path, monkeypatch, taken, said):
    mailbox = published(tmp_path)

    def interrupt(id_):
        if taken:
            mailbox.take()
            mailbox.file(asked(id="anothers").as_json())
        raise KeyboardInterrupt

    monkeypatch.setattr(Mailbox, "refusal", lambda self, id_: interrupt(id_))
    with pytest.raises(KeyboardInterrupt, match=said):
        ask(mailbox, asked())
    assert mailbox.read("request.json").get("id") == ("anothers" if taken else None)


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
