"""Progress of a training loop: durations, tokens and samples per second, waiting for data, device memory."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from math import isfinite
from statistics import median
from threading import Lock
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol, TypeVar

from bridge_profiling.common.errors import TrainingLogger, is_contained, one_line
from bridge_profiling.common.plain import whole_number, whole_text
from bridge_profiling.monitor.metrics import TRAINING_METRICS, Readings

logger = TrainingLogger(__name__)

T = TypeVar("T")

#: Iterations kept until someone reads them.
_KEPT = 1000

#: Metrics of quantities that only the loop can report, and the reason while it does not.
_REPORTED = {
    "tokens_per_second": ("tokens", "the loop does not report tokens"),
    "samples_per_second": ("samples", "the loop does not report samples"),
    "data_loading_ratio": ("loading", "the loop does not report when it waits for data"),
}

#: Memory metrics, and where torch's statistics hold them.
_MEMORY = {
    "allocated_bytes": ("allocated_bytes", "current"),
    "allocated_peak_bytes": ("allocated_bytes", "peak"),
    "reserved_bytes": ("reserved_bytes", "current"),
    "reserved_peak_bytes": ("reserved_bytes", "peak"),
}


class TimesIterations(Protocol):
    """An object that times iterations already: a ProfilingHook."""

    @property
    def durations(self) -> Iterable[tuple[int, int]]:
        """Number and nanoseconds of the last iterations."""


class Throughput(NamedTuple):
    """Rates over the recent iterations; None if the loop does not report the quantity, or no iteration was timed.

    Attributes:
        iterations_per_second: iterations.
        tokens_per_second: tokens, as the loop counts them.
        samples_per_second: samples, as the loop counts them.
    """

    iterations_per_second: float | None = None
    tokens_per_second: float | None = None
    samples_per_second: float | None = None


class TrainingMonitor:
    """Follows a loop, which marks each step and reports its own numbers:

        monitor = TrainingMonitor()
        for batch in monitor.loading(data):
            with monitor.record_step(samples=len(batch)):
                loss = train(batch)
            monitor.log_metrics({"loss": loss.item(), "samples_per_s": monitor.get_throughput()})
        print(monitor.get_summary())

    A loop without a block calls `end_step` instead: a step then lasts from the previous call to its own. With a hook the loop
    need not mark steps: the hook times them. Any thread may call, and nothing waits for a device.

    Args:
        hook: a ProfilingHook around the loop's iterations.
        tokens_per_iteration: tokens in each iteration, for a loop that does not report them with each step.
        window: number of recent iterations that rates and medians cover.
    """

    def __init__(
        self, *, hook: TimesIterations | None = None, tokens_per_iteration: float | None = None, window: int = 50
    ) -> None:
        self._hook, self._tokens_per_iteration = hook, tokens_per_iteration
        self._lock = Lock()
        self._recent: deque[int] = deque(maxlen=window)
        self._unread: deque[tuple[int, int]] = deque(maxlen=_KEPT)
        # Iterations, nanoseconds in them (`busy`), and every quantity that the loop has reported.
        self._totals: dict[str, float] = {"iterations": 0, "busy": 0}
        if tokens_per_iteration is not None:
            self._totals["tokens"] = 0
        self._marks: deque[dict[str, float]] = deque(maxlen=window + 1)
        self._begin: dict[str, float] | None = None
        self._ended: int | None = None
        self._iteration = -1
        self._loss: float | str = "the loop does not report it"
        self._metrics: dict[str, float | str] = {}
        self._refused: dict[str, str] = {}
        self._memory: dict[str, float | str] | None = None
        self._memory_due = False
        self._last_of_hook: tuple[int, int] | None = None
        if hook is not None:
            # Earlier iterations are not part of this monitor.
            self._last_of_hook = next(reversed(tuple(hook.durations)), None)
            self._mark(None)

    def __enter__(self) -> TrainingMonitor:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._read_hook()

    # -- called by the loop ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the first step. Without this call it starts at the first `end_step`, which then times nothing."""
        with self._lock:
            if self._hook is None:
                self._mark(perf_counter_ns())

    def end_step(
        self, *, tokens: float | None = None, samples: float | None = None, loss: Any = None, iteration: int | None = None
    ) -> None:
        """Report the end of a step, which began at the end of the previous one.

        Args:
            tokens: tokens trained on in this step, by this process or by the whole job: rates refer to what is passed.
            samples: samples likewise.
            loss: a number, or a tensor on the CPU. A tensor on a GPU is not read, since that would wait for the GPU; the same
                holds for tokens and samples.
            iteration: number of the step; counted from 0 by default.
        """
        now = perf_counter_ns()
        with self._lock:
            if loss is not None:
                self._loss = _number("loss", loss)
            if tokens is None and self._hook is None:
                tokens = self._tokens_per_iteration
            for name, amount in (("tokens", tokens), ("samples", samples)):
                if amount is not None:
                    self._report(name, amount)
            if self._hook is None:
                duration = None if self._ended is None else now - self._ended
                self._end_iteration(self._iteration + 1 if iteration is None else iteration, duration)
                self._mark(now)
        if self._memory_due:
            # Read at the end of a step, so that variation within a step does not show.
            self._memory_due, self._memory = False, device_memory()

    @contextmanager
    def record_step(
        self, *, tokens: float | None = None, samples: float | None = None, iteration: int | None = None
    ) -> Iterator[None]:
        """Mark a block as one step. Of the time before it, only what the loop marks as waiting for data counts.

        A block that raises is not a step. Arguments are those of `end_step`.
        """
        with self._lock:
            now = perf_counter_ns()
            if self._hook is None and self._begin is None:
                self._mark(now)
            elif self._hook is None:
                # The step began with waiting for its data.
                self._ended = now - int(self._totals.get("loading", 0) - self._marks[-1].get("loading", 0))
        yield
        self.end_step(tokens=tokens, samples=samples, iteration=iteration)

    def log_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Report own numbers, such as the loss or a learning rate; each keeps its last value.

        They go into `get_summary`, JSON lines and, by name, to Prometheus. `loss` is the training's loss.

        Args:
            metrics: numbers, or tensors on the CPU, by name. None, NaN and tensors on a GPU are unavailable, with the reason.
        """
        try:
            given = dict(metrics)
        except BaseException as error:
            if not is_contained(error):
                raise
            logger.warning("monitoring: log_metrics takes numbers by name: %s. Training continues.", one_line(error))
            return
        values = {whole_text(name): "it is None" if value is None else _number(name, value) for name, value in given.items()}
        with self._lock:
            self._loss = values.pop("loss", self._loss)
            self._metrics |= values

    @contextmanager
    def data_loading(self) -> Iterator[None]:
        """Mark a block as waiting for data."""
        began = perf_counter_ns()
        try:
            yield
        finally:
            waited = perf_counter_ns() - began
            with self._lock:
                self._report("loading", waited)

    def loading(self, data: Iterable[T]) -> Iterator[T]:
        """Yield the same elements; the time to fetch each of them counts as waiting for data."""
        iterator = iter(data)
        while True:
            with self.data_loading():
                try:
                    element = next(iterator)
                except StopIteration:
                    return
            yield element

    # -- called by readers -------------------------------------------------------------------------------------------

    def get_throughput(self) -> float | None:
        """One rate over the recent iterations, for a log: samples per second if the loop reports samples, else tokens, else
        iterations per second; None before an iteration was timed.
        """
        rates = self.throughput
        return rates.samples_per_second or rates.tokens_per_second or rates.iterations_per_second

    @property
    def throughput(self) -> Throughput:
        """Rates over the recent iterations."""
        with self._lock:
            self._read_hook()
            return self._rates(self._marks[0]) if self._marks else Throughput()

    def read(self) -> Readings:
        """The current values of all training metrics."""
        with self._lock:
            self._read_hook()
            answers = self._progress()
        # Read here if no step has done it since the last call, for example when a hook times the iterations.
        memory, self._memory = self._memory or device_memory(), None
        self._memory_due = True
        return Readings.of({}, answers | memory)

    def new_iterations(self) -> list[tuple[int, float]]:
        """Number and seconds of the iterations that ended since the last call; at most the last 1,000."""
        with self._lock:
            self._read_hook()
            new = list(self._unread)
            self._unread.clear()
        return [(iteration, duration / 1e9) for iteration, duration in new]

    def logged(self) -> Readings:
        """The last values of `log_metrics`."""
        with self._lock:
            return Readings.of({}, self._metrics)

    def get_summary(self) -> dict[str, Any]:
        """The whole training so far: totals, rates and durations over all iterations, the metrics of `read` and `log_metrics`.

        Unknown values are None, with the reason under `unavailable`.
        """
        readings = self.read()
        with self._lock:
            totals, begin = self._totals.copy(), self._begin or self._totals
            rates = self._rates(begin)
        timed = totals["iterations"] - begin["iterations"]
        return {
            "iterations": totals["iterations"],
            "seconds": totals["busy"] / 1e9,
            "iteration_mean_seconds": totals["busy"] / 1e9 / timed if timed else None,
            "tokens": totals.get("tokens"),
            "samples": totals.get("samples"),
            **readings.as_json(),
            **rates._asdict(),
            "metrics": self.logged().as_json(),
        }

    # -- private; the lock is held -----------------------------------------------------------------------------------

    def _report(self, name: str, amount: Any) -> None:
        """Add to the total of a quantity. An amount that is not a number is left out, and the reason is kept."""
        number = amount if type(amount) is int and abs(amount) < 1 << 63 else _number(name, amount)
        if isinstance(number, str):
            self._refused[name] = number
        else:
            self._totals[name] = self._totals.get(name, 0) + number

    def _end_iteration(self, iteration: int, duration: int | None) -> None:
        """Add an iteration; a duration of None is unknown."""
        try:
            # A NumPy number or a tensor could not be written as JSON.
            self._iteration = whole_number(iteration)
        except ValueError:
            self._iteration += 1
        self._totals["iterations"] += 1
        if duration is not None:
            self._totals["busy"] += duration
            self._recent.append(duration)
            self._unread.append((self._iteration, duration))

    def _mark(self, now: int | None) -> None:
        """Keep the totals at the end of an iteration, or at the beginning."""
        self._ended = now
        self._marks.append(self._totals.copy())
        if self._begin is None:
            self._begin = self._marks[0]

    def _read_hook(self) -> None:
        """Add the iterations that the hook has timed since the last call."""
        durations = reversed(tuple(self._hook.durations)) if self._hook is not None else ()
        new = list(takewhile(lambda timed: timed != self._last_of_hook, durations))[::-1]
        if not new:
            return
        self._last_of_hook = new[-1]
        for iteration, duration in new:
            self._end_iteration(iteration, duration)
        if self._tokens_per_iteration is not None:
            self._report("tokens", self._tokens_per_iteration * len(new))
        self._mark(perf_counter_ns())

    def _rates(self, since: dict[str, float]) -> Throughput:
        until = self._marks[-1] if self._marks else since
        seconds = (until["busy"] - since["busy"]) / 1e9
        names = [name for name in ("iterations", "tokens", "samples") if name in self._totals and seconds > 0]
        return Throughput(**{f"{name}_per_second": (until.get(name, 0) - since.get(name, 0)) / seconds for name in names})

    def _progress(self) -> dict[str, float | str]:
        """Every metric; device memory, which is read without the lock, replaces its own."""
        answers: dict[str, float | str] = dict.fromkeys(TRAINING_METRICS, "no iteration has ended yet")
        answers["loss"] = self._loss
        if self._totals["iterations"]:
            answers["iteration"] = self._iteration
        if self._ended is not None:
            answers["seconds_since_iteration"] = (perf_counter_ns() - self._ended) / 1e9
        if self._recent:
            since, until = self._marks[0], self._marks[-1]
            waited = until.get("loading", 0) - since.get("loading", 0)
            rates = self._rates(since)._asdict()
            answers |= {
                "iteration_seconds": self._recent[-1] / 1e9,
                "iteration_median_seconds": median(self._recent) / 1e9,
                "data_loading_ratio": min(waited / max(until["busy"] - since["busy"], 1), 1.0),
                **{metric: rate for metric, rate in rates.items() if metric in answers and rate is not None},
            }
        unreported = {metric: reason for metric, reason in _REPORTED.items() if reason[0] not in self._totals}
        return answers | {metric: self._refused.get(name, reason) for metric, (name, reason) in unreported.items()}


def device_memory() -> dict[str, float | str]:
    """Bytes of torch's caching allocator over all devices of this process, or the reason why they are unknown, by metric.

    Never imports torch or initializes CUDA. Calls no CUDA function, so any thread may call it, also during the capture of a
    CUDA graph.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return dict.fromkeys(_MEMORY, "this process has not loaded torch")
    try:
        if not torch.cuda.is_initialized():
            return dict.fromkeys(_MEMORY, "this process uses no GPU")
        devices = [torch.cuda.memory_stats_as_nested_dict(device) for device in range(torch.cuda.device_count())]
        return {
            metric: sum(device[group]["all"][kind] for device in devices if device) for metric, (group, kind) in _MEMORY.items()
        }
    except (AttributeError, KeyError, RuntimeError) as error:
        # Another allocator, or torch is only half imported.
        return dict.fromkeys(_MEMORY, f"torch does not report its memory: {one_line(error)}")


def _number(name: str, reported: Any) -> float | str:
    """A reported value as a number, or the reason why it cannot be."""
    try:
        if getattr(getattr(reported, "device", None), "type", "cpu") != "cpu":
            when = " now and then" if name == "loss" else ""
            return f"it is on the GPU, and reading it would wait for the GPU: report {name}.item(){when}"
        value = float(reported.detach() if hasattr(reported, "detach") else reported)
    except BaseException as error:  # of any class that a loop may report
        if not is_contained(error):
            raise
        return f"a {type(reported).__name__} is not a number"
    return value if isfinite(value) else f"it is {value}"
