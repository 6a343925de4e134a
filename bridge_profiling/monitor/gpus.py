"""GPUs, through NVIDIA's management library. Reads alone: no setting of a device is changed."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic, thread_time
from typing import Any

from bridge_profiling.monitor.readings import GPU_METRICS, Readings, nothing

logger = logging.getLogger(__name__)

#: The scope of an NVLink field that means all links together.
_ALL_LINKS = 0xFFFFFFFF

#: Fields of nvmlValue_t by the value's type.
_VALUE_FIELDS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")

_PCIE = ("pcie_transmit_bytes_per_second", "pcie_receive_bytes_per_second")
_NVLINK = ("nvlink_transmit_bytes_per_second", "nvlink_receive_bytes_per_second")


class Gpus:
    """This machine's GPUs and their MIG devices.

    Args:
        gpus: which ones: indices, in the driver's order as nvidia-smi shows them (CUDA_VISIBLE_DEVICES does not renumber
            them), or UUIDs. None is all.

    Attributes:
        unavailable: why no GPU can be read; None where one can.
        driver_seconds: what reading has cost a processor so far. The driver computes without Python's lock, so a training that
            has a processor of its own does not pay for it.
    """

    def __init__(self, gpus: Sequence[int | str] | None = None) -> None:
        self.unavailable: str | None = None
        self.driver_seconds = 0.0
        self._devices: list[_Device] = []
        self._nvml: Any = None
        if gpus is not None and not gpus:
            self.unavailable = "no GPU was asked for"
            return
        try:
            self._nvml = importlib.import_module("pynvml")
        except ModuleNotFoundError:
            self.unavailable = "nvidia-ml-py is not installed (pip install nvidia-ml-py)"
            return
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            self.unavailable = f"NVIDIA's driver does not answer here: {error}"
            self._nvml = None
            return
        try:
            self._devices = self._find(gpus)
        except self._nvml.NVMLError as error:
            self.unavailable = f"NVIDIA's driver does not list its GPUs: {error}"
        else:
            if not self._devices:
                self.unavailable = "the driver shows no GPU" if gpus is None else f"the driver shows no GPU {_listed(gpus)}"

    def read(self) -> tuple[Readings, ...]:
        """Every GPU once."""
        before = thread_time()
        try:
            return tuple(device.read() for device in self._devices)
        finally:
            self.driver_seconds += thread_time() - before

    def processes(self) -> list[int]:
        """Processes that compute on these GPUs, as far as the driver tells."""
        return sorted({pid for device in self._devices for pid in device.processes()})

    def close(self) -> None:
        """Let go of the library; may be called again."""
        nvml, self._nvml, self._devices = self._nvml, None, []
        if nvml is not None:
            nvml.nvmlShutdown()

    def _find(self, gpus: Sequence[int | str] | None) -> list[_Device]:
        found = []
        wanted = {str(gpu) for gpu in gpus} if gpus is not None else None
        for index in range(self._nvml.nvmlDeviceGetCount()):
            device = _Device(self._nvml, str(index), partial(self._nvml.nvmlDeviceGetHandleByIndex, index))
            if wanted is None or device.index in wanted or device.uuid in wanted:
                found += [device, *device.parts()]
            else:
                found += [part for part in device.parts() if part.index in wanted or part.uuid in wanted]
        return found


class _Device:
    """One GPU, or a part of it that MIG has made a device.

    Args:
        nvml: the library.
        index: as nvidia-smi shows it; `0:1` is the second MIG device of GPU 0.
        find: gives the library's handle.
    """

    def __init__(self, nvml: Any, index: str, find: Callable[[], Any]) -> None:
        self._nvml, self.index, self._find = nvml, index, find
        self._handle: Any = None
        self._link_bytes: dict[int, tuple[float, float]] = {}
        self._lost = False
        self.uuid: str | None = None
        self.name: str | None = None
        try:
            self._open()
        except nvml.NVMLError:
            # Said with every sample, and asked for again with each.
            self._handle = None

    def _open(self) -> None:
        self._handle = self._find()
        self.uuid = _text(self._nvml.nvmlDeviceGetUUID(self._handle))
        self.name = _text(self._nvml.nvmlDeviceGetName(self._handle))

    def parts(self) -> list[_Device]:
        """Its MIG devices."""
        nvml = self._nvml
        try:
            if self._handle is None or nvml.nvmlDeviceGetMigMode(self._handle)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
                return []
            most = nvml.nvmlDeviceGetMaxMigDeviceCount(self._handle)
        except nvml.NVMLError:
            return []
        found = []
        for part in range(most):
            try:
                nvml.nvmlDeviceGetMigDeviceHandleByIndex(self._handle, part)
            except nvml.NVMLError:
                continue
            find = partial(nvml.nvmlDeviceGetMigDeviceHandleByIndex, self._handle, part)
            found.append(_Device(nvml, f"{self.index}:{part}", find))
        return found

    def processes(self) -> list[int]:
        """Processes that compute on it."""
        try:
            return [process.pid for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)]
        except self._nvml.NVMLError:
            return []

    def read(self) -> Readings:
        """Ask for every metric; what the driver refuses is missing, with its reason."""
        try:
            if self._handle is None:
                self._open()
            values, unavailable = self._ask()
        except self._nvml.NVMLError as error:
            if not self._lost:
                logger.warning("GPU %s (%s) answers nothing any more: %s", self.index, self.uuid or "no UUID", error)
            self._lost = True
            return nothing(self._identity, GPU_METRICS, f"the GPU does not answer: {error}")
        self._lost = False
        return Readings(self._identity, values, unavailable)

    @property
    def _identity(self) -> dict[str, str | int | None]:
        return {"gpu": self.index, "uuid": self.uuid, "name": self.name}

    def _ask(self) -> tuple[dict[str, float], dict[str, str]]:
        nvml = self._nvml
        values: dict[str, float] = {}
        unavailable: dict[str, str] = {}
        questions: list[tuple[tuple[str, ...], Callable[[], tuple[float, ...]]]] = [
            (("utilization_ratio", "memory_utilization_ratio"), self._utilization),
            (("memory_used_bytes", "memory_total_bytes"), self._memory),
            (("power_watts",), self._number(1e-3, nvml.nvmlDeviceGetPowerUsage)),
            (("power_limit_watts",), self._number(1e-3, nvml.nvmlDeviceGetEnforcedPowerLimit)),
            (("temperature_celsius",), self._number(1, nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)),
            (("sm_clock_hertz",), self._number(1e6, nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM)),
            (("memory_clock_hertz",), self._number(1e6, nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM)),
            # In KB/s. The driver counts for 20 ms while this thread waits, without Python's lock.
            ((_PCIE[0],), self._number(1e3, nvml.nvmlDeviceGetPcieThroughput, nvml.NVML_PCIE_UTIL_TX_BYTES)),
            ((_PCIE[1],), self._number(1e3, nvml.nvmlDeviceGetPcieThroughput, nvml.NVML_PCIE_UTIL_RX_BYTES)),
            ((_NVLINK[0],), partial(self._link_rate, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX)),
            ((_NVLINK[1],), partial(self._link_rate, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)),
        ]
        for metrics, question in questions:
            try:
                values.update(zip(metrics, question(), strict=True))
            except nvml.NVMLError_GpuIsLost:
                raise
            except nvml.NVMLError as error:
                unavailable.update(dict.fromkeys(metrics, f"the driver says: {error}"))
            except _NotYet as reason:
                unavailable.update(dict.fromkeys(metrics, str(reason)))
        return values, unavailable

    def _number(self, unit: float, function: Callable[..., int], *arguments: object) -> Callable[[], tuple[float]]:
        """Asks a function of the library that answers one number, in multiples of `unit`."""
        return lambda: (function(self._handle, *arguments) * unit,)

    def _utilization(self) -> tuple[float, float]:
        rates = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
        return rates.gpu / 100, rates.memory / 100

    def _memory(self) -> tuple[int, int]:
        nvml = self._nvml
        try:
            # As nvidia-smi shows it: without what the driver reserves for itself.
            memory = nvml.nvmlDeviceGetMemoryInfo(self._handle, version=nvml.nvmlMemory_v2)
        except (nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NotSupported, AttributeError):
            # An older driver, or an older library.
            memory = nvml.nvmlDeviceGetMemoryInfo(self._handle)
        return memory.used, memory.total

    def _link_rate(self, field: int) -> tuple[float]:
        """Bytes per second over all NVLinks since it was asked before; the driver counts KiB since it was loaded."""
        (answer,) = self._nvml.nvmlDeviceGetFieldValues(self._handle, [(field, _ALL_LINKS)])
        if answer.nvmlReturn != self._nvml.NVML_SUCCESS:
            raise self._nvml.NVMLError(answer.nvmlReturn)
        now, count = monotonic(), getattr(answer.value, _VALUE_FIELDS[answer.valueType]) * 1024
        before = self._link_bytes.get(field)
        self._link_bytes[field] = (now, count)
        if before is None:
            raise _NotYet("it takes two samples")
        if count < before[1] or now <= before[0]:
            raise _NotYet("the driver's counter started anew")
        return ((count - before[1]) / (now - before[0]),)


class _NotYet(Exception):
    """A rate that cannot be told from the readings so far."""


def _text(answer: str | bytes) -> str:
    # Before 12.535 nvidia-ml-py answered in bytes.
    return answer.decode() if isinstance(answer, bytes) else answer


def _listed(gpus: Sequence[int | str]) -> str:
    return ", ".join(str(gpu) for gpu in gpus)
