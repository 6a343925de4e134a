"""What a job can carry out, rule by rule; and the client: what it says about a job that does not respond."""

import json
import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from bridge_profiling import ProfilingConfigError
from bridge_profiling.capture.control.client import Waiting, find_requests, trigger
from bridge_profiling.capture.control.directory import RequestDirectory
from bridge_profiling.capture.control.messages import parse_request
from bridge_profiling.capture.control.planning import plan_capture
from bridge_profiling.common.processes import pid_space
from bridge_profiling.settings.profiling import Window
from tests.capture.control.conftest import STATUS, requested


@pytest.mark.parametrize(
    ("request_", "status", "window"),
    [
        # Four polls of a second are eight iterations of half a second, and two more: ranks apart, and the warm-up.
        ({}, {}, Window(110, 112)),
        # A start that is left to the job avoids its own windows, and warms up outside of them.
        ({}, {"windows": [[114, 116], [111, 113]]}, Window(117, 119)),
        ({}, {"windows": [[113, 115], [105, 109]]}, Window(110, 112)),
        ({}, {"windows": [[105, 110]]}, Window(111, 113)),
        ({"settings": {"pytorch_profiler_warmup": 5}}, {"windows": [[105, 110]]}, Window(115, 117)),
        ({}, {"warm_up": 5, "windows": [[120, 122]]}, Window(127, 129)),
        ({"start": 117}, {"windows": [[114, 116]]}, Window(117, 119)),
        # Other requests, before them and after them, with their own warm-up.
        ({}, {"open": [plan_capture(requested(start=900), STATUS)]}, Window(110, 112)),
        ({}, {"open": [plan_capture(requested(), STATUS)]}, Window(113, 115)),
        ({}, {"open": [plan_capture(requested(start=115, settings={"pytorch_profiler_warmup": 4}), STATUS)]}, Window(118, 120)),
        ({"start": 998}, {}, Window(998, 1000)),
    ],
)
def test_a_window_is_the_nearest_that_every_rank_receives_in_time(request_, status, window):
    assert plan_capture(requested(**request_), replace(STATUS, **status)).window == window


@pytest.mark.parametrize(("ranks", "chosen"), [(None, [0]), ("all", list(range(8))), ("pp", [0, 4]), ([3, 1, 3], [3, 1])])
def test_ranks_are_the_jobs_own_or_those_requested(ranks, chosen):
    assert plan_capture(requested(ranks=ranks), STATUS).ranks == chosen


@pytest.mark.parametrize(
    ("status", "request_", "message"),
    [
        ({}, {"start": 109}, "iteration 109 is too soon.*before iteration 110.*Type --start 112 or later"),
        ({}, {"start": 100}, "iteration 100 is past.*the job is at iteration 100"),
        # One that begins right after a window would warm up inside it.
        ({"windows": [[114, 116]]}, {"start": 116}, "iterations 116 to 117 overlap the job's own window 114-116.*--start 117"),
        ({}, {"start": 999}, "training ends before iteration 1000: its last one is 999"),
        ({"completed": 2}, {}, "has completed 2 iterations.*Try again"),
        ({"under_nsys": True}, {}, "torch profiler cannot start in this job.*launched for nsys"),
        ({}, {"profilers": ["nsys"]}, "nsys cannot start in this job.*launched without it"),
        ({"under_nsys": True}, {"profilers": ["nsys"]}, "nsys has no captures left"),
        ({"under_nsys": True, "nsys_captures_left": 2}, {"profilers": ["nsys"], "ranks": [1]}, "rank 1 does not run"),
        ({"records_memory": True}, {"profilers": ["memory"]}, "already records a memory history"),
        ({"ended": "training ended"}, {}, "the job has ended: training ended"),
        *(
            (
                {"open": [plan_capture(requested(), STATUS)]},
                {"start": start},
                r"overlap another request's window 110-112.*--start 113",
            )
            for start in (110, 111, 112)
        ),
        ({"open": [plan_capture(requested(), STATUS)] * 16}, {}, "16 requests are open.*after iteration 112"),
        (
            {"open": [plan_capture(requested(profilers=["memory"]), STATUS)]},
            {"profilers": ["memory"], "start": 300},
            "another request records a memory history until iteration 111.*after iteration 112",
        ),
        *(
            (
                {"train_iters": None},
                {"start": start},
                f"iteration {start} is too far away: about .* hours.*--start 144100 or earlier",
            )
            for start in (144_101, 12_000_000, (1 << 60) - 1)
        ),
        ({}, {"run": "run-0"}, "restarted since"),
    ],
)
def test_captures_that_the_job_cannot_make_are_refused(status, request_, message):
    with pytest.raises(ProfilingConfigError, match=message):
        plan_capture(requested(**request_), replace(STATUS, **status))


def test_nsys_is_accepted_if_it_has_captures_left():
    armed = replace(STATUS, under_nsys=True, nsys_captures_left=1, profilers=["nsys"])
    assert plan_capture(requested(), armed).profilers == ["nsys"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"iterations": 0}, "iterations=0 is not a number from 1 to 1000"),
        ({"start": -1}, "start=-1 is not an iteration"),
        ({"ranks": []}, "--ranks=\\[\\] names no rank"),
        ({"profilers": "vtune"}, "profilers=\\['vtune'\\] cannot start on demand.*torch, memory, nsys"),
        ({"id": "../../etc"}, "not a valid name"),
        ({"kind": "configured"}, "request.kind is 'configured', not one of request, slow_iteration"),
        ({"starts": 9}, "the request has unknown keys .*starts.*its keys are iterations, start"),
        *((text, "Write for example") for text in ("[]", "null", "{}", "", '{"iterations": 2')),
    ],
)
def test_invalid_requests_are_refused(wrong, message):
    with pytest.raises(ProfilingConfigError, match=message):
        parse_request(wrong if isinstance(wrong, str) else json.dumps({"iterations": 2} | wrong))


def test_one_rank_or_profiler_needs_no_list():
    request = parse_request('{"iterations": 1, "ranks": 3, "profilers": "memory", "kind": "slow_iteration"}')
    assert (request.ranks, request.profilers, request.kind) == ([3], ["memory"], "slow_iteration")


#: A process id that the system gives to no process.
NO_PROCESS = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1


def published(root, **status):
    directory = RequestDirectory(root)
    directory.write("progress.json", replace(STATUS, **status))
    return directory


def pending_id(directory):
    text = directory.pending()
    return None if text is None else parse_request(text).id


def test_a_directory_without_a_job_is_refused(tmp_path):
    with pytest.raises(ProfilingConfigError, match=r"no job listens in .*Name the output directory"):
        find_requests(tmp_path)
    with pytest.raises(ProfilingConfigError, match="does not exist"):
        find_requests(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("runs", "age", "message"),
    [
        (False, 0, f"the job was killed: its rank 0, process {NO_PROCESS}, is not running"),
        (True, 300, "does not respond: its last status is 300 s old"),
        (True, 0, r"did not read the request .*withdrawn"),
    ],
)
def test_a_job_that_was_killed_is_distinguished_from_one_that_does_not_respond(tmp_path, runs, age, message):
    directory = published(tmp_path, pid=os.getpid() if runs else NO_PROCESS, pid_space=pid_space())
    os.utime(directory.path / "progress.json", (time.time() - age,) * 2)
    with pytest.raises(ProfilingConfigError, match=message):
        trigger(directory, requested(), wait=0.1)
    assert [path.name for path in directory.path.iterdir()] == ["progress.json"]


def test_a_request_never_replaces_another(tmp_path):
    """This process id means nothing where processes are counted anew, as in a container that has its machine's name."""
    directory = published(tmp_path, host=os.uname().nodename, pid=NO_PROCESS, pid_space="another")
    first = trigger(directory, requested(), wait=0)
    assert first.accepted is None
    with pytest.raises(ProfilingConfigError, match="another request is open: the job has not read it yet"):
        trigger(directory, requested(), wait=0)
    assert pending_id(directory) == first.request.id


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("pending", "the request is withdrawn"),
        ("taken", "the request is withdrawn"),
        ("accepted", "the request is withdrawn, unless the job reaches iteration 110 first"),
        ("done", "the capture is over"),
    ],
)
@pytest.mark.parametrize("end", [KeyboardInterrupt, BrokenPipeError, OSError])
def test_a_client_that_is_interrupted_withdraws_its_request_and_says_what_happens_to_it(tmp_path, end, state, said):
    directory, request = published(tmp_path), requested()
    waiting, capture = Waiting(directory, request), plan_capture(request, STATUS)

    def wait():
        trigger(directory, request, wait=0)
        if state != "pending":
            directory.take()
            directory.submit(requested(id="anothers"))
        if state == "accepted":
            directory.write(f"accepted/{request.id}.json", capture)
        if state == "done":
            directory.close(capture, "done")
        raise end

    with pytest.raises(end), waiting:
        wait()
    assert waiting.outcome == said
    assert pending_id(directory) == (None if state == "pending" else "anothers")
    assert directory.is_called_off(request.id) == (state in ("taken", "accepted"))


def test_a_request_that_was_refused_or_answered_is_not_called_off(tmp_path):
    directory, request = published(tmp_path), requested()
    for error in (None, ProfilingConfigError("refused")):
        with suppress(ProfilingConfigError), Waiting(directory, request):
            if error is not None:
                raise error
    assert not directory.is_called_off(request.id)
