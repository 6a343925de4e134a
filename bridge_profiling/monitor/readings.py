"""What is read, by its name and unit; a reading that lacks a value says why.

A metric has one name in JSON lines, in Prometheus (behind `bridge_profiling_` and its group) and in TensorBoard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

#: Of the lines of a JSON log.
SCHEMA_VERSION = 1

#: Of one GPU, or of a MIG device, which answers fewer of them.
GPU_METRICS = {
    "utilization_ratio": "Share of the last moments in which a kernel ran, 0 to 1",
    "memory_utilization_ratio": "Share of the last moments in which device memory was read or written, 0 to 1",
    "memory_used_bytes": "Device memory in use by all processes",
    "memory_total_bytes": "Device memory installed",
    "power_watts": "Power drawn",
    "power_limit_watts": "Power at which the device slows down",
    "temperature_celsius": "Temperature of the chip",
    "sm_clock_hertz": "Clock of the multiprocessors",
    "memory_clock_hertz": "Clock of the device memory",
    "pcie_transmit_bytes_per_second": "Sent over PCIe, as the driver counted it in 20 ms",
    "pcie_receive_bytes_per_second": "Received over PCIe, as the driver counted it in 20 ms",
    "nvlink_transmit_bytes_per_second": "Data sent over all NVLinks since the last sample",
    "nvlink_receive_bytes_per_second": "Data received over all NVLinks since the last sample",
}

#: Of one process.
PROCESS_METRICS = {
    "cpu_ratio": "CPU time per time since the last sample; 1 is one core",
    "resident_memory_bytes": "Memory resident, shared pages included",
    "anonymous_memory_bytes": "Memory resident that no file or other process shares",
}

#: Of the training loop.
TRAINING_METRICS = {
    "iteration": "Last iteration that has ended, 0-based",
    "iteration_seconds": "Duration of the last iteration",
    "iteration_median_seconds": "Median duration of the recent iterations",
    "seconds_since_iteration": "Time since an iteration ended",
    "tokens_per_second": "Tokens per second over the recent iterations, as the loop counts them",
    "samples_per_second": "Samples per second over the recent iterations, as the loop counts them",
    "data_loading_ratio": "Share of the recent iterations spent waiting for data, 0 to 1",
    "loss": "Loss, where the loop tells it",
    "allocated_bytes": "Device memory that this process's tensors hold",
    "allocated_peak_bytes": "Most device memory that this process's tensors have held",
    "reserved_bytes": "Device memory that this process's caching allocator holds",
}


@dataclass(frozen=True)
class Readings:
    """Values of one GPU, process or training at one moment.

    Attributes:
        identity: which one it is: `gpu`, `uuid` and `name`, or `pid` and `name`.
        values: by metric.
        unavailable: why a metric has no value. Every metric of its group is in one of the two.
    """

    identity: Mapping[str, str | int | None]
    values: Mapping[str, float]
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict:
        """Identity and metrics side by side, null for what is not available, and the reasons."""
        missing = dict.fromkeys(self.unavailable)
        return {**self.identity, **self.values, **missing, "unavailable": dict(self.unavailable)}


def nothing(identity: Mapping[str, str | int | None], metrics: Mapping[str, str], reason: str) -> Readings:
    """Readings of something that answers nothing, for one reason."""
    return Readings(identity, {}, dict.fromkeys(metrics, reason))


@dataclass(frozen=True)
class Sample:
    """All that was read at one moment.

    Attributes:
        unix_seconds: when.
        host: name of the machine.
        rank: the training's global rank, None beside a training.
        gpus: one a GPU or MIG device.
        processes: one a process.
        training: the loop's, or None beside a training.
        counters: the loop's own counters by name.
        unavailable: why there is no GPU, or no process, in it: by `gpus` and `processes`.
    """

    unix_seconds: float
    host: str
    rank: int | None = None
    gpus: tuple[Readings, ...] = ()
    processes: tuple[Readings, ...] = ()
    training: Readings | None = None
    counters: Mapping[str, float] = field(default_factory=dict)
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict:
        """The sample as a line of the JSON log; `gpus` is null where none can be read."""
        return {
            "kind": "sample",
            "schema_version": SCHEMA_VERSION,
            **stamp(self.unix_seconds),
            "host": self.host,
            "rank": self.rank,
            "gpus": None if "gpus" in self.unavailable else [gpu.as_json() for gpu in self.gpus],
            "processes": None if "processes" in self.unavailable else [process.as_json() for process in self.processes],
            "training": self.training.as_json() if self.training is not None else None,
            "counters": dict(self.counters),
            "unavailable": dict(self.unavailable),
        }


def stamp(unix_seconds: float) -> dict:
    """A moment, for people and for programs."""
    time = datetime.fromtimestamp(unix_seconds, UTC).isoformat(timespec="milliseconds")
    return {"time": time.replace("+00:00", "Z"), "unix_seconds": round(unix_seconds, 3)}
