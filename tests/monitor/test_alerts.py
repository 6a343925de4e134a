"""Patterns that raise alerts, and those that do not."""

import random

import pytest

from bridge_profiling.monitor.alerts import Alert, LeakAlert, SlowIterationAlert

MIB = 1 << 20


def leaks(readings, **settings) -> list[Alert]:
    """The alerts raised by one reading per iteration, in MiB."""
    alert = LeakAlert(**settings)
    return [found for iteration, used in enumerate(readings) if (found := alert.feed(iteration, used * MIB)) is not None]


def slow(seconds, **settings) -> list[Alert]:
    """The alerts raised by these iterations, passed a few at a time."""
    alert = SlowIterationAlert(**settings)
    numbered = list(enumerate(seconds))
    return [found for start in range(0, len(numbered), 7) for found in alert.feed(numbered[start : start + 7])]


def sawtooth(iteration: int) -> float:
    """Memory of an allocator that grows by 5 MiB per iteration and releases all 100 MiB after twenty."""
    return 1000 + 5 * (iteration % 20)


def noise(iteration: int) -> float:
    return random.Random(iteration).uniform(0, 300)


@pytest.mark.parametrize(
    ("growth", "memory", "window", "slope"),
    [
        pytest.param(lambda i: 0.5 * i, "device", 120, pytest.approx(0.5 * MIB, rel=0.05), id="steady"),
        pytest.param(lambda i: 0.5 * i + noise(i), "device", 1200, pytest.approx(0.5 * MIB, rel=0.2), id="under noise"),
        pytest.param(lambda i: i + sawtooth(i), "host", 240, pytest.approx(MIB, rel=0.1), id="on top of a sawtooth"),
    ],
)
def test_growth_is_a_leak_and_says_how_much(growth, memory, window, slope):
    found = leaks((1000 + growth(iteration) for iteration in range(2000)), memory=memory, window=window)[0]
    assert found.kind == f"{memory}_memory_leak"
    assert found.evidence["bytes_per_iteration"] == slope
    assert f"{memory} memory grows by {found.evidence['bytes_per_iteration'] / MIB:.2f} MiB per iteration" in found.message


@pytest.mark.parametrize(
    "readings",
    [
        pytest.param([sawtooth(iteration) for iteration in range(2000)], id="a sawtooth"),
        pytest.param([1000 + min(iteration, 15) * 100 for iteration in range(2000)], id="a warm-up"),
        pytest.param([1000 if iteration < 500 else 3000 for iteration in range(2000)], id="one step up"),
        pytest.param([1000 + iteration * 0.01 for iteration in range(2000)], id="below the threshold"),
        pytest.param([noise(iteration) for iteration in range(20_000)], id="noise"),
    ],
)
def test_other_patterns_of_memory_raise_no_alert(readings):
    assert leaks(readings) == []


def test_an_iteration_of_twice_the_recent_median_is_slow():
    (found,) = slow([0.1] * 60 + [0.25] + [0.1] * 60)
    message = "iteration 60 took 250.0 ms, 2.5 times the recent median of 100.0 ms"
    assert found == Alert("slow_iteration", message, {"iteration": 60, "seconds": 0.25, "median_seconds": 0.1, "ratio": 2.5})
    # Many at a time are compared with those before them.
    (found,) = SlowIterationAlert().feed([(iteration, 0.5 if iteration == 700 else 0.001) for iteration in range(1000)])
    assert found.evidence["iteration"] == 700


@pytest.mark.parametrize(
    ("seconds", "times"),
    [
        pytest.param([5.0] * 3 + [0.1] * 200, 0, id="a warm-up"),
        pytest.param([0.1, 0.19] * 100, 0, id="below the factor"),
        pytest.param([0.1 * 1.0005**iteration for iteration in range(400)], 0, id="a drift below the factor"),
        pytest.param([0.1] * 100 + [0.15] * 300 + [0.1] * 100 + [0.15] * 100, 2, id="recovered in between"),
    ],
)
def test_a_sustained_slowdown_is_reported_once_until_the_training_recovers(seconds, times):
    assert [alert.kind for alert in slow(seconds)] == ["sustained_slowdown"] * times
