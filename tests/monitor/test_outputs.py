"""JSON lines, and Prometheus metrics with the dashboard that queries them."""

import errno
import json
import os
import re
import socket
from contextlib import closing
from importlib.resources import files
from urllib.request import urlopen

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from bridge_profiling import ProfilingConfigError
from bridge_profiling.monitor import Alert, JsonLines, Prometheus, Readings, Sample
from bridge_profiling.monitor.alerts import ALERTS
from bridge_profiling.monitor.metrics import GPU_METRICS, MACHINE_METRICS, PROCESS_METRICS, TRAINING_METRICS

GPU = Readings({"gpu": "0", "uuid": "GPU-a", "name": "H100"}, {"power_watts": 500.0}, {"utilization_ratio": "refused"})
PROCESS = Readings({"pid": 7, "name": "python"}, {"cpu_ratio": 0.5, "resident_memory_bytes": 3 << 30})
TRAINING = Readings({}, {"iteration": 41, "iteration_seconds": 0.25}, {"loss": "the loop does not report it"})
MACHINE, LOGGED = Readings({}, {"cpu_ratio": 0.25, "memory_used_bytes": 64 << 30}), Readings({}, {"lr": 0.001})
SAMPLE = Sample(1_700_000_000.25, "node1", 3, (GPU,), (PROCESS,), TRAINING, {}, MACHINE, LOGGED)
BARE = Sample(1_700_000_000.25, "node1", unavailable={"gpus": "no driver", "processes": "no psutil"})
ALERT = Alert("slow_iteration", "iteration 41 took long", {"iteration": 41})


def test_each_line_is_a_complete_sample(tmp_path):
    log = JsonLines(tmp_path / "logs" / "monitor.jsonl")
    for one in (SAMPLE, BARE):
        log.write(one)
    log.alert(ALERT, SAMPLE)
    sample, bare, alert = map(json.loads, (tmp_path / "logs" / "monitor.jsonl").read_text().splitlines())
    head = {"kind": "sample", "schema_version": 1, "host": "node1", "rank": 3}
    head |= {"time": "2023-11-14T22:13:20.250Z", "unix_seconds": 1_700_000_000.25}
    assert {key: sample[key] for key in head} == head
    unread = {"utilization_ratio": None, "unavailable": {"utilization_ratio": "refused"}}
    assert sample["gpus"] == [{"gpu": "0", "uuid": "GPU-a", "name": "H100", "power_watts": 500.0, **unread}]
    assert (sample["training"]["loss"], sample["machine"]["cpu_ratio"], sample["metrics"]["lr"]) == (None, 0.25, 0.001)
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


# -- Prometheus --------------------------------------------------------------------------------------------------------

BUSY = Readings(GPU.identity, dict.fromkeys(GPU_METRICS, 0.5))
LOST = Readings({"gpu": "1", "uuid": None, "name": None}, {}, dict.fromkeys(GPU_METRICS, "the GPU does not answer"))
RUNNING = Readings(PROCESS.identity, dict.fromkeys(PROCESS_METRICS, 1.0))
LOOP = Readings({}, dict.fromkeys(TRAINING_METRICS, 41.0))
WHOLE = Readings({}, dict.fromkeys(MACHINE_METRICS, 0.5))
EVERYTHING = Sample(1_700_000_000.0, "node1", 3, (BUSY, LOST), (RUNNING,), LOOP, {}, WHOLE, LOGGED)


def scrape(port: int) -> dict[str, list[tuple[dict, float]]]:
    """Labels and values that Prometheus would read, by name."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    found: dict[str, list] = {}
    for family in families:
        assert family.documentation
        for sample in family.samples:
            found.setdefault(sample.name.removeprefix("bridge_profiling_"), []).append((sample.labels, sample.value))
    return found


@pytest.fixture
def server():
    with closing(Prometheus(0)) as serving:
        yield serving


def test_every_value_is_served_with_host_rank_and_gpu_until_it_is_gone(server):
    server.write(EVERYTHING)
    found = scrape(server.port)
    where = {"host": "node1", "rank": "3"}
    # A lost GPU has no values.
    assert found["gpu_power_watts"] == [(where | {"gpu": "0", "uuid": "GPU-a", "name": "H100"}, 0.5)]
    assert found["process_cpu_ratio"] == [(where | {"pid": "7", "name": "python"}, 1.0)]
    assert found["training_iteration_seconds"] == [(where, 41.0)]
    assert found["logged_metric"] == [(where | {"name": "lr"}, 0.001)]
    assert found["sample_timestamp_seconds"][0][1] == 1_700_000_000.0
    available = {(labels["gpu"], labels["metric"]): value for labels, value in found["gpu_metric_available"]}
    assert available == {(gpu, metric): float(gpu == "0") for gpu in "01" for metric in GPU_METRICS}
    for raised in (0, 1):
        alerts = {labels["alert"]: value for labels, value in scrape(server.port)["alerts_total"]}
        assert alerts == dict.fromkeys(ALERTS, 0) | {"slow_iteration": raised}
        server.alert(ALERT, EVERYTHING)
    server.write(Sample(1_700_000_001.0, "node1", unavailable={"gpus": "no driver"}))
    gpus = {name: samples for name, samples in scrape(server.port).items() if name.startswith("gpu")}
    assert gpus == {"gpu_available": [({"host": "node1", "rank": ""}, 0)]}


def test_only_the_loopback_address_is_served_by_default_and_a_port_in_use_is_refused(server):
    # Another address of this machine; a server at 0.0.0.0 would accept this connection.
    with socket.socket() as one:
        assert one.connect_ex(("127.0.0.2", server.port)) == errno.ECONNREFUSED
    with pytest.raises(ProfilingConfigError, match=f"port {server.port} of 127.0.0.1 cannot be served.*Use another port"):
        Prometheus(server.port)


def test_the_dashboard_and_the_rules_ask_for_what_is_served(server):
    server.write(EVERYTHING)
    served = {f"bridge_profiling_{name}": set(samples[0][0]) for name, samples in scrape(server.port).items()}
    package = files("bridge_profiling.monitor")
    dashboard = json.loads(package.joinpath("grafana.json").read_text(encoding="utf-8"))
    asked = set()
    for target in (target for panel in dashboard["panels"] for target in panel.get("targets", [])):
        names = set(re.findall(r"bridge_profiling_\w+", target["expr"]))
        labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]) + re.findall(r"(\w+)=~", target["expr"]))
        assert [name for name in names if not labels <= served.get(name, set())] == [], target
        asked |= names
    # Conversely, the dashboard shows every metric that is served.
    unseen = {name for name in served if name not in asked and not name.endswith("_metric_available")}
    assert unseen == {"bridge_profiling_training_iteration"}
    document = yaml.safe_load(package.joinpath("alert_rules.yml").read_text(encoding="utf-8"))
    rules = {rule["alert"]: rule["expr"] for group in document["groups"] for rule in group["rules"]}
    assert [rule for rule, query in rules.items() if not set(re.findall(r"bridge_profiling_\w+", query)) <= served.keys()] == []
