"""The step's budget: parts that add up to the median iteration, whichever way it is cut."""

import pyarrow as pa
import pytest

from bridge_profiling.analysis.attribution.idle import Cause
from bridge_profiling.analysis.attribution.parts import BY_CAUSE, PART_OF_CAUSE, attribution


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
