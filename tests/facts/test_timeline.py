"""Timelines: events that can be distinguished stand alone, the others are one segment that says so; all ranks on one clock."""

import pyarrow as pa
import pytest

from bridge_profiling.facts.timeline import HOST_LANE, KINDS, Window, segments, windows_of
from bridge_profiling.traces import cache
from tests.facts.ranks_in_hand import rank, span

US = 1_000


def _drawn(folder, *events, resolution_ns=10 * US, **tables):
    cache.write(rank(device_events=list(events), **tables), folder / "rank0")
    (found,) = segments(folder / "rank0", [Window(0, 3, 0, 1_000 * US, 0)], {3: resolution_ns}, host=bool(tables))
    return found


def _event(kind, start_us, end_us, name="k", **known):
    return {"kind": kind, "name": name, "start_ns": int(start_us * US), "end_ns": int(end_us * US), **known}


def _shown(found):
    columns = (found.start_ns // US, (found.start_ns + found.duration_ns) // US, found.count)
    kinds = [KINDS[kind] for kind in found.kind]
    return list(zip(kinds, found.name, *(column.tolist() for column in columns), strict=True))


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        # Short events without a visible gap are one, named for the longest.
        ([*((start, start + 3) for start in range(0, 40, 4)), (41, 45.5)], [("41", 0, 45, 11)]),
        # Another kind stays apart without a visible gap.
        ([(100, 109, "memcpy"), (110, 119)], [("100", 100, 109, 1), ("110", 110, 119, 1)]),
        # A visible gap stays.
        ([(0, 5), (60, 65)], [("0", 0, 5, 1), ("60", 60, 65, 1)]),
        # What is outside is cut.
        ([(-50, 20), (990, 1_200), (2_000, 2_010)], [("-50", 0, 20, 1), ("990", 990, 1_000, 1)]),
    ],
)
def test_what_cannot_be_distinguished_is_one_segment(tmp_path, events, expected):
    kinds = {str(start): kind[0] if kind else "compute" for start, _, *kind in events}
    found = _drawn(tmp_path, *(_event(kinds[str(start)], start, end, str(start)) for start, end, *_ in events))
    assert _shown(found) == [(kinds[each[0]], *each) for each in expected]


def test_lanes_are_streams_and_the_hosts_outermost_annotations_but_for_the_iteration_itself(tmp_path):
    ranges = (("ProfilerStep#3", 0, 1_000), ("forward", 10, 500), ("attention", 20, 100), ("optimizer", 600, 900))
    annotations = [span(name, start * US, end * US) for name, start, end in ranges]
    events = (_event("compute", 0, 20), _event("communication", 50, 99, stream=20))
    found = _drawn(tmp_path, *events, resolution_ns=US, host_events=annotations)
    assert found.lanes == [HOST_LANE, "stream 7", "stream 20"]
    assert [name for kind, name, *_ in _shown(found) if kind == "annotation"] == ["forward", "optimizer"]


@pytest.mark.parametrize(("name", "others", "shown"), [
    ("data-loading", [("enumerate(DataLoader)", 6, 980)], "data-loading"),
    ("train_step", [("forward", 10, 500)], "forward"),
])  # fmt: skip
def test_a_phase_that_takes_the_whole_iteration_is_shown_and_a_range_around_it_is_not(tmp_path, name, others, shown):
    ranges = [{"category": "annotation"} | _event("", *times, each) for each, *times in [(name, 5, 990), *others]]
    found = _drawn(tmp_path, host_events=sorted(ranges, key=lambda row: row["start_ns"]))
    assert (shown in found.name, name in found.name) == (True, shown == name)


def test_ranks_share_a_zero_on_the_common_clock():
    first = {"rank": 0, "source": "kineto", "iteration": 3, "start_ns": 1_000, "end_ns": 2_000}
    iterations = pa.Table.from_pylist([first, first | {"rank": 1, "start_ns": 5_100, "end_ns": 6_100}])
    offsets = pa.table({"rank": [0, 1], "offset_ns": [0, -4_000]})
    found = windows_of(iterations, "kineto", offsets)[3]
    assert [window.start_ns - window.zero_ns for window in found.values()] == [0, 100]
