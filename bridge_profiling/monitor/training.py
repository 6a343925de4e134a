"""How a training loop goes: durations, tokens and samples per second, waiting for data, device memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import isfinite
from statistics import median
from threading import Lock
from time import perf_counter_ns
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar

from bridge_profiling.monitor.readings import TRAINING_METRICS, Readings
from bridge_profiling.monitor.torch_memory import MEMORY_METRICS, device_memory

T = TypeVar("T")

#: How many iterations wait for someone to read them.
_KEPT = 1000


class TimesIterations(Protocol):
    """What times iterations already: a ProfilingHook."""

    @property
    def durations(self) -> Iterable[tuple[int, int]]:
        """Number and nanoseconds of the last iterations."""


class _Totals(NamedTuple):
    """What has come together up to one moment; `busy` and `loading` in nanoseconds."""

    iterations: int = 0
    busy: int = 0
    tokens: float = 0
    samples: float = 0
    loading: int = 0


class Throughput(NamedTuple):
    """Rates over the recent iterations; None where the loop does not tell, or has not come far enough.

    Attributes:
        iterations_per_second: iterations.
        tokens_per_second: tokens, as the loop counts them.
        samples_per_second: samples, as the loop counts them.
    """

    iterations_per_second: float | None
    tokens_per_second: float | None
    samples_per_second: float | None


class TrainingMonitor:
    """Watches a loop, which says when a step has ended:

        with TrainingMonitor() as training:
            for batch in training.loading(data):
                train(batch)
                training.record_step(tokens=batch.numel())
        print(training.summary())

    A step lasts from the one before to its `record_step`. With a hook the loop need not call: the hook times its iterations.
    Any thread may call, and nothing waits for a device.

    Args:
        hook: a ProfilingHook around the loop's iterations.
        tokens_per_iteration: tokens in each iteration, for a loop that does not tell them to `record_step`.
        window: how many of the last iterations rates and medians are of.
    """

    def __init__(
        self, *, hook: TimesIterations | None = None, tokens_per_iteration: float | None = None, window: int = 50
    ) -> None:
        self._hook, self._tokens_per_iteration = hook, tokens_per_iteration
        self._lock = Lock()
        self._recent: deque[int] = deque(maxlen=window)
        self._unread: deque[tuple[int, int]] = deque(maxlen=_KEPT)
        self._iterations = self._busy = self._waiting = 0
        self._tokens = self._samples = 0.0
        self._marks: deque[_Totals] = deque(maxlen=window + 1)
        self._begin: _Totals | None = None
        self._ended: int | None = None
        self._iteration: int | None = None
        self._loss: float | str = "the loop does not tell it"
        self._told = {"tokens"} if tokens_per_iteration is not None else set()
        self._refused: dict[str, str] = {}
        self._memory: tuple[dict[str, float], dict[str, str]] | None = None
        self._memory_due = False
        self._last_of_hook: tuple[int, int] | None = None
        if hook is not None:
            # What ran before is not this monitor's.
            self._last_of_hook = next(reversed(tuple(hook.durations)), None)
            self._mark()

    def __enter__(self) -> TrainingMonitor:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:
            self._read_hook()

    # -- what a loop calls -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """The first step begins now. Without this call it begins at the first `record_step`, which then times nothing."""
        with self._lock:
            if self._hook is None:
                self._ended = perf_counter_ns()
                self._mark()

    def record_step(
        self, *, tokens: float | None = None, samples: float | None = None, loss: Any = None, iteration: int | None = None
    ) -> None:
        """A step has ended.

        Args:
            tokens: tokens trained on in it, by this process or by the whole job: rates are of what is told.
            samples: samples likewise.
            loss: a number, or a tensor on the CPU. One on a GPU is not read, since that would wait for the GPU; neither are
                tokens or samples.
            iteration: the step's number; counted from 0 where it is not given.
        """
        now = perf_counter_ns()
        with self._lock:
            if loss is not None:
                self._loss = _number("loss", loss)
            if tokens is not None:
                self._tokens += self._amount("tokens", tokens)
            elif self._hook is None and self._tokens_per_iteration is not None:
                self._tokens += self._tokens_per_iteration
            if samples is not None:
                self._samples += self._amount("samples", samples)
            if self._hook is None:
                self._end_step(now, iteration)
        if self._memory_due:
            # Here, where each step has come equally far, a step's own ups and downs do not show.
            self._memory_due, self._memory = False, device_memory()

    @contextmanager
    def data_loading(self) -> Iterator[None]:
        """Around what waits for data."""
        began = perf_counter_ns()
        try:
            yield
        finally:
            self._waited(perf_counter_ns() - began)

    def loading(self, data: Iterable[T]) -> Iterator[T]:
        """The same elements, with the time that each takes to come counted as waiting for data."""
        iterator = iter(data)
        while True:
            began = perf_counter_ns()
            try:
                element = next(iterator)
            except StopIteration:
                return
            finally:
                self._waited(perf_counter_ns() - began)
            yield element

    # -- what is read ------------------------------------------------------------------------------------------------

    @property
    def throughput(self) -> Throughput:
        """Rates over the recent iterations."""
        with self._lock:
            self._read_hook()
            return self._rates(self._marks[0]) if self._marks else Throughput(None, None, None)

    def read(self) -> Readings:
        """What the loop does now."""
        with self._lock:
            self._read_hook()
            values, unavailable = self._pace()
        # Asked for here when no step has told it meanwhile, as when a hook times the iterations.
        (memory, lacking), self._memory = self._memory or device_memory(), None
        self._memory_due = True
        return Readings({}, values | memory, unavailable | lacking)

    def new_iterations(self) -> list[tuple[int, float]]:
        """Iterations that have ended since this was asked before, as number and seconds; the last 1,000 at most."""
        with self._lock:
            self._read_hook()
            new = list(self._unread)
            self._unread.clear()
        return [(iteration, duration / 1e9) for iteration, duration in new]

    def summary(self) -> dict[str, Any]:
        """The whole training so far: what `read` tells, with totals, and with rates and durations over all of it.

        What is not known is None, with the reason under `unavailable`.
        """
        readings = self.read()
        with self._lock:
            totals, told = self._totals(), set(self._told)
            begin = self._begin or totals
            rates = self._rates(begin)
        timed = totals.iterations - begin.iterations
        whole = {
            "iterations": totals.iterations,
            "seconds": totals.busy / 1e9,
            "iteration_mean_seconds": totals.busy / 1e9 / timed if timed else None,
            "tokens": totals.tokens if "tokens" in told else None,
            "samples": totals.samples if "samples" in told else None,
        }
        return {**whole, **readings.as_json(), **rates._asdict()}

    # -- inside: the lock is held --------------------------------------------------------------------------------------

    def _totals(self) -> _Totals:
        return _Totals(self._iterations, self._busy, self._tokens, self._samples, self._waiting)

    def _mark(self) -> None:
        self._marks.append(self._totals())
        if self._begin is None:
            self._begin = self._marks[-1]

    def _amount(self, name: str, told: Any) -> float:
        """What to add to a total; nothing, and the reason is kept, where it is no number."""
        amount = told if type(told) is int else _number(name, told)
        if isinstance(amount, str):
            self._refused[name] = amount
            return 0
        self._told.add(name)
        return amount

    def _end_step(self, now: int, told: int | None) -> None:
        # A NumPy number or a tensor would be none in JSON.
        iteration = int(told) if told is not None else 0 if self._iteration is None else self._iteration + 1
        self._iteration = iteration
        began, self._ended = self._ended, now
        self._iterations += 1
        if began is not None:
            self._add(iteration, now - began)
        self._mark()

    def _read_hook(self) -> None:
        """Take over what the hook has timed since it was asked before."""
        if self._hook is None:
            return
        new = []
        for one in reversed(tuple(self._hook.durations)):
            if one == self._last_of_hook:
                break
            new.append(one)
        if not new:
            return
        new.reverse()
        self._last_of_hook, self._ended = new[-1], perf_counter_ns()
        self._iteration = int(new[-1][0])
        self._iterations += len(new)
        self._tokens += (self._tokens_per_iteration or 0) * len(new)
        for iteration, duration in new:
            self._add(int(iteration), duration)
        self._mark()

    def _add(self, iteration: int, duration: int) -> None:
        self._recent.append(duration)
        self._unread.append((iteration, duration))
        self._busy += duration

    def _waited(self, nanoseconds: int) -> None:
        with self._lock:
            self._told.add("loading")
            self._waiting += nanoseconds

    def _rates(self, since: _Totals) -> Throughput:
        totals = self._marks[-1] if self._marks else since
        seconds = (totals.busy - since.busy) / 1e9
        if seconds <= 0:
            return Throughput(None, None, None)
        return Throughput(
            (totals.iterations - since.iterations) / seconds,
            (totals.tokens - since.tokens) / seconds if "tokens" in self._told else None,
            (totals.samples - since.samples) / seconds if "samples" in self._told else None,
        )

    def _pace(self) -> tuple[dict[str, float], dict[str, str]]:
        values: dict[str, float] = {}
        unavailable: dict[str, str] = {}
        if self._iteration is not None:
            values["iteration"] = self._iteration
        if self._ended is not None:
            values["seconds_since_iteration"] = (perf_counter_ns() - self._ended) / 1e9
        if self._recent:
            values["iteration_seconds"] = self._recent[-1] / 1e9
            values["iteration_median_seconds"] = median(self._recent) / 1e9
            since, until = self._marks[0], self._marks[-1]
            rates = self._rates(since)
            values |= {name: rate for name, rate in rates._asdict().items() if name in TRAINING_METRICS and rate is not None}
            if "loading" in self._told:
                values["data_loading_ratio"] = min((until.loading - since.loading) / max(until.busy - since.busy, 1), 1.0)
        if isinstance(self._loss, str):
            unavailable["loss"] = self._loss
        else:
            values["loss"] = self._loss
        for metric in TRAINING_METRICS.keys() - values.keys() - unavailable.keys() - MEMORY_METRICS:
            unavailable[metric] = self._why_no(metric)
        return values, unavailable

    def _why_no(self, metric: str) -> str:
        untold = {
            "tokens_per_second": ("tokens", "the loop does not tell its tokens"),
            "samples_per_second": ("samples", "the loop does not tell its samples"),
            "data_loading_ratio": ("loading", "the loop does not tell when it waits for data"),
        }
        name, reason = untold.get(metric, ("", ""))
        reason = self._refused.get(name, reason)
        return reason if name and name not in self._told else "no iteration has ended yet"


def _number(name: str, told: Any) -> float | str:
    """What a loop tells as a number, or why it is none."""
    if getattr(getattr(told, "device", None), "type", "cpu") != "cpu":
        when = " now and then" if name == "loss" else ""
        return f"it is on the GPU, and reading it would wait for the GPU: give record_step({name}={name}.item()){when}"
    try:
        value = float(told.detach() if hasattr(told, "detach") else told)
    except (TypeError, ValueError, RuntimeError):
        return f"a {type(told).__name__} is no number"
    return value if isfinite(value) else f"it is {value}"
