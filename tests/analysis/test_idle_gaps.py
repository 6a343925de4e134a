"""Time without compute is launch-starved, blocked or dependency-stalled, each nanosecond one of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge_profiling.analysis.attribution.device import Windows, device_work
from bridge_profiling.analysis.attribution.idle import PROMPT_NS, gaps
from bridge_profiling.analysis.session import RankQuestions
from tests.analysis.ranks_in_hand import answer, rank, values, work


def _gaps(start_ns, end_ns, *events, **tables):
    found = rank(device_events=list(events), **tables)
    window = Windows(np.array([0], np.int32), np.array([False]), np.array([start_ns]), np.array([end_ns]))
    work_done = device_work(found.device_events)
    return gaps(found.device_events, found.host_events, found["synchronizations"], work_done, window)


def _sets(found):
    def pairs(part):
        return list(zip(part.start_ns.tolist(), part.end_ns.tolist(), strict=True))

    return pairs(found.launch_starved), pairs(found.blocked), pairs(found.dependency_stalled)


@pytest.mark.parametrize(
    ("wait", "memset", "blocked"),
    [
        (None, False, False),
        ({}, False, True),
        # Recorded before the communication was enqueued, the event says nothing about it.
        ({"producer_correlation": 2}, False, False),
        # A wait enqueued after the kernel does not hold the kernel.
        ({"correlation": 8}, False, False),
        # It holds everything enqueued behind it on its stream.
        ({}, True, True),
    ],
)
def test_communication_on_another_stream_blocks_only_what_waits_for_it(wait, memset, blocked):
    events = [
        work("compute", 0, 10, -9, correlation=1),
        work("communication", 5, 45, -8, stream=20, correlation=2),
        *([work("memset", 46, 47, -5, correlation=6)] if memset else []),
        work("compute", 50, 60, -5, correlation=7),
    ]
    recorded = {"kind": "stream_wait_event", "stream": 7, "start_ns": -6, "end_ns": -6, "correlation": 5}
    recorded |= {"producer_stream": 20, "producer_correlation": 3}
    found = _gaps(0, 60, *events, synchronizations=[] if wait is None else [recorded | wait])
    assert _sets(found) == (([], [(10, 50)], []) if blocked else ([], [], [(10, 50)]))


@pytest.mark.parametrize(
    ("called_ns", "start_ns", "blocked"),
    [
        (-70, 50, True),
        # It was made to wait before the communication was launched: for something else.
        (-85, 50, False),
        (-70, 45 + PROMPT_NS, True),
        # Long after the communication was over, it is not what the kernel waited for.
        (-70, 45 + PROMPT_NS + 1, False),
    ],
)
def test_unrecorded_waits_are_inferred_from_the_call_and_from_a_prompt_start(called_ns, start_ns, blocked):
    events = [
        work("compute", 0, 10, -90),
        work("communication", 5, 45, -80, stream=20),
        work("compute", start_ns, start_ns + 10, -50),
    ]
    call = {"category": "runtime", "name": "cudaStreamWaitEvent", "start_ns": called_ns, "end_ns": called_ns + 1}
    found = _sets(_gaps(0, start_ns + 10, *events, host_events=[call]))
    assert found == (([], [(10, start_ns)], []) if blocked else ([], [], [(10, start_ns)]))


def test_without_iterations_the_whole_capture_is_one_row():
    tables = rank(device_events=[work("compute", 0, 1000, -5), work("compute", 5000, 6000, 4000)])
    names = ("iteration", "duration_us", "non_compute_us", "launch_starved_us")
    assert values(answer(tables, "idle_gaps"), *names) == [(None, 6.0, 4.0, 3.0)]


@pytest.mark.parametrize(("stream", "caveats"), [(7, []), (20, ["stream_waits_unrecorded"])])
def test_unrecorded_waits_between_streams_have_a_caveat(stream, caveats):
    tables = rank(device_events=[work("compute", 0, 10), work("compute", 20, 30, stream=stream)])
    assert [caveat.code for caveat in RankQuestions(tables).answer("idle_gaps").caveats] == caveats


def _in_order(rows):
    """Events of which none begins before the one before it on its stream is over, as devices have them."""
    over: dict[int, int] = {}
    events = []
    for kind, stream, gap, length, lead in rows:
        start = over.get(stream, 0) + gap
        over[stream] = start + length
        events.append(work(kind, start, start + length, None if lead is None else start - lead, stream=stream))
    return sorted(events, key=lambda event: event["start_ns"])


_KINDS = st.sampled_from(["compute", "compute", "communication", "memcpy"])
_LEADS = st.none() | st.integers(0, 30)
_EVENTS = st.lists(st.tuples(_KINDS, st.integers(0, 2), st.integers(0, 12), st.integers(0, 8), _LEADS), max_size=12)


def _naive(events, start_ns, end_ns):
    """Every nanosecond judged by itself."""
    computes = [event for event in events if event["kind"] == "compute" and event["end_ns"] > event["start_ns"]]
    never = -(10**6)
    found: tuple[list[int], ...] = ([], [], [])
    for now in range(start_ns, end_ns):
        if any(event["start_ns"] <= now < event["end_ns"] for event in computes):
            continue
        following = [event for event in computes if now < event["start_ns"] < end_ns]
        if not following:
            found[0].append(now)
            continue
        kernel = min(following, key=lambda event: (event["start_ns"], event.get("launch_end_ns", never)))
        begin = max([start_ns, *(event["end_ns"] for event in computes if event["end_ns"] <= now)])
        before = [event["end_ns"] for event in events[: events.index(kernel)] if event["stream"] == kernel["stream"]]
        starved, blocked = now < kernel.get("launch_end_ns", never), max(before, default=never) > begin
        found[0 if starved else 1 if blocked else 2].append(now)
    return found


@given(_EVENTS, st.lists(st.integers(-3, 120), min_size=2, max_size=6))
def test_the_parts_are_those_of_a_judgement_nanosecond_by_nanosecond(rows, cuts):
    events = _in_order(rows)
    end_ns = max((event["end_ns"] for event in events), default=0) + 5
    found = _gaps(-3, end_ns, *events)
    points = [[point for start, end in pairs for point in range(start, end)] for pairs in _sets(found)]
    assert tuple(points) == _naive(events, -3, end_ns)
    # The parts of any window add up to its time without compute.
    cuts = [min(cut, end_ns) for cut in sorted(cuts)]
    start, end = np.array(cuts[:-1], np.int64), np.array(cuts[1:], np.int64)
    parts = sum(part.within_ns(start, end) for part in (found.launch_starved, found.blocked, found.dependency_stalled))
    compute = device_work(rank(device_events=events).device_events).compute
    assert parts.tolist() == (end - start - compute.within_ns(start, end)).tolist()
