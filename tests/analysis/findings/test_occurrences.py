"""Causes that strike some iterations, and iterations that medians leave out."""

import numpy as np
import pytest

from bridge_profiling.analysis.findings.occurrences import occurrence
from tests.analysis.findings.simulated_jobs import MS, SimulatedJob

approx = pytest.approx


def _pausing(pauses_ms, ranks=2, iterations=6):
    """Rank 1 pauses in some iterations; each takes 20 ms without that."""

    def step(job, number):
        job.be_in(1, "something", pauses_ms.get(number, 0) * MS)
        job.busy()
        job.meet()

    return SimulatedJob(step, ranks, iterations)


def test_a_cause_of_every_iteration_strikes_all_of_them(find):
    found = find(_pausing(dict.fromkeys(range(10, 16), 10) | {12: 20}))
    assert {finding.occurrence for finding in found.values()} == {None}


@pytest.mark.parametrize(
    ("lost_us", "struck"),
    [
        ([0, 0, 9, 0], [2]),
        ([1, 1, 9, 1, 8], [2, 4]),
        ([1, 1, 2, 1], None),  # not much more than the others
        ([0, 9], None),  # which of the two is usual?
        ([9, 9, 9, 0], None),  # most of them
        ([1, 1, 1, 1, 1, 1, 4], None),  # the others lose more in sum
        ([0, 0, 0], None),
    ],
)
def test_iterations_are_struck_that_lose_most(lost_us, struck):
    found = occurrence(range(len(lost_us)), np.array(lost_us, float))
    assert (list(found.iterations) if found else None) == struck


def test_a_captured_iteration_that_medians_leave_out_is_named(find):
    job = _pausing({12: 900, 10: 30})
    for rank in job.all:
        for place in (0, 2):  # the profiler starts in the first, and flushes in the third
            job.rows[rank]["iterations"][place]["boundary"] = True
    found = find(job)
    slow = found["slow_iterations"]
    assert slow.evidence["iterations"] == [12]
    assert slow.ranks == [1]
    assert slow.recoverable_us_per_iteration == approx(900_000 / 6, rel=0.02)
    assert slow.title.startswith("Iteration 12 takes 920 ms, 45")
    assert "host_pause" not in found
