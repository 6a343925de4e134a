"""The windows of one rank: the schedule of those to come, and the capture of each one from its plan to its manifest.

At most one window records at a time. Windows come from the config when the hook opens, and from requests while the training
runs. Those of requests are posted by another thread; everything else here happens in the training's thread.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import pairwise
from threading import Thread

from bridge_profiling.capture.files import CaptureFiles, give_up_attempt
from bridge_profiling.capture.garbage import GarbageCollections
from bridge_profiling.capture.loop import Inbox
from bridge_profiling.capture.manifest_file import ManifestFile
from bridge_profiling.capture.nsys_profiler import NsysProfiler
from bridge_profiling.capture.profiler import Profiler, for_each, guarded, synchronize_device
from bridge_profiling.capture.record import CaptureRecord, Rank, WindowPlan
from bridge_profiling.capture.signals import signals_held
from bridge_profiling.capture.torch_profiler import MemoryProfiler, TorchProfiler
from bridge_profiling.config import ProfilingConfig, Window
from bridge_profiling.errors import TrainingLogger
from bridge_profiling.launch_env import LaunchEnv
from bridge_profiling.manifest import Status, Trigger

logger = TrainingLogger(__name__)

#: Later than every iteration: there is nothing more to do.
NEVER = sys.maxsize

#: A profiler, and the function that writes the rest of its capture.
_Unwritten = tuple[Profiler, Callable[[], None]]


class CaptureWindow:
    """The capture of one window: its profilers, its files and its manifest.

    Its state is `waiting`, then `armed` (a profiler warms up), `capturing` and `closed`. Creating one writes its manifest and
    touches no profiler, so another thread than the training's may create it.
    """

    def __init__(self, plan: WindowPlan, files: CaptureFiles, rank: Rank) -> None:
        self.plan, self.window, self.files, self._rank = plan, plan.config.window, files, rank
        self.state = "waiting"
        self.profilers = _profilers(plan.config, files, rank)
        self.record = CaptureRecord(plan, files, rank, self.profilers)
        self.record.reason = f"the process ended before it reached iteration {self.window.start}"
        self._manifest = ManifestFile(files.manifest)
        self._manifest.create(self.record.build())
        self._writer: Thread | None = None
        self._garbage = GarbageCollections(self._enter_ranges)
        self._finished = False
        self._before: int | None = None  # the iteration that began last before the window

    @property
    def active(self) -> list[Profiler]:
        """The profilers that have neither failed nor finished."""
        return [profiler for profiler in self.profilers if profiler.active]

    @property
    def edge(self) -> int:
        """The first iteration that needs more than timing: one before the window, when a profiler warms up in it.

        While the window records, every one does, those before it included: the training may go back.
        """
        if self.state == "capturing":
            return 0
        if self.state == "waiting" and any(profiler.needs_warm_up for profiler in self.active):
            return max(self.window.start - self.plan.config.warm_up, 0)
        return self.window.start

    def is_due(self, iteration: int) -> bool:
        """Whether `advance` changes the state before `iteration` runs."""
        if self.state == "closed":
            return False
        return iteration not in self.window if self.state == "capturing" else iteration >= self.edge

    # -- in the training's thread, signals held ------------------------------------------------------------------------

    def open(self) -> None:
        """Prepare the profilers; memory history records from here on."""
        for_each(self.active, "open", lambda profiler: profiler.open())
        if not self.active:
            self.close(None)

    def advance(self, iteration: int) -> None:
        """Bring a window that is due to the state for `iteration`: warm up, start recording, or close."""
        if self.state == "capturing":
            self.close(f"iteration {iteration} came before the window {self.window} was complete")
            return
        before = self._rank.iteration()
        if iteration >= self.window.end:
            jumped = f"the training went from iteration {before} to {iteration}"
            started = f"training started at iteration {iteration}"
            self.close(f"{started if before is None else jumped}, past the window {self.window}")
            return
        if self.state == "waiting":
            self.state = "armed"
            for_each(self.active, "warm up", lambda profiler: profiler.warm_up())
        if iteration not in self.window:
            return
        # Before anything records: writing must not be in the capture, and starting may kill the process.
        for profiler in self.active:
            profiler.status = "failed"
        self._write_manifest("the process died inside the window, before the capture was written")
        synchronize_device(self._rank.number)
        for profiler in self.active:
            with profiler.guarded("start"):
                profiler.start()
        if not self.active:
            self.close(None)
            return
        self.state, self._before = "capturing", before
        self.record.garbage_collection = self._garbage.__enter__().totals
        logger.info(
            "rank %d: capturing iterations %d to %d with %s",
            self._rank.number, iteration, self.window.last, " and ".join(profiler.name for profiler in self.active),
        )  # fmt: skip

    def iteration_ended(self, iteration: int, error: BaseException | None) -> None:
        """Note an iteration that ran while this window records, and close the window after its last one."""
        (self.record.interrupted if error is not None else self.record.captured).append(iteration)
        if error is None and iteration == self.window.last:
            self.close(None)
        self._garbage.raise_lost()

    def _enter_ranges(self, name: str) -> ExitStack:
        stack = ExitStack()
        for profiler in self.active:
            if (one := profiler.phase_range(name)) is not None:
                stack.enter_context(one)
        return stack

    # -- the end of the window -----------------------------------------------------------------------------------------

    def close(self, ending: str | None) -> None:
        """Stop recording and write, in a thread if training need not wait; `ending` is why the window ends early, or None."""
        state, self.state = self.state, "closed"
        if state == "closed":
            return
        status: Status = "missed"
        reason = ending
        unwritten: list[_Unwritten] = []
        with signals_held():
            self._garbage.__exit__()
            if state == "capturing":
                status, reason = self._completeness(ending)
                self.record.durations = [one for one in self._rank.durations() if one[0] in self.window]
                interrupted = [iteration for iteration in self.record.interrupted if iteration not in self.record.captured]
                synchronize_device(self._rank.number)
                for profiler in self.active:
                    with profiler.guarded("stop"):
                        rest = profiler.stop(interrupted)
                        unwritten += [(profiler, rest)] if rest is not None else []
            self._close_profilers()
            if unwritten:
                # Not a daemon: an interpreter that exits waits for it.
                writer = Thread(target=self._finish, args=(status, reason, unwritten), name="bridge_profiling writer")
                # From Python 3.12 on an exiting interpreter starts no threads; nor does a process at its limit of them.
                with suppress(RuntimeError):
                    writer.start()
                    self._writer = writer
            if self._writer is None:
                self._finish(status, reason, unwritten)

    def _close_profilers(self) -> None:
        for_each(self.profilers, "close", lambda profiler: profiler.close())

    def _finish(self, status: Status, reason: str | None, unwritten: list[_Unwritten]) -> None:
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
        self._finished = self.record.final = True
        self._write_manifest(None)
        self._manifest.release()
        for profiler in self.profilers:
            profiler.log_outcome(self.record.captured)

    def _completeness(self, ending: str | None) -> tuple[Status, str | None]:
        captured, length = self.record.captured, self.window.end - self.window.start
        # In order from the first to the last; a list of a window's iterations may not fit into memory.
        in_order = len(captured) == length and all(one == self.window.start + place for place, one in enumerate(captured))
        if in_order:
            return "complete", None
        if ending is not None:
            return "partial", ending
        if self.record.interrupted:
            return "partial", f"iteration {self.record.interrupted[0]} was interrupted"
        for one, following in pairwise(captured):
            if following <= one:
                return "partial", f"the training went back from iteration {one} to {following}"
            if following > one + 1:
                return "partial", _skipped(one + 1, following - 1)
        if self._before is not None and self._before < captured[0] - 1:
            return "partial", _skipped(self._before + 1, captured[0] - 1)
        if self.plan.trigger.request is not None:
            return "partial", f"this rank received the request for the window {self.window} in iteration {captured[0]}"
        return "partial", f"the run's first iteration was {captured[0]}, inside the window {self.window}"

    def fail(self, reason: str) -> None:
        """Mark everything failed after an error in profiling itself, unless it is written or being written."""
        if self._finished or self._writer is not None:
            return
        self.state, self._finished, self.record.final = "closed", True, True
        self._garbage.__exit__()
        for profiler in self.profilers:
            profiler.fail(reason)
        self._close_profilers()
        self._write_manifest(None)
        self._manifest.release()

    def give_up(self) -> None:
        """Remove a window that will not be captured: a repeated one that the run resumed after, or one that is withdrawn."""
        self.state = "closed"
        self._close_profilers()
        self._manifest.release()
        give_up_attempt(self.files.manifest)

    def forked(self) -> None:
        """Leave everything to the parent, in a child process that the training has forked."""
        self.state = "closed"
        self._garbage.__exit__()
        for profiler in self.profilers:
            profiler.forked()

    def release(self) -> None:
        """Free the memory of what is written: the next window's recording needs it."""
        if self._writer is None or not self._writer.is_alive():
            for_each(self.profilers, "release", lambda profiler: profiler.release())

    def settle(self) -> None:
        """Wait until everything is written, and write the manifest for the last time."""
        if self._writer is not None:
            self._writer.join()
        self._write_manifest(self.record.reason)

    def _write_manifest(self, reason: str | None) -> None:
        """Write the manifest with the reason why the whole capture is not `complete`; log it when that fails."""
        self.record.reason = reason
        with guarded("the manifest could not be written", self._rank.number):
            self._manifest.write(self.record.build())


class WindowSchedule:
    """The windows of one rank that are still to come, and those that are closed.

    `build` creates the capture of a planned window and may raise OSError.
    """

    def __init__(self, rank: int, build: Callable[[WindowPlan], CaptureWindow], inbox: Inbox) -> None:
        self._rank, self._build, self._inbox = rank, build, inbox
        #: Windows that are not closed: the one at work first, then by their iterations.
        self._live: list[CaptureWindow] = []
        self._closed: list[CaptureWindow] = []
        #: Profilers of closed windows that have left something in another thread.
        self._unsettled: list[Profiler] = []
        #: Windows of the config that are built when their profilers have to prepare.
        self._plans: deque[WindowPlan] = deque()
        #: The last iterations with a checkpoint or an evaluation.
        self.long_iterations: deque[int] = deque(maxlen=100)

    def plan(self, plans: Iterable[WindowPlan]) -> None:
        """Build the first window and prepare its profilers; the others need nothing until the iteration before them."""
        first, *later = plans
        self._add(self._build(first))
        self._plans.extend(later)

    @property
    def windows(self) -> list[CaptureWindow]:
        """All windows built so far, the closed ones first, in the order of their ends."""
        return [*self._closed, *self._live]

    @property
    def capturing(self) -> CaptureWindow | None:
        """The window that records now."""
        return next((window for window in self._live[:1] if window.state == "capturing"), None)

    def recorded(self) -> list[Window]:
        """The iterations of the windows that record or have recorded."""
        return [one.window for one in self.windows if one.state == "capturing" or one.record.captured]

    @property
    def records_memory(self) -> bool:
        """Whether a memory history is being recorded."""
        return any(one.plan.config.record_memory_history and one.state != "closed" for one in self.windows)

    def is_disturbed(self, iteration: int) -> bool:
        """Whether an iteration paid for a profiler, a checkpoint or an evaluation."""
        profiled = any(one.window.start - one.plan.config.warm_up <= iteration <= one.window.end for one in self.windows)
        return profiled or iteration in self.long_iterations

    def post(self, plan: WindowPlan) -> None:
        """Capture a window that is still to come, from any thread; raises OSError if its manifest cannot be written."""
        self._inbox.posted.append(self._build(plan))
        self._inbox.wake()

    def withdraw(self, request: str) -> None:
        """Drop the window of a request unless it has begun, from any thread."""
        self._inbox.withdrawn.append(request)
        self._inbox.wake()

    def next_edge(self) -> int:
        """The first iteration that needs more than timing, now that windows may have closed."""
        self._sort()
        if self._unsettled:
            return 0
        planned = _first_edge(self._plans[0]) if self._plans else NEVER
        return min(self._live[0].edge if self._live else NEVER, planned)

    def is_due(self, iteration: int) -> bool:
        """Whether `due` has work before `iteration` runs."""
        return (
            bool(self._inbox.posted or self._inbox.withdrawn)
            or bool(self._unsettled)
            or self._plan_is_due(iteration)
            or any(window.is_due(iteration) for window in self._live[:1])
        )

    def due(self, iteration: int) -> Iterator[CaptureWindow]:
        """Yield each window that the caller has to advance to `iteration`: a second one only where that closed the first."""
        self._clean_up()
        while self._inbox.posted:
            self._add(self._inbox.posted.popleft())
        self._drop_withdrawn()
        while self._plan_is_due(iteration):
            plan = self._plans.popleft()
            if iteration < plan.config.window.end or not self._plans:
                with guarded(f"window {plan.config.window} will not be captured", self._rank):
                    self._add(self._build(plan))
                break
        while self._live and self._live[0].is_due(iteration):
            first = self._live[0]
            later = self._plans or len(self._live) > 1
            if first.plan.trigger.kind == "repeat" and first.state == "waiting" and iteration >= first.window.end and later:
                # The run resumed after it.
                first.give_up()
                self._live.remove(first)
                continue
            yield first
            self._sort()

    def _plan_is_due(self, iteration: int) -> bool:
        # Not inside another window: its memory history, as it ends, would end the next one's too.
        return bool(self._plans) and iteration >= _first_edge(self._plans[0]) and self.capturing is None

    def _add(self, window: CaptureWindow) -> None:
        for earlier in self._closed:
            earlier.release()
        window.open()
        self._live.append(window)
        self._sort()

    def _clean_up(self) -> None:
        """Have this thread remove what profilers left in it."""
        for_each(self._unsettled, "clean up", lambda profiler: profiler.clean_up())
        self._unsettled = [profiler for profiler in self._unsettled if profiler.is_unsettled]

    def _drop_withdrawn(self) -> None:
        while self._inbox.withdrawn:
            request = self._inbox.withdrawn.popleft()
            for window in [one for one in self._live if one.state == "waiting" and one.plan.trigger.request == request]:
                window.give_up()
                self._live.remove(window)

    def _sort(self) -> None:
        closed = [window for window in self._live if window.state == "closed"]
        self._closed += closed
        self._unsettled += [profiler for window in closed for profiler in window.profilers if profiler.is_unsettled]
        live = [window for window in self._live if window.state != "closed"]
        # First the window whose profiler is armed: a second one cannot be armed at the same time.
        self._live = sorted(live, key=lambda window: (window.state == "waiting", window.window.start))

    def ended(self, ending: str) -> None:
        """Close every window at the end of the training, and wait until everything is written."""
        while self._inbox.posted:
            self._live.append(self._inbox.posted.popleft())
        self._drop_withdrawn()
        for window in self._live:
            where = "inside" if window.state == "capturing" else "before"
            window.close(f"{ending}, {where} the window {window.window}")
        self._sort()
        self._clean_up()
        for window in self.windows:
            window.settle()
        last_of_a_kind = {profiler.name: profiler for window in self.windows for profiler in window.profilers}
        for_each(last_of_a_kind.values(), "leave", lambda profiler: profiler.leave())

    def fail(self, reason: str) -> None:
        """Capture nothing more after an error in profiling itself."""
        self._plans.clear()
        while self._inbox.posted:
            self._live.append(self._inbox.posted.popleft())
        for window in self.windows:
            window.fail(reason)
        self._sort()


def _first_edge(plan: WindowPlan) -> int:
    """The first iteration in which a profiler of this window prepares."""
    return plan.config.window.start - plan.config.warm_up


def planned_windows(config: ProfilingConfig, attempt: int | None, train_iters: int | None) -> list[WindowPlan]:
    """The windows that a config asks for; of repeated ones, those that the training is known to reach."""
    if config.profile_every is None:
        return [WindowPlan(config, Trigger(), attempt)]
    return [
        WindowPlan(
            replace(config, profile_step_start=window.start, profile_step_end=window.end),
            Trigger(
                kind="repeat",
                reason=f"one every {config.profile_every} iterations, number {number} of at most {config.profile_at_most}",
                number=number,
            ),
            attempt if number == 1 else None,
        )
        for number, window in enumerate(config.windows, 1)
        if number == 1 or train_iters is None or window.end <= train_iters
    ]


def _skipped(first: int, last: int) -> str:
    return f"the training skipped iteration{f' {first}' if first == last else f's {first} to {last}'}"


def _profilers(config: ProfilingConfig, files: CaptureFiles, rank: Rank) -> list[Profiler]:
    metadata: dict[str, object] = {
        "rank": rank.number,
        "window": [files.window.start, files.window.end],
        "attempt": files.attempt,
        "job": LaunchEnv.read().job_id,
        "coordinates": rank.layout.coordinates(rank.number),
    }
    wanted: list[tuple[bool, type[Profiler]]] = [
        (config.record_memory_history, MemoryProfiler),
        (config.use_nsys_profiler, NsysProfiler),
        (config.use_pytorch_profiler, TorchProfiler),
    ]
    ranks = config.profile_ranks
    is_first = rank.number == (min(ranks) if isinstance(ranks, list) else 0)
    return [profiler(config, files, metadata, announces=is_first) for asked, profiler in wanted if asked]
