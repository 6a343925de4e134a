"""Profiles a function that does one step (`@auto_profile(warmup=3, iterations=10)`), and names and times its parts
(`with phase("forward"):`). Loads no torch.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import current_thread
from time import perf_counter_ns
from typing import Any, ParamSpec, TypeVar, overload

from bridge_profiling.common.errors import TrainingLogger, require
from bridge_profiling.common.launch_env import LaunchEnv
from bridge_profiling.common.plain import is_set, whole_text
from bridge_profiling.common.printable import printable
from bridge_profiling.frameworks.outcome import captures_since, lines
from bridge_profiling.frameworks.session import OutputDir, ProfilingDriver, config_from, current_hook
from bridge_profiling.settings.profiling import ProfilingConfig, resolve_output_dir

P = ParamSpec("P")
R = TypeVar("R")

logger = TrainingLogger(__name__)

#: Time limit for the summary of one rank's capture.
_SUMMARY_TIMEOUT_S = 120


@overload
def auto_profile(step: Callable[P, R]) -> Callable[P, R]: ...
@overload
def auto_profile(
    *,
    warmup: int = 3,
    iterations: int = 10,
    ranks: str | Sequence[int] = "all",
    output_dir: OutputDir = None,
    profile_memory: bool = False,
    summary: bool = True,
    **settings: Any,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def auto_profile(
    step: Callable[..., Any] | None = None,
    *,
    warmup: int = 3,
    iterations: int = 10,
    ranks: str | Sequence[int] = "all",
    output_dir: OutputDir = None,
    profile_memory: bool = False,
    summary: bool = True,
    **settings: Any,
) -> Callable[..., Any]:
    """Profile calls `warmup` to `warmup + iterations - 1` of a function, counted from 0; each is an iteration.

    After the last of them the capture is written, and each rank prints its location; the function then runs as if it were not
    decorated. Results and exceptions pass through. Calls inside a call, in other threads and in forked processes do not count.
    `step.capture_dir` is the output directory after this rank's capture is written, None before.

    Args:
        step: a function or a method; calls on all instances count together.
        warmup: calls before the first profiled one, at least 0.
        iterations: number of profiled calls, at least 1.
        ranks: `all`, or a list of global ranks.
        output_dir: root of captures; None for BRIDGE_PROFILING_DIR, else `profiles`.
        profile_memory: record allocations as events in the trace.
        summary: also print the verdict on the first rank's own capture, if the extra `analysis` is installed. Another process
            reads the capture; the call that ends the window waits for it, some seconds.
        settings: fields of `bridge_profiling.ProfilingConfig`, such as `record_shapes=True`.

    Raises:
        ProfilingConfigError: an invalid request, when the function is decorated. Nothing is raised later.
    """
    asked = {"use_pytorch_profiler": not settings.get("use_nsys_profiler"), "pytorch_profiler_profile_memory": profile_memory}
    window = {"profile_step_start": warmup, "profile_step_end": warmup + iterations, "profile_ranks": ranks}
    root = {"output_dir": None if output_dir is None else os.path.abspath(output_dir)}
    config = config_from("auto_profile", asked | settings | window | root)
    decorate = functools.partial(_decorated, config=config, summary=summary)
    return decorate if step is None else decorate(step)


def _decorated(function: Callable[..., Any], config: ProfilingConfig, summary: bool) -> Callable[..., Any]:
    require(
        callable(function),
        f"auto_profile cannot profile {function!r}, which is not a function",
        instead="Name what you set, as in @auto_profile(warmup=3, iterations=10)",
    )
    returns_early = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    require(
        not any(check(function) for check in returns_early),
        f"auto_profile cannot profile {getattr(function, '__qualname__', function)!s}, a coroutine or generator",
        why="a call of it returns before its work is done",
        instead="Decorate a plain function that does one step",
    )
    profile = _Profile(config, summary)

    @functools.wraps(function)
    def profiled(*arguments: Any, **keywords: Any) -> Any:
        return profile.call(function, arguments, keywords)

    # An attribute of the function, because an instance of a class would not bind as a method.
    profiled.capture_dir = None  # type: ignore[attr-defined]
    profile.on_written = functools.partial(setattr, profiled, "capture_dir")
    return profiled


class _Profile:
    """The calls of one function."""

    def __init__(self, config: ProfilingConfig, summary: bool) -> None:
        self._driver = ProfilingDriver(config)
        self._summary = summary
        self._calls = 0
        self._over = self._warned = False
        #: The thread whose calls are iterations: the first to call.
        self._thread: int | None = None
        self._choosing = threading.Lock()
        self._started_ns = 0
        self.on_written: Callable[[Path], None] = lambda path: None

    def __reduce__(self) -> tuple[type[_Profile], tuple[ProfilingConfig, bool]]:
        # Ray sends functions with what they refer to.
        return _Profile, (self._driver.config, self._summary)

    def call(self, function: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
        """Make a call, which is an iteration unless it is inside one, in another thread, or after the last one."""
        if self._over or not self._is_own_call() or self._driver.in_iteration:
            return function(*arguments, **keywords)
        if self._driver.hook is None:
            self._started_ns = time.time_ns()
            if not self._driver.open(independent=True):
                self._over = True
                return function(*arguments, **keywords)
            # The hook has registered its own function by now, so this one runs first.
            atexit.register(self._finish)
        try:
            with self._driver.step(self._calls):
                return function(*arguments, **keywords)
        finally:
            self._calls += 1
            if self._calls >= self._driver.config.window.end:
                self._finish()

    def _is_own_call(self) -> bool:
        """Whether this is the thread that called first, in the process that did; says once that calls in others don't count."""
        with self._choosing:
            if self._thread is None:
                self._thread = threading.get_ident()
            own = self._thread == threading.get_ident()
            warned, self._warned = self._warned, self._warned or not own
        if not own and not warned and self._driver.in_own_process:
            logger.warning(
                "auto_profile profiles the thread that called first; calls in %s run unprofiled", current_thread().name
            )
        return own and (self._driver.hook is None or self._driver.in_own_process)

    def _finish(self) -> None:
        """Write the capture at the end of the window or of the process, and print its location."""
        if not self._over and self._driver.in_own_process:
            self._over = True
            atexit.unregister(self._finish)
            self._driver.guard(self._driver.close)
            self._driver.guard(self._report)

    def _report(self) -> None:
        root, rank = resolve_output_dir(self._driver.config), LaunchEnv.current().rank
        mine = [capture for capture in captures_since(root, self._started_ns) if capture.rank == rank]
        for line in lines(root, mine):
            print(printable(f"bridge-profiling: {line}"), flush=True)
        if not any(capture.artifacts for capture in mine):
            return
        self.on_written(root)
        trace = mine[-1].torch_trace
        if self._summary and self._driver.on_first_rank and trace is not None:
            command = [sys.executable, "-m", "bridge_profiling.cli", "report", "--no-page", str(trace)]
            # Unless the capture cannot be read here.
            with suppress(OSError, subprocess.SubprocessError):
                done = subprocess.run(command, capture_output=True, text=True, timeout=_SUMMARY_TIMEOUT_S, check=True)
                print(done.stdout, end="", flush=True)


@dataclass(frozen=True)
class PhaseTime:
    """Time of the phases of one name, on the host's clock.

    Args:
        count: number of phases.
        total_ns: time of all of them.
        min_ns: time of the shortest.
        max_ns: time of the longest.
        squares_ns: sum of the squares of the times.
        outermost_ns: time of all phases, of any name, that were inside no other.
    """

    count: int
    total_ns: int
    min_ns: int
    max_ns: int
    squares_ns: int = field(default=0, compare=False, repr=False)
    outermost_ns: int = field(default=0, compare=False, repr=False)

    @property
    def mean_ns(self) -> float:
        """Mean time."""
        return self.total_ns / self.count

    @property
    def std_ns(self) -> float | None:
        """Standard deviation of the time; None for a single phase."""
        if self.count < 2:
            return None
        # Of integers, so that nothing cancels out.
        return (max(self.count * self.squares_ns - self.total_ns**2, 0) / (self.count * (self.count - 1))) ** 0.5

    @property
    def share(self) -> float | None:
        """Share (0 to 1) of the time of all phases that were inside no other; None while these are still open."""
        return self.total_ns / self.outermost_ns if self.outermost_ns else None

    def __str__(self) -> str:
        mean, low, high, total = (value / 1e6 for value in (self.mean_ns, self.min_ns, self.max_ns, self.total_ns))
        deviation = "" if self.std_ns is None else f" ± {self.std_ns / 1e6:.3f}"
        share = "" if self.share is None else f", {self.share:.1%}"
        return f"{self.count} times, {mean:.3f} ms each{deviation} ({low:.3f} to {high:.3f}), {total:.1f} ms together{share}"


class PhaseTimes(dict[str, PhaseTime]):
    """Phases by name; printed one per line."""

    def __str__(self) -> str:
        width = max((len(name) for name in self), default=0)
        return "\n".join(f"{name:{width}}  {time}" for name, time in self.items())


_lock = threading.Lock()
_times: PhaseTimes = PhaseTimes()
_outermost_ns = 0
_inside = threading.local()


@contextmanager
def phase(name: str, *, synchronize: bool = False) -> Iterator[None]:
    """Name and time a part of a step. Phases may be nested, and run in several threads.

    The analysis knows `data-loading` and `checkpoint`; `host-to-device`, `forward`, `backward`, `optimizer`, `evaluation` and
    `logging` are also common.

    Args:
        name: name of the phase.
        synchronize: wait for the CUDA device before and after, so the time includes the device's; this slows the step down.
    """
    global _outermost_ns
    hook, name, synchronize = current_hook(), whole_text(name), is_set(synchronize)
    here = vars(_inside)  # of this thread, whichever one ends the phase
    outermost = not here.get("a_phase", False)
    here["a_phase"] = True
    try:
        with nullcontext() if hook is None else hook.range(name):
            if synchronize:
                _synchronize()
            started = perf_counter_ns()
            try:
                yield
            finally:
                if synchronize:
                    _synchronize()
                took = perf_counter_ns() - started
                with _lock:
                    before = _times.get(name) or PhaseTime(0, 0, took, took)
                    low, high = min(before.min_ns, took), max(before.max_ns, took)
                    squares = before.squares_ns + took**2
                    _times[name] = PhaseTime(before.count + 1, before.total_ns + took, low, high, squares)
                    _outermost_ns += took if outermost else 0
    finally:
        if outermost:
            here["a_phase"] = False


def phase_times() -> PhaseTimes:
    """Times of all phases since the start, or since `reset_phase_times`, in the order in which they first ended."""
    with _lock:
        return PhaseTimes({name: replace(time, outermost_ns=_outermost_ns) for name, time in _times.items()})


def reset_phase_times() -> None:
    """Clear the times of all phases."""
    global _outermost_ns
    with _lock:
        _outermost_ns = 0
        _times.clear()


def _synchronize() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
