"""The last sample, for Prometheus to fetch over HTTP. What is not available is absent, and a gauge says so with a 0."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.monitor.alerts import ALERTS, Alert
from bridge_profiling.monitor.readings import GPU_METRICS, PROCESS_METRICS, TRAINING_METRICS, Readings, Sample

#: What every metric's name begins with.
PREFIX = "bridge_profiling_"

#: Labels of every metric.
_EVERYWHERE = ("host", "rank")


class Prometheus:
    """Serves the last sample at `http://bind:port/metrics`, from threads of its own and a registry of its own.

    A GPU or a process that has gone is gone from the next answer too: nothing keeps its last value.

    Args:
        port: the port; 0 takes a free one.
        bind: the address. Whoever reaches it can read: no other than this machine by default.

    Attributes:
        port: the port served.

    Raises:
        ProfilingConfigError: prometheus_client is missing, or the port or the address is not to be had.
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
            self._server, self._thread = start_http_server(port, bind, registry)
        except (OSError, OverflowError) as error:
            raise ProfilingConfigError(
                f"port {port} of {bind} cannot be served: {error}", instead="Name another port, or 0 for any that is free"
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
        self._thread.join()

    def collect(self) -> Iterator[Any]:
        """What prometheus_client asks for at each request: the families that have a value."""
        sample = self._sample
        if sample is not None:
            yield from (family for family in self._families(sample) if family.samples)

    def _families(self, sample: Sample) -> Iterator[Any]:
        make = _Families(sample)
        yield make.gauge("sample_timestamp_seconds", "When this was read, since the epoch", [({}, sample.unix_seconds)])
        available = float("gpus" not in sample.unavailable)
        yield make.gauge("gpu_available", "1 where a GPU can be read, else 0", [({}, available)])
        yield from make.group("gpu", GPU_METRICS, sample.gpus, ("gpu", "uuid", "name"))
        yield from make.group("process", PROCESS_METRICS, sample.processes, ("pid", "name"))
        yield from make.group("training", TRAINING_METRICS, [sample.training] if sample.training else [], ())
        counts = [({"name": name}, count) for name, count in sample.counters.items()]
        yield make.counter("counter", "What the loop counts, by its name for it", counts, ("name",))
        alerts = [({"alert": kind}, count) for kind, count in self._alerts.items()]
        yield make.counter("alerts", "Alerts, by kind", alerts, ("alert",))


class _Families:
    """Makes prometheus_client's metric families of one sample.

    Args:
        sample: gives the labels that every metric has.
    """

    def __init__(self, sample: Sample) -> None:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        self._gauge, self._counter = GaugeMetricFamily, CounterMetricFamily
        self._everywhere = {"host": sample.host, "rank": "" if sample.rank is None else str(sample.rank)}

    def gauge(self, name: str, text: str, values: Iterable[tuple[Mapping, float]], labels: Sequence[str] = ()) -> Any:
        """A gauge with the values given, each with its labels."""
        return self._filled(self._gauge(PREFIX + name, text, labels=(*_EVERYWHERE, *labels)), values, labels)

    def counter(self, name: str, text: str, values: Iterable[tuple[Mapping, float]], labels: Sequence[str] = ()) -> Any:
        """A counter likewise; prometheus_client adds `_total` to its name."""
        return self._filled(self._counter(PREFIX + name, text, labels=(*_EVERYWHERE, *labels)), values, labels)

    def group(
        self, name: str, metrics: Mapping[str, str], readings: Sequence[Readings], labels: Sequence[str]
    ) -> Iterator[Any]:
        """A gauge for each metric of a group, and one that says which of them are available."""
        for metric, text in metrics.items():
            values = [(one.identity, one.values[metric]) for one in readings if metric in one.values]
            yield self.gauge(f"{name}_{metric}", text, values, labels)
        known = [
            (one.identity | {"metric": metric}, float(metric in one.values))  # type: ignore[operator]
            for one in readings
            for metric in metrics
        ]
        yield self.gauge(f"{name}_metric_available", "1 where a metric can be read, else 0", known, (*labels, "metric"))

    def _filled(self, family: Any, values: Iterable[tuple[Mapping, float]], labels: Sequence[str]) -> Any:
        for identity, value in values:
            own = ["" if identity.get(label) is None else str(identity[label]) for label in labels]
            family.add_metric([*self._everywhere.values(), *own], value)
        return family
