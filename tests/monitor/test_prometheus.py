"""Prometheus metrics, served over HTTP and read by prometheus_client's parser, and the dashboard that queries them."""

from __future__ import annotations

import errno
import json
import re
import socket
import sys
from importlib.resources import files
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bridge_profiling import ProfilingConfigError
from bridge_profiling.monitor import Alert, Monitor, Prometheus, Readings, Sample
from bridge_profiling.monitor.metrics import GPU_METRICS, PROCESS_METRICS, TRAINING_METRICS

GPU = Readings({"gpu": "0", "uuid": "GPU-a", "name": "H100"}, dict.fromkeys(GPU_METRICS, 0.5))
LOST = Readings({"gpu": "1", "uuid": None, "name": None}, {}, dict.fromkeys(GPU_METRICS, "the GPU does not answer"))
PROCESS = Readings({"pid": 7, "name": "python"}, dict.fromkeys(PROCESS_METRICS, 1.0))
TRAINING = Readings({}, dict.fromkeys(TRAINING_METRICS, 41.0))
EVERYTHING = Sample(1_700_000_000.0, "node1", 3, (GPU, LOST), (PROCESS,), TRAINING, {"skipped": 2})


def scrape(port: int) -> dict[str, list]:
    """The samples that Prometheus would read, by name."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    found: dict[str, list] = {}
    for family in families:
        assert family.documentation
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


@pytest.fixture
def server():
    with_port = Prometheus(0)
    yield with_port
    with_port.close()


def test_every_value_is_served_with_host_rank_and_gpu(server):
    server.write(EVERYTHING)
    found = scrape(server.port)
    (power,) = found["bridge_profiling_gpu_power_watts"]
    assert power.labels == {"host": "node1", "rank": "3", "gpu": "0", "uuid": "GPU-a", "name": "H100"}
    assert power.value == 0.5
    (cpu,) = found["bridge_profiling_process_cpu_ratio"]
    assert cpu.labels == {"host": "node1", "rank": "3", "pid": "7", "name": "python"}
    (seconds,) = found["bridge_profiling_training_iteration_seconds"]
    assert (seconds.labels, seconds.value) == ({"host": "node1", "rank": "3"}, 41.0)
    (skipped,) = found["bridge_profiling_counter_total"]
    assert (skipped.labels["name"], skipped.value) == ("skipped", 2.0)
    assert found["bridge_profiling_sample_timestamp_seconds"][0].value == 1_700_000_000.0


def test_a_lost_gpu_has_no_values_and_is_served_as_unavailable(server):
    server.write(EVERYTHING)
    found = scrape(server.port)
    lost = [sample.name for samples in found.values() for sample in samples if sample.labels.get("gpu") == "1"]
    assert set(lost) == {"bridge_profiling_gpu_metric_available"}
    availability = {
        (sample.labels["gpu"], sample.labels["metric"]): sample.value
        for sample in found["bridge_profiling_gpu_metric_available"]
    }
    assert availability[("0", "power_watts")] == 1
    assert {value for (gpu, _), value in availability.items() if gpu == "1"} == {0}


def test_a_gpu_that_is_gone_is_no_longer_served(server):
    server.write(EVERYTHING)
    assert "bridge_profiling_gpu_power_watts" in scrape(server.port)
    server.write(Sample(1_700_000_001.0, "node1", unavailable={"gpus": "no driver"}))
    found = scrape(server.port)
    assert [name for name in found if name.startswith("bridge_profiling_gpu")] == ["bridge_profiling_gpu_available"]
    assert found["bridge_profiling_gpu_available"][0].value == 0
    assert found["bridge_profiling_gpu_available"][0].labels["rank"] == ""


def test_alert_counters_start_at_zero(server):
    server.write(EVERYTHING)
    alerts = {sample.labels["alert"]: sample.value for sample in scrape(server.port)["bridge_profiling_alerts_total"]}
    assert set(alerts.values()) == {0}
    server.alert(Alert("slow_iteration", "", {}), EVERYTHING)
    alerts = {sample.labels["alert"]: sample.value for sample in scrape(server.port)["bridge_profiling_alerts_total"]}
    assert alerts["slow_iteration"] == 1


def test_a_running_training_is_served(no_driver):
    server = Prometheus(0)
    with Monitor(sinks=[server], interval=0.05, rank=0) as monitor:
        monitor.counters.add("batches", 3)
        for _ in range(5):
            monitor.training.record_step(tokens=100)
        found = {}
        while "bridge_profiling_training_iteration" not in found:
            found = scrape(server.port)
        assert found["bridge_profiling_training_iteration"][0].value == 4
        assert found["bridge_profiling_training_tokens_per_second"][0].value > 0
        assert found["bridge_profiling_process_resident_memory_bytes"][0].value > 1 << 20
        # Without a GPU no idle GPU is reported.
        assert found["bridge_profiling_gpu_available"][0].value == 0
        assert "bridge_profiling_gpu_utilization_ratio" not in found
        assert "bridge_profiling_training_allocated_bytes" not in found
    with pytest.raises(URLError):
        scrape(server.port)


def test_only_the_loopback_address_is_served_by_default(server):
    # Another address of this machine; a server at 0.0.0.0 would accept this connection.
    with socket.socket() as one:
        assert one.connect_ex(("127.0.0.2", server.port)) == errno.ECONNREFUSED
        assert socket.create_connection(("127.0.0.1", server.port), timeout=10).close() is None


def test_a_port_in_use_is_refused_with_advice(server):
    with pytest.raises(ProfilingConfigError, match=f"port {server.port} of 127.0.0.1 cannot be served.*Use another port"):
        Prometheus(server.port)


def test_without_prometheus_client_it_says_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ProfilingConfigError, match="Type pip install prometheus_client"):
        Prometheus(0)


def test_every_query_of_the_dashboard_uses_metrics_and_labels_that_are_served(server):
    server.write(EVERYTHING)
    served = {name: set(samples[0].labels) for name, samples in scrape(server.port).items()}
    dashboard = json.loads(files("bridge_profiling.monitor").joinpath("grafana.json").read_text(encoding="utf-8"))
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert len(targets) > 30
    asked = set()
    for target in targets:
        names = re.findall(r"bridge_profiling_\w+", target["expr"])
        assert names, target
        assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for name in names:
            assert name in served, target
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            matched = set(re.findall(r"(\w+)=~", target["expr"]))
            assert shown | matched <= served[name], target
        asked.update(names)
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"] if panel.get("targets")} == {"${datasource}"}
    assert ("datasource", "datasource") in [(each["name"], each["type"]) for each in dashboard["templating"]["list"]]
    variables = [variable["query"]["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    for query in variables:
        name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query).groups()
        assert label in served[name]
    # Conversely, the dashboard shows every metric that is served.
    unseen = {name for name in served if name not in asked and not name.endswith("_metric_available")}
    assert unseen == {"bridge_profiling_training_iteration"}
