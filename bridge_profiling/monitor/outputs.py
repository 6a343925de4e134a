"""Outputs of samples and alerts: JSON lines and Prometheus."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from bridge_profiling.common.errors import ProfilingConfigError
from bridge_profiling.monitor.alerts import ALERTS, Alert
from bridge_profiling.monitor.metrics import (
    GPU_METRICS,
    MACHINE_METRICS,
    PROCESS_METRICS,
    TRAINING_METRICS,
    Readings,
    Sample,
)

#: Size at which a log becomes `<name>.1`, replacing an older one: a day of samples of eight GPUs, one per second.
MAX_BYTES = 512 << 20

#: Prefix of the name of every Prometheus metric.
PREFIX = "bridge_profiling_"


class Sink(Protocol):
    """An output of samples: JsonLines, Prometheus, or any object with these three methods."""

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


class Prometheus:
    """Serves the last sample at `http://bind:port/metrics`, from a registry of its own; port 0 selects a free one.

    A GPU or process that is gone is also gone from the next response. An unavailable metric is left out, and the gauge
    `…_metric_available` is 0 for it. Anyone who can reach the address can read the metrics; by default only this machine can.
    Raises ProfilingConfigError if prometheus_client is not installed, or the port or address cannot be used.
    """

    def __init__(self, port: int, bind: str = "127.0.0.1") -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ModuleNotFoundError:
            raise ProfilingConfigError(
                "serving Prometheus needs prometheus_client, which is not installed",
                instead="Type pip install prometheus_client",
            ) from None
        self._sample: Sample | None = None
        self._alerts = dict.fromkeys(ALERTS, 0)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._server, _ = start_http_server(port, bind, registry)
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
        self._server.shutdown()
        self._server.server_close()

    def collect(self) -> Iterator[Any]:
        """The metric families that have a value; prometheus_client calls this for each request."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        sample = self._sample
        if sample is None:
            return
        common = {"host": sample.host, "rank": "" if sample.rank is None else str(sample.rank)}
        for name, text, labels, values in self._metrics(sample):
            make = CounterMetricFamily if name == "alerts" else GaugeMetricFamily
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
        yield "alerts", "Alerts, by kind", ("alert",), [({"alert": kind}, count) for kind, count in self._alerts.items()]
