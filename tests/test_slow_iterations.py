"""The rule for slow iterations."""

from bridge_profiling.slow_iterations import SlowThreshold, slow_threshold


def test_the_threshold_is_a_multiple_of_the_median():
    durations = [3.0, 1.0, 2.0, 2.0] * 5
    assert slow_threshold(durations, factor=1.5, at_least=20) == SlowThreshold(above=3.0, median=2.0, count=20)


def test_too_few_iterations_have_no_threshold():
    assert slow_threshold([1.0] * 9, factor=2.0, at_least=10) is None
