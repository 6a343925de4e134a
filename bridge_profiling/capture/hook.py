"""The hook a training loop calls: it starts and stops profiling on the ranks and iterations asked for.

It never harms training: a profiler that fails is logged and marked in the manifest, and training goes on. The device
is synchronized at both edges of the window and nowhere else.
"""

from __future__ import annotations

import atexit
import logging
import os
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from time import perf_counter_ns
from types import TracebackType
from typing import TYPE_CHECKING

from bridge_profiling.capture.agenda import Agenda, planned_windows
from bridge_profiling.capture.attempt import choose_attempt, claim_attempt
from bridge_profiling.capture.files import CaptureFiles
from bridge_profiling.capture.iteration_timer import IterationTimer
from bridge_profiling.capture.profiler import Backend
from bridge_profiling.capture.ranges import NvtxRange, range_functions
from bridge_profiling.capture.signals import exit_after_all, raised_by_handler, signals_held, told_to_exit
from bridge_profiling.capture.window_capture import NEVER, Rank, WindowCapture, WindowPlan
from bridge_profiling.capture.work import IterationWork
from bridge_profiling.config import OUTPUT_DIR_VARIABLE, ProfilingConfig, Window, resolve_output_dir
from bridge_profiling.errors import ProfilingConfigError, one_line
from bridge_profiling.layout import ParallelLayout, select_ranks

if TYPE_CHECKING:
    from bridge_profiling.capture.control.listener import Listener

logger = logging.getLogger(__name__)

#: Phases that no iteration is called slow for.
_APART = frozenset({"checkpoint", "evaluation"})

_NO_RANGE: AbstractContextManager = nullcontext()


class ProfilingHook:
    """Profiles a window of iterations of a training loop.

    Every rank opens one, after `torch.distributed` is up and before the model is built:

        with ProfilingHook(config.profiling, rank=rank, layout=layout) as hook:
            for iteration in range(start, train_iters):
                with hook.iteration(iteration):
                    with hook.range("forward-backward"):
                        ...

    Leaving the outer `with` by any way (the loop's end, `break`, an exception, SystemExit) writes what was captured.

    Args:
        config: the `profiling` section; None profiles nothing.
        rank: global rank of this process.
        world_size: number of ranks; taken from `layout` when that is given.
        layout: the job's parallel layout; needed for `profile_ranks="pp"` and for the manifest's coordinates.
        output_dir: root of what is written; wins over the config's and over BRIDGE_PROFILING_DIR.
        work: what one iteration of the whole job computes; then the manifest has each iteration's model TFLOP/s and MFU.
        train_iters: iterations the training runs, when known: then a request for a later one is refused at once.

    Raises:
        ProfilingConfigError: the config contradicts itself, or `rank` lies outside the world.
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
    ) -> None:
        self._config = replace(config) if config is not None else ProfilingConfig(on_demand=False)
        # A caller that tells neither the world nor the layout is believed about its rank.
        layout_given, layout = layout, layout or ParallelLayout(world_size=world_size if world_size > 1 else rank + 1)
        if world_size not in (1, layout.world_size) or not 0 <= rank < layout.world_size:
            raise ProfilingConfigError(
                f"rank {rank} of {world_size} does not fit a layout of {layout.world_size} ranks",
                instead="Pass ProfilingHook the global rank, and the world size or the layout of the same job",
            )
        self._config.finalize(world_size=layout.world_size if layout_given or world_size > 1 else None)
        self._selected = self._config.enabled and rank in select_ranks(self._config.profile_ranks, layout)
        self._output_dir = output_dir
        self._train_iters = train_iters
        self._opened = False
        self._process = os.getpid()
        self._agenda = Agenda(_nothing)
        self._capturing: WindowCapture | None = None
        self._edge = 0 if self._config.nvtx_ranges else NEVER
        self._timer = IterationTimer(self)
        self._iteration_ranges: ExitStack | None = None
        self._listener: Listener | None = None
        self._prepare_capture: Callable[[WindowPlan], WindowCapture] = _nothing
        #: The last iterations with a checkpoint or an evaluation inside.
        self._apart: deque[int] = deque(maxlen=100)
        #: What a framework says of itself: an integration may fill it while the hook is open, and manifests carry it.
        self.facts: dict[str, object] = {}
        self._rank = Rank(rank, layout, work, self.facts, lambda: self._timer.durations.copy(), self._opened_windows)

    # -- what a training loop calls ------------------------------------------------------------------------------

    def __enter__(self) -> ProfilingHook:
        if self._config.enabled or self._heeds_requests:
            with signals_held():
                self._open()
        return self

    def iteration(self, iteration: int) -> AbstractContextManager:
        """A context manager around global iteration `iteration` (0-based, a resume counts on)."""
        if told_to_exit:
            exit_after_all()
        if iteration >= self._edge:
            self._safely(self._reach, iteration)
        timer = self._timer
        timer.iteration = iteration
        timer.started = perf_counter_ns()
        return timer

    def range(self, name: str) -> AbstractContextManager:
        """A context manager that names a phase (`forward-backward`, `optimizer`, …) inside the window.

        Outside the window it does nothing, unless `nvtx_ranges` asks for ranges everywhere.
        """
        if name in _APART:
            self._apart.append(self._timer.iteration)
        if self._capturing is None and not self._config.nvtx_ranges:
            return _NO_RANGE
        return self._ranges(name, lambda backend: backend.phase_range(name))

    @property
    def durations(self) -> tuple[tuple[int, int], ...]:
        """`(iteration, nanoseconds)` of the last 1,000 iterations, the oldest first."""
        return tuple(self._timer.durations.copy())

    @property
    def capturing(self) -> bool:
        """Whether a window is open, so that what costs time is worth doing."""
        return self._capturing is not None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._safely(self._close, _ending(error))

    # -- its windows ---------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Agree on the folder with the other ranks, and prepare the profilers of this one."""
        # The interpreter crashes when it exits with a live Kineto trace.
        atexit.register(self._close, "the process exited without leaving the hook")
        self._opened, self._process = True, os.getpid()
        root = resolve_output_dir(self._config, self._output_dir)
        attempt: int | None = None
        identity = uuid.uuid4().hex
        try:
            if self._config.enabled:
                attempt, identity = choose_attempt(root, self._config.window, self._rank.number)
        except Exception as error:
            if self._selected:
                self._nothing_captured(error)
            return
        self._agenda = Agenda(lambda plan: self._capture(plan, root, identity))
        if self._selected:
            first, *later = planned_windows(self._config, attempt, self._train_iters)
            try:
                self._agenda.add(self._capture(first, root, identity))
                self._agenda.plan(later)
            except Exception as error:
                self._nothing_captured(error)
        if self._heeds_requests:
            try:
                self._listen(root, identity)
            except Exception as error:
                # No thread can be started, for one: that is no reason to lose the windows of the config.
                logger.error("rank %d: no captures on demand: %s. Training goes on.", self._rank.number, one_line(error))
        self._turn_to_next()

    def _nothing_captured(self, error: Exception) -> None:
        logger.error("rank %d: nothing will be captured: %s. Training goes on.", self._rank.number, one_line(error))

    def _capture(self, plan: WindowPlan, root: Path, identity: str) -> WindowCapture:
        """The capture of a planned window.

        Raises:
            OSError: its manifest cannot be written.
        """
        rank = self._rank
        attempt = plan.attempt
        if attempt is None:
            attempt = claim_attempt(root, plan.window, rank.number, identity)
        return WindowCapture(
            plan, CaptureFiles(root, plan.window, attempt, rank.number, plan.config.memory_snapshot_path), rank
        )

    def _reach(self, iteration: int) -> None:
        """Do what `iteration` calls for before it runs: warm up, open the window, close it, name the iteration."""
        self._agenda.advance(iteration)
        self._turn_to_next()
        if self._capturing is not None or self._config.nvtx_ranges:
            # First: an exit that comes while the ranges open leaves the trace with an iteration that is no whole one.
            self._timer.iteration, self._timer.watched = iteration, True
            self._iteration_ranges = self._ranges(f"iteration_{iteration}", lambda backend: backend.iteration_range(iteration))

    def iteration_ended(self, iteration: int, error: BaseException | None) -> None:
        """Called by the timer when an iteration inside a window, or one with ranges, has ended."""
        self._safely(self._leave, iteration, error)

    def _leave(self, iteration: int, error: BaseException | None) -> None:
        self._timer.watched = False
        if self._iteration_ranges is not None:
            ranges, self._iteration_ranges = self._iteration_ranges, None
            ranges.close()
        self._agenda.iteration_ended(iteration, error)
        self._turn_to_next()

    def _turn_to_next(self) -> None:
        """Know what is captured now, and which iteration is the first for which there is something to do."""
        self._capturing = self._agenda.capturing
        self._edge = 0 if self._config.nvtx_ranges else self._agenda.edge
        # After the assignment: what another thread has posted before it is seen here, and what it posts later sets it again.
        if self._agenda.posted:
            self._edge = 0

    def _close(self, ending: str) -> None:
        # All of it: a handler that raises anywhere in here, in the listener's end for one, would cost what was captured.
        with signals_held():
            self._close_undisturbed(ending)

    def _close_undisturbed(self, ending: str) -> None:
        atexit.unregister(self._close)
        # A process that the training has forked ends as well, and has neither captured nor missed anything.
        if not self._opened or os.getpid() != self._process:
            return
        self._opened = False
        if self._timer.watched:
            # From atexit, or when an exit came as the iteration's ranges opened: any other way has left its iteration by now.
            self._leave(self._timer.iteration, SystemExit())
        durations = self._timer.durations
        ending = f"{ending} after iteration {durations[-1][0]}" if durations else f"{ending} before its first iteration"
        # First: a request that is made from here on is refused, and none opens a window any more.
        if self._listener is not None:
            self._listener.stop(ending)
        self._agenda.ended(ending)
        self._agenda.leave()
        self._report_repeats()
        self._turn_to_next()

    def _report_repeats(self) -> None:
        if self._selected and self._config.profile_every is not None:
            captured = sum(1 for capture in self._agenda.captures if capture.plan.trigger.number and capture.record.captured)
            logger.info(
                "rank %d: captured %d of at most %d windows, one every %d iterations",
                self._rank.number, captured, self._config.profile_at_most, self._config.profile_every,
            )  # fmt: skip

    # -- on demand, seen from the listener's thread ----------------------------------------------------------------------

    @property
    def _heeds_requests(self) -> bool:
        """Whether this training may be asked for captures. One that named no directory must not find one made for it."""
        if self._config.on_demand is not None:
            return self._config.on_demand
        chosen = self._output_dir or self._config.output_dir or os.environ.get(OUTPUT_DIR_VARIABLE)
        return bool(chosen) or self._config.enabled or self._config.slow_iteration_factor is not None

    def _listen(self, root: Path, identity: str) -> None:
        from bridge_profiling.capture.control.coordinator import Coordinator
        from bridge_profiling.capture.control.listener import Listener
        from bridge_profiling.capture.control.protocol import RequestDirectory

        directory, coordinator = RequestDirectory(root), None
        if self._rank.number == 0:
            coordinator = Coordinator(
                directory,
                self._config,
                self._rank.layout,
                self._train_iters,
                lambda window: claim_attempt(root, window, 0, identity),
            )
        self._prepare_capture = lambda plan: self._capture(plan, root, identity)
        listener = Listener(directory, self._config, self._rank.number, self, coordinator)
        listener.start()
        self._listener = listener

    @property
    def running_iteration(self) -> int | None:
        """The iteration that began last; None before the first."""
        return self._timer.iteration if self._timer.started else None

    def schedule(self, plan: WindowPlan) -> None:
        """Capture a window that is still to come. May be called from any thread.

        Raises:
            OSError: its manifest cannot be written.
        """
        self._agenda.post(self._prepare_capture(plan))
        self._edge = 0

    def _opened_windows(self) -> list[Window]:
        return [capture.window for capture in self._agenda.captures if capture.state == "capturing" or capture.record.captured]

    @property
    def records_memory(self) -> bool:
        """Whether a memory history is being recorded."""
        return any(capture.plan.config.record_memory_history and capture.state != "closed" for capture in self._agenda.captures)

    def is_disturbed(self, iteration: int) -> bool:
        """Whether an iteration paid for something that is not its own: a profiler, a checkpoint, an evaluation."""
        if iteration in self._apart:
            return True
        return any(capture.window.start - 1 <= iteration <= capture.window.end for capture in self._agenda.captures)

    # -- ranges, and calls that may not fail -----------------------------------------------------------------------

    def _ranges(self, name: str, of_backend: Callable[[Backend], AbstractContextManager | None]) -> ExitStack:
        """Enter the ranges of one name, the capturing profilers' and `nvtx_ranges`' own; closing the stack leaves them."""
        stack = ExitStack()
        kinds = set()
        try:
            for outcome in self._capturing.profilers.active if self._capturing is not None else ():
                one = of_backend(outcome.backend)
                if one is not None:
                    stack.enter_context(one)
                    kinds.add(type(one))
            if self._config.nvtx_ranges:
                own = self._standing_range(name)
                if type(own) not in kinds:
                    stack.enter_context(own)
        except Exception as error:
            if raised_by_handler(error):
                raise
            logger.error("rank %d: no range %r: %s", self._rank.number, name, one_line(error))
        return stack

    @cached_property
    def _standing_range(self) -> Callable[[str], AbstractContextManager]:
        """What `nvtx_ranges` emits in every iteration: NVTX on a GPU, the torch profiler's annotations on a CPU."""
        import torch

        if torch.cuda.is_available():
            push, pop = range_functions(megatron_ranges=True)
            return lambda name: NvtxRange(name, push, pop)
        return torch.profiler.record_function

    def _safely(self, step: Callable[..., None], *arguments: object) -> None:
        """Take one step of the hook; whatever goes wrong in it ends the profiling, never the training."""
        try:
            step(*arguments)
        except Exception as error:
            if raised_by_handler(error):
                raise
            logger.exception("rank %d: profiling failed: %s. Training goes on.", self._rank.number, one_line(error))
            self._timer.watched = False
            self._agenda.fail(one_line(error))
            self._turn_to_next()


def _nothing(plan: WindowPlan) -> WindowCapture:
    raise OSError("the hook is not open")


def _ending(error: BaseException | None) -> str:
    if error is None:
        return "training ended"
    if isinstance(error, SystemExit):
        return f"the process was told to exit (code {error.code})"
    if isinstance(error, KeyboardInterrupt):
        return "training was interrupted from the keyboard"
    return f"training raised {one_line(error)}"
