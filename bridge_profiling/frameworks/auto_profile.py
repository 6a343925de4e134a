"""Profiles a function that does one step: `@auto_profile(warmup=3, iterations=10)`. Loads no torch."""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import current_thread
from typing import Any, ParamSpec, TypeVar

from bridge_profiling.common.errors import TrainingLogger, require
from bridge_profiling.common.launch_env import LaunchEnv
from bridge_profiling.common.printable import printable
from bridge_profiling.frameworks.outcome import captures_since, lines
from bridge_profiling.frameworks.session import OutputDir, Session, config_from
from bridge_profiling.settings.profiling import ProfilingConfig, resolve_output_dir

P = ParamSpec("P")
R = TypeVar("R")

logger = TrainingLogger(__name__)

#: Time limit for the summary of one rank's capture.
_SUMMARY_TIMEOUT_S = 120


def auto_profile(
    *,
    warmup: int = 3,
    iterations: int = 10,
    ranks: str | Sequence[int] = "all",
    output_dir: OutputDir = None,
    profile_memory: bool = False,
    summary: bool = True,
    **settings: Any,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Profile calls `warmup` to `warmup + iterations - 1` of a function, counted from 0; each is an iteration.

    After the last of them the capture is written, and each rank prints its location; the function then runs as if it were not
    decorated. Results and exceptions pass through. Calls inside a call, in other threads and in forked processes do not count.
    `step.capture_dir` is the output directory after this rank's capture is written, None before. A method's calls on all
    instances count together.

    Args:
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

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        _check(function)
        profile = _Profile(config, summary)

        @functools.wraps(function)
        def profiled(*arguments: P.args, **keywords: P.kwargs) -> R:
            return profile.call(functools.partial(function, *arguments, **keywords))

        # An attribute of the function, because an instance of a class would not bind as a method.
        profiled.capture_dir = None  # type: ignore[attr-defined]
        profile.on_written = functools.partial(setattr, profiled, "capture_dir")
        return profiled

    return decorate


def _check(function: Any) -> None:
    require(
        callable(function),
        f"auto_profile cannot profile {function!r}, which is not a function",
        instead="Decorate a function that does one step",
    )
    returns_early = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    require(
        not any(check(function) for check in returns_early),
        f"auto_profile cannot profile {getattr(function, '__qualname__', function)!s}, a coroutine or generator",
        why="a call of it returns before its work is done",
        instead="Decorate a plain function that does one step",
    )


class _Profile:
    """The calls of one function."""

    def __init__(self, config: ProfilingConfig, summary: bool) -> None:
        self._session = Session(config)
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
        return _Profile, (self._session.config, self._summary)

    def call(self, step: Callable[[], R]) -> R:
        """Make a call, which is an iteration unless it is inside one, in another thread, or after the last one."""
        if self._over or not self._is_own_call() or self._session.in_iteration:
            return step()
        if self._session.hook is None:
            self._started_ns = time.time_ns()
            if not self._session.open(independent=True):
                self._over = True
                return step()
            # The hook has registered its own function by now, so this one runs first.
            atexit.register(self._finish)
        try:
            with self._session.step(self._calls):
                return step()
        finally:
            self._calls += 1
            if self._calls >= self._session.config.window.end:
                self._finish()

    def _is_own_call(self) -> bool:
        """Whether this is the thread that called first, in the process that did; says once that calls in others don't count."""
        with self._choosing:
            if self._thread is None:
                self._thread = threading.get_ident()
            own = self._thread == threading.get_ident()
            warned, self._warned = self._warned, self._warned or not own
        if not own and not warned and self._session.in_own_process:
            logger.warning(
                "auto_profile profiles the thread that called first; calls in %s run unprofiled", current_thread().name
            )
        return own and (self._session.hook is None or self._session.in_own_process)

    def _finish(self) -> None:
        """Write the capture at the end of the window or of the process, and print its location."""
        if not self._over and self._session.in_own_process:
            self._over = True
            atexit.unregister(self._finish)
            self._session.guard(self._session.close)
            self._session.guard(self._report)

    def _report(self) -> None:
        root, rank = resolve_output_dir(self._session.config), LaunchEnv.current().rank
        mine = [capture for capture in captures_since(root, self._started_ns) if capture.rank == rank]
        for line in lines(root, mine):
            print(printable(f"bridge-profiling: {line}"), flush=True)
        if not any(capture.artifacts for capture in mine):
            return
        self.on_written(root)
        trace = mine[-1].torch_trace
        if self._summary and self._session.on_first_rank and trace is not None:
            command = [sys.executable, "-m", "bridge_profiling.cli", "report", "--no-page", str(trace)]
            # Unless the capture cannot be read here.
            with suppress(OSError, subprocess.SubprocessError):
                done = subprocess.run(command, capture_output=True, text=True, timeout=_SUMMARY_TIMEOUT_S, check=True)
                print(done.stdout, end="", flush=True)
