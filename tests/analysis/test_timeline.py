"""Timelines: what can be told apart is, what cannot is one segment that says so; all ranks on one clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from bridge_profiling.analysis.ranks.timeline import HOST_LANE, KINDS, Segments, Window, segments, windows_of
from bridge_profiling.traces import cache
from tests.analysis.ranks_in_hand import rank

US = 1_000


def _drawn(folder: Path, events: list[dict[str, Any]], resolution_ns: int, **tables: list[dict[str, Any]]) -> Segments:
    cache.write(rank(device_events=events, **tables), folder / "rank0")
    window = Window(0, 3, 0, 1_000 * US, 0)
    (found,) = segments(folder / "rank0", [window], {3: resolution_ns}, host=bool(tables))
    return found


def _event(kind: str, start_us: float, end_us: float, name: str = "k", **known: Any) -> dict[str, Any]:
    return {"kind": kind, "name": name, "start_ns": int(start_us * US), "end_ns": int(end_us * US), **known}


def _shown(found: Segments) -> list[tuple[str, int, int, int]]:
    kinds = (KINDS[kind] for kind in found.kind)
    columns = (found.start_ns // US, (found.start_ns + found.duration_ns) // US, found.count)
    return list(zip(kinds, *(column.tolist() for column in columns), strict=True))


def test_long_events_stand_alone_even_without_a_gap(tmp_path: Path) -> None:
    found = _drawn(tmp_path, [_event("compute", 0, 50, "a"), _event("compute", 50, 100, "b")], 10 * US)
    assert _shown(found) == [("compute", 0, 50, 1), ("compute", 50, 100, 1)]
    assert found.name == ["a", "b"]


def test_short_events_without_a_visible_gap_are_one_named_for_the_longest(tmp_path: Path) -> None:
    events = [_event("compute", start, start + 3, f"k{start}") for start in range(0, 40, 4)] + [
        _event("compute", 41, 45.5, "long")
    ]
    found = _drawn(tmp_path, events, 10 * US)
    assert _shown(found) == [("compute", 0, 45, 11)]
    assert found.name == ["long"]


def test_a_visible_gap_and_another_kind_stay_apart(tmp_path: Path) -> None:
    events = [
        _event("compute", 0, 5),
        _event("compute", 60, 65),
        _event("communication", 100, 109),
        _event("compute", 110, 119),
    ]
    found = _drawn(tmp_path, events, 10 * US)
    assert _shown(found) == [
        ("compute", 0, 5, 1),
        ("compute", 60, 65, 1),
        ("communication", 100, 109, 1),
        ("compute", 110, 119, 1),
    ]


def test_segments_are_bounded_by_the_picture_whatever_ran(tmp_path: Path) -> None:
    events = [_event(("compute", "memcpy", "communication")[n % 3], n / 4, n / 4 + 0.2) for n in range(4_000)]
    found = _drawn(tmp_path, events, 10 * US)
    assert len(found) <= 2 * 100
    assert int(found.count.sum()) == 4_000


def test_streams_are_lanes_and_what_lies_outside_is_cut(tmp_path: Path) -> None:
    events = [_event("compute", -50, 20), _event("communication", 990, 1_200, stream=20), _event("compute", 2_000, 2_010)]
    found = _drawn(tmp_path, events, US)
    assert found.lanes == ["stream 7", "stream 20"]
    assert _shown(found) == [("compute", 0, 20, 1), ("communication", 990, 1_000, 1)]


def test_the_hosts_outermost_annotations_have_a_lane_but_for_the_iteration_itself(tmp_path: Path) -> None:
    annotations = [
        {"category": "annotation", "name": name, "start_ns": start * US, "end_ns": end * US}
        for name, start, end in (
            ("ProfilerStep#3", 0, 1_000),
            ("forward", 10, 500),
            ("attention", 20, 100),
            ("optimizer", 600, 900),
        )
    ]
    found = _drawn(tmp_path, [_event("compute", 0, 20)], US, host_events=annotations)
    assert found.lanes[0] == HOST_LANE
    assert [name for name, kind in zip(found.name, found.kind, strict=True) if KINDS[kind] == "annotation"] == [
        "forward",
        "optimizer",
    ]


def test_ranks_share_a_zero_on_the_common_clock() -> None:
    iterations = pa.Table.from_pylist(
        [
            {"rank": 0, "source": "kineto", "iteration": 3, "start_ns": 1_000, "end_ns": 2_000},
            {"rank": 1, "source": "kineto", "iteration": 3, "start_ns": 5_100, "end_ns": 6_100},
        ]
    )
    offsets = pa.Table.from_pylist([{"rank": 0, "offset_ns": 0}, {"rank": 1, "offset_ns": -4_000}])
    found = windows_of(iterations, "kineto", offsets)[3]
    assert [window.start_ns - window.zero_ns for window in found.values()] == [0, 100]
