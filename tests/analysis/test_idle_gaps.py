"""Time without compute is launch-starved, blocked or dependency-stalled, each nanosecond one of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge_profiling.analysis.attribution.device import IdleGaps, Windows, device_work
from bridge_profiling.analysis.attribution.idle import PROMPT_NS, gaps
from bridge_profiling.analysis.intervals import Intervals
from tests.analysis.ranks_in_hand import answer, rank, work


def _absent(start_ns: int, end_ns: int, **tables: list[dict[str, Any]]) -> IdleGaps:
    found = rank(**tables)
    window = Windows(np.array([0], np.int32), np.array([False]), np.array([start_ns]), np.array([end_ns]))
    events = found.device_events
    return gaps(events, found.host_events, found["synchronizations"], device_work(events), window)


def _sets(absent: IdleGaps) -> tuple[list, list, list]:
    def pairs(found: Intervals) -> list[tuple[int, int]]:
        return list(zip(found.start_ns.tolist(), found.end_ns.tolist(), strict=True))

    return pairs(absent.launch_starved), pairs(absent.blocked), pairs(absent.dependency_stalled)


def test_a_gap_is_starved_until_the_kernel_that_ends_it_is_launched() -> None:
    events = [work("compute", 0, 10, -5), work("compute", 50, 60, 40)]
    assert _sets(_absent(0, 60, device_events=events)) == ([(10, 40)], [], [(40, 50)])


def test_a_kernel_that_starts_before_its_call_returns_was_starved_until_it_started() -> None:
    events = [work("compute", 0, 10, -5), work("compute", 50, 60, 55)]
    assert _sets(_absent(0, 60, device_events=events)) == ([(10, 50)], [], [])


@pytest.mark.parametrize("kind", ["communication", "memcpy", "memset"])
def test_a_launched_kernel_behind_other_work_on_its_stream_is_blocked(kind: str) -> None:
    events = [work("compute", 0, 10, -9), work(kind, 12, 48, -8), work("compute", 50, 60, 20)]
    assert _sets(_absent(0, 60, device_events=events)) == ([(10, 20)], [(20, 50)], [])


def test_work_that_ended_before_the_gap_began_blocks_nobody() -> None:
    events = [work("memcpy", 0, 5, -9), work("compute", 5, 10, -9), work("compute", 50, 60, 20)]
    assert _sets(_absent(0, 60, device_events=events)) == ([(10, 20)], [(0, 5)], [(20, 50)])


def test_communication_on_another_stream_blocks_only_who_waits_for_it() -> None:
    events = [
        work("compute", 0, 10, -9, correlation=1),
        work("communication", 5, 45, -8, stream=20, correlation=2),
        work("compute", 50, 60, -5, correlation=7),
    ]
    wait = {"kind": "stream_wait_event", "stream": 7, "start_ns": -6, "end_ns": -6, "correlation": 5}
    producer = {"producer_stream": 20, "producer_correlation": 3}
    assert _sets(_absent(0, 60, device_events=events)) == ([], [], [(10, 50)])
    assert _sets(_absent(0, 60, device_events=events, synchronizations=[wait | producer])) == ([], [(10, 50)], [])
    # Recorded before the communication was enqueued, the event says nothing about it.
    early = wait | {"producer_stream": 20, "producer_correlation": 2}
    assert _sets(_absent(0, 60, device_events=events, synchronizations=[early])) == ([], [], [(10, 50)])
    # A wait enqueued after the kernel does not hold the kernel.
    late = wait | producer | {"correlation": 8}
    assert _sets(_absent(0, 60, device_events=events, synchronizations=[late])) == ([], [], [(10, 50)])


def test_a_wait_holds_everything_enqueued_behind_it_on_its_stream() -> None:
    events = [
        work("compute", 0, 10, -9, correlation=1),
        work("communication", 5, 45, -8, stream=20, correlation=2),
        work("memset", 46, 47, -5, correlation=6),
        work("compute", 50, 60, -5, correlation=7),
    ]
    wait = {"kind": "stream_wait_event", "stream": 7, "start_ns": -6, "end_ns": -6, "correlation": 5}
    found = _absent(0, 60, device_events=events, synchronizations=[wait | {"producer_stream": 20, "producer_correlation": 3}])
    assert _sets(found) == ([], [(10, 50)], [])


def test_unrecorded_waits_are_told_from_the_call_and_from_a_prompt_start() -> None:
    events = [
        work("compute", 0, 10, -90),
        work("communication", 5, 45, -80, stream=20),
        work("compute", 50, 60, -50),
    ]
    call = {"category": "runtime", "name": "cudaStreamWaitEvent", "start_ns": -70, "end_ns": -69}
    assert _sets(_absent(0, 60, device_events=events, host_events=[call])) == ([], [(10, 50)], [])
    # Told to wait before the communication was launched: for something else.
    before = call | {"start_ns": -85, "end_ns": -84}
    assert _sets(_absent(0, 60, device_events=events, host_events=[before])) == ([], [], [(10, 50)])
    # Long after the communication was over, it is not what the kernel waited for.
    late = 45 + PROMPT_NS + 1
    events[-1] = work("compute", late, late + 10, -50)
    assert _sets(_absent(0, late + 10, device_events=events, host_events=[call])) == ([], [], [(10, late)])


def test_a_kernel_without_a_recorded_launch_is_never_starved() -> None:
    events = [work("compute", 0, 10), work("compute", 50, 60)]
    assert _sets(_absent(0, 60, device_events=events)) == ([], [], [(10, 50)])


def test_time_that_no_kernel_ends_is_starved() -> None:
    assert _sets(_absent(0, 90, device_events=[work("compute", 20, 30, 5)])) == ([(0, 5), (30, 90)], [], [(5, 20)])
    assert _sets(_absent(0, 90, device_events=[work("memcpy", 20, 30, 5)])) == ([(0, 90)], [], [])
    assert _sets(_absent(0, 90)) == ([(0, 90)], [], [])


def test_streams_of_two_devices_with_one_number_are_two_streams() -> None:
    events = [
        work("compute", 0, 10, -9),
        work("memcpy", 12, 48, -8, device=1),
        work("compute", 50, 60, 20),
    ]
    assert _sets(_absent(0, 60, device_events=events))[1] == []


def test_without_iterations_the_whole_capture_is_one_row() -> None:
    tables = rank(device_events=[work("compute", 0, 1000, -5), work("compute", 5000, 6000, 4000)])
    (row,) = answer(tables, "idle_gaps").to_pylist()
    assert row["iteration"] is None
    assert (row["duration_us"], row["non_compute_us"], row["launch_starved_us"]) == (6.0, 4.0, 3.0)


_KINDS = st.sampled_from(["compute", "compute", "communication", "memcpy"])
_EVENTS = st.lists(
    st.tuples(_KINDS, st.integers(0, 2), st.integers(0, 12), st.integers(0, 8), st.none() | st.integers(0, 30)), max_size=12
)


def _in_order(rows: list[tuple[str, int, int, int, int | None]]) -> list[dict[str, Any]]:
    """Events of which none begins before the one before it on its stream is over, as devices have them."""
    over: dict[int, int] = {}
    events = []
    for kind, stream, gap, length, lead in rows:
        start = over.get(stream, 0) + gap
        over[stream] = start + length
        events.append(work(kind, start, start + length, None if lead is None else start - lead, stream=stream))
    return sorted(events, key=lambda event: event["start_ns"])


def _naive(events: list[dict[str, Any]], start_ns: int, end_ns: int) -> tuple[list[int], list[int], list[int]]:
    """Every nanosecond judged by itself."""
    computes = [event for event in events if event["kind"] == "compute" and event["end_ns"] > event["start_ns"]]
    found: tuple[list[int], list[int], list[int]] = ([], [], [])
    for now in range(start_ns, end_ns):
        if any(event["start_ns"] <= now < event["end_ns"] for event in computes):
            continue
        following = [event for event in computes if now < event["start_ns"] < end_ns]
        if not following:
            found[0].append(now)
            continue
        first = min(event["start_ns"] for event in following)
        never = -(10**6)
        kernel = min(
            (event for event in following if event["start_ns"] == first), key=lambda event: event.get("launch_end_ns", never)
        )
        begin = max([start_ns, *(event["end_ns"] for event in computes if event["end_ns"] <= now)])
        before = [event["end_ns"] for event in events[: events.index(kernel)] if event["stream"] == kernel["stream"]]
        if now < kernel.get("launch_end_ns", never):
            found[0].append(now)
        elif max(before, default=never) > begin:
            found[1].append(now)
        else:
            found[2].append(now)
    return found


@given(_EVENTS)
def test_the_three_parts_are_those_of_a_judgement_nanosecond_by_nanosecond(rows: list) -> None:
    events = _in_order(rows)
    end_ns = max((event["end_ns"] for event in events), default=0) + 5
    absent = _absent(-3, end_ns, device_events=events)
    points = [[point for start, end in pairs for point in range(start, end)] for pairs in _sets(absent)]
    assert tuple(points) == _naive(events, -3, end_ns)


@given(_EVENTS, st.lists(st.integers(-3, 120), min_size=2, max_size=6))
def test_the_three_parts_of_any_window_add_up_to_its_time_without_compute(rows: list, cuts: list[int]) -> None:
    events = _in_order(rows)
    work_done = device_work(rank(device_events=events).device_events)
    cuts = sorted(cuts)
    absent = _absent(-3, 200, device_events=events)
    start, end = np.array(cuts[:-1], np.int64), np.array(cuts[1:], np.int64)
    parts = sum(part.within_ns(start, end) for part in (absent.launch_starved, absent.blocked, absent.dependency_stalled))
    assert parts.tolist() == (end - start - work_done.compute.within_ns(start, end)).tolist()
