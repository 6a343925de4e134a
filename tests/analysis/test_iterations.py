"""Iterations as the device lived them, and which of them count."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from bridge_profiling.analysis.attribution.parts import steady, typical_iteration
from tests.analysis.ranks_in_hand import answer, rank, work


def _iteration(number: int, start_ns: int, end_ns: int, *, boundary: bool = False) -> dict[str, Any]:
    return {"iteration": number, "start_ns": start_ns, "end_ns": end_ns, "boundary": boundary}


def _found(iterations: list[dict[str, Any]], events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return answer(rank(iterations=iterations, device_events=events), "iterations").to_pylist()


def _labelled(table: pa.Table) -> pa.Table:
    rows = table.num_rows
    return table.append_column("rank", pa.array([0] * rows, pa.int32())).append_column("source", pa.array(["kineto"] * rows))


def test_with_a_synchronisation_at_its_end_an_iteration_is_its_host_range() -> None:
    events = [work("compute", 1000, 4000, 900, iteration=9), work("communication", 3000, 6000, 950, iteration=9, stream=20)]
    (row,) = _found([_iteration(9, 0, 10_000)], events)
    assert row["duration_us"] == 10
    assert row["compute_us"] == 3
    assert row["communication_us"] == 3
    assert row["exposed_communication_us"] == 2
    assert row["overlapped_communication_us"] == 1
    assert row["idle_us"] == 5


def test_a_device_that_lags_behind_the_host_keeps_what_was_launched_in_an_iteration() -> None:
    """The host is done with iteration 9 when the device has hardly begun it."""
    iterations = [_iteration(9, 0, 1000), _iteration(10, 1000, 2000)]
    events = [work("compute", 500, 5500, 100, iteration=9), work("compute", 5500, 10_500, 1100, iteration=10)]
    rows = _found(iterations, events)
    assert [row["compute_us"] for row in rows] == [5, 5]
    assert [row["duration_us"] for row in rows] == [5.5, 5]
    assert rows[0]["end_ns"] == rows[1]["start_ns"] == 5500


def test_communication_that_runs_on_into_the_next_iteration_does_not_move_its_beginning() -> None:
    iterations = [_iteration(9, 0, 1000), _iteration(10, 1000, 2000)]
    events = [
        work("compute", 100, 900, 50, iteration=9),
        work("communication", 900, 1500, 60, iteration=9, stream=20),
        work("compute", 1100, 1900, 1050, iteration=10),
    ]
    assert [row["duration_us"] for row in _found(iterations, events)] == [1, 1]


def test_time_between_iterations_belongs_to_none() -> None:
    rows = _found([_iteration(9, 0, 1000), _iteration(10, 5000, 6000)], [work("compute", 2000, 3000)])
    assert [(row["duration_us"], row["compute_us"]) for row in rows] == [(1, 0), (1, 0)]


def test_an_iteration_without_device_work_is_all_idle() -> None:
    (row,) = _found([_iteration(9, 0, 1000)], [])
    assert row["idle_us"] == row["launch_starved_us"] == row["duration_us"] == 1


@pytest.mark.parametrize(
    ("boundaries", "counted"),
    [
        ([True, False, False, True], [1, 2]),
        ([True, False, False], [1, 2]),
        ([True, False], [0, 1]),
        ([True], [0]),
        ([True, True, True], [0, 1, 2]),
    ],
)
def test_boundary_iterations_are_left_out_of_medians_where_three_were_captured(
    boundaries: list[bool], counted: list[int]
) -> None:
    iterations = [
        _iteration(place, place * 1000, place * 1000 + 100 * 2**place, boundary=boundary)
        for place, boundary in enumerate(boundaries)
    ]
    table = _labelled(answer(rank(iterations=iterations), "iterations"))
    assert [row["iteration"] for row in steady(table.to_pylist())] == counted
    (row,) = typical_iteration(table).table.to_pylist()
    durations = sorted(2**place / 10 for place in counted)
    middle = len(durations) // 2
    median = durations[middle] if len(durations) % 2 else (durations[middle - 1] + durations[middle]) / 2
    assert row["iterations"] == len(counted)
    assert row["duration_us"] == pytest.approx(median)


def test_without_iterations_there_is_no_typical_one() -> None:
    table = _labelled(answer(rank(device_events=[work("compute", 0, 10)]), "iterations"))
    assert table.num_rows == typical_iteration(table).table.num_rows == 0
