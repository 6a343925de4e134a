"""The step's budget: parts that add up to the median iteration, whichever way it is cut."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from bridge_profiling.analysis import Run
from bridge_profiling.analysis.attribution.idle import Cause
from bridge_profiling.analysis.attribution.parts import BY_ACTIVITY, BY_CAUSE, PART_OF_CAUSE, attribution

_TIMES = (
    "duration_us",
    "compute_us",
    "exposed_communication_us",
    "idle_us",
)


def _iterations(*durations_us: float, boundary: int | None = None) -> pa.Table:
    """One rank's iterations that compute for half of their time, and else wait for nothing."""
    rows = [
        {
            "rank": 0,
            "source": "kineto",
            "iteration": number,
            "boundary": number == boundary,
            "duration_us": duration,
            "compute_us": duration / 2,
            "exposed_communication_us": 0.0,
            "idle_us": duration / 2,
        }
        for number, duration in enumerate(durations_us)
    ]
    return pa.Table.from_pylist(rows)


def _absences(*rows: tuple[int, Cause, float]) -> pa.Table:
    named = [
        {"rank": 0, "source": "kineto", "iteration": n, "cause": str(cause), "between": False, "lost_us": lost}
        for n, cause, lost in rows
    ]
    schema = [
        ("rank", pa.int32()),
        ("source", pa.string()),
        ("iteration", pa.int32()),
        ("cause", pa.string()),
        ("between", pa.bool_()),
    ]
    return pa.Table.from_pylist(named, schema=pa.schema([*schema, ("lost_us", pa.float64())]))


def _ranks(**waiting_us: float | None) -> pa.Table:
    rows = [{"rank": 0, "iteration": int(name[1:]), "waiting_us": value} for name, value in waiting_us.items()]
    schema = pa.schema([("rank", pa.int32()), ("iteration", pa.int32()), ("waiting_us", pa.float64())])
    return pa.Table.from_pylist(rows, schema=schema)


def test_the_parts_of_real_ranks_add_up_to_the_iteration_either_way(run_of, captures: Path) -> None:
    run: Run = run_of(captures / "kineto" / "tp2_dp2")
    rows = run.attribution().to_pylist()
    medians = {row["rank"]: row["duration_us"] for row in run.typical_iteration().to_pylist()}
    assert [row["rank"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        assert row["duration_us"] == pytest.approx(medians[row["rank"]])
        for parts in (BY_CAUSE, BY_ACTIVITY):
            assert sum(row[part] for part in parts) == pytest.approx(row["duration_us"], rel=1e-9)
            assert all(row[part] >= 0 for part in parts)
    # The hosts of 1 and 3 are late; 0 and 2 wait for them, and communicate no longer than the others.
    assert min(rows[1]["host_launch_us"], rows[3]["host_launch_us"]) > 2 * max(
        rows[0]["host_launch_us"], rows[2]["host_launch_us"]
    )
    assert min(rows[0]["waiting_us"], rows[2]["waiting_us"]) > 90_000
    assert max(row["communication_us"] for row in rows) < 15_000


def test_it_is_of_the_middle_iteration_or_the_mean_of_the_middle_two() -> None:
    odd = attribution(_iterations(100, 300, 120), _absences((2, Cause.data_loading, 60.0)), _ranks()).to_pylist()[0]
    assert (odd["duration_us"], odd["iterations"], odd["data_loading_us"]) == (120, 3, 60)
    even = attribution(_iterations(100, 300, 120, 140), _absences((2, Cause.data_loading, 60.0)), _ranks()).to_pylist()[0]
    assert (even["duration_us"], even["data_loading_us"]) == (130, 30)


def test_boundary_iterations_are_left_out() -> None:
    found = attribution(_iterations(900, 100, 100, 100, boundary=0), _absences(), _ranks()).to_pylist()[0]
    assert (found["duration_us"], found["iterations"]) == (100, 3)


def test_waiting_is_taken_from_communication_and_never_more_than_it() -> None:
    lost = _absences(*((n, Cause.blocked_by_communication, 40.0) for n in range(3)))
    some = attribution(_iterations(100, 100, 100), lost, _ranks(i0=30.0, i1=30.0, i2=30.0)).to_pylist()[0]
    assert (some["communication_us"], some["waiting_us"], some["waiting_known"]) == (10, 30, True)
    more = attribution(_iterations(100, 100, 100), lost, _ranks(i0=70.0, i1=70.0, i2=70.0)).to_pylist()[0]
    assert (more["communication_us"], more["waiting_us"]) == (0, 40)
    unknown = attribution(_iterations(100, 100, 100), lost, _ranks(i0=None, i1=None, i2=None)).to_pylist()[0]
    assert (unknown["communication_us"], unknown["waiting_us"], unknown["waiting_known"]) == (40, 0, False)


def test_every_cause_has_a_part() -> None:
    assert set(PART_OF_CAUSE) == set(Cause)
    assert set(PART_OF_CAUSE.values()) <= set(BY_CAUSE)


def test_without_iterations_there_is_none() -> None:
    assert attribution(_iterations(100).slice(0, 0), _absences(), _ranks()).num_rows == 0
