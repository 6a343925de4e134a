"""The time budget of a run: parts that add up to the typical iteration."""

import pytest

from bridge_profiling.report.budget import budget
from tests.report.summaries import MS, row


def test_parts_add_up_to_the_median_iteration_however_the_ranks_differ():
    rows = [row(0, waiting_us=20 * MS), row(1, 120 * MS, copy_us=12 * MS), row(2, 200 * MS) | {"waiting_known": False}]
    found = budget(rows)
    assert (found.iteration_us, found.waiting_known) == (120 * MS, False)
    assert sum(part.time_us for part in found.parts) == pytest.approx(120 * MS)
    by_column = {part.column: (part.time_us, part.share, part.low, part.high) for part in found.parts}
    assert by_column["waiting_us"] == pytest.approx((8 * MS, 0.2 / 3, 0.0, 0.2))
    assert by_column["compute_us"] == pytest.approx((108 * MS, 0.9, 0.8, 1.0))
