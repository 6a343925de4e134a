"""JSON lines, TensorBoard events and terminal lines; test_prometheus.py covers Prometheus."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys

import pytest

from bridge_profiling import ProfilingConfigError
from bridge_profiling.monitor import Alert, JsonLines, Readings, Sample, TensorBoard
from bridge_profiling.monitor.outputs import Terminal

GPU = Readings({"gpu": "0", "uuid": "GPU-a", "name": "H100"}, {"power_watts": 500.0}, {"utilization_ratio": "refused"})
PROCESS = Readings({"pid": 7, "name": "python"}, {"cpu_ratio": 0.5, "resident_memory_bytes": 3 << 30})
TRAINING = Readings({}, {"iteration": 41, "iteration_seconds": 0.25}, {"loss": "the loop does not report it"})
SAMPLE = Sample(1_700_000_000.25, "node1", 3, (GPU,), (PROCESS,), TRAINING, {"skipped": 2})
BARE = Sample(1_700_000_000.25, "node1", unavailable={"gpus": "no driver", "processes": "no psutil"})
ALERT = Alert("slow_iteration", "iteration 41 took long", {"iteration": 41})

WRITER = """
import sys
from bridge_profiling.monitor import JsonLines, Sample
log = JsonLines(sys.argv[1])
for second in range(10**9):
    log.write(Sample(float(second), "node1"))
    if second == 200:
        print(flush=True)
"""


def test_each_line_is_a_complete_sample(tmp_path):
    log = JsonLines(tmp_path / "logs" / "monitor.jsonl")
    for one in (SAMPLE, BARE):
        log.write(one)
    log.alert(ALERT, SAMPLE)
    sample, bare, alert = map(json.loads, (tmp_path / "logs" / "monitor.jsonl").read_text().splitlines())
    assert (sample["kind"], sample["schema_version"], sample["host"], sample["rank"]) == ("sample", 1, "node1", 3)
    assert (sample["time"], sample["unix_seconds"]) == ("2023-11-14T22:13:20.250Z", 1_700_000_000.25)
    assert sample["gpus"] == [
        {
            "gpu": "0",
            "uuid": "GPU-a",
            "name": "H100",
            "power_watts": 500.0,
            "utilization_ratio": None,
            "unavailable": {"utilization_ratio": "refused"},
        }
    ]
    assert sample["training"]["loss"] is None
    assert sample["counters"] == {"skipped": 2}
    assert bare["gpus"] is None
    assert bare["processes"] is None
    assert bare["unavailable"] == {"gpus": "no driver", "processes": "no psutil"}
    assert (alert["kind"], alert["alert"], alert["evidence"]) == ("alert", "slow_iteration", {"iteration": 41})


def test_a_killed_process_loses_at_most_its_last_line_and_the_next_one_appends(tmp_path):
    path = tmp_path / "monitor.jsonl"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with open(path, "a") as file:
        file.write('{"kind": "sam')  # as after a power failure
    JsonLines(path).write(SAMPLE)
    *lines, torn, last = path.read_text().splitlines()
    assert [json.loads(line)["unix_seconds"] for line in lines] == list(range(len(lines)))
    assert len(lines) > 200
    assert torn == '{"kind": "sam'
    assert json.loads(last)["host"] == "node1"


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
    assert set(events.Tags()["scalars"]) == {
        "gpu/0/power_watts",
        "process/7/cpu_ratio",
        "process/7/resident_memory_bytes",
        "training/iteration_seconds",
        "counter/skipped",
        *(f"alerts/{kind}" for kind in ("device_memory_leak", "host_memory_leak", "slow_iteration", "sustained_slowdown")),
    }
    (first, _) = events.Scalars("gpu/0/power_watts")
    assert (first.step, first.wall_time, first.value) == (41, 1_700_000_000.25, 500.0)
    assert [event.value for event in events.Scalars("alerts/slow_iteration")] == [0.0, 1.0]


@pytest.mark.parametrize(("package", "output"), [("tensorboard", TensorBoard)])
def test_an_output_whose_package_is_missing_says_what_to_type(tmp_path, monkeypatch, package, output):
    for module in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ProfilingConfigError, match=f"Type pip install {package}"):
        output(tmp_path)


def test_the_terminal_shows_unavailable_for_a_missing_value():
    stream = io.StringIO()
    lines = Terminal(stream)
    lines.write(SAMPLE)
    lines.write(BARE)
    gpu, process, no_gpus, no_processes = stream.getvalue().splitlines()
    assert "GPU 0  H100  unavailable" in gpu
    assert "500 W" in gpu
    assert "0.0 GiB" not in gpu
    assert "process 7 python    50% of a core    3.00 GiB" in process
    assert no_gpus.endswith("GPUs unavailable: no driver")
    assert no_processes.endswith("processes unavailable: no psutil")
