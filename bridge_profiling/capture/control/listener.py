"""One rank's part in captures on demand: a thread that looks for accepted captures and for slow iterations.

It polls the request directory about once a second, in a thread of its own, so that a file system that hangs does not delay
training. Rank 0's listener runs the coordinator. Ranks do not communicate otherwise.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from bridge_profiling.capture.control.coordinator import Coordinator
from bridge_profiling.capture.control.protocol import (
    PROFILERS,
    AcceptedCapture,
    CaptureRequest,
    JobStatus,
    RankAnswer,
    RequestDirectory,
)
from bridge_profiling.capture.nsys_profiler import check_armed
from bridge_profiling.capture.window import WindowPlan
from bridge_profiling.config import ProfilingConfig
from bridge_profiling.errors import CaptureError, one_line
from bridge_profiling.launch_env import LaunchEnv
from bridge_profiling.manifest import Trigger
from bridge_profiling.nsys.launch import runs_under_nsys
from bridge_profiling.slow_iterations import SlowThreshold, slow_threshold

logger = logging.getLogger(__name__)

#: Training that ends waits at most this long for a thread that may hang in a file system.
_STOP_SECONDS = 2.0

#: How many recent iterations the median covers, and the fewest it needs.
_MEDIAN_OF, _AT_LEAST = 50, 10

#: After a capture, this many iterations are not reported, so that the next median is of other iterations.
COOL_DOWN = 50


class Training(Protocol):
    """The hook, as the listener's thread uses it."""

    @property
    def running_iteration(self) -> int | None:
        """The iteration that began last; None before the first."""

    @property
    def durations(self) -> tuple[tuple[int, int], ...]:
        """`(iteration, nanoseconds)` of the last 1,000."""

    @property
    def records_memory(self) -> bool:
        """Whether a memory history is being recorded."""

    def is_disturbed(self, iteration: int) -> bool:
        """Whether a profiler, a checkpoint or an evaluation made this iteration longer."""

    def schedule(self, plan: WindowPlan) -> None:
        """Capture a window that has not begun."""


class SlowWatch:
    """Finds slow iterations of one rank.

    Args:
        factor: an iteration is slow above this many medians of recent iterations.
        is_disturbed: whether an iteration neither counts as slow nor for the median.
    """

    def __init__(self, factor: float, is_disturbed: Callable[[int], bool]) -> None:
        self._factor, self._is_disturbed = factor, is_disturbed
        self._threshold: SlowThreshold | None = None
        self._next = 0

    def check(self, durations: Sequence[tuple[int, int]]) -> str | None:
        """Compare iterations that ended since the last call with those before; describe the first slow one.

        Args:
            durations: `(iteration, nanoseconds)` of the last ones.
        """
        slow, threshold = None, self._threshold
        for iteration, duration in durations:
            if threshold is None or iteration < self._next or duration <= threshold.above or self._is_disturbed(iteration):
                continue
            slow = (
                f"iteration {iteration} took {duration / 1e6:.1f} ms, {duration / threshold.median:.1f} x the median"
                f" {threshold.median / 1e6:.1f} ms of the {threshold.count} iterations before it"
            )
            self.ignore_before(iteration + COOL_DOWN)
            break
        # The first iteration includes one-time work.
        typical = [duration for iteration, duration in durations[1:] if not self._is_disturbed(iteration)]
        self._threshold = slow_threshold(typical[-_MEDIAN_OF:], factor=self._factor, at_least=_AT_LEAST)
        if durations:
            self.ignore_before(durations[-1][0] + 1)
        return slow

    def ignore_before(self, iteration: int) -> None:
        """Do not report iterations before this one."""
        self._next = max(self._next, iteration)


class Listener:
    """One rank's thread.

    Args:
        requests: the job's request directory.
        config: the job's own.
        rank: global rank.
        training: the hook.
        coordinator: on rank 0, else None.
    """

    def __init__(
        self,
        requests: RequestDirectory,
        config: ProfilingConfig,
        rank: int,
        training: Training,
        coordinator: Coordinator | None,
    ) -> None:
        self._requests, self._config, self._rank = requests, config, rank
        self._training, self._coordinator = training, coordinator
        factor = config.slow_iteration_factor
        self._watch = None if factor is None else SlowWatch(factor, training.is_disturbed)
        self._slow_captures = 0
        #: The status when this rank began to listen; an earlier run may have left it.
        self._first_status: JobStatus | None = None
        self._received: str | None = None
        self._logged: set[type] = set()
        self._ending = "training ended"
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bridge_profiling listener", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, ending: str) -> None:
        """Stop the thread; rank 0 publishes how training ended."""
        self._ending = ending
        self._stopping.set()
        self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        with self._guard():
            if self._coordinator is not None:
                self._coordinator.begin()
            else:
                self._first_status = self._requests.status()
        while True:
            with self._guard():
                self._poll()
            if self._stopping.wait(self._config.on_demand_seconds):
                break
        with self._guard():
            if self._coordinator is not None:
                self._coordinator.end(self._ending)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # Once per type: a missing directory, for example, fails at every poll.
            if type(error) not in self._logged:
                self._logged.add(type(error))
                logger.error("rank %d: no captures on demand: %s. Training goes on.", self._rank, one_line(error))

    def _poll(self) -> None:
        training = self._training
        if self._coordinator is not None:
            self._coordinator.poll(training.running_iteration, training.durations, records_memory=training.records_memory)
        accepted = self._requests.accepted()
        if accepted is not None and accepted.id != self._received and self._is_current(accepted):
            self._receive(accepted)
        if self._watch is not None:
            self._request_capture(self._watch.check(training.durations))

    def _is_current(self, accepted: AcceptedCapture) -> bool:
        """Whether a running rank 0 accepted it; an earlier run's stays until this run's rank 0 removes it."""
        if self._coordinator is not None:
            return True
        status = self._requests.status()
        is_running = status is not None and status != self._first_status and status.run == accepted.run
        return is_running and accepted.launch == LaunchEnv.read().launch_id

    def _receive(self, accepted: AcceptedCapture) -> None:
        self._received = accepted.id
        self._slow_captures += accepted.kind == "slow_iteration"
        if self._watch is not None:
            self._watch.ignore_before(accepted.end + COOL_DOWN)
        if self._rank not in accepted.ranks:
            return
        iteration = self._training.running_iteration
        try:
            self._schedule(accepted, iteration)
            answer = RankAnswer(rank=self._rank, status="armed", iteration=iteration)
        except Exception as error:
            reason = str(error) if isinstance(error, CaptureError) else one_line(error)
            logger.error("rank %d: cannot carry out request %s: %s. Training goes on.", self._rank, accepted.id, reason)
            answer = RankAnswer(rank=self._rank, status="refused", reason=reason, iteration=iteration)
        self._requests.write(f"answers/{accepted.id}/rank-{self._rank}.json", answer)

    def _schedule(self, accepted: AcceptedCapture, iteration: int | None) -> None:
        if iteration is not None and iteration >= accepted.start:
            raise CaptureError(
                f"this rank received the request in iteration {iteration}, and the window begins at {accepted.start};"
                " request it again with a later --start"
            )
        if "torch" in accepted.profilers and runs_under_nsys():
            raise CaptureError("nsys runs around this rank, and the torch profiler needs CUPTI for itself")
        if "nsys" in accepted.profilers:
            check_armed()
        switches: dict[str, Any] = {setting: name in accepted.profilers for name, setting in PROFILERS.items()}
        config = replace(
            self._config,
            profile_step_start=accepted.start,
            profile_step_end=accepted.end,
            profile_ranks=accepted.ranks,
            record_shapes=self._config.record_shapes or accepted.shapes,
            pytorch_profiler_collect_callstack=self._config.pytorch_profiler_collect_callstack or accepted.stacks,
            **switches,
        )
        trigger = Trigger(
            kind=accepted.kind,
            reason=accepted.reason,
            requested_at=accepted.requested_at,
            requested_by=accepted.requested_by,
            request=accepted.id,
        )
        self._training.schedule(WindowPlan(config, trigger, accepted.attempt))

    def _request_capture(self, slow: str | None) -> None:
        """Request a capture for a slow iteration, unless a request is open or the limit is reached."""
        if slow is None or self._slow_captures >= self._config.slow_iteration_captures:
            return
        if self._requests.accepted() is not None or self._requests.pending() is not None:
            return
        reason = f"{slow}, on rank {self._rank}"
        length = self._config.profile_step_end - self._config.profile_step_start
        logger.warning("rank %d: %s; requesting a capture of %d iterations", self._rank, reason, length)
        self._requests.submit(
            CaptureRequest(iterations=length, kind="slow_iteration", reason=reason, requested_by=f"rank {self._rank}")
        )
