"""Metrics by name and unit, and the samples that hold them. A metric without a value carries the reason.

A metric has the same name in JSON lines and, after `bridge_profiling_` and its group, in Prometheus.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

#: Schema of the lines of a JSON log.
SCHEMA_VERSION = 1

#: Metrics of a GPU. A MIG device supports fewer of them.
GPU_METRICS = {
    "utilization_ratio": "Share of the sampling period in which a kernel ran, 0 to 1",
    "memory_utilization_ratio": "Share of the sampling period in which device memory was read or written, 0 to 1",
    "memory_used_bytes": "Device memory in use by all processes",
    "memory_total_bytes": "Device memory installed",
    "power_watts": "Power draw",
    "power_limit_watts": "Power limit that the driver enforces",
    "energy_joules": "Energy used since the driver was loaded",
    "temperature_celsius": "Temperature of the chip",
    "temperature_limit_celsius": "Temperature at which the driver slows the chip down",
    "sm_clock_hertz": "Clock of the multiprocessors",
    "memory_clock_hertz": "Clock of the device memory",
}

#: Metrics of the whole machine, all of its processes included.
MACHINE_METRICS = {
    "cpu_ratio": "Share of the CPU time of all cores in use since the last sample, 0 to 1",
    "memory_used_bytes": "Memory in use, without caches that the system can free",
    "memory_total_bytes": "Memory installed",
}

PROCESS_METRICS = {
    "cpu_ratio": "CPU time per elapsed time since the last sample; 1 is one core",
    "resident_memory_bytes": "Resident memory, shared pages included",
    "anonymous_memory_bytes": "Resident memory not shared with a file or another process",
}

TRAINING_METRICS = {
    "iteration": "Last completed iteration, 0-based",
    "iteration_seconds": "Duration of the last iteration",
    "iteration_median_seconds": "Median duration of the recent iterations",
    "seconds_since_iteration": "Time since an iteration ended",
    "tokens_per_second": "Tokens per second over the recent iterations, as the loop counts them",
    "samples_per_second": "Samples per second over the recent iterations, as the loop counts them",
    "data_loading_ratio": "Share of the recent iterations spent waiting for data, 0 to 1",
    "loss": "Loss, if the loop reports it",
    "allocated_bytes": "Device memory held by tensors of this process",
    "allocated_peak_bytes": "Peak device memory held by tensors of this process",
    "reserved_bytes": "Device memory held by the caching allocator of this process",
    "reserved_peak_bytes": "Peak device memory held by the caching allocator of this process",
}


@dataclass(frozen=True)
class Readings:
    """Values of one GPU, process or training at one moment; every metric is in either `values` or `unavailable` (with a
    reason).
    """

    identity: Mapping[str, str | int | None]
    values: Mapping[str, float]
    unavailable: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, identity: Mapping[str, str | int | None], answers: Mapping[str, float | str]) -> Readings:
        """Readings from one answer per metric: a number is its value, a text the reason why it has none."""
        values = {metric: answer for metric, answer in answers.items() if not isinstance(answer, str)}
        return cls(identity, values, {metric: answer for metric, answer in answers.items() if isinstance(answer, str)})

    def as_json(self) -> dict:
        """Identity and metrics in one mapping, null for unavailable metrics, and the reasons under `unavailable`."""
        missing = dict.fromkeys(self.unavailable)
        return {**self.identity, **self.values, **missing, "unavailable": dict(self.unavailable)}


@dataclass(frozen=True)
class Sample:
    """All readings of one moment.

    Attributes:
        unix_seconds: time of the sample.
        host: name of the machine.
        rank: global rank of the training; None outside a training.
        gpus: one element per GPU or MIG device.
        processes: one element per process.
        training: readings of the training loop; None outside a training.
        unavailable: the reason why no GPU or no process can be read, under `gpus` and `processes`.
        machine: readings of the whole machine.
        metrics: the loop's own numbers (`TrainingMonitor.log_metrics`) by name.
    """

    unix_seconds: float
    host: str
    rank: int | None = None
    gpus: tuple[Readings, ...] = ()
    processes: tuple[Readings, ...] = ()
    training: Readings | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)
    machine: Readings = field(default_factory=lambda: Readings({}, {}))
    metrics: Readings = field(default_factory=lambda: Readings({}, {}))

    def as_json(self) -> dict:
        """The sample as a line of the JSON log; `gpus` and `processes` are null if none can be read."""
        return {
            "kind": "sample",
            "schema_version": SCHEMA_VERSION,
            **self.origin(),
            "gpus": None if "gpus" in self.unavailable else [gpu.as_json() for gpu in self.gpus],
            "processes": None if "processes" in self.unavailable else [process.as_json() for process in self.processes],
            "machine": self.machine.as_json(),
            "training": self.training.as_json() if self.training is not None else None,
            "metrics": self.metrics.as_json(),
            "unavailable": dict(self.unavailable),
        }

    def origin(self) -> dict:
        """Time, host and rank, the fields common to all records of the JSON log."""
        time = datetime.fromtimestamp(self.unix_seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return {"time": time, "unix_seconds": round(self.unix_seconds, 3), "host": self.host, "rank": self.rank}
