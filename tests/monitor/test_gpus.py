"""GPU readings: a metric that the driver refuses is unavailable with the reason, never zero."""

import json
import sys
from time import sleep

import pynvml
import pytest

from bridge_profiling import ProfilingConfigError
from bridge_profiling.monitor import GPUMonitor
from bridge_profiling.monitor.gpus import Gpus
from bridge_profiling.monitor.metrics import GPU_METRICS, MACHINE_METRICS

LOST = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
REFUSED = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def identities(found: Gpus) -> list[tuple]:
    return [(gpu.identity["gpu"], gpu.identity["uuid"]) for gpu in found.read()]


def test_every_metric_has_its_unit_and_one_that_the_driver_refuses_is_unavailable(driver):
    driver.add()
    driver.add(nvmlDeviceGetPowerUsage=REFUSED, nvmlDeviceGetUtilizationRates=REFUSED)
    readings, partial = Gpus().read()
    assert readings.identity == {"gpu": "0", "uuid": "GPU-aaaaaaaa", "name": "NVIDIA H100 80GB HBM3"}
    assert readings.values == {
        "utilization_ratio": 0.87,
        "memory_utilization_ratio": 0.34,
        "memory_used_bytes": 60 << 30,
        "memory_total_bytes": 80 << 30,
        "power_watts": 512.0,
        "power_limit_watts": 700.0,
        "energy_joules": 3600.0,
        "temperature_celsius": 61,
        "temperature_limit_celsius": 90,
        "sm_clock_hertz": 1.755e9,
        "memory_clock_hertz": 2.619e9,
    }
    assert readings.unavailable == {}
    refused = {"power_watts", "utilization_ratio", "memory_utilization_ratio"}
    assert partial.unavailable == dict.fromkeys(refused, "the driver says: Not Supported")
    assert partial.values.keys() == GPU_METRICS.keys() - refused
    assert {partial.as_json()[metric] for metric in refused} == {None}


def test_a_lost_gpu_is_unavailable_as_a_whole_and_the_others_are_read(driver, caplog):
    driver.add()
    lost = driver.add(nvmlDeviceGetUUID="GPU-bbbbbbbb")
    found = Gpus()
    assert all(gpu.values for gpu in found.read())
    lost["nvmlDeviceGetTemperature"] = LOST
    for _ in range(3):
        well, gone = found.read()
        assert well.values["temperature_celsius"] == 61
        assert (gone.values, gone.identity["uuid"]) == ({}, "GPU-bbbbbbbb")
        assert gone.unavailable == dict.fromkeys(GPU_METRICS, "the GPU does not respond: GPU is lost")
    assert [record.getMessage() for record in caplog.records] == ["GPU 1 (GPU-bbbbbbbb) stopped responding: GPU is lost"]
    lost["nvmlDeviceGetTemperature"] = 50
    assert found.read()[1].values["temperature_celsius"] == 50


def test_mig_devices_are_listed_after_their_gpu_with_their_own_memory(driver):
    refused = {"nvmlDeviceGetUtilizationRates": REFUSED}
    parts = [driver.add(nvmlDeviceGetUUID=f"MIG-{part}", nvmlDeviceGetPowerUsage=REFUSED, **refused) for part in "ab"]
    driver.gpus.clear()
    driver.add(nvmlDeviceGetMigMode=(pynvml.NVML_DEVICE_MIG_ENABLE, 1), parts=parts, **refused)
    found = Gpus().read()
    assert found[1].values["memory_used_bytes"] == 60 << 30
    assert "power_watts" in found[1].unavailable
    assert identities(Gpus()) == [("0", "GPU-aaaaaaaa"), ("0:0", "MIG-a"), ("0:1", "MIG-b")]
    assert identities(Gpus(["MIG-b"])) == [("0:1", "MIG-b")]


def test_gpus_are_selected_by_index_or_uuid(driver):
    assert Gpus().unavailable == "the driver reports no GPU"
    for letter in "abc":
        driver.add(nvmlDeviceGetUUID=f"GPU-{letter}")
    assert identities(Gpus([2, "GPU-a"])) == [("0", "GPU-a"), ("2", "GPU-c")]
    assert Gpus(["GPU-z"]).unavailable == "the driver reports no GPU GPU-z"


def test_without_a_driver_or_its_library_no_gpu_is_read_and_the_reason_is_given(no_driver, monkeypatch):
    found = Gpus()
    assert (found.read(), found.unavailable) == ((), f"NVIDIA's driver does not respond: {no_driver}")
    with GPUMonitor() as monitor:
        pass
    assert monitor.get_summary()["gpus"] is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Gpus().unavailable == "nvidia-ml-py is not installed (pip install nvidia-ml-py)"


def test_a_block_is_summarized_by_gpu_and_metric_also_when_it_raises(driver):
    gpu = driver.add()
    monitor = GPUMonitor(interval=60)

    def train() -> None:
        with monitor:
            while not monitor.get_summary()["gpus"]:
                sleep(0.001)
            gpu["nvmlDeviceGetPowerUsage"] = 300_000
            raise KeyError("theirs")

    with pytest.raises(KeyError):
        train()
    found = monitor.get_summary()
    (summary,), machine = found["gpus"], found["machine"]
    assert summary["uuid"] == "GPU-aaaaaaaa"
    # One at the beginning of the block and one at its end.
    assert summary["metrics"]["power_watts"] == {"mean": 406.0, "min": 300.0, "max": 512.0, "samples": 2}
    means = [summary["metrics"][name]["mean"] for name in ("utilization_ratio", "memory_used_bytes")]
    assert means == [pytest.approx(0.87), 60 << 30]
    assert summary["unavailable"] == {}
    assert {*machine["metrics"], *machine["unavailable"]} == set(MACHINE_METRICS)
    assert machine["metrics"]["memory_used_bytes"]["samples"] == 2
    assert driver.shut_down == 1


def test_a_log_has_a_line_per_gpu_and_sample_without_a_block(driver, tmp_path):
    """Under the names of the profiling guide's own GPUMonitor."""
    driver.add()
    driver.add(nvmlDeviceGetPowerUsage=REFUSED)
    monitor, log = GPUMonitor(), tmp_path / "gpus.jsonl"
    monitor.start_logging(interval_sec=60, output_file=log)
    with pytest.raises(ProfilingConfigError, match=r"sampling already.*Call stop_logging"):
        monitor.start_logging(output_file=log)
    monitor.stop_logging()
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    # One sample at the beginning and one at the end.
    assert [(row["gpu_id"], row["power_w"]) for row in rows] == [(0, 512.0), (1, None)] * 2
    assert rows[0].pop("timestamp") <= rows[2]["timestamp"]
    assert rows[0] == monitor.get_metrics()[0]
