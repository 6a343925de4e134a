"""GPU readings through NVIDIA's management library (NVML). Read-only: no device setting is changed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import thread_time
from typing import Any

from bridge_profiling.common.errors import TrainingLogger
from bridge_profiling.monitor.metrics import GPU_METRICS, Readings

logger = TrainingLogger(__name__)

#: NVML functions, the constant that each takes, and the metrics in its answer: attribute (None: the answer itself) and unit.
_QUERIES: tuple[tuple[str, str | None, dict[str, tuple[str | None, float]]], ...] = (
    ("nvmlDeviceGetUtilizationRates", None, {"utilization_ratio": ("gpu", 0.01), "memory_utilization_ratio": ("memory", 0.01)}),
    # Version 2 leaves out the memory that the driver reserves for itself, as nvidia-smi does.
    ("nvmlDeviceGetMemoryInfo", "nvmlMemory_v2", {"memory_used_bytes": ("used", 1), "memory_total_bytes": ("total", 1)}),
    ("nvmlDeviceGetPowerUsage", None, {"power_watts": (None, 1e-3)}),
    ("nvmlDeviceGetEnforcedPowerLimit", None, {"power_limit_watts": (None, 1e-3)}),
    ("nvmlDeviceGetTotalEnergyConsumption", None, {"energy_joules": (None, 1e-3)}),
    ("nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU", {"temperature_celsius": (None, 1)}),
    (
        "nvmlDeviceGetTemperatureThreshold",
        "NVML_TEMPERATURE_THRESHOLD_SLOWDOWN",
        {"temperature_limit_celsius": (None, 1)},
    ),
    ("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM", {"sm_clock_hertz": (None, 1e6)}),
    ("nvmlDeviceGetClockInfo", "NVML_CLOCK_MEM", {"memory_clock_hertz": (None, 1e6)}),
)


class Gpus:
    """This machine's GPUs and MIG devices, by indices as nvidia-smi shows them, or UUIDs; None selects all.

    CUDA_VISIBLE_DEVICES does not renumber them. `driver_seconds` is the CPU time of the last `read`, computed without Python's
    lock, so a training with a CPU core of its own does not pay for it.
    """

    def __init__(self, gpus: Sequence[int | str] | None = None) -> None:
        self.driver_seconds = 0.0
        self._devices: list[_Device] = []
        self._nvml: Any = None
        self.unavailable = self._open(gpus)

    def _open(self, gpus: Sequence[int | str] | None) -> str | None:
        """Load NVML and find the devices; returns the reason if there is none."""
        if gpus is not None and not gpus:
            return "no GPU was selected"
        try:
            nvml = importlib.import_module("pynvml")
        except ModuleNotFoundError:
            return "nvidia-ml-py is not installed (pip install nvidia-ml-py)"
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            return f"NVIDIA's driver does not respond: {error}"
        self._nvml = nvml
        wanted = {str(gpu) for gpu in gpus} if gpus is not None else None
        try:
            for index in range(nvml.nvmlDeviceGetCount()):
                device = _Device(nvml, str(index), partial(nvml.nvmlDeviceGetHandleByIndex, index))
                family = [device, *device.mig_devices()]
                if wanted is not None and not wanted & {device.index, device.uuid}:
                    family = [each for each in family if wanted & {each.index, each.uuid}]
                self._devices += family
        except nvml.NVMLError as error:
            return f"NVIDIA's driver does not list its GPUs: {error}"
        if self._devices:
            return None
        return "the driver reports no GPU" + ("" if gpus is None else f" {', '.join(str(gpu) for gpu in gpus)}")

    def read(self) -> tuple[Readings, ...]:
        """Read every GPU once."""
        before = thread_time()
        readings = tuple(device.read() for device in self._devices)
        self.driver_seconds = thread_time() - before
        return readings

    def processes(self) -> list[int]:
        """Ids of the compute processes on these GPUs that the driver reports."""
        found: set[int] = set()
        for device in self._devices:
            with suppress(self._nvml.NVMLError):
                found |= {process.pid for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(device.handle)}
        return sorted(found)

    def close(self) -> None:
        """Release NVML; may be called again."""
        nvml, self._nvml, self._devices = self._nvml, None, []
        if nvml is not None:
            nvml.nvmlShutdown()


class _Device:
    """One GPU or MIG device; `index` is as nvidia-smi shows it, `0:1` for the second MIG device of GPU 0."""

    def __init__(self, nvml: Any, index: str, find: Callable[[], Any]) -> None:
        self._nvml, self.index, self._find = nvml, index, find
        self.handle: Any = None
        self._lost = False
        self.uuid: str | None = None
        self.name: str | None = None
        # Each sample tries again and reports the reason.
        with suppress(nvml.NVMLError):
            self._open()

    def _open(self) -> None:
        handle = self._find()
        self.uuid, self.name = self._nvml.nvmlDeviceGetUUID(handle), self._nvml.nvmlDeviceGetName(handle)
        self.handle = handle

    def mig_devices(self) -> list[_Device]:
        """The MIG devices of this GPU."""
        nvml, found = self._nvml, []
        with suppress(nvml.NVMLError):
            if self.handle is not None and nvml.nvmlDeviceGetMigMode(self.handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE:
                for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(self.handle)):
                    find = partial(nvml.nvmlDeviceGetMigDeviceHandleByIndex, self.handle, number)
                    found.append(_Device(nvml, f"{self.index}:{number}", find))
        # Numbers without a device have no handle.
        return [device for device in found if device.handle is not None]

    def read(self) -> Readings:
        """Query every metric; those that the driver refuses are unavailable with its reason."""
        try:
            if self.handle is None:
                self._open()
            answers = self._query()
            self._lost = False
        except self._nvml.NVMLError as error:
            if not self._lost:
                logger.warning("GPU %s (%s) stopped responding: %s", self.index, self.uuid or "UUID unknown", error)
            self._lost = True
            answers = dict.fromkeys(GPU_METRICS, f"the GPU does not respond: {error}")
        return Readings.of({"gpu": self.index, "uuid": self.uuid, "name": self.name}, answers)

    def _query(self) -> dict[str, float | str]:
        nvml = self._nvml
        answers: dict[str, float | str] = {}
        for function, constant, metrics in _QUERIES:
            arguments = () if constant is None else (getattr(nvml, constant),)
            try:
                answer = getattr(nvml, function)(self.handle, *arguments)
            except nvml.NVMLError_GpuIsLost:
                raise
            except nvml.NVMLError as error:
                answers |= dict.fromkeys(metrics, f"the driver says: {error}")
            else:
                for metric, (attribute, unit) in metrics.items():
                    # Rounded, since 57 * 0.01 is 0.5700000000000001.
                    answers[metric] = round((answer if attribute is None else getattr(answer, attribute)) * unit, 6)
        return answers
