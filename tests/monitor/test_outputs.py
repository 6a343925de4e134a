"""JSON lines, TensorBoard events and terminal lines; test_prometheus.py covers Prometheus."""

from __future__ import annotations

import io
import json
import os
import sys

import pytest

from bridge_profiling import ProfilingConfigError
from bridge_profiling.monitor import Alert, JsonLines, Prometheus, Readings, Sample, TensorBoard
from bridge_profiling.monitor.alerts import ALERTS
from bridge_profiling.monitor.outputs import Terminal

GPU = Readings({"gpu": "0", "uuid": "GPU-a", "name": "H100"}, {"power_watts": 500.0}, {"utilization_ratio": "refused"})
PROCESS = Readings({"pid": 7, "name": "python"}, {"cpu_ratio": 0.5, "resident_memory_bytes": 3 << 30})
TRAINING = Readings({}, {"iteration": 41, "iteration_seconds": 0.25}, {"loss": "the loop does not report it"})
SAMPLE = Sample(1_700_000_000.25, "node1", 3, (GPU,), (PROCESS,), TRAINING, {"skipped": 2})
BARE = Sample(1_700_000_000.25, "node1", unavailable={"gpus": "no driver", "processes": "no psutil"})
ALERT = Alert("slow_iteration", "iteration 41 took long", {"iteration": 41})


def test_each_line_is_a_complete_sample(tmp_path):
    log = JsonLines(tmp_path / "logs" / "monitor.jsonl")
    for one in (SAMPLE, BARE):
        log.write(one)
    log.alert(ALERT, SAMPLE)
    sample, bare, alert = map(json.loads, (tmp_path / "logs" / "monitor.jsonl").read_text().splitlines())
    head = {"kind": "sample", "schema_version": 1, "host": "node1", "rank": 3}
    head |= {"time": "2023-11-14T22:13:20.250Z", "unix_seconds": 1_700_000_000.25, "counters": {"skipped": 2}}
    assert {key: sample[key] for key in head} == head
    unread = {"utilization_ratio": None, "unavailable": {"utilization_ratio": "refused"}}
    assert sample["gpus"] == [{"gpu": "0", "uuid": "GPU-a", "name": "H100", "power_watts": 500.0, **unread}]
    assert sample["training"]["loss"] is None
    assert [bare[key] for key in ("gpus", "processes", "unavailable")] == [None, None, BARE.unavailable]
    assert [alert[key] for key in ("kind", "alert", "evidence")] == ["alert", "slow_iteration", {"iteration": 41}]


def test_the_size_of_the_file_is_bounded(tmp_path):
    log = JsonLines(tmp_path / "monitor.jsonl", max_bytes=2_000)
    for _ in range(100):
        log.write(SAMPLE)
    log.close()
    assert sorted(os.listdir(tmp_path)) == ["monitor.jsonl", "monitor.jsonl.1"]
    for file in tmp_path.iterdir():
        assert file.stat().st_size < 4_000
        assert all(json.loads(line)["kind"] == "sample" for line in file.read_text().splitlines())


def test_tensorboard_reads_the_event_file(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = TensorBoard(tmp_path)
    board.write(SAMPLE)
    board.alert(ALERT, SAMPLE)
    board.write(SAMPLE)
    board.close()
    events = accumulators.EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = {"gpu/0/power_watts", "process/7/cpu_ratio", "process/7/resident_memory_bytes", "counter/skipped"}
    assert set(events.Tags()["scalars"]) == scalars | {"training/iteration_seconds", *(f"alerts/{kind}" for kind in ALERTS)}
    (first, _) = events.Scalars("gpu/0/power_watts")
    assert (first.step, first.wall_time, first.value) == (41, 1_700_000_000.25, 500.0)
    assert [event.value for event in events.Scalars("alerts/slow_iteration")] == [0.0, 1.0]


@pytest.mark.parametrize(("package", "output"), [("tensorboard", TensorBoard), ("prometheus_client", Prometheus)])
def test_an_output_whose_package_is_missing_says_what_to_type(tmp_path, monkeypatch, package, output):
    for module in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ProfilingConfigError, match=f"Type pip install {package}"):
        output(tmp_path if output is TensorBoard else 0)


def test_the_terminal_shows_unavailable_for_a_missing_value():
    stream = io.StringIO()
    lines = Terminal(stream)
    for sample in (SAMPLE, BARE):
        lines.write(sample)
    gpu, process, no_gpus, no_processes = stream.getvalue().splitlines()
    assert "GPU 0  H100  unavailable" in gpu
    assert "500 W" in gpu
    assert "0.0 GiB" not in gpu
    assert "process 7 python    50% of a core    3.00 GiB" in process
    assert no_gpus.endswith("GPUs unavailable: no driver")
    assert no_processes.endswith("processes unavailable: no psutil")
