"""Time between pairs of calls, and device memory at labelled points."""

import json
import threading
from types import SimpleNamespace

import pytest

from bridge_profiling.easy import MemoryProfiler, PerformanceCounter
from bridge_profiling.easy import points as module


def test_pairs_of_a_name_add_up_and_threads_do_not_disturb_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    counter = PerformanceCounter()
    for seconds in (1.0, 3.0):
        counter.start_counter("tokenize")
        now[0] += seconds
        other = threading.Thread(target=counter.end_counter, args=("tokenize",))  # which has begun nothing
        other.start()
        other.join()
        counter.end_counter("tokenize")
    counter.end_counter("never begun")
    assert counter.get_counter_stats("tokenize") == {"total_time": 4.0, "count": 2, "avg_time": 2.0}
    assert counter.get_counter_stats("never begun") is None
    assert list(counter.get_all_stats()) == ["tokenize"]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Of a GPU, in GB."""
    now = SimpleNamespace(allocated=1.0)

    def read() -> dict[str, float]:
        numbers = {"allocated_bytes": now.allocated, "reserved_bytes": 4.0}
        numbers |= {"allocated_peak_bytes": now.allocated + 1, "reserved_peak_bytes": 5.0}
        return {name: value * 1e9 for name, value in numbers.items()}

    monkeypatch.setattr(module, "device_memory", read)
    return now


def test_points_are_printed_and_summed_up(memory: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    profiler = MemoryProfiler()
    profiler.log_memory_stats(0, "after forward")
    memory.allocated = 3.0
    point = profiler.log_memory_stats(1)
    assert point == profiler.memory_stats[1]
    assert point == {"step": 1, "description": "", "allocated": 3.0, "cached": 4.0, "max_allocated": 4.0, "max_cached": 5.0}
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["Step 0 (after forward): 1.00 GB allocated, 4.00 GB cached", "Step 1: 3.00 GB allocated, 4.00 GB cached"]
    patterns = profiler.analyze_memory_patterns()
    expected = {"peak_allocated": 4.0, "peak_cached": 5.0, "avg_allocated": 2.0, "avg_cached": 4.0, "memory_efficiency": 0.5}
    assert patterns == expected
    json.dumps(patterns)


@pytest.mark.parametrize(
    ("growth", "labels", "points", "leaks"),
    [
        (0.01, ("",), 12, True),
        # Memory differs between the labels of a step, and grows at each of them.
        (0.01, ("before", "after"), 24, True),
        (0.0, ("before", "after"), 24, False),
        (0.01, tuple(f"step {step}" for step in range(12)), 12, True),
    ],
)
def test_memory_that_grows_from_point_to_point_is_a_leak(memory, growth, labels, points, leaks) -> None:
    profiler = MemoryProfiler()
    for step in range(points):
        memory.allocated = 1.0 + growth * step + 0.5 * (step % len(labels) if len(labels) == 2 else 0)
        profiler.log_memory_stats(step, labels[step % len(labels)])
    assert profiler.detect_memory_leaks() is leaks
