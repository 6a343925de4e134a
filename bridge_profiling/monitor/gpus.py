"""GPU readings and energy through NVIDIA's management library (NVML). Read-only: no device setting is changed."""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic, thread_time
from typing import Any

from bridge_profiling.errors import TrainingLogger
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
    # In KB/s. The driver measures PCIe for 20 ms while this thread waits without holding Python's lock.
    ("nvmlDeviceGetPcieThroughput", "NVML_PCIE_UTIL_TX_BYTES", {"pcie_transmit_bytes_per_second": (None, 1e3)}),
    ("nvmlDeviceGetPcieThroughput", "NVML_PCIE_UTIL_RX_BYTES", {"pcie_receive_bytes_per_second": (None, 1e3)}),
)

#: Fields that count the bytes sent and received over NVLink.
_LINK_COUNTERS = {
    "nvlink_transmit_bytes_per_second": "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX",
    "nvlink_receive_bytes_per_second": "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX",
}

#: Scope of an NVLink field that covers all links together.
_ALL_LINKS = 0xFFFFFFFF

#: Samples after an iteration that a figure covers: a minute at the default interval if each iteration is shorter than that.
_SAMPLES = 60

#: Fields of nvmlValue_t by value type.
_VALUE_FIELDS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


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
        self._link_bytes: dict[str, tuple[float, int]] = {}
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
            answer = self._ask(partial(getattr(nvml, function), self.handle, *arguments))
            for metric, (attribute, unit) in metrics.items():
                value = answer if attribute is None or isinstance(answer, str) else getattr(answer, attribute)
                # Rounded, since 57 * 0.01 is 0.5700000000000001.
                answers[metric] = value if isinstance(value, str) else round(value * unit, 6)
        return answers | {metric: self._ask(partial(self._link_rate, metric)) for metric in _LINK_COUNTERS}

    def _ask(self, query: Callable[[], Any]) -> Any:
        """The answer to a query, or the driver's reason for refusing it as text."""
        try:
            return query()
        except self._nvml.NVMLError_GpuIsLost:
            raise
        except self._nvml.NVMLError as error:
            return f"the driver says: {error}"

    def _link_rate(self, metric: str) -> float | str:
        """Bytes per second over all NVLinks since the last call, or the reason why the rate is unknown."""
        nvml = self._nvml
        (answer,) = nvml.nvmlDeviceGetFieldValues(self.handle, [(getattr(nvml, _LINK_COUNTERS[metric]), _ALL_LINKS)])
        if answer.nvmlReturn != nvml.NVML_SUCCESS:
            raise nvml.NVMLError(answer.nvmlReturn)
        # The driver counts KiB since it was loaded.
        now, count = monotonic(), getattr(answer.value, _VALUE_FIELDS[answer.valueType]) * 1024
        before, self._link_bytes[metric] = self._link_bytes.get(metric), (now, count)
        if before is None:
            return "needs two samples"
        if count < before[1] or now <= before[0]:
            return "the driver's counter was reset"
        return (count - before[1]) / (now - before[0])


class EnergyMeter:
    """Divides the energy of all monitored GPUs by the iterations and tokens of the same time.

    Work of other processes on these GPUs is included; a rank that monitors only its own GPU gets its own energy.
    """

    def __init__(self) -> None:
        self._kept: deque[tuple[float, Mapping[str, float]]] = deque(maxlen=_SAMPLES)

    def read(self, gpus: Sequence[Readings], totals: Mapping[str, float]) -> dict[str, float | str]:
        """`joules_per_iteration` and `joules_per_token`, or the reason why they are unknown.

        Args:
            gpus: readings of every monitored GPU.
            totals: iterations, and tokens if the loop reports them, since the training began.
        """
        metrics = {"joules_per_iteration": "iterations", "joules_per_token": "tokens"}
        # A part of a GPU counts no energy; the whole GPU does.
        gpus = [gpu for gpu in gpus if ":" not in str(gpu.identity.get("gpu"))]
        unknown = next((gpu.unavailable["energy_joules"] for gpu in gpus if "energy_joules" in gpu.unavailable), None)
        if unknown is not None or not gpus:
            self._kept.clear()
            return dict.fromkeys(metrics, unknown or "no GPU can be read")
        joules = sum(gpu.values["energy_joules"] for gpu in gpus)
        if self._kept and joules < self._kept[-1][0]:
            self._kept.clear()  # The driver was loaded again.
        # Only samples after an iteration has ended: the energy of a part of one belongs to no number of them.
        if not self._kept or totals["iterations"] > self._kept[-1][1]["iterations"]:
            self._kept.append((joules, dict(totals)))
        (before, since), (joules, totals) = self._kept[0], self._kept[-1]
        found: dict[str, float | str] = {}
        for metric, quantity in metrics.items():
            amount = totals.get(quantity, 0) - since.get(quantity, 0)
            reason = (
                f"the loop does not report {quantity}" if quantity not in totals else "needs an iteration between two samples"
            )
            found[metric] = (joules - before) / amount if amount > 0 else reason
        return found
