"""A fake driver with GPUs: a table answers pynvml's functions. Errors and constants are pynvml's own."""

from __future__ import annotations

from types import SimpleNamespace

import pynvml
import pytest

#: What an H100 at work answers.
ANSWERS = {
    "nvmlDeviceGetUUID": "GPU-aaaaaaaa",
    "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=87, memory=34),
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=60 << 30, total=80 << 30),
    "nvmlDeviceGetPowerUsage": 512_000,
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetClockInfo": {(pynvml.NVML_CLOCK_SM,): 1755, (pynvml.NVML_CLOCK_MEM,): 2619},
    "nvmlDeviceGetPcieThroughput": {(pynvml.NVML_PCIE_UTIL_TX_BYTES,): 2_000_000, (pynvml.NVML_PCIE_UTIL_RX_BYTES,): 1_000},
    "nvmlDeviceGetMigMode": pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED),
    "nvmlDeviceGetComputeRunningProcesses": [],
}


class Driver:
    """The answers of each GPU, which tests change. An error among them is raised.

    `nvlink` holds the KiB that each NVLink field has counted, or an NVML error code.
    """

    def __init__(self) -> None:
        self.gpus: list[dict] = []
        self.shut_down = 0

    def add(self, **answers: object) -> dict:
        gpu = ANSWERS | {"nvlink": {}} | answers
        self.gpus.append(gpu)
        return gpu

    def ask(self, function: str, gpu: dict, *arguments: object, **_: object) -> object:
        answer = gpu[function]
        if isinstance(answer, dict):
            answer = answer[arguments]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def handle(self, index: int) -> dict:
        if isinstance(self.gpus[index].get("handle"), Exception):
            raise self.gpus[index]["handle"]
        return self.gpus[index]

    @staticmethod
    def part(gpu: dict, index: int) -> dict:
        parts = gpu.get("parts", [])
        if index >= len(parts):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return parts[index]

    @staticmethod
    def fields(gpu: dict, asked: list) -> list:
        found = []
        for number, _ in asked:
            counted = gpu["nvlink"].get(number, pynvml.NVML_ERROR_NOT_SUPPORTED)
            wrong = counted if number not in gpu["nvlink"] else pynvml.NVML_SUCCESS
            value = SimpleNamespace(ullVal=counted)
            found.append(SimpleNamespace(nvmlReturn=wrong, valueType=pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, value=value))
        return found

    def stop(self) -> None:
        self.shut_down += 1


@pytest.fixture
def driver(monkeypatch) -> Driver:
    one = Driver()
    for function in ANSWERS:
        monkeypatch.setattr(pynvml, function, lambda *asked, function=function, **named: one.ask(function, *asked, **named))
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", one.stop)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(one.gpus))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", one.handle)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetFieldValues", one.fields)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMaxMigDeviceCount", lambda gpu: 7)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMigDeviceHandleByIndex", one.part)
    return one


@pytest.fixture
def no_driver(monkeypatch) -> str:
    """Simulates a machine without NVIDIA's driver; returns the library's error message."""

    def refuse() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    return str(pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))
