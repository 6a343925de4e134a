"""Where the time of an iteration goes: sets of intervals, iterations, idle gaps, and the budget that adds up."""

from statistics import median

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge_profiling.facts.device import PROMPT_NS, Windows, device_work, gaps
from bridge_profiling.facts.intervals import parents, union
from bridge_profiling.facts.parts import steady, typical_iteration
from tests.facts.ranks_in_hand import answer, facts, rank, span, values, work

_BOUND = 40
_RANGES = st.lists(st.tuples(st.integers(-_BOUND, _BOUND), st.integers(-_BOUND, _BOUND)), max_size=12)
#: The same near the largest times there are: nanoseconds since 1970 fill 61 bits.
_OFFSETS = st.sampled_from([0, 1_795_177_822_134_345_236])


def _arrays(ranges, offset=0):
    pairs = np.array(ranges, np.int64).reshape(-1, 2) + offset
    return pairs[:, 0], pairs[:, 1]


def _points(ranges):
    return {point for start, end in ranges for point in range(start, end)}


def _members(intervals, offset=0):
    return _points(list(zip((intervals.start_ns - offset).tolist(), (intervals.end_ns - offset).tolist(), strict=True)))


@given(_RANGES, _RANGES, _OFFSETS)
def test_sets_of_intervals_are_sets_of_their_points(mine, theirs, offset):
    a, b = union(*_arrays(mine, offset)), union(*_arrays(theirs, offset))
    assert _members(a, offset) == _points(mine)
    assert a.total_ns == len(_points(mine))
    # In order, without empty ones, and those that touch are one.
    assert (a.end_ns > a.start_ns).all()
    assert (a.start_ns[1:] > a.end_ns[:-1]).all()
    assert _members(a & b, offset) == _points(mine) & _points(theirs)
    assert _members(a - b, offset) == _points(mine) - _points(theirs)
    assert _members(a | b, offset) == _points(mine) | _points(theirs)
    assert a.within_ns(*_arrays(theirs, offset)).tolist() == [len(_points(mine) & _points([each])) for each in theirs]


def _naive_parents(threads, ranges):
    """Walk each thread with a stack of open ranges."""
    order = sorted(range(len(ranges)), key=lambda row: (threads[row], ranges[row][0], -ranges[row][1], row))
    found, stack = [-1] * len(ranges), []
    for row in order:
        while stack and (threads[stack[-1]] != threads[row] or ranges[stack[-1]][1] <= ranges[row][0]):
            stack.pop()
        found[row] = stack[-1] if stack else -1
        stack.append(row)
    return found


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, _BOUND), st.integers(0, 20)), max_size=30))
def test_parents_of_any_ranges_are_the_innermost_open_ones(rows):
    threads, ranges = [row[0] for row in rows], [(row[1], row[1] + row[2]) for row in rows]
    assert parents(np.array(threads, np.int64), *_arrays(ranges)).tolist() == _naive_parents(threads, ranges)


def _found(ranges, *events, boundary=None):
    """The iterations from 9 on, in nanoseconds of the host."""
    marks = [
        {"iteration": 9 + place, "start_ns": start, "end_ns": end, "boundary": bool(boundary and boundary[place])}
        for place, (start, end) in enumerate(ranges)
    ]
    table = answer(rank(iterations=marks, device_events=list(events)), "iterations")
    return table.add_column(0, "rank", pa.array([0] * len(table))).add_column(0, "source", pa.array(["kineto"] * len(table)))


def test_an_iteration_has_what_was_launched_in_it():
    # The host is done with iteration 9 when the device has hardly begun it.
    ahead = [work("compute", 500, 5500, 100, iteration=9), work("compute", 5500, 10_500, 1100, iteration=10)]
    # Communication that runs on into the next iteration does not move its beginning.
    computes = [work("compute", 100, 900, 50, iteration=9), work("compute", 1100, 1900, 1050, iteration=10)]
    overlapping = [*computes, work("communication", 900, 1500, 60, iteration=9, stream=20)]
    for events, expected in ((ahead, [(5500, 5000), (5000, 5000)]), (overlapping, [(1000, 800), (1000, 800)])):
        found = _found([(0, 1000), (1000, 2000)], *events)
        assert values(found, "duration_ns", "compute_ns") == expected
        assert found["end_ns"][0] == found["start_ns"][1]


def test_the_first_iteration_begins_when_the_device_is_done_with_what_was_launched_before():
    before = [work("compute", 0, 400, None, iteration=None), work("compute", 400, 700, None, iteration=None)]
    own = [work("compute", 700, 1500, 50, iteration=9), work("compute", 1600, 1900, 1050, iteration=10)]
    found = _found([(0, 1000), (1000, 2000)], *before, *own, work("compute", 1950, 1960, None, iteration=None))
    assert values(found, "duration_ns", "compute_ns") == [(800, 800), (500, 310)]


def test_time_between_iterations_belongs_to_none_and_one_without_work_is_all_idle():
    found = _found([(0, 1000), (5000, 6000)], work("compute", 2000, 3000, 1500))
    assert values(found, "duration_ns", "compute_ns", "idle_ns", "launch_starved_ns") == [(1000, 0, 1000, 1000)] * 2


@pytest.mark.parametrize(
    ("boundaries", "counted", "codes"),
    [
        ([True, False, False, True], [1, 2], []),
        ([True, False], [0, 1], ["few_iterations"]),
        ([True, True, True], [0, 1, 2], ["no_steady_iteration"]),
    ],
)
def test_boundary_iterations_are_left_out_of_medians_where_three_were_captured(boundaries, counted, codes):
    table = _found([(place * 1000, place * 1000 + 100 * 2**place) for place in range(len(boundaries))], boundary=boundaries)
    assert [row["iteration"] - 9 for row in steady(table.to_pylist())] == counted
    found, middle = typical_iteration(table), median(100 * 2**place for place in counted)
    assert values(found.table, "iterations", "duration_ns") == [(len(counted), middle)]
    assert [caveat.code for caveat in found.caveats] == codes


def test_launch_statistics_tell_graphs_from_kernels_launched_one_by_one():
    events = [
        work("compute", 10_000, 11_000, 0, launch_start_ns=0, launch_end_ns=3_000, correlation=1),
        work("compute", 20_000, 22_000, 0, launch_start_ns=4_000, launch_end_ns=9_000, correlation=2),
        # A graph, and a kernel whose launch was not recorded.
        work("compute", 30_000, 33_000, 0, launch_start_ns=9_000, launch_end_ns=29_000, correlation=3),
        work("compute", 40_000, 44_000, 0, launch_start_ns=9_000, launch_end_ns=29_000, correlation=3),
        work("compute", 50_000, 60_000),
    ]
    names = ("kernel_count", "mean_kernel_ns", "median_kernel_ns", "launch_count", "launch_call_ns", "graph_kernel_count")
    assert values(answer(rank(device_events=events), "launch_statistics"), *names) == [(5, 4000, 3000, 2, 4000, 2)]


def _gaps(start_ns, end_ns, *events, **tables):
    found = rank(device_events=list(events), **tables)
    window = Windows(np.array([0], np.int32), np.array([False]), np.array([start_ns]), np.array([end_ns]))
    work_done = device_work(found["device_events"])
    return gaps(found["device_events"], found["host_events"], found["synchronizations"], work_done, window)


def _sets(found):
    parts = (found.launch_starved, found.blocked, found.dependency_stalled)
    return tuple(list(zip(part.start_ns.tolist(), part.end_ns.tolist(), strict=True)) for part in parts)


_WAIT = {"kind": "stream_wait_event", "stream": 7, "start_ns": -6, "end_ns": -6, "correlation": 5}
_WAIT |= {"producer_stream": 20, "producer_correlation": 3}


@pytest.mark.parametrize(
    ("recorded", "between", "start_ns", "blocked"),
    [
        ({}, [], 50, False),
        ({"synchronizations": [_WAIT]}, [], 50, True),
        # Recorded before the communication was enqueued, the event says nothing about it.
        ({"synchronizations": [_WAIT | {"producer_correlation": 2}]}, [], 50, False),
        # A wait enqueued after the kernel does not hold the kernel.
        ({"synchronizations": [_WAIT | {"correlation": 8}]}, [], 50, False),
        # It holds everything enqueued behind it on its stream.
        ({"synchronizations": [_WAIT]}, [work("memset", 46, 47, -5, correlation=6)], 50, True),
        # The call was made before the communication was launched: for something else.
        (-9, [], 50, False),
        (-7, [], 45 + PROMPT_NS, True),
        # Long after the communication was over, it is not what the kernel waited for.
        (-7, [], 45 + PROMPT_NS + 1, False),
    ],
)
def test_communication_on_another_stream_blocks_only_what_waits_for_it(recorded, between, start_ns, blocked):
    """Where no wait is recorded, one is inferred from its call (recorded: when) and from a prompt start."""
    if isinstance(recorded, int):
        recorded = {"host_events": [span("cudaStreamWaitEvent", recorded, recorded + 1, "runtime")]}
    before = [work("compute", 0, 10, -9, correlation=1), work("communication", 5, 45, -8, stream=20, correlation=2)]
    kernel = work("compute", start_ns, start_ns + 10, -5, correlation=7)
    found = _sets(_gaps(0, start_ns + 10, *before, *between, kernel, **recorded))
    assert found == (([], [(10, start_ns)], []) if blocked else ([], [], [(10, start_ns)]))


@pytest.mark.parametrize(("stream", "caveats"), [(7, []), (20, ["stream_waits_unrecorded"])])
def test_unrecorded_waits_between_streams_have_a_caveat(stream, caveats):
    tables = rank(device_events=[work("compute", 0, 10), work("compute", 20, 30, stream=stream)])
    assert [caveat.code for caveat in facts(tables)["idle_gaps"].caveats] == caveats


def _in_order(rows):
    """Events of which none begins before the one before it on its stream is over, as devices have them."""
    over, events = {}, []
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
    found = ([], [], [])
    for now in range(start_ns, end_ns):
        if any(event["start_ns"] <= now < event["end_ns"] for event in computes):
            continue
        if not (following := [event for event in computes if now < event["start_ns"] < end_ns]):
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
    assert [sorted(_points(pairs)) for pairs in _sets(found)] == list(_naive(events, -3, end_ns))
    # The parts of any window add up to its time without compute.
    cuts = [min(cut, end_ns) for cut in sorted(cuts)]
    start, end = np.array(cuts[:-1], np.int64), np.array(cuts[1:], np.int64)
    parts = sum(part.within_ns(start, end) for part in (found.launch_starved, found.blocked, found.dependency_stalled))
    compute = device_work(rank(device_events=events)["device_events"]).compute
    assert parts.tolist() == (end - start - compute.within_ns(start, end)).tolist()
