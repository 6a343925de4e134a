"""`Monitor`: a background thread that samples a training and its machine, sends samples to outputs and warns."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from threading import TIMEOUT_MAX, Event, Thread
from time import monotonic, thread_time, time
from typing import Any, Literal

from bridge_profiling.common.errors import ProfilingConfigError, TrainingLogger, is_contained, one_line, require
from bridge_profiling.common.launch_env import LaunchEnv
from bridge_profiling.monitor.alerts import ALERTS, Alert, LeakAlert, SlowIterationAlert, usual_leaks
from bridge_profiling.monitor.gpus import Gpus
from bridge_profiling.monitor.metrics import Sample
from bridge_profiling.monitor.outputs import JsonLines, Prometheus, Sink
from bridge_profiling.monitor.processes import Machine, Processes
from bridge_profiling.monitor.training import TimesIterations, TrainingMonitor

logger = TrainingLogger(__name__)

#: Seconds between two alerts of a kind: a lasting condition is reported once a minute.
_BETWEEN_ALERTS = 60.0

#: Share of the time that sampling may compute at the default interval.
MAX_CPU_SHARE = 0.0005

#: Seconds to wait for a reading at the end: many times the duration of any reading.
_PATIENCE = 10.0


class PeriodicThread(Thread):
    """Calls `function` every `interval` seconds from a daemon thread, for the first time at once.

    The first failure of a call is logged; the next call comes all the same, and missed calls are not made up for. Above
    `max_share` of the time, without the CPU seconds that `function` returns, calls become rarer.
    """

    def __init__(
        self, function: Callable[[], float | None], interval: float, name: str, max_share: float | None = None
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.check_interval(interval)
        self._function, self._interval, self._max_share, self._failed = function, interval, max_share, False
        self._end = Event()

    @staticmethod
    def check_interval(interval: float) -> None:
        """Raise ProfilingConfigError unless a thread can wait for `interval` seconds."""
        require(0 < interval <= TIMEOUT_MAX, f"interval={interval} is not a valid time", instead="Use seconds, such as 1.0")

    def finish(self) -> bool:
        """End the thread and make a last call, so that the end counts even if it comes before the interval is over.

        Returns whether the thread has ended: a call that hangs is abandoned, since a driver must not block the end of a
        training.
        """
        self._end.set()
        self.join(_PATIENCE)
        if self.is_alive():
            logger.warning("monitoring: a reading did not end within %.0f s and is abandoned", _PATIENCE)
            return False
        self._call()
        return True

    def run(self) -> None:
        """Call until `finish`; runs in the thread."""
        due = monotonic()
        while True:
            before = thread_time()
            excluded = self._call()
            now, computed = monotonic(), thread_time() - before - excluded
            due = max(due + self._interval, now if self._max_share is None else now + computed / self._max_share)
            if self._end.wait(due - now):
                return

    def _call(self) -> float:
        try:
            return self._function() or 0.0
        except BaseException as error:
            if not is_contained(error):
                raise
            if not self._failed:
                logger.warning("monitoring: %s. Training continues.", one_line(error))
            self._failed = True
            return 0.0


class Monitor:
    """Watches a training and its machine while the block runs; one line enables it in any loop:

        with ProfilingHook(config.profiling, rank=rank) as hook, Monitor(hook=hook, jsonl="monitor.jsonl", port=9400):
            for iteration in range(train_iters):
                with hook.iteration(iteration):
                    ...

    Without a hook the loop calls `monitor.training.end_step(tokens=…)`. Monitoring never harms the training: an output that
    cannot be opened or a reading that fails is logged, and the training continues.

    Args:
        hook: the training's open ProfilingHook.
        training: a TrainingMonitor that the loop already has; created by default.
        tokens_per_iteration: tokens in each iteration, for a loop that does not report them with each step.
        jsonl: a file for JSON lines.
        port: a port for Prometheus.
        bind: its address.
        sinks: further outputs; they are closed at the end.
        interval: seconds between two samples. None is one second, and more if the thread would otherwise hold Python's lock for
            more than 0.05% of the time.
        gpus: indices as nvidia-smi shows them, or UUIDs; None selects all GPUs of the machine, `[]` none.
        pids: the processes, or `gpu` for those that compute on the GPUs; None selects this one.
        rank: global rank; by default that of the launcher, if there is one.
        in_training: False in a process without a training: samples then hold only GPUs and processes.
        slow_iterations: when to warn of slow iterations.
        leaks: when to warn of growing memory.

    Attributes:
        training: where the loop reports steps and waiting for data.
        sample: the last sample, None before the first.
        alerts: number of alerts of each kind, including those not reported because they repeated within a minute.
        ended: set when the reader of an output, such as a pipe, has closed it.
        failed_sinks: ids of the outputs that lack a sample, as on a full disk.
    """

    def __init__(
        self,
        *,
        hook: TimesIterations | None = None,
        training: TrainingMonitor | None = None,
        tokens_per_iteration: float | None = None,
        jsonl: str | os.PathLike[str] | None = None,
        port: int | None = None,
        bind: str = "127.0.0.1",
        sinks: Sequence[Sink] = (),
        interval: float | None = None,
        gpus: Sequence[int | str] | None = None,
        pids: Sequence[int] | Literal["gpu"] | None = None,
        rank: int | None = None,
        in_training: bool = True,
        slow_iterations: SlowIterationAlert | None = None,
        leaks: Sequence[LeakAlert] | None = None,
    ) -> None:
        self.training = training or TrainingMonitor(hook=hook, tokens_per_iteration=tokens_per_iteration)
        self.sample: Sample | None = None
        self.ended = Event()
        self._selected, self._in_training = gpus, in_training
        self._gpus: Gpus  # opened with the block
        self._gpu_processes, self._processes = pids == "gpu", Processes([] if pids == "gpu" else pids)
        env = LaunchEnv.read()
        self._host = socket.gethostname()
        self._rank = env.rank if rank is None and env.launcher != "none" else rank
        self._sinks: list[Sink] = list(sinks)
        serve = partial(Prometheus, bind=bind)
        outputs: tuple[tuple[Callable[..., Sink], Any], ...] = ((JsonLines, jsonl), (serve, port))
        self._to_open = [partial(make, where) for make, where in outputs if where is not None]
        self.failed_sinks: set[int] = set()
        self._slow = slow_iterations or SlowIterationAlert()
        self._leaks = leaks if leaks is not None else [leak for memory in ("device", "host") for leak in usual_leaks(memory)]
        self._machine = Machine()
        self.alerts = dict.fromkeys(ALERTS, 0)
        self._next_alert: dict[str, float] = {}
        seconds, max_share = (1.0, MAX_CPU_SHARE) if interval is None else (interval, None)
        self._thread = PeriodicThread(self._take_sample, seconds, "bridge_profiling monitor", max_share)

    def __enter__(self) -> Monitor:
        self._process_id = os.getpid()
        for open_sink in self._to_open:
            try:
                self._sinks.append(open_sink())
            except (OSError, ProfilingConfigError) as error:
                logger.error("monitoring continues without one of its outputs: %s", error)
        self._gpus = Gpus(self._selected)
        if self._gpus.unavailable is not None:
            logger.info("monitoring: GPUs are unavailable: %s", self._gpus.unavailable)
        self.training.start()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        # In a process forked inside the block no thread samples, and the outputs belong to the parent.
        if os.getpid() != self._process_id or not self._thread.finish():
            return
        for sink in self._sinks:
            self._send(sink, sink.close)
        self._gpus.close()

    def _take_sample(self) -> float:
        """Read everything once and send it to the outputs; returns the CPU seconds that the GPU driver computed."""
        if self._gpu_processes:
            self._processes.watch(self._gpus.processes())
        gpus = self._gpus.read()
        missing = {"gpus": self._gpus.unavailable, "processes": self._processes.unavailable}
        self.sample = sample = Sample(
            unix_seconds=time(),
            host=self._host,
            rank=self._rank,
            gpus=gpus,
            processes=self._processes.read(),
            machine=self._machine.read(),
            training=self.training.read() if self._in_training else None,
            metrics=self.training.logged(),
            unavailable={name: reason for name, reason in missing.items() if reason is not None},
        )
        for sink in self._sinks:
            self._send(sink, sink.write, sample)
        for alert in self._new_alerts(sample):
            self.alerts[alert.kind] += 1
            if monotonic() >= self._next_alert.get(alert.kind, 0.0):
                self._next_alert[alert.kind] = monotonic() + _BETWEEN_ALERTS
                logger.warning("monitoring: %s", alert.message)
                for sink in self._sinks:
                    self._send(sink, sink.alert, alert, sample)
        return self._gpus.driver_seconds

    def _new_alerts(self, sample: Sample) -> Iterator[Alert]:
        training, processes = sample.training, sample.processes
        yield from self._slow.feed(self.training.new_iterations())
        if training is None or "iteration" not in training.values:
            return
        in_use = {"device": training.values.get("allocated_bytes")}
        in_use["host"] = processes[0].values.get("anonymous_memory_bytes") if processes else None
        for leak in self._leaks:
            reading = in_use[leak.memory]
            if reading is not None and (alert := leak.feed(int(training.values["iteration"]), reading)):
                yield alert

    def _send(self, sink: Sink, call: Callable[..., None], *arguments: object) -> None:
        """Call a method of an output. A failure, such as a full disk, is logged once; the next sample tries again."""
        try:
            call(*arguments)
        except BrokenPipeError:
            self.ended.set()
        except BaseException as error:
            if not is_contained(error):
                raise
            if id(sink) not in self.failed_sinks:
                self.failed_sinks.add(id(sink))
                logger.error("monitoring: %s does not accept samples: %s", type(sink).__name__, one_line(error))
