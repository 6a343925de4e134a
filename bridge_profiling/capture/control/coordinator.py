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
import uuid
from collections import deque
from dataclasses import replace
from itertools import pairwise

from bridge_profiling.capture.control.planning import check_none_open, plan_capture
from bridge_profiling.capture.control.protocol import (
    PROFILERS,
    AcceptedCapture,
    CaptureRequest,
    JobStatus,
    RefusedRequest,
    RequestDirectory,
    new_id,
    parse_request,
)
from bridge_profiling.capture.files import claim_attempt
from bridge_profiling.config import ProfilingConfig
from bridge_profiling.errors import ProfilingConfigError, require
from bridge_profiling.launch_env import LaunchEnv
from bridge_profiling.layout import ParallelLayout
from bridge_profiling.nsys.launch import runs_under_nsys
from bridge_profiling.processes import pid_space

logger = logging.getLogger(__name__)

#: Polls remembered to measure the time from one iteration's start to the next.
_KEPT_POLLS = 11


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
        self._slow_captures = self._nsys_captures = 0
        #: Text of an unreadable request at the last poll, whose writer may not have finished.
        self._unreadable: str | None = None
        #: Time in seconds and current iteration of the last polls.
        self._polls: deque[tuple[float, int]] = deque(maxlen=_KEPT_POLLS)
        env = LaunchEnv.read()
        self._status = JobStatus(
            run=uuid.uuid4().hex,
            launch=env.launch_id,
            job_id=env.job_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            pid_space=pid_space(),
            poll_seconds=config.on_demand_seconds,
            world_size=layout.world_size,
            pipeline_ranks=layout.pipeline_ranks(),
            profile_ranks=config.profile_ranks,
            profilers=[name for name, setting in PROFILERS.items() if getattr(config, setting)] or ["torch"],
            train_iters=train_iters,
        )

    def begin(self) -> None:
        """Close what an earlier run left open in this directory."""
        accepted = self._requests.accepted()
        if accepted is not None:
            self._requests.close(accepted, "the job ended before it was done")
        self._decide(ProfilingConfigError("this run of the job began after the request", instead="Request it again"))

    def poll(self, iteration: int | None, durations: tuple[tuple[int, int], ...], *, records_memory: bool) -> None:
        """Close a capture that is over, decide on a pending request, and publish the status.

        Args:
            iteration: the one that rank 0 is in.
            durations: `(iteration, nanoseconds)` of the last ones.
            records_memory: whether a memory history is being recorded.
        """
        self._update_status(iteration, durations, records_memory)
        accepted = self._status.open
        if accepted is not None and iteration is not None and iteration >= accepted.end:
            self._close(accepted, "done")
        self._read_request()
        self._requests.write("progress.json", self._status)

    def end(self, ending: str) -> None:
        """Training has ended: refuse a pending request, and publish how it ended."""
        self._status = replace(self._status, ended=ending)
        if self._status.open is not None:
            self._close(self._status.open, ending)
        self._decide(ProfilingConfigError(f"the job has ended: {ending}", instead="Name a job that is running"))
        self._requests.write("progress.json", self._status)

    def _read_request(self) -> None:
        pending, unreadable = self._requests.pending(), self._unreadable
        self._unreadable = None
        if pending is None:
            return
        try:
            parse_request(pending)
        except ProfilingConfigError:
            if pending != unreadable:
                self._unreadable = pending
                return
        self._decide()

    def _decide(self, refusal: ProfilingConfigError | None = None) -> None:
        """Take the pending request, and accept it or write down why not."""
        text = self._requests.take()
        if text is None:
            return
        request = None
        try:
            request = parse_request(text)
            if refusal is not None:
                raise refusal
            self._accept(request)
        except ProfilingConfigError as error:
            logger.warning("refused a capture request: %s", error)
            # The client looks for the answer under the request's name, unless that is another request's.
            request_id = new_id() if request is None or self._requests.knows(request.id) else request.id
            refused = RefusedRequest(refused=str(error), request=request or text[:1000])
            self._requests.write(f"refused/{request_id}.json", refused)

    def _accept(self, request: CaptureRequest) -> None:
        check_none_open(self._status)
        # A rank carries out each name once, and done/ keeps one file for it.
        require(
            not self._requests.knows(request.id),
            f"an earlier request was called {request.id}",
            instead="Leave id out, or give each request its own",
        )
        is_slow = request.kind == "slow_iteration"
        limit = self._config.slow_iteration_captures if self._config.slow_iteration_factor is not None else 0
        require(
            not is_slow or self._slow_captures < limit,
            f"this job captures slow iterations {limit} times, and has done so {self._slow_captures} times",
            why="profiling.slow_iteration_factor turns this on, profiling.slow_iteration_captures limits it",
            instead="Leave kind out",
        )
        planned = plan_capture(request, self._status)
        accepted = replace(planned, attempt=claim_attempt(self._requests.root, planned.window, 0, self._holder))
        self._requests.write("accepted.json", accepted)
        self._status = replace(self._status, open=accepted)
        self._slow_captures += is_slow
        self._nsys_captures += "nsys" in accepted.profilers
        logger.info(
            "accepted request %s: iterations %d to %d of rank(s) %s with %s%s",
            accepted.id, accepted.start, accepted.window.last, accepted.ranks, " and ".join(accepted.profilers),
            f": {accepted.reason}" if accepted.reason else "",
        )  # fmt: skip

    def _close(self, accepted: AcceptedCapture, ended: str) -> None:
        self._status = replace(self._status, open=None)
        self._requests.close(accepted, ended)

    def _update_status(self, iteration: int | None, durations: tuple[tuple[int, int], ...], records_memory: bool) -> None:
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
        captures_left = self._config.nsys_capture_count - len(self._config.windows) - self._nsys_captures
        self._status = replace(
            self._status,
            iteration=iteration,
            completed=len(durations),
            fastest_ns=max(min(recent[-10:]), min(polled)) if recent else None,
            median_ns=int(max(statistics.median(recent), statistics.median(polled))) if recent else None,
            windows=[[window.start, window.end] for window in self._config.windows if window.end > (iteration or 0)],
            records_memory=records_memory,
            cuda=torch is not None and torch.cuda.is_initialized(),
            under_nsys=under_nsys,
            nsys_captures_left=captures_left if under_nsys else 0,
        )
