"""Iterations as the device lived them, and which of them count."""

from statistics import median

import pyarrow as pa
import pytest

from bridge_profiling.analysis.attribution.parts import steady, typical_iteration
from tests.analysis.ranks_in_hand import answer, rank, values, work


def _found(ranges, *events, boundary=None):
    """The iterations from 9 on, in nanoseconds of the host."""
    marks = [
        {"iteration": 9 + place, "start_ns": start, "end_ns": end, "boundary": bool(boundary and boundary[place])}
        for place, (start, end) in enumerate(ranges)
    ]
    table = answer(rank(iterations=marks, device_events=list(events)), "iterations")
    return table.add_column(0, "rank", pa.array([0] * len(table), pa.int32())).add_column(
        0, "source", [["kineto"] * len(table)]
    )


@pytest.mark.parametrize(
    ("events", "durations_us", "compute_us"),
    [
        # The host is done with iteration 9 when the device has hardly begun it.
        ([work("compute", 500, 5500, 100, iteration=9), work("compute", 5500, 10_500, 1100, iteration=10)], [5.5, 5], [5, 5]),
        # Communication that runs on into the next iteration does not move its beginning.
        (
            [
                work("compute", 100, 900, 50, iteration=9),
                work("communication", 900, 1500, 60, iteration=9, stream=20),
                work("compute", 1100, 1900, 1050, iteration=10),
            ],
            [1, 1],
            [0.8, 0.8],
        ),
    ],
)
def test_an_iteration_has_what_was_launched_in_it(events, durations_us, compute_us):
    found = _found([(0, 1000), (1000, 2000)], *events)
    assert values(found, "duration_us", "compute_us") == list(zip(durations_us, compute_us, strict=True))
    assert found["end_ns"][0] == found["start_ns"][1]


def test_time_between_iterations_belongs_to_none_and_one_without_work_is_all_idle():
    found = _found([(0, 1000), (5000, 6000)], work("compute", 2000, 3000, 1500))
    assert values(found, "duration_us", "compute_us", "idle_us", "launch_starved_us") == [(1, 0, 1, 1)] * 2


@pytest.mark.parametrize(
    ("boundaries", "counted", "codes"),
    [
        ([True, False, False, True], [1, 2], []),
        ([True, False, False], [1, 2], []),
        ([True, False], [0, 1], ["few_iterations"]),
        ([True, True, True], [0, 1, 2], ["no_steady_iteration"]),
    ],
)
def test_boundary_iterations_are_left_out_of_medians_where_three_were_captured(boundaries, counted, codes):
    table = _found([(place * 1000, place * 1000 + 100 * 2**place) for place in range(len(boundaries))], boundary=boundaries)
    assert [row["iteration"] - 9 for row in steady(table.to_pylist())] == counted
    expected = (len(counted), pytest.approx(median(2**place / 10 for place in counted)))
    found = typical_iteration(table)
    assert values(found.table, "iterations", "duration_us") == [expected]
    assert [caveat.code for caveat in found.caveats] == codes


def test_without_iterations_there_is_no_typical_one():
    table = _found([], work("compute", 0, 10))
    assert table.num_rows == typical_iteration(table).table.num_rows == 0
