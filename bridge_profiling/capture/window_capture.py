"""One window on one rank, from before it opens until it is written: its profilers, its files and its manifest.

Moved from one state to the next by the hook: `waiting`, `armed` (a profiler warms up), `capturing`, `closed`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Thread

from bridge_profiling.capture.attempt import give_up_attempt
from bridge_profiling.capture.files import CaptureFiles
from bridge_profiling.capture.memory import MemoryBackend
from bridge_profiling.capture.nsys_profiler import NsysBackend
from bridge_profiling.capture.profiler import Backend
from bridge_profiling.capture.profilers import Profilers
from bridge_profiling.capture.record import CaptureRecord
from bridge_profiling.capture.signals import signals_held
from bridge_profiling.capture.torch_profiler import TorchProfilerBackend
from bridge_profiling.capture.work import IterationWork
from bridge_profiling.config import ProfilingConfig, Window
from bridge_profiling.launch_env import LaunchEnv
from bridge_profiling.layout import ParallelLayout
from bridge_profiling.manifest import Status, Trigger

logger = logging.getLogger(__name__)

#: No iteration is as late as this one: nothing more to do.
NEVER = sys.maxsize


@dataclass(frozen=True)
class WindowPlan:
    """A window to be captured.

    Attributes:
        config: what is asked of it: its window, ranks and profilers.
        trigger: what asked for it.
        attempt: its folder's number, where that is agreed already.
    """

    config: ProfilingConfig
    trigger: Trigger
    attempt: int | None = None

    @property
    def window(self) -> Window:
        """The iterations."""
        return self.config.window


@dataclass(frozen=True)
class Rank:
    """What every window's capture of a rank has in common.

    Attributes:
        number: global rank.
        layout: the job's parallel layout.
        work: what one iteration computes.
        facts: what a framework says of itself.
        durations: gives `(iteration, nanoseconds)` of the last iterations, a copy.
        windows: gives the windows of this process so far.
    """

    number: int
    layout: ParallelLayout
    work: IterationWork | None
    facts: dict[str, object]
    durations: Callable[[], Iterable[tuple[int, int]]]
    windows: Callable[[], list[Window]]


class WindowCapture:
    """The capture of one window.

    Making one writes its manifest and touches no profiler, so it may be made in another thread than the training's.

    Args:
        plan: what to capture.
        files: where to.
        rank: on which rank.

    Raises:
        OSError: the manifest cannot be written.
    """

    def __init__(self, plan: WindowPlan, files: CaptureFiles, rank: Rank) -> None:
        self.plan, self.window, self.files, self._rank = plan, plan.window, files, rank
        self.state = "waiting"
        self.profilers = Profilers(rank.number, self._backends())
        self.record = CaptureRecord(plan.config, files, rank.number, rank.layout, self.profilers, rank.work)
        self.record.facts, self.record.trigger = rank.facts, plan.trigger
        self.record.reason = f"the process ended before it reached iteration {self.window.start}"
        self.record.write(())
        #: How long the window's iterations took: a run goes on for longer than durations are kept.
        self._durations: list[tuple[int, int]] = []
        self._writer: Thread | None = None
        self._finished = False
        self._released = False
        self._skipped = False

    def _backends(self) -> list[Backend]:
        config, rank = self.plan.config, self._rank
        metadata: dict[str, object] = {
            "rank": rank.number,
            "window": [self.window.start, self.window.end],
            "attempt": self.files.attempt,
            "job": LaunchEnv.read().job_id,
            "coordinates": rank.layout.coordinates(rank.number),
        }
        wanted: list[tuple[bool, type[Backend]]] = [
            (config.record_memory_history, MemoryBackend),
            (config.use_nsys_profiler, NsysBackend),
            (config.use_pytorch_profiler, TorchProfilerBackend),
        ]
        return [backend(config, self.files, metadata) for asked, backend in wanted if asked]

    # -- the window, in the training's thread --------------------------------------------------------------------------

    def open(self) -> None:
        """Prepare the profilers; memory history records from here on."""
        self.profilers.open()
        if not self.profilers.active:
            self.close(None)

    @property
    def edge(self) -> int:
        """The first iteration for which there is something to do."""
        if self.state == "closed":
            return NEVER
        return self._warm_up_at if self.state == "waiting" else self.window.start

    @property
    def _warm_up_at(self) -> int:
        """The iteration before the window when a profiler warms up in it, else the window's first."""
        return max(self.window.start - 1, 0) if self.profilers.warm_up_needed else self.window.start

    def advance(self, iteration: int) -> None:
        """Do what `iteration` calls for before it runs: warm up, open the window, or close it."""
        if self.state in ("waiting", "armed"):
            if iteration >= self.window.end:
                self.close(f"training started at iteration {iteration}, past the window {self.window}")
            elif iteration in self.window:
                # After the warm-up in the iteration before the window, this is no resume.
                self._skipped = self.state == "armed" and iteration > self.window.start
                self._start(iteration)
            elif self.state == "waiting" and iteration >= self._warm_up_at:
                self._warm_up()
        elif self.state == "capturing" and iteration not in self.window:
            self.close(f"iteration {iteration} came before the window {self.window} was complete")

    def _warm_up(self) -> None:
        self.state = "armed"
        self.profilers.warm_up()

    def _start(self, iteration: int) -> None:
        if self.state == "waiting":
            self._warm_up()
        self.record.reason = "the process died inside the window, before the capture was written"
        self.profilers.presume_failed()
        # Before anything records: writing it is no part of the training, and starting may be what kills the process.
        self.write_manifest()
        self.profilers.start()
        if not self.profilers.active:
            self.close(None)
            return
        self.state = "capturing"
        logger.info(
            "rank %d: capturing iterations %d to %d with %s",
            self._rank.number, iteration, self.window.last, self.profilers.names,
        )  # fmt: skip

    def iteration_ended(self, iteration: int, error: BaseException | None) -> None:
        """An iteration inside the window has ended."""
        (self.record.interrupted if error is not None else self.record.captured).append(iteration)
        if error is None and iteration == self.window.last:
            self.close(None)

    # -- its end -------------------------------------------------------------------------------------------------------

    def close(self, ending: str | None) -> None:
        """Stop what is recording, and write it: what can be written beside the training goes to a thread.

        Args:
            ending: why the window ends before its last iteration, or None.
        """
        state, self.state = self.state, "closed"
        if state == "closed":
            return
        status: Status = "missed"
        reason = ending
        with signals_held():
            if state == "capturing":
                status, reason = self._completeness(ending)
                captured = self.record.captured
                self._durations = [taken for taken in self._rank.durations() if taken[0] in self.window]
                self.profilers.stop([iteration for iteration in self.record.interrupted if iteration not in captured])
            self.profilers.close()
            if not (self.profilers.unwritten and self._finish_beside(status, reason)):
                self._finish(status, reason)

    def _finish_beside(self, status: Status, reason: str | None) -> bool:
        """Write the rest while training goes on; whether that can be done."""
        # Not a daemon: an interpreter that exits waits for it.
        writer = Thread(target=self._finish, args=(status, reason), name="bridge_profiling writer")
        try:
            writer.start()
        except RuntimeError:
            # From Python 3.12 on an interpreter that is about to exit starts none; nor does a process at its limit of them.
            return False
        self._writer = writer
        return True

    def _finish(self, status: Status, reason: str | None) -> None:
        """Write the rest, and only then say in the manifest that it is there."""
        unpacked = self.profilers.unpacked
        if unpacked:
            # A launcher kills what takes too long to end: then this is true.
            where = " and ".join(str(path) for path in unpacked)
            self.record.reason = f"the process died while it compressed its trace; all of it lies in {where}"
            self.write_manifest()
        self.profilers.finish(status, reason)
        self.record.reason = None
        self.write_manifest()
        self._finished = True
        self.profilers.report(self.record.captured)

    def _completeness(self, ending: str | None) -> tuple[Status, str | None]:
        captured = self.record.captured
        wanted = list(range(self.window.start, self.window.end))
        if captured == wanted:
            return "complete", None
        if ending is not None:
            return "partial", ending
        if self.record.interrupted:
            return "partial", f"iteration {self.record.interrupted[0]} was interrupted"
        if self.plan.trigger.request is not None:
            return "partial", f"this rank was in iteration {captured[0]} when it heard of the window {self.window}"
        if self._skipped:
            return "partial", f"the training skipped iteration {self.window.start}"
        return "partial", f"the run's first iteration was {captured[0]}, inside the window {self.window}"

    def ended(self, ending: str) -> None:
        """The training has ended: close what is open.

        Args:
            ending: how, and after which iteration.
        """
        where = "inside" if self.state == "capturing" else "before"
        self.close(f"{ending}, {where} the window {self.window}")

    def settle(self) -> None:
        """Wait until everything is written, and write the manifest for the last time."""
        if self._writer is not None:
            self._writer.join()
        self.write_manifest()

    def give_up(self) -> None:
        """Leave nothing of a window that the run began after, where a later one will be captured in its place."""
        self.state, self._finished = "closed", True
        self.profilers.close()
        give_up_attempt(self.files.manifest)

    def release(self) -> None:
        """Let go of what was recorded, once it is written: the next window's recording needs the memory."""
        if not self._released and self.state == "closed" and (self._writer is None or not self._writer.is_alive()):
            self._released = True
            self.profilers.release()

    def fail(self, reason: str) -> None:
        """Profiling itself went wrong: mark everything failed, and say so."""
        if self._finished or self._writer is not None:
            return
        self.state, self._finished = "closed", True
        self.record.reason = None
        self.profilers.fail(reason)
        self.write_manifest()

    def write_manifest(self) -> None:
        """Write the manifest; one that cannot be written is logged."""
        self.record.other_windows = [[one.start, one.end] for one in self._rank.windows() if one != self.window]
        durations = list(self._rank.durations())
        kept = {iteration for iteration, _ in durations}
        try:
            self.record.write([*(taken for taken in self._durations if taken[0] not in kept), *durations])
        except OSError as error:
            logger.error("rank %d: the manifest could not be written: %s. Training goes on.", self._rank.number, error)
