"""Outputs of samples and alerts: JSON lines, the terminal, Prometheus and TensorBoard."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, TextIO

from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.monitor.alerts import ALERTS, Alert
from bridge_profiling.monitor.metrics import (
    GPU_METRICS,
    MACHINE_METRICS,
    PROCESS_METRICS,
    TRAINING_METRICS,
    Readings,
    Sample,
)
from bridge_profiling.monitor.server import MetricsServer
from bridge_profiling.printable import printable

#: Size at which a log becomes `<name>.1`, replacing an older one: a day of samples of eight GPUs, one per second.
MAX_BYTES = 512 << 20

#: Prefix of the name of every Prometheus metric.
PREFIX = "bridge_profiling_"

_GIB = 1 << 30

#: Columns of the terminal: a title, the text with its metrics' values, their unit, and the metrics.
_GPU_COLUMNS = (
    ("", "{:4.0%} busy", 1, "utilization_ratio"),
    ("", "{:6.1f} of {:.1f} GiB", _GIB, "memory_used_bytes", "memory_total_bytes"),
    ("", "{:5.0f} W", 1, "power_watts"),
    ("", "{:3.0f} °C", 1, "temperature_celsius"),
    ("", "{:5.0f} MHz", 1e6, "sm_clock_hertz"),
    ("PCIe ", "{:.2f} out {:.2f} in GB/s", 1e9, "pcie_transmit_bytes_per_second", "pcie_receive_bytes_per_second"),
    ("NVLink ", "{:.2f} out {:.2f} in GB/s", 1e9, "nvlink_transmit_bytes_per_second", "nvlink_receive_bytes_per_second"),
)
_MACHINE_COLUMNS = (
    ("CPU ", "{:4.0%}", 1, "cpu_ratio"),
    ("", "{:.0f} of {:.0f} GiB", _GIB, "memory_used_bytes", "memory_total_bytes"),
)
_PROCESS_COLUMNS = (("", "{:5.0%} of a core", 1, "cpu_ratio"), ("", "{:6.2f} GiB", _GIB, "resident_memory_bytes"))


class Sink(Protocol):
    """An output of samples: JsonLines, Terminal, Prometheus, TensorBoard, or any object with these three methods."""

    def write(self, sample: Sample) -> None:
        """Receive a sample."""

    def alert(self, alert: Alert, sample: Sample) -> None:
        """Receive an alert that `sample` led to."""

    def close(self) -> None:
        """Release all resources; no call follows."""


class JsonLines:
    """Appends one JSON document per line to a file, or standard output (`-`); a crash loses at most the last line.

    At `max_bytes` the file is renamed to `<name>.1` and a new one started. Raises OSError if the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> None:
        self._path = None if os.fspath(path) == "-" else Path(path)
        self._max_bytes = max_bytes
        self._file: TextIO = sys.stdout if self._path is None else _open_log(self._path)

    def write(self, sample: Sample) -> None:
        """Append a sample."""
        self._append(sample.as_json())

    def alert(self, alert: Alert, sample: Sample) -> None:
        """Append an alert that `sample` led to."""
        what = {"alert": alert.kind, "message": alert.message, "evidence": alert.evidence}
        self._append({"kind": "alert", **sample.origin(), **what})

    def close(self) -> None:
        """Close the file."""
        if self._path is not None:
            self._file.close()

    def _append(self, record: dict) -> None:
        # One write per line: processes that append to the same file do not mix their lines.
        self._file.write(json.dumps(record, ensure_ascii=self._path is None, allow_nan=False) + "\n")
        self._file.flush()
        if self._path is not None and self._file.tell() >= self._max_bytes:
            self._file.close()
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
            self._file = _open_log(self._path)


def _open_log(path: Path) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        # A killed process may have left half a line.
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
    # Names come from anywhere; one that is no Unicode must not cost the line.
    return open(path, "a", encoding="utf-8", errors="backslashreplace")


class Terminal:
    """Writes a line of text for the machine, each GPU and each process to a stream. Alerts go to the log only."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._said: set[str] = set()

    def write(self, sample: Sample) -> None:
        """Write a sample."""
        gpus = [_line("GPU {gpu}  {name}", gpu, _GPU_COLUMNS) for gpu in sample.gpus]
        machine = [_line("machine", sample.machine, _MACHINE_COLUMNS)] if sample.machine.values else []
        processes = [_line("process {pid} {name}", process, _PROCESS_COLUMNS) for process in sample.processes]
        time = datetime.fromtimestamp(sample.unix_seconds).strftime("%H:%M:%S")
        titles = {"gpus": "GPUs", "processes": "processes"}
        missing = [f"{titles[key]} unavailable: {reason}" for key, reason in sample.unavailable.items()]
        # Once: a package that is missing is missing in every sample.
        new = [line for line in missing if line not in self._said]
        self._said.update(missing)
        for line in [*new, *machine, *gpus, *processes]:
            self._stream.write(f"{time}  {printable(line)}\n")
        self._stream.flush()

    def alert(self, alert: Alert, sample: Sample) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: the stream belongs to the caller."""


def _line(title: str, readings: Readings, columns: Sequence[tuple[Any, ...]]) -> str:
    parts = [title.format_map({**readings.identity, "name": readings.identity.get("name") or "unnamed"})]
    if not readings.values:
        parts.append(f"unavailable: {next(iter(readings.unavailable.values()), '')}")
        columns = ()
    for name, text, unit, *metrics in columns:
        values = [readings.values[metric] / unit for metric in metrics if metric in readings.values]
        parts.append(name + (text.format(*values) if len(values) == len(metrics) else "unavailable"))
    return "  ".join(parts)


class Prometheus:
    """Serves the last sample at `http://bind:port/metrics`, from its own server and registry; port 0 selects a free one.

    A GPU or process that is gone is also gone from the next response. An unavailable metric is left out, and the gauge
    `…_metric_available` is 0 for it. Anyone who can reach the address can read the metrics; by default only this machine can.
    Raises ProfilingConfigError if prometheus_client is not installed, or the port or address cannot be used.
    """

    def __init__(self, port: int, bind: str = "127.0.0.1") -> None:
        try:
            from prometheus_client import CollectorRegistry, make_wsgi_app
        except ModuleNotFoundError:
            raise _not_installed("serving Prometheus", "prometheus_client") from None
        self._sample: Sample | None = None
        self._alerts = dict.fromkeys(ALERTS, 0)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._server = MetricsServer(bind, port, make_wsgi_app(registry))
        except (OSError, OverflowError) as error:
            raise ProfilingConfigError(
                f"port {port} of {bind} cannot be served: {error}", instead="Use another port, or 0 for any free one"
            ) from None
        self.port = int(self._server.server_port)

    def write(self, sample: Sample) -> None:
        """Serve a sample from now on."""
        self._sample = sample

    def alert(self, alert: Alert, sample: Sample) -> None:
        """Count an alert."""
        self._alerts[alert.kind] += 1

    def close(self) -> None:
        """Stop serving."""
        self._server.stop()

    def collect(self) -> Iterator[Any]:
        """The metric families that have a value; prometheus_client calls this for each request."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        sample = self._sample
        if sample is None:
            return
        common = {"host": sample.host, "rank": "" if sample.rank is None else str(sample.rank)}
        for name, text, labels, values in self._metrics(sample):
            make = CounterMetricFamily if name in ("counter", "alerts") else GaugeMetricFamily
            family = make(PREFIX + name, text, labels=(*common, *labels))
            for identity, value in values:
                own = ("" if identity.get(label) is None else str(identity[label]) for label in labels)
                family.add_metric([*common.values(), *own], value)
            if family.samples:
                yield family

    def _metrics(self, sample: Sample) -> Iterator[tuple[str, str, Sequence[str], Iterable[tuple[Mapping, float]]]]:
        """Name, help text, labels and labelled values of every metric."""
        yield "sample_timestamp_seconds", "Unix time of the sample", (), [({}, sample.unix_seconds)]
        yield "gpu_available", "1 if a GPU can be read, else 0", (), [({}, float("gpus" not in sample.unavailable))]
        groups: tuple[tuple[str, Mapping[str, str], Sequence[Readings], tuple[str, ...]], ...] = (
            ("gpu", GPU_METRICS, sample.gpus, ("gpu", "uuid", "name")),
            ("process", PROCESS_METRICS, sample.processes, ("pid", "name")),
            ("machine", MACHINE_METRICS, [sample.machine] if sample.machine.values else [], ()),
            ("training", TRAINING_METRICS, [sample.training] if sample.training else [], ()),
        )
        for group, metrics, readings, labels in groups:
            for metric, text in metrics.items():
                measured = [(r.identity, r.values[metric]) for r in readings if metric in r.values]
                yield f"{group}_{metric}", text, labels, measured
            known = [({**r.identity, "metric": metric}, float(metric in r.values)) for r in readings for metric in metrics]
            yield f"{group}_metric_available", "1 if a metric can be read, else 0", (*labels, "metric"), known
        logged = [({"name": name}, value) for name, value in sample.metrics.values.items()]
        yield "logged_metric", "Numbers that the training loop logs, by name", ("name",), logged
        counters = [({"name": name}, count) for name, count in sample.counters.items()]
        yield "counter", "Counters of the training loop, by name", ("name",), counters
        yield "alerts", "Alerts, by kind", ("alert",), [({"alert": kind}, count) for kind, count in self._alerts.items()]


def _not_installed(purpose: str, package: str) -> ProfilingConfigError:
    return ProfilingConfigError(f"{purpose} needs {package}, which is not installed", instead=f"Type pip install {package}")


class TensorBoard:
    """Writes an event file with one scalar per metric, such as `gpu/0/power_watts` or `training/iteration_seconds`.

    Uses tensorboard's own writer, without torch or TensorFlow. The step of a scalar is the training's iteration; without a
    training, the seconds since the first sample. Raises ProfilingConfigError if tensorboard is not installed, OSError if the
    directory cannot be written.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ModuleNotFoundError:
            raise _not_installed("writing TensorBoard scalars", "tensorboard") from None
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(os.fspath(directory), flush_secs=10)
        self._alerts = dict.fromkeys(ALERTS, 0)
        self._first: float | None = None

    def write(self, sample: Sample) -> None:
        """Write every value of a sample."""
        self._first = sample.unix_seconds if self._first is None else self._first
        training = dict(sample.training.values) if sample.training is not None else {}
        step = training.pop("iteration", sample.unix_seconds - self._first)
        groups = [(f"gpu/{gpu.identity['gpu']}", gpu.values) for gpu in sample.gpus]
        groups += [(f"process/{process.identity['pid']}", process.values) for process in sample.processes]
        groups += [("machine", sample.machine.values), ("training", training), ("metrics", sample.metrics.values)]
        groups += [("counter", sample.counters), ("alerts", self._alerts)]
        scalars = {f"{group}/{name}": value for group, values in groups for name, value in values.items()}
        summary = self._summary(value=[self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()])
        self._writer.add_event(self._event(wall_time=sample.unix_seconds, step=int(step), summary=summary))

    def alert(self, alert: Alert, sample: Sample) -> None:
        """Count an alert; later samples write the count of its kind."""
        self._alerts[alert.kind] += 1

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()
