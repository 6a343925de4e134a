"""Profiles some calls of a function that does one step: `@auto_profile(warmup=3, iterations=10)`."""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from bridge_profiling.capture.hook import ProfilingHook
from bridge_profiling.capture.signals import raised_by_handler
from bridge_profiling.config import ProfilingConfig, resolve_output_dir
from bridge_profiling.easy import current
from bridge_profiling.easy.launch import launch_named
from bridge_profiling.easy.outcome import captures_since, lines
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.launch_env import LaunchEnv
from bridge_profiling.layout import ParallelLayout, select_ranks

if TYPE_CHECKING:
    from bridge_profiling.integrations.torch_phases import PhaseWatch

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

#: How long the summary of one rank's capture may take, in seconds.
_SUMMARY_PATIENCE_S = 120


@overload
def auto_profile(step: Callable[P, R]) -> Callable[P, R]: ...
@overload
def auto_profile(
    *,
    warmup: int = 3,
    iterations: int = 10,
    ranks: str | Sequence[int] = "all",
    output_dir: str | os.PathLike[str] | None = None,
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
    output_dir: str | os.PathLike[str] | None = None,
    profile_memory: bool = False,
    summary: bool = True,
    **settings: Any,
) -> Callable[..., Any]:
    """Profile calls `warmup` to `warmup + iterations - 1` of a function, counted from 0; each is an iteration.

    After the last of them the capture is written, and rank by rank it is said where; the function then runs as if it were not
    decorated. What it returns and raises passes through. Calls inside a call, and calls in other threads and in processes that
    were forked, are not counted. `step.capture_dir` is the output directory once this rank's capture is written, None before.

    Args:
        step: the function, a method too; all instances count together.
        warmup: calls before the first that is profiled, at least 0.
        iterations: calls profiled, at least 1.
        ranks: `all`, or a list of global ranks.
        output_dir: root of what is written; None for BRIDGE_PROFILING_DIR, else `profiles`.
        profile_memory: record allocations as events in the trace.
        summary: say also what the first rank's own capture tells, where the extra `analysis` is installed. It is read in
            another process; the call that ends the window waits for it, some seconds.
        settings: fields of `bridge_profiling.ProfilingConfig`, as `record_shapes=True`.

    Raises:
        ProfilingConfigError: a request that cannot work, when the function is decorated. Later nothing is raised.
    """
    asked = {"use_pytorch_profiler": not settings.get("use_nsys_profiler"), "pytorch_profiler_profile_memory": profile_memory}
    window = {"profile_step_start": warmup, "profile_step_end": warmup + iterations, "profile_ranks": ranks}
    root = {"output_dir": None if output_dir is None else os.path.abspath(output_dir)}
    try:
        config = ProfilingConfig(**(asked | settings | window | root))
    except TypeError as error:
        instead = "Pass fields of ProfilingConfig, or leave it out"
        raise ProfilingConfigError(f"auto_profile: {error}", instead=instead) from None
    config.finalize()

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        return _decorated(function, config, summary)

    return decorate if step is None else decorate(step)


def _decorated(function: Callable[..., Any], config: ProfilingConfig, summary: bool) -> Callable[..., Any]:
    if not callable(function):
        raise ProfilingConfigError(
            f"auto_profile cannot profile {function!r}, which is no function",
            instead="Name what you set, as in @auto_profile(warmup=3, iterations=10)",
        )
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ProfilingConfigError(
            f"auto_profile cannot profile {function.__qualname__}, a coroutine or generator",
            why="a call of it returns before its work is done",
            instead="Decorate a plain function that does one step",
        )
    profile = _Profile(config, summary)

    @functools.wraps(function)
    def profiled(*arguments: Any, **keywords: Any) -> Any:
        if not profile.counts_now():
            return function(*arguments, **keywords)
        return profile.call(function, arguments, keywords)

    # An attribute of the function: a wrapper's own class would not bind as a method does.
    profiled.capture_dir = None  # type: ignore[attr-defined]
    profile.on_written = functools.partial(setattr, profiled, "capture_dir")
    return profiled


class _Profile:
    """The calls of one function, and the hook around them."""

    def __init__(self, config: ProfilingConfig, summary: bool) -> None:
        self._config = config
        self._summary = summary
        self._calls = 0
        self._inside = False
        self._over = False
        self._hook: ProfilingHook | None = None
        self._phases: PhaseWatch | None = None
        self._process = self._thread = 0
        self._started_ns = 0
        self.on_written: Callable[[Path], None] = lambda path: None

    def counts_now(self) -> bool:
        """Whether a call now is an iteration."""
        if self._over or self._inside:
            return False
        return self._hook is None or (os.getpid() == self._process and threading.get_ident() == self._thread)

    def call(self, function: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
        """One iteration."""
        if self._hook is None:
            self._open()
        if self._hook is None:
            return function(*arguments, **keywords)
        self._inside = True
        try:
            with self._hook.iteration(self._calls):
                try:
                    return function(*arguments, **keywords)
                finally:
                    if self._phases is not None:
                        self._phases.end_open()
        finally:
            self._inside = False
            self._calls += 1
            if self._calls >= self._config.window.end:
                self._finish()

    def _open(self) -> None:
        try:
            self._started_ns = time.time_ns()
            self._process, self._thread = os.getpid(), threading.get_ident()
            here = LaunchEnv.current()
            hook = ProfilingHook(self._config, rank=here.rank, world_size=here.world_size)
            with launch_named():
                self._hook = hook.__enter__()
            current.opened(self._hook)
            self._watch_phases(self._hook)
            # After the hook's own, so that it is called before that.
            atexit.register(self._finish)
        except Exception as error:
            self._over = True
            logger.error("nothing will be captured: %s: %s. The function runs on.", type(error).__name__, error)

    def _watch_phases(self, hook: ProfilingHook) -> None:
        if "torch" in sys.modules:
            from bridge_profiling.integrations.torch_phases import PhaseWatch

            self._phases = PhaseWatch(hook.range)
            self._phases.everything()

    def _finish(self) -> None:
        """The window is over, or the process: write what was captured and say where. Lets through what a handler raises."""
        hook = self._hook
        if self._over or hook is None or os.getpid() != self._process:
            return
        self._over = True
        atexit.unregister(self._finish)
        try:
            if self._phases is not None:
                self._phases.detach()
            current.closed(hook)
            hook.__exit__(None, None, None)
            self._tell()
        except Exception as error:
            if raised_by_handler(error):
                raise
            logger.exception("profiling failed at its end")

    def _tell(self) -> None:
        root, rank = resolve_output_dir(self._config), LaunchEnv.current().rank
        mine = [capture for capture in captures_since(root, self._started_ns) if capture.rank == rank]
        for line in lines(root, mine):
            print(f"bridge-profiling: {line}", flush=True)
        if not any(capture.artifacts for capture in mine):
            return
        self.on_written(root)
        trace = mine[-1].torch_trace
        first = select_ranks(self._config.profile_ranks, ParallelLayout(world_size=LaunchEnv.current().world_size))[0]
        if self._summary and rank == first and trace is not None:
            print(_summary_of(trace), end="", flush=True)


def _summary_of(trace: Path) -> str:
    """What a capture tells, in some lines; nothing where it cannot be read here."""
    command = [sys.executable, "-m", "bridge_profiling.easy.summary", str(trace)]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_SUMMARY_PATIENCE_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
