"""The hook a training loop calls: it starts and stops profiling on the ranks and iterations asked for.

It never harms training: a profiler that fails is logged and marked in the manifest, and training goes on. The device
is synchronized at both edges of the window and nowhere else.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import cached_property
from threading import Thread
from time import perf_counter_ns
from types import TracebackType
from typing import ClassVar

from bridge_profiling.capture.attempt import choose_attempt, job_id
from bridge_profiling.capture.backend import Backend
from bridge_profiling.capture.files import CaptureFiles, resolve_output_dir
from bridge_profiling.capture.manifest import Manifest
from bridge_profiling.capture.memory import MemoryBackend
from bridge_profiling.capture.nsys import NsysBackend
from bridge_profiling.capture.nvtx import NvtxRange, range_functions
from bridge_profiling.capture.profilers import Profilers, one_line
from bridge_profiling.capture.ranks import ParallelLayout, select_ranks
from bridge_profiling.capture.signals import signals_held
from bridge_profiling.capture.torch_profiler import TorchProfilerBackend
from bridge_profiling.capture.work import IterationWork
from bridge_profiling.config import ProfilingConfig
from bridge_profiling.errors import ProfilingConfigError

logger = logging.getLogger(__name__)

#: How many iterations' durations a manifest keeps.
_KEPT_DURATIONS = 1000

#: No iteration is as late as this one: nothing more to do.
_NEVER = sys.maxsize

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
    ) -> None:
        self._config = replace(config) if config is not None else ProfilingConfig()
        self._rank = rank
        # A caller that tells neither the world nor the layout is believed about its rank.
        self._layout = layout or ParallelLayout(world_size=world_size if world_size > 1 else rank + 1)
        if world_size not in (1, self._layout.world_size) or not 0 <= rank < self._layout.world_size:
            raise ProfilingConfigError(
                f"rank {rank} of {world_size} does not fit a layout of {self._layout.world_size} ranks",
                instead="Pass ProfilingHook the global rank, and the world size or the layout of the same job",
            )
        self._config.finalize(world_size=self._layout.world_size if layout or world_size > 1 else None)
        self._selected = self._config.enabled and rank in select_ranks(self._config.profile_ranks, self._layout)
        self._output_dir = output_dir
        self._work = work
        self._window = self._config.window
        self._manifest: Manifest | None = None
        self._profilers = Profilers(rank, [])
        self._state = "closed"
        self._edge = 0 if self._config.nvtx_ranges else _NEVER
        self._timer = _IterationTimer(self)
        self._iteration_ranges: ExitStack | None = None
        self._writer: Thread | None = None

    # -- what a training loop calls ------------------------------------------------------------------------------

    def __enter__(self) -> ProfilingHook:
        if self._config.enabled:
            self._open()
        return self

    def iteration(self, iteration: int) -> AbstractContextManager:
        """A context manager around global iteration `iteration` (0-based, a resume counts on)."""
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
        if self._state != "capturing" and not self._config.nvtx_ranges:
            return _NO_RANGE
        return self._ranges(name, lambda backend: backend.phase_range(name))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._safely(self._close, _ending(error))

    # -- the window ----------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Agree on the folder with the other ranks, and prepare the profilers of this one."""
        try:
            root = resolve_output_dir(self._config, self._output_dir)
            attempt = choose_attempt(root, self._window, self._rank)
            files = CaptureFiles(root, self._window, attempt, self._rank, self._config.memory_snapshot_path)
            if not self._selected:
                return
            profilers = Profilers(self._rank, self._backends(files))
            manifest = Manifest(self._config, files, self._rank, self._layout, profilers, self._work)
            manifest.reason = f"the process ended before it reached iteration {self._window.start}"
            manifest.write(())
        except Exception as error:
            if self._selected:
                logger.error("rank %d: nothing will be captured: %s. Training goes on.", self._rank, one_line(error))
            return
        self._manifest, self._profilers = manifest, profilers
        profilers.open()
        self._state = "waiting"
        self._edge = 0 if self._config.nvtx_ranges else self._first_edge
        # The interpreter crashes when it exits with a live Kineto trace.
        atexit.register(self._close, "the process exited without leaving the hook")
        if not profilers.active:
            self._close_window(None)

    def _backends(self, files: CaptureFiles) -> list[Backend]:
        metadata: dict[str, object] = {
            "rank": self._rank,
            "window": [self._window.start, self._window.end],
            "attempt": files.attempt,
            "job": job_id(),
            "coordinates": self._layout.coordinates(self._rank),
        }
        wanted: list[tuple[bool, type[Backend]]] = [
            (self._config.record_memory_history, MemoryBackend),
            (self._config.use_nsys_profiler, NsysBackend),
            (self._config.use_pytorch_profiler, TorchProfilerBackend),
        ]
        return [backend(self._config, files, metadata) for asked, backend in wanted if asked]

    @property
    def _first_edge(self) -> int:
        """The iteration before the window when a profiler warms up in it, else the window's first."""
        return max(self._window.start - 1, 0) if self._profilers.warm_up_needed else self._window.start

    def _reach(self, iteration: int) -> None:
        """Do what `iteration` calls for before it runs: warm up, open the window, close it, name the iteration."""
        self._advance(iteration)
        if self._state == "capturing" or self._config.nvtx_ranges:
            self._iteration_ranges = self._ranges(f"iteration_{iteration}", lambda backend: backend.iteration_range(iteration))
            self._timer.watched = True

    def _advance(self, iteration: int) -> None:
        """Move the window's state on to `iteration`."""
        if self._state in ("waiting", "armed"):
            if iteration >= self._window.end:
                self._close_window(f"training started at iteration {iteration}, past the window {self._window}")
            elif iteration in self._window:
                self._open_window(iteration)
            elif self._state == "waiting" and iteration >= self._first_edge:
                self._warm_up()
        elif self._state == "capturing" and iteration not in self._window:
            self._close_window(f"iteration {iteration} came before the window {self._window} was complete")

    def _warm_up(self) -> None:
        self._state = "armed"
        self._edge = 0 if self._config.nvtx_ranges else self._window.start
        self._profilers.warm_up()

    def _open_window(self, iteration: int) -> None:
        if self._state == "waiting":
            self._warm_up()
        assert self._manifest is not None
        self._manifest.reason = "the process died inside the window, before the capture was written"
        self._profilers.presume_failed()
        # Before anything records: writing it is no part of the training, and starting may be what kills the process.
        self._write_manifest()
        self._profilers.start()
        if not self._profilers.active:
            self._close_window(None)
            return
        self._state = "capturing"
        logger.info(
            "rank %d: capturing iterations %d to %d with %s", self._rank, iteration, self._window.last, self._profilers.names
        )

    def _leave(self, iteration: int, error: BaseException | None) -> None:
        """Called when an iteration inside the window, or one with ranges, has ended."""
        self._timer.watched = False
        if self._iteration_ranges is not None:
            ranges, self._iteration_ranges = self._iteration_ranges, None
            ranges.close()
        if self._state != "capturing":
            return
        assert self._manifest is not None
        (self._manifest.interrupted if error is not None else self._manifest.captured).append(iteration)
        if error is None and iteration == self._window.last:
            self._close_window(None)

    def _close_window(self, ending: str | None) -> None:
        """Stop what is recording, and write it: what can be written beside the training goes to a thread.

        Args:
            ending: why the window ends before its last iteration, or None.
        """
        manifest, state, self._state = self._manifest, self._state, "closed"
        assert manifest is not None
        self._edge = 0 if self._config.nvtx_ranges else _NEVER
        status, reason = "missed", ending
        with signals_held():
            if state == "capturing":
                status, reason = self._completeness(ending)
                self._profilers.stop([iteration for iteration in manifest.interrupted if iteration not in manifest.captured])
            self._profilers.close()
            if self._profilers.unwritten:
                # Not a daemon: an interpreter that exits waits for it.
                self._writer = Thread(target=self._finish_window, args=(status, reason), name="bridge_profiling writer")
                self._writer.start()
            else:
                self._finish_window(status, reason)

    def _finish_window(self, status: str, reason: str | None) -> None:
        """Write the rest, and only then say in the manifest that it is there."""
        assert self._manifest is not None
        self._profilers.finish(status, reason)
        self._manifest.reason = None
        self._write_manifest()
        self._profilers.report(self._manifest.captured)

    def _completeness(self, ending: str | None) -> tuple[str, str | None]:
        assert self._manifest is not None
        captured = self._manifest.captured
        wanted = list(range(self._window.start, self._window.end))
        if captured == wanted:
            return "complete", None
        if ending is not None:
            return "partial", ending
        if self._manifest.interrupted:
            return "partial", f"iteration {self._manifest.interrupted[0]} was interrupted"
        return "partial", f"the run's first iteration was {captured[0]}, inside the window {self._window}"

    def _close(self, ending: str) -> None:
        atexit.unregister(self._close)
        if self._manifest is None:
            return
        if self._timer.watched:
            # Reached only from atexit: a `with` block has left its iteration by now.
            self._leave(self._timer.iteration, SystemExit())
        if self._state != "closed":
            self._close_window(self._ending_reason(ending))
        with signals_held():
            if self._writer is not None:
                self._writer.join()
            self._write_manifest()
            self._profilers.leave()
        self._manifest = None

    def _ending_reason(self, ending: str) -> str:
        durations = self._timer.durations
        last = f"after iteration {durations[-1][0]}" if durations else "before its first iteration"
        where = "inside" if self._state == "capturing" else "before"
        return f"{ending} {last}, {where} the window {self._window}"

    # -- ranges, and calls that may not fail -----------------------------------------------------------------------

    def _ranges(self, name: str, of_backend: Callable[[Backend], AbstractContextManager | None]) -> ExitStack:
        """Enter the ranges of one name, the capturing profilers' and `nvtx_ranges`' own; closing the stack leaves them."""
        stack = ExitStack()
        kinds = set()
        try:
            for outcome in self._profilers.active if self._state == "capturing" else ():
                one = of_backend(outcome.backend)
                if one is not None:
                    stack.enter_context(one)
                    kinds.add(type(one))
            if self._config.nvtx_ranges:
                own = self._standing_range(name)
                if type(own) not in kinds:
                    stack.enter_context(own)
        except Exception as error:
            logger.error("rank %d: no range %r: %s", self._rank, name, one_line(error))
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
            logger.exception("rank %d: profiling failed: %s. Training goes on.", self._rank, one_line(error))
            self._state, self._edge, self._timer.watched = "closed", _NEVER, False
            self._profilers.fail(one_line(error))
            if self._manifest is not None:
                self._write_manifest()

    def _write_manifest(self) -> None:
        assert self._manifest is not None
        try:
            # A copy: the writer's thread gets here while iterations go on.
            self._manifest.write(self._timer.durations.copy())
        except OSError as error:
            logger.error("rank %d: the manifest could not be written: %s. Training goes on.", self._rank, error)


class _IterationTimer:
    """Times one iteration after the other; with `iteration()` above, all that runs in every iteration of a training."""

    __slots__ = ("_hook", "_keep", "durations", "iteration", "started", "watched")

    def __init__(self, hook: ProfilingHook) -> None:
        self._hook = hook
        self.durations: deque[tuple[int, int]] = deque(maxlen=_KEPT_DURATIONS)
        self._keep = self.durations.append
        self.iteration = 0
        self.started = 0
        self.watched = False

    # `iteration()` has read the clock already, so entering has nothing to do, and the cheapest nothing is a builtin:
    # a Python function here costs a sixth of the whole (benchmarks/hook_overhead.py).
    __enter__: ClassVar[Callable[[], None]] = [].clear

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._keep((self.iteration, perf_counter_ns() - self.started))
        if self.watched:
            self._hook._safely(self._hook._leave, self.iteration, error)


def _ending(error: BaseException | None) -> str:
    if error is None:
        return "training ended"
    if isinstance(error, SystemExit):
        return f"the process was told to exit (code {error.code})"
    if isinstance(error, KeyboardInterrupt):
        return "training was interrupted from the keyboard"
    return f"training raised {one_line(error)}"
