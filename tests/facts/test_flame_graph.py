"""Stacks of nested, overlapping and empty ranges, and the host and device time in each."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from bridge_profiling.facts.rank import stacks_of
from tests.facts.ranks_in_hand import answer, rank, values, work

US = 1000


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 15)), max_size=14))
def test_the_stack_at_each_time_is_the_ranges_open_then_without_those_that_outlast_one_they_start_in(rows):
    ranges = sorted(((start, start + length) for start, length in rows), key=lambda each: (each[0], -each[1]))
    host = [{"category": "python", "name": str(row), "thread": 1} | _times(*each) for row, each in enumerate(ranges)]
    launches = [work("compute", time, time + 1000, time) for time in range(50)]
    found = answer(rank(host_events=host, device_events=launches), "flame_graph")
    expected = Counter(_stack(ranges, time) for time in range(50))
    expected.pop(())
    calls = Counter()
    for row in found.to_pylist():
        calls[row["stack"][-1]] += row["count"]
        assert row["device_ns"] == 1000 * row["self_ns"] == 1000 * expected.pop(tuple(row["stack"]), 0)
    assert not expected
    assert calls == {str(row): 1 for row in range(len(ranges))}


def _stack(ranges, time):
    found = []
    for row, (start, end) in enumerate(ranges):
        outlasts = any(first < end for begin, first in ranges[:row] if begin <= start and time < first)
        if start <= time < end and not outlasts:
            found.append(str(row))
    return tuple(found)


def _times(start, end):
    return {"start_ns": start, "end_ns": end}


def _event(category, name, start_us, end_us, thread=1, **known):
    return {"category": category, "name": name, "thread": thread, "start_ns": start_us * US, "end_ns": end_us * US} | known


#: Two iterations of a loop whose annotation is entered in a Python frame; a second thread without Python.
HOST = [
    _event("python", "train.py(1): <module>", 0, 100),
    _event("annotation", "ProfilerStep#1", 5, 50),
    _event("python", "train.py(9): step", 10, 40),
    _event("python", "profiler.py(7): __enter__", 12, 14),
    _event("annotation", "forward", 13, 30),
    _event("operator", "aten::mm", 15, 25, operator=4),
    _event("runtime", "cudaLaunchKernel", 16, 18, operator=4),
    _event("runtime", "cudaLaunchKernel", 32, 34),
    _event("annotation", "ProfilerStep#2", 50, 95),
    _event("python", "train.py(9): step", 60, 70),
    _event("python", "<built-in method sleep of Lock object at 0x7f00>", 61, 63),
    _event("python", "<built-in method sleep of Lock object at 0x7fff>", 64, 68),
    _event("operator", "aten::mm", 15, 35, thread=2, operator=5),
    _event("operator", "aten::empty", 20, 20, thread=2),
]
DEVICE = [
    work("compute", 20 * US, 26 * US, 17 * US),
    work("compute", 26 * US, 27 * US, 33 * US),
    # On the second thread; by an operator without a recorded call; by an unknown launch; before the first iteration.
    work("compute", 30 * US, 60 * US, 22 * US) | {"launch_thread": 2},
    work("memcpy", 60 * US, 64 * US, operator=5),
    work("memset", 64 * US, 66 * US),
    work("compute", 1 * US, 3 * US, 2 * US),
]
ITERATIONS = [{"iteration": 1, "start_ns": 5 * US, "end_ns": 50 * US}, {"iteration": 2, "start_ns": 50 * US, "end_ns": 95 * US}]
NAMES = ("thread", "stack", "category", "count", "self_ns", "total_ns", "device_ns", "device_total_ns")
MODULE, STEP = "train.py(1): <module>", "train.py(9): step"


def test_each_stack_has_the_time_it_was_open_without_and_with_its_callees_and_the_device_time_it_launched():
    tables = rank(host_events=HOST, device_events=DEVICE, iterations=ITERATIONS)
    found = stacks_of(tables)["flame_graph"]
    enter, forward = "profiler.py(7): __enter__", "forward"
    assert [(*row[:4], *(time_ns / US for time_ns in row[4:])) for row in values(found.table, *NAMES)] == [
        (1, [MODULE], "python", 1, 50, 90, 0, 7),
        (1, [MODULE, STEP], "python", 2, 14, 40, 1, 7),
        # `forward` counts from the end of the frame that enters it.
        (1, [MODULE, STEP, forward], "annotation", 1, 6, 16, 0, 6),
        (1, [MODULE, STEP, forward, "aten::mm"], "operator", 1, 8, 10, 6, 6),
        (1, [MODULE, STEP, forward, "aten::mm", "cudaLaunchKernel"], "runtime", 1, 2, 2, 0, 0),
        (1, [MODULE, STEP, "<built-in method sleep of Lock object>"], "python", 2, 6, 6, 0, 0),
        (1, [MODULE, STEP, enter], "python", 1, 2, 2, 0, 0),
        (1, [MODULE, STEP, "cudaLaunchKernel"], "runtime", 1, 2, 2, 0, 0),
        (2, ["aten::mm"], "operator", 1, 20, 20, 34, 34),
        (2, ["aten::mm", "aten::empty"], "operator", 1, 0, 0, 0, 0),
    ]
    small_left_out = answer(tables, "flame_graph", least_share=0.12)
    assert [stack[-1] for stack in small_left_out["stack"].to_pylist()] == [MODULE, STEP, forward, "aten::mm", "aten::mm"]
    beside = "0.002 ms of device work are in no stack of the flame graph"
    assert [caveat.text.startswith(beside) for caveat in found.caveats] == [True]
