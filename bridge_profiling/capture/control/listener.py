"""One rank's part in captures on demand: a thread that looks for accepted captures and for slow iterations.

It polls the request directory about once a second, in a thread of its own, so that a file system that hangs does not delay
training. Rank 0's listener runs the coordinator. Ranks do not communicate otherwise.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from bridge_profiling.capture.control import protocol
from bridge_profiling.capture.control.coordinator import Coordinator, Training
from bridge_profiling.capture.control.protocol import AcceptedCapture, CaptureRequest, RankAnswer, RequestDirectory
from bridge_profiling.capture.nsys_profiler import check_armed
from bridge_profiling.capture.window import WindowPlan
from bridge_profiling.config import ProfilingConfig
from bridge_profiling.errors import CaptureError, one_line
from bridge_profiling.launch_env import LaunchEnv
from bridge_profiling.manifest import Trigger
from bridge_profiling.nsys.launch import runs_under_nsys
from bridge_profiling.slow_iterations import COOL_DOWN, SlowWatch

logger = logging.getLogger(__name__)

#: Training that ends waits at most this long for a thread that may hang in a file system.
_STOP_SECONDS = 2.0


class Listener(threading.Thread):
    """One rank's thread.

    Args:
        requests: the job's request directory.
        config: the job's own.
        rank: global rank.
        hook: the rank's own.
        coordinator: on rank 0, else None.
    """

    def __init__(
        self, requests: RequestDirectory, config: ProfilingConfig, rank: int, hook: Training, coordinator: Coordinator | None
    ) -> None:
        super().__init__(name="bridge_profiling listener", daemon=True)
        self._requests, self._config, self._rank, self._hook, self._coordinator = requests, config, rank, hook, coordinator
        factor = config.slow_iteration_factor
        self._watch = None if factor is None else SlowWatch(factor, hook.is_disturbed)
        #: The status when this rank began to listen; an earlier run may have left it.
        self._first_status: protocol.JobStatus | None = None
        self._received: str | None = None
        self._logged: set[type] = set()
        self._ending = "training ended"
        self._stopping = threading.Event()

    def stop(self, ending: str) -> None:
        """Stop the thread; rank 0 publishes how training ended."""
        self._ending = ending
        self._stopping.set()
        self.join(_STOP_SECONDS)

    def run(self) -> None:
        """Poll until `stop`."""
        with self._guard():
            self._first_status = self._requests.status()
            if self._coordinator is not None:
                self._coordinator.begin()
        while not self._stopping.is_set():
            with self._guard():
                self._poll()
            self._stopping.wait(self._config.on_demand_seconds)
        with self._guard():
            if self._coordinator is not None:
                self._coordinator.poll(self._hook, self._ending)

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
        if self._coordinator is not None:
            self._coordinator.poll(self._hook)
        accepted = self._requests.accepted()
        if accepted is not None and accepted.id != self._received and self._is_current(accepted):
            self._receive(accepted)
        slow = None if self._watch is None else self._watch.check(self._hook.durations)
        if slow is not None and accepted is None:
            self._request_capture(slow)

    def _is_current(self, accepted: AcceptedCapture) -> bool:
        """Whether a running rank 0 accepted it; an earlier run's stays until this run's rank 0 removes it."""
        status = self._requests.status()
        is_running = status is not None and status != self._first_status and status.run == accepted.run
        return is_running and accepted.launch == LaunchEnv.read().launch_id

    def _receive(self, accepted: AcceptedCapture) -> None:
        self._received = accepted.id
        if self._watch is not None:
            self._watch.ignore_before(accepted.end + COOL_DOWN)
        if self._rank not in accepted.ranks:
            return
        iteration = self._hook.running_iteration
        reason = None
        try:
            self._schedule(accepted, iteration)
        except Exception as error:
            reason = str(error) if isinstance(error, CaptureError) else one_line(error)
            logger.error("rank %d: cannot carry out request %s: %s. Training goes on.", self._rank, accepted.id, reason)
        answer = RankAnswer(rank=self._rank, status="refused" if reason else "armed", reason=reason, iteration=iteration)
        self._requests.write(f"answers/{accepted.id}/rank-{self._rank}.json", answer)

    def _schedule(self, accepted: AcceptedCapture, iteration: int | None) -> None:
        if iteration is not None and iteration >= accepted.start:
            raise CaptureError(
                f"iteration {iteration} runs already, and the window begins at {accepted.start}; request a later --start"
            )
        if "torch" in accepted.profilers and runs_under_nsys():
            raise CaptureError("nsys runs around this rank, and the torch profiler needs CUPTI for itself")
        if "nsys" in accepted.profilers:
            check_armed()
        switches: dict[str, Any] = {setting: name in accepted.profilers for name, setting in protocol.PROFILERS.items()}
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
        self._hook.schedule(WindowPlan(config, trigger, accepted.attempt))

    def _request_capture(self, slow: str) -> None:
        """Request a capture for a slow iteration, unless a request is pending or the job makes no more such captures."""
        status = self._requests.status()
        if status is None or status.slow_captures_left <= 0 or self._requests.pending() is not None:
            return
        reason = f"{slow}, on rank {self._rank}"
        length = self._config.profile_step_end - self._config.profile_step_start
        logger.warning("rank %d: %s; requesting a capture of %d iterations", self._rank, reason, length)
        request = CaptureRequest(iterations=length, kind="slow_iteration", reason=reason, requested_by=f"rank {self._rank}")
        self._requests.submit(request)
