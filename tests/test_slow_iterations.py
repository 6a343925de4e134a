"""The rule for slow iterations."""

from bridge_profiling.slow_iterations import SlowThreshold, SlowWatch, slow_threshold


def test_the_threshold_is_a_multiple_of_the_median():
    durations = [3.0, 1.0, 2.0, 2.0] * 5
    assert slow_threshold(durations, factor=1.5, at_least=20) == SlowThreshold(above=3.0, median=2.0, count=20)


def durations(count, first=0, nanoseconds=10_000_000):
    return tuple((iteration, nanoseconds) for iteration in range(first, first + count))


def test_an_iteration_is_slow_against_the_median_of_those_before_it():
    watch = SlowWatch(2.0, lambda iteration: False)
    assert watch.check((*durations(10), (10, 10**9))) is None, "too few before it"
    watch = SlowWatch(2.0, lambda iteration: False)
    assert watch.check(durations(11)) is None
    assert watch.check((*durations(11), (11, 20_000_000))) is None, "not above the factor"
    slow = "iteration 60 took 23.0 ms, 2.3 x the median 10.0 ms of the 11 iterations before it"
    assert watch.check((*durations(11), (11, 10_000_000), (60, 23_000_000))) == slow
    assert watch.check((*durations(11), (11, 10_000_000), (60, 23_000_000))) is None, "reported once"
