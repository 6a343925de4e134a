"""Findings as annotations of the merged trace: tracks above the ranks they are about."""

import json
from dataclasses import replace

import pytest

from bridge_profiling.findings import Event
from bridge_profiling.report.merged_trace import write_merged_trace
from tests.report.known import finding
from tests.traces.kineto_files import steps


@pytest.fixture
def merge(made, tmp_path):
    """The events of two merged ranks with findings, whose own events are named by a rank and two times in microseconds."""
    run = made(ranks=2)
    begins = run.facts.iterations["start_ns"][0].as_py()

    def merged(*findings):
        placed = [
            replace(each, events=[replace(event, start_ns=event.start_ns + begins) for event in each.events])
            for each in findings
        ]
        write_merged_trace(run.facts, tmp_path / "all.json", findings=placed)
        return json.loads((tmp_path / "all.json").read_text())["traceEvents"]

    return merged


def _slices(events):
    return [event for event in events if event.get("cat") == "finding"]


def test_a_finding_is_where_its_event_is_and_says_what_to_change(merge):
    # Four events, of which the slice is as long as one.
    event = Event(1, "dataloader <b>", 0, 200_000, 200_000, 4)
    (found,) = _slices(merge(finding(ranks=[1], events=[event])))
    assert (found["pid"], found["ts"], found["dur"]) == (1, 200.0, 50.0)
    assert (found["name"], found["args"]["event"]) == (finding().title, "dataloader <b>")


def test_a_finding_without_a_place_covers_the_iterations_of_its_ranks(merge):
    found = _slices(merge(finding(ranks=[1], events=[])))
    assert [(each["pid"], each["ts"], each["dur"]) for each in found] == [(1, 0.0, 900.0), (1, 1000.0, 900.0)]


def test_each_finding_has_a_track_of_its_own_above_the_threads_and_slices_never_overlap(merge):
    overlapping = [Event(0, "a", 0, 100_000, 200_000), Event(0, "b", 0, 200_000, 200_000)]
    events = merge(finding(ranks=[0], events=overlapping), finding(id="host_sync", ranks=[0]))
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    order = {event["tid"]: event["args"]["sort_index"] for event in events if event["name"] == "thread_sort_index"}
    mine = _slices(events)
    assert {names[each["tid"]] for each in mine} == {"finding 1: data_loading", "finding 2: host_sync"}
    assert all(order[each["tid"]] < 0 for each in mine)
    first, second = (each for each in mine if names[each["tid"]].startswith("finding 1"))
    assert first["ts"] + first["dur"] <= second["ts"]


def test_times_count_from_the_first_event_so_that_none_loses_digits(write_trace, run_of, tmp_path):
    """Microseconds of Unix time have more digits than JSON's numbers."""
    for rank, base_ns in enumerate((1_795_178_166_000_000_001, 1_795_178_166_000_000_124)):
        write_trace(steps(250), f"two/rank-{rank}.json.gz", baseTimeNanoseconds=base_ns, distributedInfo={"rank": rank})
    write_merged_trace(run_of(tmp_path / "two").facts, tmp_path / "all.json")
    merged = json.loads((tmp_path / "all.json").read_text())
    assert merged["baseTimeNanoseconds"] == 1_795_178_166_000_000_001
    begins = [
        min(event["ts"] for event in merged["traceEvents"] if event["ph"] == "X" and event["pid"] == rank) for rank in (0, 1)
    ]
    assert begins == [0, 0.123]
