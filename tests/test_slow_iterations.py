"""The rule for slow iterations."""

import pytest

from bridge_profiling.slow_iterations import MIN_ITERATIONS, SlowThreshold, slow_threshold


def test_the_threshold_is_a_multiple_of_the_median():
    assert slow_threshold([3.0, 1.0, 2.0, 2.0] * 5, 1.5) == SlowThreshold(median=2.0, limit=3.0, count=20)


@pytest.mark.parametrize("settings", [{}, {"min_iterations": 20}])
def test_too_few_iterations_have_no_threshold(settings):
    enough = settings.get("min_iterations", MIN_ITERATIONS)
    assert slow_threshold([1.0] * (enough - 1), 2.0, **settings) is None
    assert slow_threshold([1.0] * enough, 2.0, **settings) is not None
