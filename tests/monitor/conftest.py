"""A fake driver with GPUs: a table answers pynvml's functions. Errors and constants are pynvml's own."""

import functools
from types import SimpleNamespace

import pynvml
import pytest

from bridge_profiling.monitor import training

#: What an H100 at work answers.
ANSWERS = {
    "nvmlDeviceGetUUID": "GPU-aaaaaaaa",
    "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=87, memory=34),
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=60 << 30, total=80 << 30),
    "nvmlDeviceGetPowerUsage": 512_000,
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetTotalEnergyConsumption": 3_600_000,
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetTemperatureThreshold": 90,
    "nvmlDeviceGetClockInfo": {(pynvml.NVML_CLOCK_SM,): 1755, (pynvml.NVML_CLOCK_MEM,): 2619},
    "nvmlDeviceGetMigMode": pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED),
    "nvmlDeviceGetComputeRunningProcesses": [],
}


class Driver:
    """The answers of each GPU, which tests change. An error among them is raised."""

    def __init__(self) -> None:
        self.gpus: list[dict] = []
        self.shut_down = 0

    def add(self, **answers: object) -> dict:
        self.gpus.append(ANSWERS | answers)
        return self.gpus[-1]

    def ask(self, function: str, gpu: dict, *arguments: object, **_: object) -> object:
        answer = gpu[function]
        return raised(answer[arguments] if isinstance(answer, dict) else answer)

    @staticmethod
    def part(gpu: dict, index: int) -> dict:
        return raised(dict(enumerate(gpu.get("parts", []))).get(index, pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)))

    def stop(self) -> None:
        self.shut_down += 1


def raised(answer: object) -> object:
    if isinstance(answer, Exception):
        raise answer
    return answer


@pytest.fixture
def driver(monkeypatch) -> Driver:
    one = Driver()
    functions = {function: functools.partial(one.ask, function) for function in ANSWERS} | {
        "nvmlInit": lambda: None,
        "nvmlShutdown": one.stop,
        "nvmlDeviceGetCount": lambda: len(one.gpus),
        "nvmlDeviceGetHandleByIndex": lambda index: one.gpus[index],
        "nvmlDeviceGetMaxMigDeviceCount": lambda gpu: 7,
        "nvmlDeviceGetMigDeviceHandleByIndex": one.part,
    }
    for name, function in functions.items():
        monkeypatch.setattr(pynvml, name, function)
    return one


@pytest.fixture
def no_driver(monkeypatch) -> str:
    """Simulates a machine without NVIDIA's driver; returns the library's error message."""

    error = pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: raised(error))
    return str(error)


@pytest.fixture
def clock(monkeypatch):
    """A clock of the loop; `clock(seconds)` advances it."""
    now = [100.0]

    def wait(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(training, "perf_counter_ns", lambda: round(now[0] * 1e9))
    return wait
