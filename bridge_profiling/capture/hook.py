"""The hook that a training loop calls: it starts and stops profiling on the requested ranks and iterations.

It never harms training: a profiler that fails is logged and marked in the manifest, and training goes on. The device
is synchronized at both edges of the window and nowhere else.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import cache
from time import perf_counter
from types import TracebackType
from typing import Any
from weakref import WeakSet

from bridge_profiling.capture.closing import Closing
from bridge_profiling.capture.control.listener import Listener
from bridge_profiling.capture.describe import Plan, RankInfo
from bridge_profiling.capture.files import choose_attempt
from bridge_profiling.capture.loop import NEVER, Inbox, Span, timing_span
from bridge_profiling.capture.profiler import Profiler, guarded
from bridge_profiling.capture.ranges import standing_ranges
from bridge_profiling.capture.signals import raise_pending_exit, raised_by_handler, signals_held
from bridge_profiling.capture.window import Capture
from bridge_profiling.capture.windows import Windows, planned
from bridge_profiling.capture.work import IterationWork
from bridge_profiling.common.errors import ProfilingConfigError, TrainingLogger, is_contained, require
from bridge_profiling.common.launch_env import LaunchEnv, initialized_distributed
from bridge_profiling.common.plain import safe_name, shown, whole_number
from bridge_profiling.layout import ParallelLayout
from bridge_profiling.settings.profiling import OUTPUT_DIR_VARIABLE, ProfilingConfig, resolve_output_dir
from bridge_profiling.settings.window import select_ranks

logger = TrainingLogger(__name__)

#: Phases that make no iteration count as slow.
_LONG_PHASES = frozenset({"checkpoint", "evaluation"})

_NO_RANGE: AbstractContextManager = nullcontext()

#: The hooks of this process that were opened.
_hooks: WeakSet[ProfilingHook] = WeakSet()


class ProfilingHook:
    """Profiles a window of iterations of a training loop.

    Every rank opens one, after `torch.distributed` is initialized and before the model is built:

        with ProfilingHook(config.profiling, rank=rank, layout=layout) as hook:
            for iteration in range(start, train_iters):
                with hook.iteration(iteration):
                    with hook.range("forward-backward"):
                        ...

    Leaving the outer `with` in any way (the loop's end, `break`, an exception, SystemExit) writes the capture. So does a
    SIGTERM inside the window: where the process has no handler for it, the loop unwinds with SystemExit, and the hook raises
    the signal again once the capture is written. Outside the window the hook leaves the signal's disposition alone.

    Copies and pickles of a hook, and of what its methods return, profile nothing.

    Args:
        config: the `profiling` section; None profiles nothing.
        rank: global rank of this process.
        world_size: number of ranks; taken from `layout` when that is given.
        layout: the job's parallel layout; needed for `profile_ranks="pp"` and for the manifest's coordinates.
        output_dir: root of all files; wins over the config's and over BRIDGE_PROFILING_DIR.
        work: the computation of one iteration of the whole job; adds each iteration's model TFLOP/s and MFU to the manifest.
        train_iters: iterations the training runs, when known: then a request for a later one is refused at once.
        owns_process: the process exists only for this training: SIGTERM inside the window ends it with exit code 143, and the
            signal is not raised again.

    Raises:
        ProfilingConfigError: the config contradicts itself, or `rank` is outside the world.
    """

    def __init__(
        self,
        config: ProfilingConfig | None,
        *,
        rank: int,
        world_size: int = 1,
        layout: ParallelLayout | None = None,
        output_dir: str | os.PathLike[str] | None = None,
        work: IterationWork | None = None,
        train_iters: int | None = None,
        owns_process: bool = False,
    ) -> None:
        self._config = replace(config) if config is not None else ProfilingConfig(on_demand=False)
        rank, world_size = _count(rank, "rank"), _count(world_size, "world_size")
        train_iters = None if train_iters is None else _count(train_iters, "train_iters")
        world_is_known = layout is not None or world_size > 1
        if not world_is_known:
            env = LaunchEnv.current()
            world_is_known, world_size = env.world_size > max(rank, 1), max(env.world_size, rank + 1)
        layout = layout or ParallelLayout(world_size=world_size)
        require(
            world_size in (1, layout.world_size) and 0 <= rank < layout.world_size,
            f"rank {rank} of {world_size} does not fit a layout of {layout.world_size} ranks",
            instead="Pass ProfilingHook the global rank, and the world size or the layout of the same job",
        )
        if config is not None and (joined := initialized_distributed()) is not None:
            joined_rank, joined_size = joined.get_rank(), joined.get_world_size()
            require(
                rank == joined_rank or (world_is_known and layout.world_size != joined_size),
                f"rank={rank} is not this process's rank, which torch.distributed says is {joined_rank} of {joined_size}",
                why="ranks with one number write the same files",
                instead="Pass ProfilingHook(rank=torch.distributed.get_rank())",
            )
        self._config.finalize(world_size=layout.world_size if world_is_known else None)
        self._profiled = select_ranks(self._config.profile_ranks, layout) if self._config.enabled else []
        self._selected = rank in self._profiled
        self._output_dir = output_dir
        self._inbox, self._rank = Inbox(), RankInfo(rank, layout, work, train_iters)
        if self._config.nvtx_ranges:
            self._inbox.wake()
        self._mark, self._span = self._rank.log.mark, timing_span(self._rank.log.mark)
        self._windows = Windows(self._rank, self._inbox)
        #: The capture that records now.
        self._recording: Capture | None = None
        #: The open iteration, if it has ranges.
        self._iteration: _Iteration | None = None
        #: Whether the loop counts with another type than int; whether every iteration had a number.
        self._converts, self._numbered = False, True
        self._closing = Closing(self._inbox, lambda: self._windows.needs_loop, self._finish, owns_process=owns_process)
        self._listener: Listener | None = None
        #: Facts that a framework reports about itself: an integration fills it while the hook is open, for the manifests.
        self.facts = self._rank.facts

    def __reduce__(self) -> tuple[Callable[..., ProfilingHook], tuple[type[ProfilingHook]]]:
        # A model, a config or a callback that holds the hook is copied, pickled and sent to other processes.
        return _inert, (type(self),)

    # -- what a training loop calls ------------------------------------------------------------------------------

    def __enter__(self) -> ProfilingHook:
        _hooks.add(self)
        if self._config.enabled or self._listens:
            with signals_held():
                self._open()
        self._update()
        # The first iteration shows with which type the loop counts.
        self._inbox.wake()
        return self

    def iteration(self, iteration: int) -> AbstractContextManager:
        """A context manager around global iteration `iteration` (0-based, a resume counts on)."""
        try:
            if iteration < self._inbox.edge:  # False where it is not a number (NaN)
                mark = self._mark
                mark(iteration)
                mark(perf_counter())
                return self._span
        except BaseException as error:
            # One that cannot be compared is not a number.
            if raised_by_handler(error) or not is_contained(error):
                raise
        return self._watched(iteration)

    def range(self, name: str) -> AbstractContextManager:
        """A context manager that names a phase (`forward-backward`, `optimizer`, …) inside the window.

        Outside the window it does nothing, unless `nvtx_ranges` asks for ranges everywhere.
        """
        try:
            if name in _LONG_PHASES:
                self._windows.long_iterations.append(self._rank.log.running() or 0)
        except BaseException as error:
            if not is_contained(error):
                raise
            name = safe_name(name)  # it has no hash
        if self._recording is None and not self._config.nvtx_ranges:
            return _NO_RANGE
        name = safe_name(name)
        return self._enter_ranges(name, lambda profiler: profiler.phase_range(name))

    @property
    def durations(self) -> tuple[tuple[int, int], ...]:
        """`(iteration, nanoseconds)` of the last 1,000 iterations, the oldest first."""
        return tuple(self._rank.log.durations())

    @property
    def capturing(self) -> bool:
        """Whether a window is open, so that expensive measurements are worth their time."""
        return self._recording is not None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        with self._guarded():
            self._closing.close(error)

    # -- its windows ---------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Agree on the folder with the other ranks, and prepare the profilers of this one."""
        self._closing.open()
        root, rank = resolve_output_dir(self._config, self._output_dir), self._rank
        holder, plans = uuid.uuid4().hex, list[Plan]()
        if self._selected and "torch" not in sys.modules:
            _say_once(
                "the hook was opened before torch was imported: ranks cannot agree on a folder through torch.distributed yet,"
                " and memory that is allocated meanwhile is not in a history. Import torch, and connect the ranks, before"
            )
        with guarded("nothing will be captured", rank.number):
            if self._selected:
                ranks, world_size = self._profiled, rank.layout.world_size
                attempt, holder = choose_attempt(root, self._config.window, rank.number, ranks=ranks, world_size=world_size)
                plans = planned(self._config, attempt, rank.train_iters)
        chosen = bool(plans) or not self._selected
        with guarded("nothing will be captured", rank.number):
            self._windows.open(root, holder, plans)
        if chosen and self._listens:
            # A process that can start no thread still captures the windows of its config.
            with guarded("no captures on demand", rank.number):
                listener = Listener(root, self._config, rank, self._windows, holder)
                listener.start()
                self._listener = listener

    def _update(self) -> None:
        """Take the capture that records now and the next edge from the windows."""
        self._recording = self._windows.recording
        if self._recording is None:
            self._closing.restore_sigterm()
        self._inbox.sleep_until(0 if self._config.nvtx_ranges or self._converts else self._windows.edge)

    def _watched(self, given: object) -> AbstractContextManager:
        """Bring the windows to an iteration, whatever type the loop counts with, and open its ranges."""
        with self._guarded():
            raise_pending_exit()
            self._closing.close_if_asked()
        iteration = self._number(given)
        with self._guarded():
            try:
                if self._windows.edge <= iteration and not self._windows.records(iteration):
                    # Installed first, and then held: a handler that raises while a profiler starts leaves it half started.
                    self._closing.handle_sigterm()
                    with signals_held():
                        self._windows.advance(iteration)
            finally:
                # Also where a handler raised: the training may catch that, and run this iteration again.
                self._update()
        span: Span = self._span
        if self._recording is not None or self._config.nvtx_ranges:
            # First: an exit while the ranges open marks this iteration in the trace as interrupted.
            self._mark(iteration)
            span = self._iteration = _Iteration(self, iteration)
            with self._guarded():
                span.ranges = self._enter_ranges(f"iteration_{iteration}", lambda profiler: profiler.iteration_range(iteration))
        self._mark(iteration)
        self._mark(perf_counter())
        return span

    def _number(self, given: object) -> int:
        """The number of an iteration; one without is counted, and nothing is captured any more."""
        if type(given) is not int or given >= NEVER:
            # Every iteration of this loop comes here, so that only integers are marked.
            self._converts = True
            try:
                return whole_number(given)
            except ValueError as error:
                reason, last = f"hook.iteration({shown(given)}): {error}", self._rank.log.running()
                if self._numbered:
                    self._numbered = False
                    logger.error("rank %d: profiling failed: %s. Training goes on.", self._rank.number, reason)
                    with self._guarded():
                        self._fail(reason)
                return 0 if last is None else last + 1
        return given

    def _end_iteration(self, one: _Iteration, error: BaseException | None) -> None:
        """Close the ranges of an iteration, and the window after its last one."""
        with self._guarded():
            self._iteration = None
            try:
                one.ranges.close()
                self._windows.iteration_ended(one.number, error)
            finally:
                self._update()
            self._closing.close_if_asked()

    def _finish(self, ending: str) -> None:
        """Write everything; called once, with signals held."""
        if self._iteration is not None:
            # Called by atexit, or an exit came as the iteration's ranges opened. Otherwise the iteration has ended.
            self._end_iteration(self._iteration, SystemExit())
        durations = self._rank.log.durations()
        ending += f" after iteration {durations[-1][0]}" if durations else " before its first iteration"
        # First: a request that is made from here on is refused, and none opens a window.
        if self._listener is not None:
            self._listener.stop(ending)
        self._windows.end(ending)
        self._update()

    def _guarded(self) -> AbstractContextManager[None]:
        """Guard a step of the hook: an error in it ends the profiling, never the training."""
        return guarded("profiling failed", self._rank.number, self._fail, traceback=True)

    def _fail(self, reason: str) -> None:
        self._iteration = None
        self._windows.fail(reason)
        self._update()

    def _forked(self) -> None:
        """Profile nothing in a child process that the training has forked: threads and files are its parent's."""
        self._closing.forked()
        for one in self._windows.all:
            one.forked()
        self._selected = False
        self._config, self._listener, self._iteration = ProfilingConfig(on_demand=False), None, None
        self._inbox = Inbox()
        self._windows = Windows(self._rank, self._inbox)
        self._update()

    @property
    def _listens(self) -> bool:
        """Whether this training accepts requests. It creates no directory for them that nobody asked for."""
        if self._config.on_demand is not None:
            return self._config.on_demand
        chosen = self._output_dir or self._config.output_dir or os.environ.get(OUTPUT_DIR_VARIABLE)
        return bool(chosen) or self._config.enabled or self._config.slow_iteration_factor is not None

    # -- ranges --------------------------------------------------------------------------------------------------------

    def _enter_ranges(self, name: str, of_profiler: Callable[[Profiler], AbstractContextManager | None]) -> ExitStack:
        """Enter the profilers' ranges, and that of `nvtx_ranges` unless it is of the same kind; closing the stack ends them."""
        stack = _Ranges(self._rank.number)
        with guarded(f"no range {name!r}", self._rank.number):
            ranges = self._recording.ranges(of_profiler) if self._recording is not None else []
            if self._config.nvtx_ranges and type(own := standing_ranges()(name)) not in map(type, ranges):
                ranges.append(own)
            for one in ranges:
                stack.enter_context(one)
        return stack


def _inert(kind: type[ProfilingHook]) -> ProfilingHook:
    """A hook that profiles nothing: a copy."""
    hook = kind.__new__(kind)
    ProfilingHook.__init__(hook, None, rank=0)
    return hook


def _after_fork() -> None:
    for hook in list(_hooks):
        hook._forked()


os.register_at_fork(after_in_child=_after_fork)


class _Iteration(Span):
    """What is around an iteration with ranges: marks its end as well, and tells the hook unless that has ended it."""

    def __init__(self, hook: ProfilingHook, number: int) -> None:
        self._hook, self.number, self.ranges = hook, number, ExitStack()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._hook._span.__exit__(kind, error, trace)
        if self._hook._iteration is self:
            self._hook._end_iteration(self, error)


class _Ranges(ExitStack):
    """Ranges that never raise on exit: a range is not worth an error in training."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self._rank = rank

    def __exit__(self, *details: Any) -> None:
        with guarded("a range did not end", self._rank):
            super().__exit__(*details)

    def __reduce__(self) -> tuple[type[AbstractContextManager], tuple[()]]:
        return nullcontext, ()


@cache
def _say_once(what: str) -> None:
    logger.warning("%s", what)


def _count(value: object, name: str) -> int:
    try:
        return whole_number(value)
    except ValueError as error:
        raise ProfilingConfigError(f"ProfilingHook got {name}={shown(value)}", why=str(error)) from None
