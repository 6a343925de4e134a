"""The step's budget: parts that add up to the median iteration, whichever way it is cut."""

import pyarrow as pa
import pytest

from bridge_profiling.analysis.attribution.idle import Cause
from bridge_profiling.analysis.attribution.parts import BY_ACTIVITY, BY_CAUSE, PART_OF_CAUSE, attribution


def _attributed(*durations_us, boundary=None, lost_us=None, cause=Cause.data_loading, waiting_us=None):
    """The budget of one rank's iterations that compute for half of their time, and lose some of the rest to a cause."""
    capture = {"rank": 0, "source": "kineto"}
    iterations = [
        capture
        | {"iteration": number, "boundary": number == boundary, "duration_us": duration, "exposed_communication_us": 0.0}
        | {"compute_us": duration / 2, "idle_us": duration / 2}
        for number, duration in enumerate(durations_us)
    ]
    lost = [
        capture | {"iteration": number, "cause": str(cause), "between": between, "lost_us": lost}
        for number, lost in (lost_us or {0: 0.0}).items()
        for between in (False, True)
    ]
    ranks = [{"rank": 0, "iteration": number, "waiting_us": waiting_us} for number in range(len(durations_us))]
    (found,) = attribution(*(pa.Table.from_pylist(rows) for rows in (iterations, lost, ranks))).to_pylist()
    return found


def test_the_parts_of_real_ranks_add_up_to_the_iteration_either_way(real):
    run = real("kineto/tp2_dp2")
    rows = run.attribution().to_pylist()
    assert [row["rank"] for row in rows] == [0, 1, 2, 3]
    assert [row["duration_us"] for row in rows] == pytest.approx(run.typical_iteration()["duration_us"].to_pylist())
    for row in rows:
        for parts in (BY_CAUSE, BY_ACTIVITY):
            assert sum(row[part] for part in parts) == pytest.approx(row["duration_us"], rel=1e-9)
            assert all(row[part] >= 0 for part in parts)
    # The hosts of 1 and 3 are late; 0 and 2 wait for them, and communicate no longer than the others.
    launch_us = [row["host_launch_us"] for row in rows]
    assert min(launch_us[1], launch_us[3]) > 2 * max(launch_us[0], launch_us[2])
    assert min(rows[0]["waiting_us"], rows[2]["waiting_us"]) > 90_000
    assert max(row["communication_us"] for row in rows) < 15_000


@pytest.mark.parametrize(
    ("durations_us", "boundary", "expected"),
    [
        ((100, 300, 120), None, (120, 60, 3)),
        # The mean of the middle two.
        ((100, 300, 120, 140), None, (130, 30, 4)),
        ((900, 100, 120, 140), 0, (120, 60, 3)),
    ],
)
def test_it_is_of_the_middle_iteration_without_boundary_ones(durations_us, boundary, expected):
    found = _attributed(*durations_us, boundary=boundary, lost_us={2: 60.0})
    assert (found["duration_us"], found["data_loading_us"], found["iterations"]) == expected


@pytest.mark.parametrize(("waiting_us", "expected"), [(30.0, (10, 30, True)), (70.0, (0, 40, True)), (None, (40, 0, False))])
def test_waiting_is_taken_from_communication_and_never_more_than_it(waiting_us, expected):
    lost = dict.fromkeys(range(3), 40.0)
    found = _attributed(100, 100, 100, lost_us=lost, cause=Cause.blocked_by_communication, waiting_us=waiting_us)
    assert (found["communication_us"], found["waiting_us"], found["waiting_known"]) == expected


def test_every_cause_has_a_part():
    assert set(PART_OF_CAUSE) == set(Cause)
    assert set(PART_OF_CAUSE.values()) <= set(BY_CAUSE)
