"""The whole monitor in real loops: it logs, raises alerts, and never harms the training."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from itertools import count
from threading import Event
from time import monotonic, sleep

import pytest

from bridge_profiling import ProfilingConfig, ProfilingConfigError
from bridge_profiling.capture import ProfilingHook
from bridge_profiling.monitor import Alert, GPUMonitor, LeakAlert, Monitor, SlowIterationAlert, TrainingMonitor, sampler


def records(path, kind="sample") -> list[dict]:
    return [record for line in path.read_text().splitlines() if (record := json.loads(line))["kind"] == kind]


def wait_for(condition) -> None:
    """Wait for the sampling thread; the test's timeout is the limit."""
    while not condition():
        sleep(0.002)


def test_a_hooks_iterations_are_logged_and_the_end_of_a_short_training_too(tmp_path, no_driver):
    path = tmp_path / "monitor.jsonl"
    with (
        ProfilingHook(ProfilingConfig(), rank=0) as hook,
        Monitor(hook=hook, tokens_per_iteration=64, jsonl=path, interval=60, rank=0) as monitor,
    ):
        for iteration in range(100, 103):
            with hook.iteration(iteration):
                with monitor.training.data_loading():
                    sleep(0.001)
                monitor.counters.add("batches")
    last = records(path)[-1]
    assert last["rank"] == 0
    assert last["training"]["iteration"] == 102
    assert last["training"]["tokens_per_second"] == pytest.approx(64 * 3 / sum(ns for _, ns in hook.durations) * 1e9)
    assert 0 < last["training"]["data_loading_ratio"] <= 1
    assert last["counters"] == {"batches": 3}
    assert last["gpus"] is None
    assert no_driver in last["unavailable"]["gpus"]
    assert last["training"]["allocated_bytes"] is None
    assert last["processes"][0]["resident_memory_bytes"] > 1 << 20


def test_the_driver_is_read_and_released(tmp_path, driver):
    driver.add()
    path = tmp_path / "monitor.jsonl"
    with Monitor(jsonl=path, interval=60):
        pass
    assert records(path)[0]["gpus"][0]["power_watts"] == 512.0
    assert driver.shut_down == 1


def test_a_slow_iteration_is_logged_recorded_and_counted(tmp_path, caplog):
    path = tmp_path / "monitor.jsonl"
    slow = SlowIterationAlert(warm_up=0, window=15)
    with caplog.at_level(logging.WARNING), Monitor(jsonl=path, interval=60, gpus=[], slow_iterations=slow) as monitor:
        for step in range(20):
            sleep(0.3 if step == 17 else 0.01)
            monitor.training.record_step()
    alerts = {alert["alert"]: alert for alert in records(path, "alert")}
    assert alerts["slow_iteration"]["evidence"]["iteration"] == 17
    assert alerts["slow_iteration"]["message"] in caplog.text
    assert monitor.alerts["slow_iteration"] == 1


def test_a_loop_that_leaks_memory_raises_an_alert(tmp_path, caplog):
    path = tmp_path / "monitor.jsonl"
    leak = LeakAlert("host", warm_up=2, window=24, bytes_per_iteration=1 << 20)
    kept = []
    with (
        caplog.at_level(logging.WARNING),
        Monitor(jsonl=path, interval=0.005, gpus=[], pids=None, leaks=[leak]) as monitor,
    ):
        for _ in range(400):
            kept.append(bytearray(b"x" * (4 << 20)))
            monitor.training.record_step()
            sampled = monitor.sample
            wait_for(lambda before=sampled: monitor.sample is not before)
            if monitor.alerts["host_memory_leak"]:
                break
    (alert,) = [alert for alert in records(path, "alert") if alert["alert"] == "host_memory_leak"]
    assert alert["evidence"]["bytes_per_iteration"] == pytest.approx(4 << 20, rel=0.2)
    assert "host memory grows by" in caplog.text


def test_alerts_of_one_kind_are_reported_once_a_minute_and_all_are_counted(monkeypatch):
    class Reported(list):
        def alert(self, alert, sample):
            self.append((now[0] - began, alert.kind))

        def write(self, sample):
            pass

        def close(self):
            pass

    reported = Reported()
    with Monitor(sinks=[reported], interval=60, gpus=[]) as monitor:
        wait_for(lambda: monitor.sample is not None)
        began = monotonic()
        now = [began]
        monkeypatch.setattr(sampler, "monotonic", lambda: now[0])
        kinds = ["slow_iteration"]
        monkeypatch.setattr(monitor, "_new_alerts", lambda *_: [Alert(kind, "", {}) for kind in kinds])
        for seconds in range(0, 200, 10):
            kinds[1:] = ["host_memory_leak"] if seconds == 20 else []
            now[0] = began + seconds
            monitor._take_sample()
        kinds.clear()
    expected = [(0, "slow_iteration"), (20, "host_memory_leak"), (60, "slow_iteration")]
    assert reported == [*expected, (120, "slow_iteration"), (180, "slow_iteration")]
    assert (monitor.alerts["slow_iteration"], monitor.alerts["host_memory_leak"]) == (20, 1)


def test_an_output_that_cannot_be_opened_is_logged_and_the_training_continues(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with Monitor(jsonl=tmp_path / "file" / "monitor.jsonl", interval=60, gpus=[]) as monitor:
        monitor.training.record_step()
    assert "monitoring continues without one of its outputs" in caplog.text
    assert monitor.sample.training.values["iteration"] == 0


def test_a_failing_output_is_logged_once_and_the_others_get_every_sample(tmp_path, caplog):
    class Full:
        def write(self, sample):
            raise OSError(28, "No space left on device")

        alert = close = write

    path = tmp_path / "monitor.jsonl"
    with Monitor(sinks=[Full()], jsonl=path, interval=0.01, gpus=[]):
        wait_for(lambda: path.exists() and len(records(path)) >= 3)
    assert caplog.text.count("No space left on device") == 1


def test_a_reading_that_fails_does_not_end_the_monitor(tmp_path, monkeypatch, caplog):
    def broken(self):
        raise RuntimeError("planted")

    path = tmp_path / "monitor.jsonl"
    with Monitor(jsonl=path, interval=0.01, gpus=[]):
        wait_for(path.exists)
        monkeypatch.setattr(sampler.Processes, "read", broken)
        wait_for(lambda: "planted" in caplog.text)
        monkeypatch.undo()
        seen = len(records(path))
        wait_for(lambda: len(records(path)) > seen)
    assert caplog.text.count("planted") == 1


def test_an_exception_in_the_loop_is_passed_on_and_the_log_is_complete(tmp_path):
    path = tmp_path / "monitor.jsonl"

    def train() -> None:
        with Monitor(jsonl=path, interval=60, gpus=[]) as monitor:
            monitor.training.record_step()
            raise ValueError("theirs")

    with pytest.raises(ValueError, match="theirs"):
        train()
    assert records(path)[-1]["training"]["iteration"] == 0


def test_the_default_rank_is_the_launchers(monkeypatch):
    monkeypatch.setenv("RANK", "5")
    with Monitor(interval=60, gpus=[]) as monitor:
        pass
    assert monitor.sample.rank == 5


def test_a_loops_own_monitor_is_used():
    training = TrainingMonitor()
    training.record_step(loss=1.0)
    with Monitor(training=training, interval=60, gpus=[]) as monitor:
        pass
    assert monitor.sample.training.values["loss"] == 1.0


@pytest.mark.parametrize("interval", [0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("monitor", [Monitor, GPUMonitor])
def test_an_invalid_interval_is_refused(monitor, interval):
    with pytest.raises(ProfilingConfigError, match="is not a valid time"):
        monitor(interval=interval)


def test_a_process_forked_in_the_block_leaves_the_outputs_to_its_parent(tmp_path):
    path = tmp_path / "monitor.jsonl"
    child = 0
    with Monitor(jsonl=path, port=0, interval=60, gpus=[]) as monitor:
        wait_for(lambda: monitor.sample is not None)
        try:
            child = os.fork()
            if not child:
                monitor.__exit__(None, None, None)
        finally:
            if not child:
                os._exit(0)
        assert os.waitpid(child, 0) == (child, 0)
    assert len(records(path)) == 2


def test_monitoring_imports_neither_torch_nor_the_packages_of_unused_outputs():
    code = (
        "import sys, bridge_profiling.monitor as m\n"
        "with m.Monitor(interval=60) as monitor: monitor.training.record_step(tokens=1)\n"
        "print(sorted({'torch', 'prometheus_client', 'tensorboard'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_hanging_driver_does_not_block_the_end_of_the_training(monkeypatch, caplog):
    hanging = Event()
    monkeypatch.setattr(sampler, "_PATIENCE", 0.1)
    monkeypatch.setattr(sampler.Gpus, "read", lambda self: hanging.wait(60) and ())
    with Monitor(interval=60) as monitor:
        monitor.training.record_step()
    assert "is abandoned" in caplog.text
    hanging.set()


@pytest.mark.parametrize(("most", "seconds"), [(0.001, 5.0), (None, 1.0)])
def test_sampling_above_its_share_of_time_becomes_rarer(most, seconds, monkeypatch):
    now, computed, waited = [0.0], count(0, 0.005), []

    def wait(stopped, time):
        waited.append(time)
        now[0] += time
        return len(waited) == 3

    monkeypatch.setattr(sampler.Event, "wait", wait)
    monkeypatch.setattr(sampler, "monotonic", lambda: now[0])
    monkeypatch.setattr(sampler, "thread_time", lambda: next(computed))
    sampler.PeriodicThread(lambda: None, 1.0, "test", most).run()
    assert waited == pytest.approx([seconds] * 3)
