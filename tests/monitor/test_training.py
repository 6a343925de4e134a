"""Readings of a training loop: rates, durations, waiting for data, memory."""

from __future__ import annotations

import json
import sys
from threading import Thread
from types import SimpleNamespace

import pytest

from bridge_profiling import ProfilingConfigError
from bridge_profiling.capture import ProfilingHook
from bridge_profiling.monitor import Counters, TrainingMonitor, training
from bridge_profiling.monitor.metrics import TRAINING_METRICS
from bridge_profiling.monitor.training import device_memory


@pytest.fixture
def clock(monkeypatch):
    """The monitor's clock; `clock(seconds)` advances it."""
    now = [0]

    def wait(seconds: float) -> None:
        now[0] += round(seconds * 1e9)

    monkeypatch.setattr(training, "perf_counter_ns", lambda: now[0])
    return wait


def test_a_step_starts_at_the_end_of_the_previous_one(clock):
    monitor = TrainingMonitor()
    clock(60)  # the model is built
    with monitor:
        for seconds in (1.0, 2.0, 3.0):
            with monitor.data_loading():
                clock(seconds / 4)
            clock(seconds * 3 / 4)
            monitor.record_step(tokens=1000, samples=4, loss=seconds / 2)
    values = monitor.read().values
    assert values["iteration"] == 2
    assert values["iteration_seconds"] == 3.0
    assert values["iteration_median_seconds"] == 2.0
    assert values["tokens_per_second"] == 500.0
    assert values["samples_per_second"] == 2.0
    assert values["data_loading_ratio"] == 0.25
    assert values["loss"] == 1.5
    assert values["seconds_since_iteration"] == 0.0
    assert monitor.throughput == (0.5, 500.0, 2.0)
    assert monitor.new_iterations() == [(0, 1.0), (1, 2.0), (2, 3.0)]
    assert monitor.new_iterations() == []


def test_without_a_start_the_first_step_is_counted_and_not_timed(clock):
    monitor = TrainingMonitor()
    clock(60)
    monitor.record_step(tokens=10)
    assert monitor.throughput == (None, None, None)
    assert monitor.read().unavailable["tokens_per_second"] == "no iteration has ended yet"
    clock(2)
    monitor.record_step(tokens=10)
    summary = monitor.summary()
    assert (summary["iterations"], summary["seconds"], summary["tokens"]) == (2, 2.0, 20)
    assert (summary["iteration_mean_seconds"], summary["tokens_per_second"]) == (2.0, 5.0)


def test_rates_cover_the_recent_iterations_and_the_summary_covers_all(clock):
    monitor = TrainingMonitor(window=2)
    with monitor:
        for seconds in (10.0, 1.0, 1.0):
            clock(seconds)
            monitor.record_step(tokens=12)
    assert monitor.throughput.tokens_per_second == 12.0
    assert monitor.summary()["tokens_per_second"] == 3.0


def test_metrics_that_the_loop_does_not_report_are_unavailable_with_the_reason():
    readings = TrainingMonitor().read()
    assert readings.values == {}
    assert readings.unavailable.keys() == TRAINING_METRICS.keys()
    assert readings.unavailable["tokens_per_second"] == "the loop does not report tokens"
    assert readings.unavailable["data_loading_ratio"] == "the loop does not report when it waits for data"
    assert readings.unavailable["iteration_seconds"] == "no iteration has ended yet"


def test_every_metric_is_either_available_or_unavailable(clock):
    with TrainingMonitor() as monitor:
        clock(1)
        monitor.record_step(tokens=5)
        readings = monitor.read()
    assert readings.values.keys() | readings.unavailable.keys() == TRAINING_METRICS.keys()
    assert not readings.values.keys() & readings.unavailable.keys()


def test_tokens_per_iteration_also_count_without_a_hook(clock):
    with TrainingMonitor(tokens_per_iteration=100) as monitor:
        clock(2)
        monitor.record_step()
        clock(2)
        monitor.record_step(tokens=300)
    assert monitor.read().values["tokens_per_second"] == 100.0
    assert monitor.summary()["tokens"] == 400


def test_a_hook_times_the_iterations_so_the_loop_need_not_report_them(clock):
    hook = SimpleNamespace(durations=((0, 9_000_000_000),))
    monitor = TrainingMonitor(hook=hook, tokens_per_iteration=100)
    hook.durations += ((1, 1_000_000_000), (2, 3_000_000_000))
    with monitor.data_loading():
        clock(1)
    assert monitor.read().values["tokens_per_second"] == 50.0
    hook.durations = (*hook.durations[2:], (3, 1_000_000_000))
    readings = monitor.read()
    assert readings.values["iteration"] == 3
    assert readings.values["iteration_seconds"] == 1.0
    assert readings.values["tokens_per_second"] == 60.0
    assert readings.values["data_loading_ratio"] == 0.2
    # Iteration 0 ended before this monitor was created.
    assert monitor.new_iterations() == [(1, 1.0), (2, 3.0), (3, 1.0)]
    assert monitor.summary()["iterations"] == 3


def test_all_iterations_of_a_real_hook_are_counted():
    with ProfilingHook(None, rank=0) as hook:
        monitor = TrainingMonitor(hook=hook)
        for iteration in range(7):
            with hook.iteration(iteration):
                pass
    assert [iteration for iteration, _ in monitor.new_iterations()] == list(range(7))


def test_data_is_passed_on_unchanged_and_waiting_for_it_counts(clock):
    def data():
        for element in "abc":
            clock(1)
            yield element

    with TrainingMonitor() as monitor:
        got = []
        for element in monitor.loading(data()):
            got.append(element)
            clock(3)
            monitor.record_step()
    assert got == ["a", "b", "c"]
    assert monitor.read().values["data_loading_ratio"] == 0.25


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (float("nan"), "it is nan"),
        (float("inf"), "it is inf"),
        ("much", "a str is not a number"),
        (SimpleNamespace(device=SimpleNamespace(type="cuda")), "it is on the GPU"),
    ],
)
def test_an_unusable_loss_is_unavailable_and_nothing_waits_for_a_gpu(loss, reason):
    monitor = TrainingMonitor()
    monitor.record_step(loss=loss)
    assert monitor.read().unavailable["loss"].startswith(reason)


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (float("nan"), "it is nan"),
        (float("inf"), "it is inf"),
        (SimpleNamespace(device=SimpleNamespace(type="cuda")), "it is on the GPU, and reading it would wait for the GPU: pass"),
    ],
)
def test_tokens_that_are_not_a_number_are_left_out_and_the_rest_counts(clock, tokens, reason):
    with TrainingMonitor() as monitor:
        clock(1)
        monitor.record_step(tokens=tokens, samples=4)
    readings = monitor.read()
    assert readings.unavailable["tokens_per_second"].startswith(reason)
    assert readings.values["samples_per_second"] == 4.0
    clock(1)
    monitor.record_step(tokens=10, samples=4)
    assert monitor.read().values["tokens_per_second"] == 5.0


def test_tensors_on_the_cpu_and_numpy_numbers_are_accepted():
    torch, numpy = pytest.importorskip("torch"), pytest.importorskip("numpy")
    with TrainingMonitor() as monitor:
        loss = torch.tensor(2.5, requires_grad=True)
        monitor.record_step(loss=loss, tokens=torch.tensor(7), samples=numpy.float32(2), iteration=numpy.int64(41))
    assert monitor.read().values["loss"] == 2.5
    counters = Counters()
    counters.add("padding", torch.tensor(3))
    counters.add("retries", numpy.int64(2))
    told = json.loads(json.dumps([monitor.summary(), monitor.new_iterations(), counters.snapshot()], allow_nan=False))
    assert (told[0]["tokens"], told[0]["samples"], told[0]["iteration"], told[1][0][0]) == (7, 2, 41, 41)
    assert told[2] == {"padding": 3, "retries": 2}


def test_reading_memory_does_not_import_torch(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert device_memory() == dict.fromkeys(device_memory(), "this process has not loaded torch")
    assert "torch" not in sys.modules


def test_a_process_without_cuda_has_no_device_memory():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_initialized():
        pytest.skip("this process uses CUDA")
    assert set(device_memory().values()) == {"this process uses no GPU"}


def test_memory_is_summed_over_all_devices_of_the_process(monkeypatch):
    def statistics(device: int) -> dict:
        allocated = {"all": {"current": 10 + device, "peak": 100}}
        return {"allocated_bytes": allocated, "reserved_bytes": {"all": {"current": 50, "peak": 60}}}

    cuda = SimpleNamespace(is_initialized=lambda: True, device_count=lambda: 2, memory_stats_as_nested_dict=statistics)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert device_memory() == {"allocated_bytes": 21, "allocated_peak_bytes": 200, "reserved_bytes": 100}


def test_memory_is_read_at_the_end_of_a_step_once_per_sample(monkeypatch):
    asked = []
    monkeypatch.setattr(training, "device_memory", lambda: asked.append(1) or {"allocated_bytes": len(asked)})
    monitor = TrainingMonitor()
    monitor.read()
    for _ in range(5):
        monitor.record_step()
    assert len(asked) == 2
    assert monitor.read().values["allocated_bytes"] == 2


def test_threads_count_and_record_without_losing_updates():
    monitor, counters = TrainingMonitor(), Counters()

    def work() -> None:
        for _ in range(5_000):
            counters.add("seen")
            counters.add("bytes", 3)
            monitor.record_step(tokens=2)

    threads = [Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.snapshot() == {"bytes": 60_000, "seen": 20_000}
    assert monitor.summary()["iterations"] == 20_000
    assert monitor.summary()["tokens"] == 40_000


def test_a_counter_only_grows():
    counters = Counters()
    counters.add("skipped", 0)
    assert counters.snapshot() == {"skipped": 0}
    assert counters["never"] == 0
    for amount in (-1, float("nan"), float("inf"), "many"):
        with pytest.raises(ProfilingConfigError, match="a counter only grows"):
            counters.add("skipped", amount)
