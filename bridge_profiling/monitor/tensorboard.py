"""Samples as TensorBoard scalars, written with tensorboard's own writer: no torch, no TensorFlow."""

from __future__ import annotations

import os
from collections.abc import Iterator

from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.monitor.alerts import ALERTS, Alert
from bridge_profiling.monitor.readings import Sample


class TensorBoard:
    """Writes an event file, one scalar a metric, such as `gpu/0/power_watts` or `training/iteration_seconds`.

    A scalar's step is the training's iteration; beside a training, the seconds since the first sample.

    Args:
        directory: what `tensorboard --logdir` is given; it is made.

    Raises:
        ProfilingConfigError: tensorboard is not installed.
        OSError: the directory cannot be written.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ModuleNotFoundError:
            raise ProfilingConfigError(
                "TensorBoard scalars need tensorboard, which is not installed",
                instead="Type pip install tensorboard",
            ) from None
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(os.fspath(directory), flush_secs=10)
        self._alerts = dict.fromkeys(ALERTS, 0)
        self._first: float | None = None

    def write(self, sample: Sample) -> None:
        """Write every value of a sample."""
        if self._first is None:
            self._first = sample.unix_seconds
        step = int(sample.unix_seconds - self._first)
        if sample.training is not None and "iteration" in sample.training.values:
            step = int(sample.training.values["iteration"])
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in self._scalars(sample)]
        self._writer.add_event(self._event(wall_time=sample.unix_seconds, step=step, summary=self._summary(value=values)))

    def alert(self, alert: Alert, sample: Sample) -> None:
        """Count an alert; its kind's count is a scalar of the samples that follow."""
        self._alerts[alert.kind] += 1

    def close(self) -> None:
        """Write what waits, and close the file."""
        self._writer.close()

    def _scalars(self, sample: Sample) -> Iterator[tuple[str, float]]:
        for group, key, readings in (("gpu", "gpu", sample.gpus), ("process", "pid", sample.processes)):
            for one in readings:
                yield from ((f"{group}/{one.identity[key]}/{name}", value) for name, value in one.values.items())
        if sample.training is not None:
            yield from ((f"training/{name}", value) for name, value in sample.training.values.items() if name != "iteration")
        yield from ((f"counter/{name}", count) for name, count in sample.counters.items())
        yield from ((f"alerts/{kind}", count) for kind, count in self._alerts.items())
