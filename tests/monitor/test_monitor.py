"""The whole monitor in real loops: it logs, raises alerts, and never harms the training."""

import json
import runpy
import sys
from itertools import count
from pathlib import Path
from threading import Event
from time import monotonic, sleep
from types import SimpleNamespace

import pytest

from bridge_profiling import ProfilingConfig
from bridge_profiling.capture import ProfilingHook
from bridge_profiling.monitor import Alert, Monitor, TrainingMonitor, sampler
from tests.system.jobs import wait_until

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "monitor_loop.py"


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "monitor.jsonl"


def records(path: Path, kind: str = "sample") -> list[dict]:
    return [record for line in path.read_text().splitlines() if (record := json.loads(line))["kind"] == kind]


def test_a_hooks_iterations_are_logged_and_the_end_of_a_short_training_too(path, no_driver):
    with (
        ProfilingHook(ProfilingConfig(), rank=0) as hook,
        Monitor(hook=hook, tokens_per_iteration=64, jsonl=path, interval=60, rank=0) as monitor,
    ):
        for iteration in range(100, 103):
            with hook.iteration(iteration), monitor.training.data_loading():
                sleep(0.001)
    last = records(path)[-1]
    assert (last["rank"], last["training"]["iteration"], last["gpus"]) == (0, 102, None)
    assert last["training"]["tokens_per_second"] == pytest.approx(64 * 3 / sum(ns for _, ns in hook.durations) * 1e9)
    assert 0 < last["training"]["data_loading_ratio"] <= 1
    assert no_driver in last["unavailable"]["gpus"]
    assert last["processes"][0]["resident_memory_bytes"] > 1 << 20
    assert 1 << 20 < last["machine"]["memory_used_bytes"] < last["machine"]["memory_total_bytes"]


def test_the_example_of_the_documentation_monitors_a_plain_loop(path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(path)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    last = records(path)[-1]
    assert (last["training"]["iteration"], last["metrics"]["elements"]) == (31, 128 * 64)
    assert last["training"]["samples_per_second"] > 0
    assert 0 < last["training"]["data_loading_ratio"] < 1


def test_a_leak_is_an_alert_of_the_monitor(path):
    alert = Alert("host_memory_leak", "host memory grows", {})
    leak = SimpleNamespace(memory="host", feed=lambda iteration, used: alert if used > 0 else None)
    with Monitor(jsonl=path, interval=60, gpus=[], leaks=[leak]) as monitor:
        monitor.training.end_step()
    assert [one["alert"] for one in records(path, "alert")] == ["host_memory_leak"]


def test_alerts_of_one_kind_are_reported_once_a_minute_and_all_are_counted(monkeypatch):
    reported, sink = [], SimpleNamespace(write=lambda sample: None, close=lambda: None)
    sink.alert = lambda alert, sample: reported.append((now[0] - began, alert.kind))
    with Monitor(sinks=[sink], interval=60, gpus=[]) as monitor:
        wait_until(lambda: monitor.sample is not None)
        began = float(round(monotonic()))  # whole, so that sums are exact
        now, kinds = [began], ["slow_iteration"]
        monkeypatch.setattr(sampler, "monotonic", lambda: now[0])
        monkeypatch.setattr(monitor, "_new_alerts", lambda *_: [Alert(kind, "", {}) for kind in kinds])
        for seconds in range(0, 200, 10):
            kinds[1:] = ["host_memory_leak"] if seconds == 20 else []
            now[0] = began + seconds
            monitor._take_sample()
        kinds.clear()
    seconds = {kind: [at for at, of in reported if of == kind] for kind in ("slow_iteration", "host_memory_leak")}
    assert seconds == {"slow_iteration": [0, 60, 120, 180], "host_memory_leak": [20]}
    assert (monitor.alerts["slow_iteration"], monitor.alerts["host_memory_leak"]) == (20, 1)


def test_an_output_that_cannot_be_opened_is_logged_and_the_training_continues(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    training = TrainingMonitor()
    with Monitor(training=training, jsonl=tmp_path / "file" / "monitor.jsonl", interval=60, gpus=[]) as monitor:
        training.end_step(loss=1.0)
    assert "monitoring continues without one of its outputs" in caplog.text
    assert monitor.sample.training.values["loss"] == 1.0


def test_an_output_of_the_trainings_own_may_exit(caplog):
    def leave(*_):
        raise SystemExit(3)

    with Monitor(sinks=[SimpleNamespace(write=leave, alert=leave, close=leave)], interval=60, gpus=[]) as monitor:
        pass
    assert monitor.sample is not None
    assert caplog.text.count("does not accept samples: SystemExit: 3") == 1


def test_a_reading_that_fails_does_not_end_the_monitor(path, monkeypatch, caplog):
    def broken(self):
        raise RuntimeError("injected")

    with Monitor(jsonl=path, interval=0.01, gpus=[]):
        wait_until(path.exists)
        with monkeypatch.context() as patch:
            patch.setattr(sampler.Processes, "read", broken)
            wait_until(lambda: "injected" in caplog.text)
        seen = len(records(path))
        wait_until(lambda: len(records(path)) > seen)
    assert caplog.text.count("injected") == 1


def test_a_hanging_driver_does_not_block_the_end_of_the_training(monkeypatch, caplog):
    hanging = Event()
    monkeypatch.setattr(sampler, "_PATIENCE", 0.1)
    monkeypatch.setattr(sampler.Gpus, "read", lambda self: hanging.wait(60) and ())
    with Monitor(interval=60) as monitor:
        monitor.training.end_step()
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
