"""Everything together: a thread that samples GPUs, processes and the training, tells the sinks, and raises alerts."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from threading import Event
from time import monotonic, time
from types import TracebackType
from typing import Literal, Protocol

from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.launch_env import LaunchEnv
from bridge_profiling.monitor.alerts import Alert, Bounded, LeakAlert, SlowIterationAlert
from bridge_profiling.monitor.counters import Counters
from bridge_profiling.monitor.gpus import Gpus
from bridge_profiling.monitor.jsonl import JsonLines
from bridge_profiling.monitor.processes import Processes
from bridge_profiling.monitor.prometheus import Prometheus
from bridge_profiling.monitor.readings import Sample
from bridge_profiling.monitor.tensorboard import TensorBoard
from bridge_profiling.monitor.ticking import Ticking, check_interval
from bridge_profiling.monitor.training import TimesIterations, TrainingMonitor

logger = logging.getLogger(__name__)

#: Seconds between two alerts of a kind: what goes on is said once a minute.
_BETWEEN_ALERTS = 60.0

#: Share of the time that sampling may compute, unless an interval is asked for.
MOST_OF_A_PROCESSOR = 0.0005


class Sink(Protocol):
    """Where samples go: JsonLines, Prometheus, TensorBoard, or what has these three methods."""

    def write(self, sample: Sample) -> None:
        """Take a sample."""

    def alert(self, alert: Alert, sample: Sample) -> None:
        """Take an alert that `sample` has led to."""

    def close(self) -> None:
        """No more will come."""


class Monitor:
    """Watches a training and its machine while the block runs; any loop switches it on in a line:

        with ProfilingHook(config.profiling, rank=rank) as hook, Monitor(hook=hook, jsonl="monitor.jsonl", port=9400):
            for iteration in range(train_iters):
                with hook.iteration(iteration):
                    ...

    Without a hook the loop tells `monitor.training.record_step(tokens=…)`. It never harms the training: what cannot be opened
    or read is logged, and the training goes on.

    Args:
        hook: the training's open ProfilingHook.
        training: a TrainingMonitor that the loop has already; one is made where it is not given.
        tokens_per_iteration: tokens in each iteration, for a loop that does not tell them to `record_step`.
        counters: the loop's counters; made where they are not given.
        jsonl: a file for JSON lines.
        port: a port for Prometheus.
        bind: its address.
        tensorboard: a directory for TensorBoard.
        sinks: further sinks; they are closed at the end.
        interval: seconds between two samples. None is one second, and more where the thread would otherwise hold Python's lock
            for more than half a thousandth of the time.
        gpus: indices as nvidia-smi shows them, or UUIDs; None is all of the machine's, `[]` none.
        pids: the processes, or `gpu` for those that compute on the GPUs; None is this one. Their children count too.
        rank: global rank; None is what the launcher says, if it does.
        in_training: False beside a training: samples then hold GPUs and processes only.
        slow_iterations: when to warn of slow iterations.
        leaks: when to warn of memory that grows.

    Attributes:
        training: what the loop may tell its steps, and when it waits for data.
        counters: what the loop may count with.
        sample: the last sample, None before the first.
        ended: for whoever waits for an end: set when nobody reads the pipe any more that samples are written to.
    """

    def __init__(
        self,
        *,
        hook: TimesIterations | None = None,
        training: TrainingMonitor | None = None,
        tokens_per_iteration: float | None = None,
        counters: Counters | None = None,
        jsonl: str | os.PathLike[str] | None = None,
        port: int | None = None,
        bind: str = "127.0.0.1",
        tensorboard: str | os.PathLike[str] | None = None,
        sinks: Sequence[Sink] = (),
        interval: float | None = None,
        gpus: Sequence[int | str] | None = None,
        pids: Sequence[int] | Literal["gpu"] | None = None,
        rank: int | None = None,
        in_training: bool = True,
        slow_iterations: SlowIterationAlert | None = None,
        leaks: Sequence[LeakAlert] | None = None,
    ) -> None:
        if interval is not None:
            check_interval(interval)
        self.training = training or TrainingMonitor(hook=hook, tokens_per_iteration=tokens_per_iteration)
        self.counters = counters or Counters()
        self.sample: Sample | None = None
        self.ended = Event()
        self._asked, self._in_training = gpus, in_training
        self._of_gpus, self._processes = pids == "gpu", Processes([] if pids == "gpu" else pids)
        self._gpus: Gpus | None = None
        self._host, self._rank = socket.gethostname(), rank if rank is not None else _launch_rank()
        self._sinks: list[Sink] = list(sinks)
        self._to_open: list[Callable[[], Sink]] = []
        if jsonl is not None:
            self._to_open.append(lambda: JsonLines(jsonl))
        if port is not None:
            self._to_open.append(lambda: Prometheus(port, bind))
        if tensorboard is not None:
            self._to_open.append(lambda: TensorBoard(tensorboard))
        self._silent: set[int] = set()
        self._slow = slow_iterations or SlowIterationAlert()
        self._leaks = leaks if leaks is not None else (LeakAlert("device"), LeakAlert("host"))
        self._bounded = Bounded(_BETWEEN_ALERTS)
        seconds, most = (1.0, MOST_OF_A_PROCESSOR) if interval is None else (interval, None)
        self._ticking = Ticking(self._take, seconds, "bridge_profiling monitor", most, lambda: self._of_driver)

    def __enter__(self) -> Monitor:
        self._process = os.getpid()
        for opened in self._to_open:
            try:
                self._sinks.append(opened())
            except (OSError, ProfilingConfigError) as error:
                logger.error("monitoring goes on without one of its outputs: %s", error)
        self._gpus = Gpus(self._asked)
        if self._gpus.unavailable is not None:
            logger.info("monitoring: GPUs are unavailable: %s", self._gpus.unavailable)
        self.training.start()
        self._ticking.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # In a process that was forked inside the block nothing samples, and the outputs are its parent's.
        if os.getpid() != self._process or not self._ticking.stop():
            return
        # The last iterations, and a training that was shorter than the interval.
        self._ticking.call()
        for sink in self._sinks:
            self._tell(sink, sink.close)
        if self._gpus is not None:
            self._gpus.close()

    @property
    def alerts(self) -> dict[str, int]:
        """How many alerts of each kind there were, also those that were not said again within a minute."""
        return dict(self._bounded.counts)

    @property
    def _of_driver(self) -> float:
        return self._gpus.driver_seconds if self._gpus is not None else 0.0

    def _take(self) -> None:
        """Read everything once, and tell it."""
        assert self._gpus is not None
        if self._of_gpus:
            self._processes.watch(self._gpus.processes())
        missing = {"gpus": self._gpus.unavailable, "processes": self._processes.unavailable}
        self.sample = sample = Sample(
            unix_seconds=time(),
            host=self._host,
            rank=self._rank,
            gpus=self._gpus.read(),
            processes=self._processes.read(),
            training=self.training.read() if self._in_training else None,
            counters=self.counters.snapshot(),
            unavailable={name: reason for name, reason in missing.items() if reason is not None},
        )
        for sink in self._sinks:
            self._tell(sink, sink.write, sample)
        for alert in self._judge(sample):
            if self._bounded.admit(alert, monotonic()):
                logger.warning("monitoring: %s", alert.message)
                for sink in self._sinks:
                    self._tell(sink, sink.alert, alert, sample)

    def _judge(self, sample: Sample) -> Iterator[Alert]:
        yield from self._slow.feed(self.training.new_iterations())
        iteration = sample.training.values.get("iteration") if sample.training is not None else None
        if iteration is None:
            return
        own = sample.processes[0].values if sample.processes else {}
        assert sample.training is not None
        in_use = {"device": sample.training.values.get("allocated_bytes"), "host": own.get("anonymous_memory_bytes")}
        for leak in self._leaks:
            reading = in_use[leak.memory]
            alert = leak.feed(int(iteration), reading) if reading is not None else None
            if alert is not None:
                yield alert

    def _tell(self, sink: Sink, call: Callable[..., None], *arguments: object) -> None:
        """Give a sink something; a full disk is said once, and tried again."""
        try:
            call(*arguments)
        except BrokenPipeError:
            self.ended.set()
        except Exception as error:
            if id(sink) not in self._silent:
                self._silent.add(id(sink))
                logger.error("monitoring: %s does not take samples: %s", type(sink).__name__, error)


def _launch_rank() -> int | None:
    """The launcher's global rank; None for a process on its own."""
    env = LaunchEnv.read()
    return None if env.launcher == "none" else env.rank
