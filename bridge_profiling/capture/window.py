"""The capture of one window on one rank, from its plan to its manifest."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from enum import IntEnum
from itertools import pairwise
from threading import Thread

from bridge_profiling import manifest
from bridge_profiling.capture.describe import Plan, RankInfo, describe
from bridge_profiling.capture.files import CaptureFiles, give_up_attempt
from bridge_profiling.capture.garbage import GarbageCollections
from bridge_profiling.capture.loop import NEVER
from bridge_profiling.capture.manifest_file import ManifestFile
from bridge_profiling.capture.memory_history import MemoryHistory
from bridge_profiling.capture.nsys_profiler import NsysProfiler
from bridge_profiling.capture.profiler import Outcome, Profiler, for_each, guarded, synchronize_device
from bridge_profiling.capture.signals import signals_held
from bridge_profiling.capture.torch_profiler import TorchProfiler
from bridge_profiling.capture.work import describe_work, throughput
from bridge_profiling.common.errors import TrainingLogger
from bridge_profiling.common.launch_env import LaunchEnv
from bridge_profiling.common.redaction import redact_urls
from bridge_profiling.manifest import Manifest, Status
from bridge_profiling.settings.profiling import ProfilingConfig

logger = TrainingLogger(__name__)

#: A profiler, and the function that writes the rest of its capture.
_Unwritten = tuple[Profiler, Callable[[], None]]


class Phase(IntEnum):
    """Where a capture is. It only goes forwards."""

    WAITING = 0
    ARMED = 1  # a profiler warms up
    RECORDING = 2
    WRITING = 3
    DONE = 4


class Capture:
    """One window on one rank: its profilers, its files and its manifest.

    Creating one writes its manifest and touches no profiler, so another thread than the training's may create it.
    """

    def __init__(self, plan: Plan, files: CaptureFiles, rank: RankInfo) -> None:
        self.plan, self.window, self.files, self._rank = plan, plan.window, files, rank
        self.phase = Phase.WAITING
        self.profilers = _profilers(plan.config, files, rank)
        self.iterations: list[int] = []
        self.interrupted: list[int] = []
        #: Those of the window: in a long run the log keeps only those of later iterations.
        self._durations: list[tuple[int, int]] = []
        self._garbage = GarbageCollections(self._enter_ranges)
        self._before: int | None = None  # the iteration that began last before the window
        self._writer: Thread | None = None
        self._reason: str | None = f"the process ended before it reached iteration {self.window.start}"
        self._manifest = ManifestFile(files.manifest)
        self._manifest.create(self._describe())

    @property
    def active(self) -> list[Profiler]:
        """The profilers that have neither failed nor finished."""
        return [profiler for profiler in self.profilers if profiler.outcome is None]

    @property
    def needs_loop(self) -> bool:
        """Whether only the loop's thread can end it: torch's recording, or its export."""
        return Phase.ARMED <= self.phase <= Phase.WRITING and self._writer is None

    @property
    def edge(self) -> int:
        """The first iteration that needs more than timing.

        While the window records, every one does, those before it included: the training may go back.
        """
        warms_up = self.plan.first_edge if self.plan.config.use_pytorch_profiler else self.window.start
        edges = {Phase.WAITING: warms_up, Phase.ARMED: self.window.start, Phase.RECORDING: 0}
        return edges.get(self.phase, NEVER)

    # -- in the training's thread, signals held ------------------------------------------------------------------------

    def open(self) -> None:
        """Prepare the profilers; memory history records from here on."""
        for_each(self.active, Profiler.open)
        if not self.active:
            self.end(None)

    def advance(self, iteration: int) -> None:
        """Bring a capture whose edge is reached to the phase for `iteration`: warm up, start recording, or end."""
        if self.phase is Phase.RECORDING:
            if iteration not in self.window:
                self.end(f"iteration {iteration} came before the window {self.window} was complete")
            return
        self._before = self._rank.log.running()
        if iteration >= self.window.end:
            jumped = f"the training went from iteration {self._before} to {iteration}"
            started = f"training started at iteration {iteration}"
            self.end(f"{started if self._before is None else jumped}, past the window {self.window}")
            return
        if self.phase is Phase.WAITING:
            self.phase = Phase.ARMED
            for_each(self.active, Profiler.warm_up)
        if iteration in self.window:
            self._start(iteration)

    def _start(self, iteration: int) -> None:
        self.phase = Phase.RECORDING
        # Before anything records: writing must not be in the capture, and starting may kill the process.
        self._write_manifest("the process died inside the window, before the capture was written")
        synchronize_device(self._rank.number)
        for_each(self.active, Profiler.start)
        if not self.active:
            self.end(None)
            return
        self._rank.recorded.append(self.window)
        self._garbage.__enter__()
        logger.info(
            "rank %d: capturing iterations %d to %d with %s",
            self._rank.number, iteration, self.window.last, " and ".join(profiler.name for profiler in self.active),
        )  # fmt: skip

    def iteration_ended(self, iteration: int, error: BaseException | None) -> None:
        """Note an iteration that ran while this window records, and end the window after its last one."""
        (self.interrupted if error is not None else self.iterations).append(iteration)
        if error is None and iteration == self.window.last:
            self.end(None)

    def ranges(self, of_profiler: Callable[[Profiler], AbstractContextManager | None]) -> list[AbstractContextManager]:
        """The profilers' ranges."""
        return [one for one in map(of_profiler, self.active) if one is not None]

    def _enter_ranges(self, name: str) -> ExitStack:
        stack = ExitStack()
        for one in self.ranges(lambda profiler: profiler.phase_range(name)):
            stack.enter_context(one)
        return stack

    # -- the end of the window -----------------------------------------------------------------------------------------

    def end(self, why: str | None) -> None:
        """Stop recording and write, in a thread if training need not wait; `why` is the reason if the window ends early."""
        with signals_held():
            if self.phase >= Phase.WRITING:
                return
            # First: meanwhile another thread that exits may close the hook.
            was_recording, self.phase = self.phase is Phase.RECORDING, Phase.WRITING
            status: Status = "missed"
            reason, unwritten = why, list[_Unwritten]()
            self._garbage.__exit__()
            if was_recording:
                status, reason = self._completeness(why)
                self._durations = [one for one in self._rank.log.durations() if one[0] in self.window]
                interrupted = [iteration for iteration in self.interrupted if iteration not in self.iterations]
                synchronize_device(self._rank.number)
                for profiler in self.active:
                    with profiler.guarded("stop"):
                        if (rest := profiler.stop(interrupted)) is not None:
                            unwritten.append((profiler, rest))
            for_each(self.profilers, Profiler.close)
            if unwritten:
                # Not a daemon, even if the loop's thread is one: an interpreter that exits waits for it.
                work = (status, reason, unwritten)
                writer = Thread(target=self._write, args=work, name="bridge_profiling writer", daemon=False)
                # From Python 3.12 on an exiting interpreter starts no threads; nor does a process at its limit of them.
                with suppress(RuntimeError):
                    writer.start()
                    self._writer = writer
            if self._writer is None:
                self._write(status, reason, unwritten)

    def _write(self, status: Status, reason: str | None, unwritten: list[_Unwritten]) -> None:
        """Write the rest, and say in the manifest only afterwards that it is there. May run in another thread."""
        unpacked = [profiler.unpacked for profiler, _ in unwritten if profiler.unpacked is not None]
        if unpacked:
            # True for a process that a launcher kills because it takes too long to end.
            where = " and ".join(str(path) for path in unpacked)
            self._write_manifest(f"the process died while it compressed its trace; the whole trace is in {where}")
        for profiler, write in unwritten:
            with profiler.guarded("write"):
                write()
        for profiler in self.active:
            profiler.finish(status, reason)
        self._write_last_manifest()
        for profiler in self.profilers:
            profiler.log_outcome(self.iterations)

    def _completeness(self, why: str | None) -> tuple[Status, str | None]:
        captured, length = self.iterations, self.window.end - self.window.start
        # In order from the first to the last; a list of a window's iterations may not fit into memory.
        in_order = len(captured) == length and all(one == self.window.start + place for place, one in enumerate(captured))
        if in_order:
            return "complete", None
        if why is not None:
            return "partial", why
        if self.interrupted:
            return "partial", f"iteration {self.interrupted[0]} was interrupted"
        for one, following in pairwise(captured):
            if following <= one:
                return "partial", f"the training went back from iteration {one} to {following}"
            if following > one + 1:
                return "partial", _skipped(one + 1, following - 1)
        if not captured:
            return "missed", None  # no profiler started
        if self._before is not None and self._before < captured[0] - 1:
            return "partial", _skipped(self._before + 1, captured[0] - 1)
        if self.plan.trigger.request is not None:
            return "partial", f"this rank received the request for the window {self.window} in iteration {captured[0]}"
        return "partial", f"the run's first iteration was {captured[0]}, inside the window {self.window}"

    def fail(self, reason: str) -> None:
        """Mark everything failed after an error in profiling itself, unless it is written or being written."""
        if self.phase is Phase.DONE or self._writer is not None:
            return
        self._garbage.__exit__()
        for profiler in self.profilers:
            profiler.fail(reason)
        for_each(self.profilers, Profiler.close)
        self._write_last_manifest()

    def give_up(self) -> None:
        """Remove a window that will not be captured: a repeated one that the run resumed after, or one that is withdrawn."""
        self.phase = Phase.DONE
        for_each(self.profilers, Profiler.close)
        self._manifest.release()
        give_up_attempt(self.files.manifest)

    def forked(self) -> None:
        """Leave everything to the parent, in a child process that the training has forked."""
        self.phase = Phase.DONE
        self._garbage.__exit__()
        for profiler in self.profilers:
            profiler.forked()

    def release(self) -> None:
        """Free the memory of what is written: the next window's recording needs it."""
        if self.phase is Phase.DONE:
            for_each(self.profilers, Profiler.release)

    def settle(self) -> None:
        """Wait until everything is written, and write the manifest for the last time."""
        if self._writer is not None:
            self._writer.join()
        self._write_manifest(self._reason)

    # -- the manifest ---------------------------------------------------------------------------------------------------

    def _write_last_manifest(self) -> None:
        self.phase = Phase.DONE
        self._write_manifest(None)
        self._manifest.release()

    def _write_manifest(self, reason: str | None) -> None:
        """Write the manifest with the reason why the whole capture is not `complete`; log it when that fails."""
        self._reason = reason
        with guarded("the manifest could not be written", self._rank.number):
            self._manifest.write(self._describe())

    def _describe(self) -> Manifest:
        """The manifest, true for this moment."""
        rank, described = self._rank, describe(self.plan, self.files, self._rank)
        for profiler in self.profilers:
            outcome = profiler.outcome or Outcome("missed" if self.phase < Phase.RECORDING else "failed")
            described.profilers.append(
                manifest.ProfilerRecord(
                    name=profiler.name,
                    status=outcome.status,
                    reason=outcome.reason and redact_urls(outcome.reason),
                    artifacts=manifest.list_artifacts([path for path in profiler.artifacts if path.exists()], self.files.root),
                    notes=profiler.notes,
                )
            )
        described.status = manifest.combined_status({record.status for record in described.profilers})
        reasons = [redact_urls(self._reason) if self._reason else None, *(record.reason for record in described.profilers)]
        described.reason = next(filter(None, reasons), None)
        described.final, described.interrupted = self.phase is Phase.DONE, self.interrupted
        described.garbage_collection = self._garbage.totals
        if self.iterations and described.status in ("complete", "partial"):
            first, last = self.iterations[0], self.iterations[-1]
            described.captured = manifest.Captured(first=first, last=last, iterations=self.iterations)
        recent = rank.log.durations()
        kept = {iteration for iteration, _ in recent}
        timed = [*(one for one in self._durations if one[0] not in kept), *recent]
        numbers, nanoseconds = [iteration for iteration, _ in timed], [duration for _, duration in timed]
        durations = described.durations_ns = manifest.Durations(iteration=numbers, duration_ns=nanoseconds)
        if rank.work is not None:
            described.work = describe_work(rank.work, self.plan.config.peak_tflops)
            peak = described.work.peak_tflops
            durations.model_tflops_per_gpu, durations.mfu = throughput(rank.work, peak, nanoseconds)
        return described


def _skipped(first: int, last: int) -> str:
    return f"the training skipped iteration{f' {first}' if first == last else f's {first} to {last}'}"


def _profilers(config: ProfilingConfig, files: CaptureFiles, rank: RankInfo) -> list[Profiler]:
    metadata: dict[str, object] = {
        "rank": rank.number,
        "window": [files.window.start, files.window.end],
        "attempt": files.attempt,
        "job": LaunchEnv.read().job_id,
        "coordinates": rank.layout.coordinates(rank.number),
    }
    wanted: list[tuple[bool, type[Profiler]]] = [
        (config.record_memory_history, MemoryHistory),
        (config.use_nsys_profiler, NsysProfiler),
        (config.use_pytorch_profiler, TorchProfiler),
    ]
    ranks = config.profile_ranks
    is_first = rank.number == (min(ranks) if isinstance(ranks, list) else 0)
    return [profiler(config, files, metadata, announces=is_first) for asked, profiler in wanted if asked]
