"""`GPUMonitor`: the GPUs and the machine during a block, summed up or logged, without a training."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from threading import Lock
from time import monotonic, time
from typing import Any, TextIO

from bridge_profiling.common.errors import ProfilingConfigError, TrainingLogger, require
from bridge_profiling.monitor.gpus import Gpus
from bridge_profiling.monitor.metrics import GPU_METRICS, MACHINE_METRICS, Readings
from bridge_profiling.monitor.processes import Machine
from bridge_profiling.monitor.sampler import PeriodicThread

logger = TrainingLogger(__name__)

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
        self._file: TextIO | None = None
        self._summaries: dict[str | int | None, dict[str, Any]] = {}
        self._began = self._ended = 0.0
        self.unavailable: str | None = None

    def __enter__(self) -> GPUMonitor:
        self._start(self._interval, None)
        return self

    def __exit__(self, *error: object) -> None:
        self.stop_logging()

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
            ProfilingConfigError: the file cannot be written, or the monitor is sampling already.
        """
        require(
            self._thread is None, "this GPUMonitor is sampling already", instead="Call stop_logging() first, or use another"
        )
        PeriodicThread.check_interval(interval_sec)
        try:
            file = open(output_file, "a", encoding="utf-8")  # noqa: SIM115 - closed by stop_logging
        except OSError as error:
            raise ProfilingConfigError(
                f"{output_file} cannot be written: {error.strerror}", instead="Use another file"
            ) from error
        self._start(interval_sec, file)
        if self.unavailable is not None:
            logger.warning("no GPU is logged: %s", self.unavailable)

    def stop_logging(self) -> None:
        """End with a last sample; does nothing if the monitor is not sampling."""
        thread, self._thread = self._thread, None
        if thread is not None and thread.finish():
            with self._lock:
                opened, self._opened = self._opened, None
            for each in (opened, self._file):
                if each is not None:
                    each.close()
        self._ended = monotonic()

    def get_summary(self) -> Summary:
        """Mean, minimum and maximum of each metric over the block or log; printed, a line for the machine and for each GPU.

        Returns:
            `seconds`, the duration of the block; `gpus`, None if none can be read, else for each one `gpu`, `uuid`, `name`,
            `metrics` (`mean`, `min`, `max`, `samples` of each) and `unavailable` (metrics without any value, with the
            reason); `machine`, the same of the CPU and the memory; `unavailable`, the reason why no GPU can be read.
        """
        with self._lock:
            of_gpus = [summary for gpu, summary in self._summaries.items() if gpu is not None]
            machine, *gpus = deepcopy([self._summaries.get(None, _empty({})), *of_gpus])
        for each, names in (*((gpu, GPU_METRICS) for gpu in gpus), (machine, MACHINE_METRICS)):
            # Values that were missing only in some samples, such as a rate in the first, are available.
            each["unavailable"] = {name: each["unavailable"].get(name, "") for name in names if name not in each["metrics"]}
        seconds = (monotonic() if self._thread is not None else self._ended) - self._began
        known = gpus if self.unavailable is None else None
        return Summary(seconds=seconds, gpus=known, machine=machine, unavailable=self.unavailable)

    def _open(self) -> Gpus:
        with self._lock:
            if self._opened is None:
                self._opened = Gpus(self._selected)
                self.unavailable = self._opened.unavailable
            return self._opened

    def _start(self, interval: float, file: TextIO | None) -> None:
        self._summaries.clear()
        self._open()
        self._file, self._began = file, monotonic()
        self._thread = PeriodicThread(self._sample, interval, "bridge_profiling GPU monitor")
        self._thread.start()

    def _sample(self) -> None:
        """Read everything, and add it to the summaries and the log."""
        now, readings, machine = time(), self._open().read(), self._machine.read()
        with self._lock:
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
        if self._file is not None:
            self._file.writelines(json.dumps({**gpu, "timestamp": now}) + "\n" for gpu in self._as_logged(readings))
            self._file.flush()


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
