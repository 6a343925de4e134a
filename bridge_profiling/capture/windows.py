"""The windows of one rank: those to come, the one at work, and those that are over.

At most one window records at a time. Windows come from the config when the hook opens, and from requests while the training
runs. Those of requests are posted by another thread; everything else here happens in the training's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from bridge_profiling.capture.files import CaptureFiles, claim_attempt
from bridge_profiling.capture.loop import NEVER, Inbox
from bridge_profiling.capture.profiler import Profiler, for_each, guarded
from bridge_profiling.capture.window import Capture, Phase, Plan, RankInfo
from bridge_profiling.manifest import Trigger
from bridge_profiling.settings.profiling import ProfilingConfig

_Message = TypeVar("_Message")


class Windows:
    """The windows of one rank.

    Args:
        rank: the rank.
        inbox: what other threads leave for the loop.
    """

    def __init__(self, rank: RankInfo, inbox: Inbox) -> None:
        self._rank, self._inbox = rank, inbox
        self._root, self._holder = Path(), ""
        #: Those that are not over: the one at work first, then by their iterations.
        self._live: list[Capture] = []
        self._over: list[Capture] = []
        #: Windows of the config that are made when their profilers have to prepare.
        self._plans: deque[Plan] = deque()
        #: The last iterations with a checkpoint or an evaluation.
        self.long_iterations: deque[int] = deque(maxlen=100)

    # -- from any thread -----------------------------------------------------------------------------------------------

    @property
    def all(self) -> list[Capture]:
        """All captures made so far, those that are over first, in the order of their ends."""
        return [*self._over, *self._live]

    @property
    def records_memory(self) -> bool:
        """Whether a memory history is being recorded."""
        return any(one.plan.config.record_memory_history and one.phase < Phase.WRITING for one in self.all)

    @property
    def needs_loop(self) -> bool:
        """Whether only the loop's thread can end one of them."""
        return any(one.needs_loop for one in self.all)

    def disturbed(self, oldest: int) -> list[range]:
        """Iterations from this one on that paid for a profiler, a checkpoint or an evaluation."""
        profiled = [range(one.plan.first_edge, one.window.end + 1) for one in self.all if one.window.end >= oldest]
        return profiled + [range(one, one + 1) for one in self.long_iterations.copy() if one >= oldest]

    def post(self, plan: Plan) -> None:
        """Capture a window that is still to come; raises OSError if its manifest cannot be written."""
        self._inbox.posted.append(self._capture(plan))
        self._inbox.wake()

    def withdraw(self, request: str) -> None:
        """Drop the window of a request unless it has begun."""
        self._inbox.withdrawn.append(request)
        self._inbox.wake()

    def _capture(self, plan: Plan) -> Capture:
        rank, window, attempt = self._rank.number, plan.window, plan.attempt
        if attempt is None:
            attempt = claim_attempt(self._root, window, rank, self._holder)
        return Capture(plan, CaptureFiles(self._root, window, attempt, rank, plan.config.memory_snapshot_path), self._rank)

    # -- in the training's thread --------------------------------------------------------------------------------------

    def open(self, root: Path, holder: str, plans: Sequence[Plan]) -> None:
        """Make the first capture and prepare its profilers; the others need nothing until the iteration before them.

        Raises OSError if its manifest cannot be written.

        Args:
            root: where to write.
            holder: the name under which this run holds its folders.
            plans: the windows of the config.
        """
        self._root, self._holder = root, holder
        if plans:
            self._add(self._capture(plans[0]))
            self._plans.extend(plans[1:])

    @property
    def recording(self) -> Capture | None:
        """The capture that records now."""
        return next((one for one in self._live[:1] if one.phase is Phase.RECORDING), None)

    def records(self, iteration: int) -> bool:
        """Whether a window records this iteration, and nothing else is to be done."""
        recording, inbox = self.recording, self._inbox
        return recording is not None and iteration in recording.window and not (inbox.posted or inbox.withdrawn)

    @property
    def edge(self) -> int:
        """The first iteration that needs more than timing."""
        if self._inbox.posted or self._inbox.withdrawn or self._unsettled():
            return 0
        return min(self._live[0].edge if self._live else NEVER, self._plans[0].first_edge if self._plans else NEVER)

    def advance(self, iteration: int) -> None:
        """Bring the windows to an iteration. Signals are held."""
        self._clean_up()
        for posted in _drained(self._inbox.posted):
            self._add(posted)
        self._drop_withdrawn()
        while self._plan_is_due(iteration):
            plan = self._plans.popleft()
            if iteration < plan.window.end or not self._plans:
                with guarded(f"window {plan.window} will not be captured", self._rank.number):
                    self._add(self._capture(plan))
                break
        # A second one only where that ends the first.
        while self._live and self._live[0].edge <= iteration:
            first, before = self._live[0], self._live[0].phase
            is_past = before is Phase.WAITING and iteration >= first.window.end
            if is_past and first.plan.trigger.kind == "repeat" and (self._plans or len(self._live) > 1):
                self._drop(first)  # the run resumed after it
            else:
                first.advance(iteration)
                self._sort()
            if first.phase is before:
                break

    def iteration_ended(self, iteration: int, error: BaseException | None) -> None:
        """Note an iteration of the window that records, and end the window after its last one."""
        if (recording := self.recording) is not None:
            try:
                recording.iteration_ended(iteration, error)
            finally:
                self._sort()

    def end(self, ending: str) -> None:
        """End every capture with the training, and wait until everything is written."""
        self._live += _drained(self._inbox.posted)
        self._drop_withdrawn()
        for one in self._live:
            where = "inside" if one.phase is Phase.RECORDING else "before"
            one.end(f"{ending}, {where} the window {one.window}")
        self._sort()
        self._clean_up()
        for one in self.all:
            one.settle()
        last_of_a_kind = {profiler.name: profiler for one in self.all for profiler in one.profilers}
        for_each(last_of_a_kind.values(), Profiler.leave)

    def fail(self, reason: str) -> None:
        """Capture nothing more after an error in profiling itself."""
        self._plans.clear()
        self._live += _drained(self._inbox.posted)
        for one in self.all:
            one.fail(reason)
        self._sort()

    def _plan_is_due(self, iteration: int) -> bool:
        # Not inside another window: its memory history, as it ends, would end the next one's too.
        return bool(self._plans) and iteration >= self._plans[0].first_edge and self.recording is None

    def _add(self, capture: Capture) -> None:
        for earlier in self._over:
            earlier.release()
        capture.open()
        self._live.append(capture)
        self._sort()

    def _drop(self, capture: Capture) -> None:
        capture.give_up()
        self._live.remove(capture)

    def _drop_withdrawn(self) -> None:
        for request in _drained(self._inbox.withdrawn):
            for one in [one for one in self._live if one.phase is Phase.WAITING and one.plan.trigger.request == request]:
                self._drop(one)

    def _unsettled(self) -> list[Profiler]:
        """Profilers that have left something in another thread."""
        return [profiler for one in self._over for profiler in one.profilers if profiler.is_unsettled]

    def _clean_up(self) -> None:
        """Have this thread remove what profilers left in it."""
        for_each(self._unsettled(), Profiler.clean_up)

    def _sort(self) -> None:
        self._over += [one for one in self._live if one.phase >= Phase.WRITING]
        live = [one for one in self._live if one.phase < Phase.WRITING]
        # First the one whose profiler is armed: a second one cannot be armed at the same time.
        self._live = sorted(live, key=lambda one: (one.phase is Phase.WAITING, one.window.start))


def _drained(messages: deque[_Message]) -> Iterator[_Message]:
    while messages:
        yield messages.popleft()


def planned(config: ProfilingConfig, attempt: int | None, train_iters: int | None) -> list[Plan]:
    """The windows that a config asks for; of repeated ones, those that the training is known to reach."""
    if config.profile_every is None:
        return [Plan(config, Trigger(), attempt)]
    return [
        Plan(
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
