"""Rank 0's part in captures on demand: publishes the job's status, and accepts or refuses requests for all ranks.

Runs in the listener's thread, never in the training's.
"""

from __future__ import annotations

import logging
import os
import socket
import statistics
import sys
import time
from collections import deque
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

from bridge_profiling.capture.control import protocol
from bridge_profiling.capture.control.planning import plan_capture
from bridge_profiling.capture.control.protocol import AcceptedCapture, CaptureRequest, JobStatus, RequestDirectory
from bridge_profiling.capture.files import claim_attempt
from bridge_profiling.capture.window import WindowPlan
from bridge_profiling.config import ProfilingConfig
from bridge_profiling.errors import ProfilingConfigError, require
from bridge_profiling.launch_env import LaunchEnv
from bridge_profiling.layout import ParallelLayout
from bridge_profiling.nsys.launch import runs_under_nsys
from bridge_profiling.processes import pid_space

logger = logging.getLogger(__name__)

#: Polls remembered to measure the time from one iteration's start to the next.
_KEPT_POLLS = 11


class Training(Protocol):
    """The hook, as the coordinator and the listener use it from their thread."""

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


class Coordinator:
    """Decides on requests for one job.

    Args:
        requests: the job's request directory.
        config: the job's own.
        layout: the job's parallel layout.
        train_iters: iterations the training runs, if known.
        holder: the name under which this run holds its folders.
    """

    def __init__(
        self, requests: RequestDirectory, config: ProfilingConfig, layout: ParallelLayout, train_iters: int | None, holder: str
    ) -> None:
        self._requests, self._config, self._holder = requests, config, holder
        self._accepted: list[AcceptedCapture] = []
        #: Text of the request that was pending at the last poll.
        self._pending: str | None = None
        #: Time in seconds and current iteration of the last polls.
        self._polls: deque[tuple[float, int]] = deque(maxlen=_KEPT_POLLS)
        env = LaunchEnv.read()
        self._status = JobStatus(
            run=protocol.new_id(),
            launch=env.launch_id,
            job_id=env.job_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            pid_space=pid_space(),
            poll_seconds=config.on_demand_seconds,
            world_size=layout.world_size,
            pipeline_ranks=layout.pipeline_ranks(),
            profile_ranks=config.profile_ranks,
            profilers=[name for name, setting in protocol.PROFILERS.items() if getattr(config, setting)] or ["torch"],
            train_iters=train_iters,
        )

    def begin(self) -> None:
        """Close a capture that an earlier run left open, and refuse its request: this run has timed no iterations yet."""
        accepted = self._requests.accepted()
        if accepted is not None:
            self._requests.close(accepted, "the job ended before it was done")
        self._decide()

    def poll(self, training: Training, ended: str | None = None) -> None:
        """Close a capture that is over, decide on a pending request, and publish the status.

        Args:
            training: the hook of rank 0.
            ended: how the training ended.
        """
        self._update_status(training, ended)
        accepted = self._status.open
        if accepted is not None and (ended or (self._status.iteration or 0) >= accepted.end):
            self._requests.close(accepted, ended or "done")
            self._status = replace(self._status, open=None)
        before, self._pending = self._pending, self._requests.pending()
        # A request that is written in place may be half-written: that one is taken at the next poll.
        is_complete = self._pending is not None and (self._pending == before or self._pending.rstrip().endswith("}"))
        if is_complete or ended:
            self._decide()
        self._requests.write("progress.json", self._status)

    def _decide(self) -> None:
        """Take the pending request, and accept it or write down why not."""
        text = self._requests.take()
        if text is None:
            return
        request = None
        try:
            request = protocol.parse_request(text)
            self._accept(request)
        except ProfilingConfigError as error:
            logger.warning("refused a capture request: %s", error)
            # The client looks for the answer under the request's name, unless that is another request's.
            request_id = protocol.new_id() if request is None or self._requests.knows(request.id) else request.id
            refused = protocol.RefusedRequest(refused=str(error), request=request or text[:1000])
            self._requests.write(f"refused/{request_id}.json", refused)

    def _accept(self, request: CaptureRequest) -> None:
        planned = plan_capture(request, self._status)
        # A rank carries out each name once, and done/ keeps one file for it.
        require(
            not self._requests.knows(request.id),
            f"an earlier request was called {request.id}",
            instead="Leave id out, or give each request its own",
        )
        accepted = replace(planned, attempt=claim_attempt(self._requests.root, planned.window, 0, self._holder))
        self._requests.write("accepted.json", accepted)
        self._status = replace(self._status, open=accepted)
        self._accepted.append(accepted)
        logger.info(
            "accepted request %s (%s): iterations %d to %d of rank(s) %s with %s", accepted.id,
            accepted.reason or "no reason given", accepted.start, accepted.window.last, accepted.ranks, accepted.profilers,
        )  # fmt: skip

    def _update_status(self, training: Training, ended: str | None) -> None:
        iteration, durations = training.running_iteration, training.durations
        if iteration is not None:
            self._polls.append((time.monotonic(), iteration))
        recent = [duration for _, duration in durations[-50:]]
        # From start to start: longer than an iteration itself if the loop waits, evaluates or saves between two iterations.
        polled = [
            int((now - before) * 1e9 / (current - earlier))
            for (before, earlier), (now, current) in pairwise(self._polls)
            if current > earlier
        ] or [0]
        torch = sys.modules.get("torch")
        under_nsys = self._config.use_nsys_profiler or runs_under_nsys()
        nsys_captures = len(self._config.windows) + sum("nsys" in one.profilers for one in self._accepted)
        slow_limit = self._config.slow_iteration_captures if self._config.slow_iteration_factor is not None else 0
        self._status = replace(
            self._status,
            iteration=iteration,
            completed=len(durations),
            fastest_ns=max(min(recent[-10:]), min(polled)) if recent else None,
            median_ns=int(max(statistics.median(recent), statistics.median(polled))) if recent else None,
            windows=[[window.start, window.end] for window in self._config.windows if window.end > (iteration or 0)],
            records_memory=training.records_memory,
            cuda=torch is not None and torch.cuda.is_initialized(),
            under_nsys=under_nsys,
            nsys_captures_left=self._config.nsys_capture_count - nsys_captures if under_nsys else 0,
            slow_captures_left=slow_limit - sum(one.kind == "slow_iteration" for one in self._accepted),
            ended=ended,
        )
