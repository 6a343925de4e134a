"""What a job can carry out, rule by rule."""

import json
from dataclasses import replace

import pytest

from bridge_profiling import ProfilingConfigError
from bridge_profiling.capture.control.planning import plan_capture
from bridge_profiling.capture.control.protocol import parse_request
from bridge_profiling.config import Window
from tests.capture.control.conftest import STATUS, requested


def test_the_nearest_start_leaves_every_rank_four_polls_to_receive_it():
    # Four seconds are eight iterations of half a second, and two more: ranks apart, and the warm-up.
    assert plan_capture(requested(), STATUS).window == Window(110, 112)
    assert plan_capture(requested(start=110), STATUS).window == Window(110, 112)


def test_a_start_that_is_too_soon_is_refused_with_a_possible_one():
    with pytest.raises(
        ProfilingConfigError, match=r"iteration 109 is too soon.*before iteration 110.*Type --start 112 or later"
    ):
        plan_capture(requested(start=109), STATUS)


def test_ranks_are_the_jobs_own_or_those_requested():
    assert plan_capture(requested(), STATUS).ranks == [0]
    assert plan_capture(requested(ranks="all"), STATUS).ranks == list(range(8))
    assert plan_capture(requested(ranks="pp"), STATUS).ranks == [0, 4]
    assert plan_capture(requested(ranks=[3, 1, 3]), STATUS).ranks == [3, 1]


def test_a_start_left_to_the_job_avoids_its_own_windows():
    busy = replace(STATUS, windows=[[114, 116], [111, 113]])
    assert plan_capture(requested(), busy).window == Window(117, 119)
    # One that begins right after a window would warm up inside it.
    with pytest.raises(ProfilingConfigError, match=r"iterations 116 to 117 overlap the job's own window 114-116.*--start 117"):
        plan_capture(requested(start=116), busy)
    assert plan_capture(requested(start=117), busy).window == Window(117, 119)


def test_iterations_after_the_end_of_training_are_refused():
    with pytest.raises(ProfilingConfigError, match="its last one is 999"):
        plan_capture(requested(start=999), STATUS)
    assert plan_capture(requested(start=998), STATUS).window.end == 1000
    assert plan_capture(requested(start=10**9), replace(STATUS, train_iters=None)).window.start == 10**9


@pytest.mark.parametrize(
    ("status", "request_", "message"),
    [
        ({"completed": 2}, {}, "has completed 2 iterations.*Try again"),
        ({"iteration": None, "completed": 0, "fastest_ns": None}, {"start": 50}, "has completed 0 iterations"),
        ({"under_nsys": True}, {}, "torch profiler cannot start in this job.*launched for nsys"),
        ({"under_nsys": True}, {"profilers": ["nsys"]}, "nsys has no captures left"),
        (
            {"under_nsys": True, "nsys_captures_left": 2},
            {"profilers": ["nsys"], "ranks": [1]},
            "rank 1 does not run under nsys",
        ),
        ({"records_memory": True}, {"profilers": ["memory"]}, "already records a memory history"),
        ({"ended": "training ended"}, {}, "the job has ended: training ended"),
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
        ({"iterations": True}, "request.iterations is 'True', not of type int"),
        ({"iterations": 10**6}, "iterations=1000000 is not a number from 1 to 1000"),
        ({"start": -1}, "start=-1 is not an iteration"),
        ({"start": 2.0}, "request.start is '2.0'"),
        ({"ranks": []}, "--ranks=\\[\\] names no rank"),
        ({"ranks": "every"}, "--ranks='every' is not known"),
        ({"ranks": [True]}, "request.ranks"),
        ({"profilers": []}, "cannot start on demand"),
        ({"profilers": "torch,nsys"}, "cannot start on demand"),
        ({"profilers": ["torch", "nsys"]}, "both need CUPTI"),
        ({"shapes": "yes"}, "request.shapes is 'yes', not of type bool"),
        ({"id": "../../etc"}, "not a valid name"),
        ({"reason": 3}, "request.reason is '3'"),
        ({"reason": "long" * 1000}, "longer than 1000 characters"),
        ({"kind": "configured"}, "request.kind is 'configured', not one of request, slow_iteration"),
        ({"starts": 9}, "the request has unknown keys .*starts.*its keys are iterations, start"),
    ],
)
def test_invalid_requests_are_refused(wrong, message):
    with pytest.raises(ProfilingConfigError, match=message):
        parse_request(json.dumps({"iterations": 2} | wrong))


@pytest.mark.parametrize("text", ["[]", "2", "null", "{}", "", '{"iterations": 2'])
def test_texts_that_are_not_a_request_are_refused(text):
    with pytest.raises(ProfilingConfigError, match="Write for example"):
        parse_request(text)


def test_one_rank_or_profiler_needs_no_list():
    request = parse_request('{"iterations": 1, "ranks": 3, "profilers": "memory"}')
    assert (request.ranks, request.profilers) == ([3], ["memory"])
