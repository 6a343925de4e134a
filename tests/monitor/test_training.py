"""Readings of a training loop: rates, durations, waiting for data, memory."""

import sys
from types import SimpleNamespace

import pytest

from bridge_profiling.monitor import TrainingMonitor
from bridge_profiling.monitor.metrics import TRAINING_METRICS
from bridge_profiling.monitor.training import device_memory

ON_THE_GPU = SimpleNamespace(device=SimpleNamespace(type="cuda"))


def test_a_step_starts_at_the_end_of_the_previous_one(clock):
    monitor = TrainingMonitor()
    clock(60)  # the model is built
    with monitor:
        for seconds in (1.0, 2.0, 3.0):
            with monitor.data_loading():
                clock(seconds / 4)
            clock(seconds * 3 / 4)
            monitor.end_step(tokens=1000, samples=4, loss=seconds / 2)
    readings = monitor.read()
    seconds = {"iteration_seconds": 3.0, "iteration_median_seconds": 2.0, "seconds_since_iteration": 0.0}
    rates = {"tokens_per_second": 500.0, "samples_per_second": 2.0, "data_loading_ratio": 0.25}
    assert readings.values == {"iteration": 2, "loss": 1.5} | seconds | rates
    # The others, of memory, are unavailable.
    assert readings.unavailable.keys() == TRAINING_METRICS.keys() - readings.values.keys()
    assert monitor.throughput == (0.5, 500.0, 2.0)
    assert monitor.new_iterations() == [(0, 1.0), (1, 2.0), (2, 3.0)]
    assert monitor.new_iterations() == []


def test_without_a_start_the_first_step_is_counted_and_not_timed(clock):
    monitor = TrainingMonitor()
    clock(60)
    monitor.end_step(tokens=10)
    assert monitor.throughput == (None, None, None)
    assert monitor.read().unavailable["tokens_per_second"] == "no iteration has ended yet"
    clock(2)
    monitor.end_step(tokens=10)
    summary = monitor.get_summary()
    names = ("iterations", "seconds", "tokens", "iteration_mean_seconds", "tokens_per_second")
    assert [summary[name] for name in names] == [2, 2.0, 20, 2.0, 5.0]


def test_a_step_may_be_a_block(clock):
    """As in the loop of the performance guide: the time before a block counts only where the loop waits for data."""
    monitor = TrainingMonitor()
    assert monitor.get_throughput() is None
    for _ in monitor.loading(range(3)):
        clock(60)  # validation, outside the step
        with monitor.record_step(samples=8):
            clock(2)
        monitor.log_metrics({"loss": 0.5, "lr": 1e-3, "grad_norm": None, "throughput": monitor.get_throughput()})
    with pytest.raises(ValueError, match="bad batch"), monitor.record_step(samples=8):
        raise ValueError("bad batch")
    assert monitor.get_throughput() == 4.0
    assert monitor.new_iterations() == [(0, 2.0), (1, 2.0), (2, 2.0)]
    summary = monitor.get_summary()
    assert (summary["loss"], summary["samples"]) == (0.5, 24)
    assert summary["metrics"] == {"lr": 1e-3, "throughput": 4.0, "grad_norm": None, "unavailable": {"grad_norm": "it is None"}}
    slow = TrainingMonitor()
    for _ in slow.loading(clock(1) for _ in range(3)):
        with slow.record_step():
            clock(3)
    # The first step begins after its batch has come.
    assert slow.read().values["data_loading_ratio"] == pytest.approx(2 / (3 + 4 + 4))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (float("nan"), "it is nan"),
        ("much", "a str is not a number"),
        (ON_THE_GPU, "it is on the GPU, and reading it would wait for the GPU: report"),
    ],
)
def test_values_that_are_not_numbers_are_unavailable_and_the_rest_counts(clock, value, reason):
    """And nothing waits for a GPU."""
    with TrainingMonitor() as monitor:
        clock(1)
        monitor.end_step(tokens=value, samples=4, loss=value)
    readings = monitor.read()
    assert all(readings.unavailable[name].startswith(reason) for name in ("tokens_per_second", "loss"))
    assert readings.values["samples_per_second"] == 4.0
    clock(1)
    monitor.end_step(tokens=10, samples=4)
    assert monitor.read().values["tokens_per_second"] == 5.0


def statistics(device: int) -> dict:
    allocated = {"all": {"current": 10 + device, "peak": 100}}
    return {"allocated_bytes": allocated, "reserved_bytes": {"all": {"current": 50, "peak": 60}}}


TWO_DEVICES = {"is_initialized": lambda: True, "device_count": lambda: 2, "memory_stats_as_nested_dict": statistics}


@pytest.mark.parametrize(
    ("cuda", "memory"),
    [
        (None, ["this process has not loaded torch"] * 4),
        ({"is_initialized": lambda: False}, ["this process uses no GPU"] * 4),
        (TWO_DEVICES, [21, 200, 100, 120]),
    ],
)
def test_memory_is_summed_over_all_devices_of_a_process_that_uses_some(monkeypatch, cuda, memory):
    torch = cuda and SimpleNamespace(cuda=SimpleNamespace(**cuda))
    # Until the end of the block: pytest-randomly seeds torch between tests.
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "torch", raising=False)
        if torch is not None:
            patch.setitem(sys.modules, "torch", torch)
        found = device_memory()
        assert sys.modules.get("torch") is torch, "reading must not import it"
    names = ("allocated_bytes", "allocated_peak_bytes", "reserved_bytes", "reserved_peak_bytes")
    assert [found[name] for name in names] == memory
