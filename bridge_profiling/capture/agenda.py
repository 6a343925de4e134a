"""Which windows of a rank are still to come, and which one is being captured: never two at a time.

Windows come from the config when the hook opens, and from requests while the training runs. Those of requests are posted
by another thread; everything else here happens in the training's.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from bridge_profiling.capture.signals import signals_held
from bridge_profiling.capture.window_capture import NEVER, WindowCapture, WindowPlan
from bridge_profiling.config import ProfilingConfig
from bridge_profiling.errors import one_line
from bridge_profiling.manifest import Trigger

logger = logging.getLogger(__name__)


class Agenda:
    """The windows of one rank.

    Args:
        build: makes the capture of a planned window; may raise OSError.
    """

    def __init__(self, build: Callable[[WindowPlan], WindowCapture]) -> None:
        self._build = build
        #: Captures that are not closed: the one at work first, then by their windows.
        self._live: list[WindowCapture] = []
        #: Later windows of the config, made only when it is their turn.
        self._plans: deque[WindowPlan] = deque()
        self._posted: deque[WindowCapture] = deque()
        self.closed: list[WindowCapture] = []

    # -- what is to come -----------------------------------------------------------------------------------------------

    def add(self, capture: WindowCapture) -> None:
        """A capture whose profilers may be prepared now."""
        for earlier in self.closed:
            earlier.release()
        capture.open()
        self._live.append(capture)
        self._tidy()

    def plan(self, plans: Iterable[WindowPlan]) -> None:
        """Windows for which nothing is to be done until the iteration before them."""
        self._plans.extend(plans)

    def post(self, capture: WindowCapture) -> None:
        """A capture from another thread; the training's next iteration takes it up."""
        self._posted.append(capture)

    @property
    def posted(self) -> bool:
        """Whether something waits to be taken up."""
        return bool(self._posted)

    @property
    def captures(self) -> list[WindowCapture]:
        """All of them, in the order of their ends."""
        return [*self.closed, *self._live]

    @property
    def capturing(self) -> WindowCapture | None:
        """The one that records now."""
        return self._live[0] if self._live and self._live[0].state == "capturing" else None

    @property
    def edge(self) -> int:
        """The first iteration for which there is something to do."""
        planned = max(self._plans[0].window.start - 1, 0) if self._plans else NEVER
        return min(self._live[0].edge if self._live else NEVER, planned)

    @property
    def over(self) -> bool:
        """Whether nothing is left to capture."""
        return not (self._live or self._plans or self._posted)

    # -- what happens --------------------------------------------------------------------------------------------------

    def advance(self, iteration: int) -> None:
        """Do what `iteration` calls for before it runs."""
        capture = self.capturing
        if capture is not None and iteration in capture.window and not self._plan_due(iteration) and not self._posted:
            return
        # A handler that raises where a profiler starts would leave it half started.
        with signals_held():
            self._advance(iteration)

    def _advance(self, iteration: int) -> None:
        while self._posted:
            self.add(self._posted.popleft())
        self._take_up_plans(iteration)
        while self._live:
            first = self._live[0]
            later = self._plans or len(self._live) > 1
            if first.plan.trigger.kind == "repeat" and first.state == "waiting" and iteration >= first.window.end and later:
                # A resume past it; the next one comes in its place.
                first.give_up()
                self._live.remove(first)
                continue
            first.advance(iteration)
            self._tidy()
            if self._live[:1] == [first]:
                break

    def _plan_due(self, iteration: int) -> bool:
        """Whether the next plan is to be taken up: in the iteration before its window."""
        return bool(self._plans) and iteration >= self._plans[0].window.start - 1

    def _take_up_plans(self, iteration: int) -> None:
        while self._plan_due(iteration):
            plan = self._plans.popleft()
            if iteration >= plan.window.end and self._plans:
                continue
            try:
                self.add(self._build(plan))
            except OSError as error:
                logger.error("window %s will not be captured: %s. Training goes on.", plan.window, one_line(error))

    def iteration_ended(self, iteration: int, error: BaseException | None) -> None:
        """An iteration has ended in which a window was open."""
        capture = self.capturing
        if capture is not None:
            capture.iteration_ended(iteration, error)
            self._tidy()

    def _tidy(self) -> None:
        self.closed += [capture for capture in self._live if capture.state == "closed"]
        still = [capture for capture in self._live if capture.state != "closed"]
        # What a profiler has been prepared for goes first: there can be no second one beside it.
        self._live = sorted(still, key=lambda capture: (capture.state == "waiting", capture.window.start))

    def ended(self, ending: str) -> None:
        """The training has ended."""
        while self._posted:
            self._live.append(self._posted.popleft())
        for capture in self._live:
            capture.ended(ending)
        self._tidy()

    def fail(self, reason: str) -> None:
        """Profiling itself went wrong: nothing more is captured."""
        self._plans.clear()
        while self._posted:
            self._live.append(self._posted.popleft())
        for capture in self.captures:
            capture.fail(reason)
        self._tidy()

    def leave(self) -> None:
        """Wait until everything is written; the process may exit next."""
        done: set[str] = set()
        for capture in self.captures:
            capture.settle()
        for capture in reversed(self.captures):
            done = capture.profilers.leave(done)


def planned_windows(config: ProfilingConfig, attempt: int | None, train_iters: int | None) -> list[WindowPlan]:
    """The windows that a config asks for; of repeated ones, those that the training is known to reach.

    Args:
        config: what is asked.
        attempt: the folder's number of the first.
        train_iters: iterations the training runs, when known.
    """
    windows = config.windows
    if train_iters is not None:
        windows = windows[:1] + [window for window in windows[1:] if window.end <= train_iters]
    if config.profile_every is None:
        return [WindowPlan(config, Trigger(), attempt)]
    return [
        WindowPlan(
            replace(config, profile_step_start=window.start, profile_step_end=window.end),
            Trigger(
                kind="repeat",
                reason=f"one every {config.profile_every} iterations, number {number} of at most {len(windows)}",
                number=number,
            ),
            attempt if number == 1 else None,
        )
        for number, window in enumerate(windows, 1)
    ]
