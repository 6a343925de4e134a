"""`GPUMonitor`: the GPUs and the machine during a block, summed up or logged, without a training."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from threading import Lock
from time import monotonic, time
from typing import Any, TextIO

from bridge_profiling.errors import ProfilingConfigError, TrainingLogger, require
from bridge_profiling.monitor.gpus import Gpus
from bridge_profiling.monitor.metrics import GPU_METRICS, MACHINE_METRICS, Readings
from bridge_profiling.monitor.processes import Machine
from bridge_profiling.monitor.sampler import PeriodicThread

logger = TrainingLogger(__name__)

#: Samples that are kept: more than 40 minutes at the default interval. The summary covers all samples.
_KEPT = 10_000

#: Fields of `GPUMonitor.get_metrics`: the metric and its unit.
_LOGGED = {
    "gpu_util_pct": ("utilization_ratio", 0.01),
    "memory_util_pct": ("memory_utilization_ratio", 0.01),
    "memory_used_gb": ("memory_used_bytes", 1e9),
    "memory_total_gb": ("memory_total_bytes", 1e9),
    "power_w": ("power_watts", 1),
    "temperature_c": ("temperature_celsius", 1),
}

#: Metrics of a printed summary: the text and the unit.
_PRINTED = {
    "cpu_ratio": ("CPU {mean:.0%} (at most {max:.0%})", 1),
    "utilization_ratio": ("{mean:.0%} busy (at most {max:.0%})", 1),
    "memory_used_bytes": ("memory {mean:.1f} GB (at most {max:.1f} GB)", 1e9),
    "power_watts": ("{mean:.0f} W (at most {max:.0f} W)", 1),
    "temperature_celsius": ("{mean:.0f} °C (at most {max:.0f} °C)", 1),
}


class GPUMonitor:
    """Samples the GPUs and the machine from a background thread while the block runs.

        with GPUMonitor() as monitor:
            train()
        print(monitor.get_summary())

    `start_logging` and `stop_logging` do the same without a block, and write a log of the GPUs. Without a GPU only the machine
    is sampled, and `unavailable` says why.

    Args:
        gpus: indices as nvidia-smi shows them, or UUIDs; None selects all GPUs of the machine.
        interval: seconds between two samples.

    Attributes:
        unavailable: the reason why no GPU can be read; None if one can, and before the first reading.
    """

    def __init__(self, gpus: Sequence[int | str] | None = None, *, interval: float = 0.25) -> None:
        PeriodicThread.check_interval(interval)
        self._selected, self._interval = gpus, interval
        self._lock = Lock()
        self._opened: Gpus | None = None
        self._machine = Machine()
        self._thread: PeriodicThread | None = None
        self._log: tuple[PeriodicThread, TextIO] | None = None
        self._kept: deque[tuple[float, tuple[Readings, ...]]] = deque(maxlen=_KEPT)
        self._summaries: dict[str | int | None, dict[str, Any]] = {}
        self._began = self._ended = 0.0
        self.unavailable: str | None = None

    def __enter__(self) -> GPUMonitor:
        self._begin()
        self._thread = PeriodicThread(self._sample, self._interval, "bridge_profiling GPU monitor")
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        thread, self._thread = self._thread, None
        self.stop_logging()
        if thread is None or thread.finish():
            self._close()
        self._ended = monotonic()

    @property
    def samples(self) -> list[tuple[float, tuple[Readings, ...]]]:
        """Seconds since the start of the block, and the readings of each GPU; the last 10,000 samples."""
        with self._lock:
            return list(self._kept)

    def get_metrics(self) -> list[dict[str, Any]]:
        """The GPUs at this moment.

        Returns:
            For each GPU `gpu_id` (as nvidia-smi shows it), `gpu_util_pct`, `memory_util_pct`, `memory_used_gb`,
            `memory_total_gb` (1e9 bytes), `power_w`, `temperature_c`; None for what the driver does not report.
        """
        return self._as_logged(self._open().read())

    @staticmethod
    def _as_logged(gpus: Iterable[Readings]) -> list[dict[str, Any]]:
        found = []
        for gpu in gpus:
            values = {key: gpu.values.get(metric) for key, (metric, _) in _LOGGED.items()}
            scaled = {key: None if value is None else round(value / _LOGGED[key][1], 6) for key, value in values.items()}
            number = str(gpu.identity["gpu"])
            found.append({"gpu_id": int(number) if number.isdecimal() else number, **scaled})
        return found

    def start_logging(self, interval_sec: float = 1.0, output_file: str | os.PathLike[str] = "gpu_metrics.jsonl") -> None:
        """Append `get_metrics` with a `timestamp` (Unix seconds) to a file from a background thread, a line per GPU.

        Args:
            interval_sec: seconds between two samples.
            output_file: JSON lines; created if missing.

        Raises:
            ProfilingConfigError: the file cannot be written, or the monitor is logging already.
        """
        require(self._log is None, "this GPUMonitor is logging already", instead="Call stop_logging() first")
        PeriodicThread.check_interval(interval_sec)
        try:
            file = open(output_file, "a", encoding="utf-8")  # noqa: SIM115 - closed by stop_logging
        except OSError as error:
            raise ProfilingConfigError(
                f"{output_file} cannot be written: {error.strerror}", instead="Use another file"
            ) from error
        if self._thread is None:
            self._begin()
        if self._open().unavailable is not None:
            logger.warning("no GPU is logged: %s", self.unavailable)

        def write() -> None:
            now, gpus = time(), self._take() if self._thread is None else self._open().read()
            file.writelines(json.dumps({**gpu, "timestamp": now}) + "\n" for gpu in self._as_logged(gpus))
            file.flush()

        thread = PeriodicThread(write, interval_sec, "bridge_profiling GPU log")
        self._log = thread, file
        thread.start()

    def stop_logging(self) -> None:
        """End the log with a last sample; does nothing if there is none."""
        log, self._log = self._log, None
        if log is not None and log[0].finish():
            log[1].close()
            if self._thread is None:
                self._close()
                self._ended = monotonic()

    def get_summary(self) -> Summary:
        """Mean, minimum and maximum of each metric over the block or log; printed, a line for the machine and for each GPU.

        Returns:
            `seconds`, the duration of the block; `gpus`, None if none can be read, else for each one `gpu`, `uuid`, `name`,
            `metrics` (`mean`, `min`, `max`, `samples` of each) and `unavailable` (metrics without any value, with the
            reason); `machine`, the same of the CPU and the memory; `unavailable`, the reason why no GPU can be read.
        """
        with self._lock:
            machine, *gpus = deepcopy([self._summaries.get(None, _empty({})), *self._of_gpus()])
        for each, names in (*((gpu, GPU_METRICS) for gpu in gpus), (machine, MACHINE_METRICS)):
            # Values that were missing only in some samples, such as a rate in the first, are available.
            each["unavailable"] = {name: each["unavailable"].get(name, "") for name in names if name not in each["metrics"]}
        running = self._thread is not None or self._log is not None
        seconds = (monotonic() if running else self._ended) - self._began
        known = gpus if self.unavailable is None else None
        return Summary(seconds=seconds, gpus=known, machine=machine, unavailable=self.unavailable)

    def _of_gpus(self) -> list[dict[str, Any]]:
        return [summary for gpu, summary in self._summaries.items() if gpu is not None]

    def _open(self) -> Gpus:
        with self._lock:
            if self._opened is None:
                self._opened = Gpus(self._selected)
                self.unavailable = self._opened.unavailable
            return self._opened

    def _close(self) -> None:
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def _begin(self) -> None:
        self._kept.clear()
        self._summaries.clear()
        self._open()
        self._began = self._ended = monotonic()

    def _sample(self) -> None:
        self._take()

    def _take(self) -> tuple[Readings, ...]:
        """Read everything, and add it to the summaries; returns the GPUs."""
        readings, machine = self._open().read(), self._machine.read()
        with self._lock:
            if readings:
                self._kept.append((monotonic() - self._began, readings))
            for each in (machine, *readings):
                summary = self._summaries.setdefault(each.identity.get("gpu"), _empty(each.identity))
                # A GPU that did not respond at first has no UUID and no name until it does.
                summary.update(each.identity)
                summary["unavailable"].update(each.unavailable)
                for name, value in each.values.items():
                    metric = summary["metrics"].setdefault(name, {"mean": value, "min": value, "max": value, "samples": 0})
                    metric["samples"] += 1
                    metric["mean"] += (value - metric["mean"]) / metric["samples"]
                    metric["min"], metric["max"] = min(metric["min"], value), max(metric["max"], value)
        return readings


class Summary(dict[str, Any]):
    """What `GPUMonitor.get_summary` returns: a dictionary that prints as text."""

    def __str__(self) -> str:
        lines = [f"{self['seconds']:.1f} s"]
        for each in (self["machine"], *(self["gpus"] or [])):
            name = f"GPU {each['gpu']} {each['name'] or ''}".rstrip() if "gpu" in each else "machine"
            parts = [
                text.format(**{part: each["metrics"][metric][part] / unit for part in ("mean", "max")})
                for metric, (text, unit) in _PRINTED.items()
                if metric in each["metrics"]
            ]
            lines.append(f"{name}: {', '.join(parts) or 'unavailable'}")
        if self["unavailable"] is not None:
            lines.append(f"GPUs unavailable: {self['unavailable']}")
        return "\n".join(lines)


def _empty(identity: Mapping[str, Any]) -> dict[str, Any]:
    return {**identity, "metrics": {}, "unavailable": {}}
