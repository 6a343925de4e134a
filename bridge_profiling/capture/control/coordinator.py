"""The coordinator: on rank 0 it publishes the job's status, and accepts or refuses requests for all ranks."""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from collections import deque
from dataclasses import replace
from itertools import pairwise

from bridge_profiling.capture.control.directory import RequestDirectory
from bridge_profiling.capture.control.messages import (
    AcceptedCapture,
    CaptureRequest,
    JobStatus,
    RefusedRequest,
    new_id,
    parse_request,
)
from bridge_profiling.capture.control.planning import plan_capture, warm_up_of
from bridge_profiling.capture.describe import RankInfo
from bridge_profiling.capture.files import claim_attempt
from bridge_profiling.capture.windows import Windows
from bridge_profiling.common.errors import ProfilingConfigError, TrainingLogger, require
from bridge_profiling.common.launch_env import LaunchEnv
from bridge_profiling.common.printable import printable
from bridge_profiling.common.processes import pid_space
from bridge_profiling.nsys.launch import runs_under_nsys
from bridge_profiling.settings.profiling import PROFILERS, ProfilingConfig

logger = TrainingLogger(__name__)

#: Polls remembered to measure the time from one iteration's start to the next.
_KEPT_POLLS = 11


class Coordinator:
    """Decides on requests for one job, on its rank 0.

    Args:
        requests: the job's directory.
        config: the `profiling` section.
        rank: rank 0.
        windows: its windows.
        holder: the name under which this run holds its folders.
    """

    def __init__(
        self, requests: RequestDirectory, config: ProfilingConfig, rank: RankInfo, windows: Windows, holder: str
    ) -> None:
        self._requests, self._config, self._rank, self._windows = requests, config, rank, windows
        self._holder, self._run, self._env = holder, new_id(), LaunchEnv.read()
        #: All accepted captures, and those that are not over.
        self._accepted: list[AcceptedCapture] = []
        self._open: list[AcceptedCapture] = []
        #: Text of the request that was pending at the last poll.
        self._pending: str | None = None
        #: Time in seconds and current iteration of the last polls.
        self._polls: deque[tuple[float, int]] = deque(maxlen=_KEPT_POLLS)

    def begin(self) -> None:
        """Close a capture that an earlier run left open, and refuse its request: this run has timed no iterations yet."""
        for accepted in self._requests.accepted():
            self._requests.close(accepted, "the job ended before it was done")
        self._decide(replace(self._status(None), iteration=None, completed=0))

    def poll(self, ended: str | None = None) -> None:
        """Close a capture that is over, decide on a pending request, and publish the status.

        `ended` says how the training ended.
        """
        if (iteration := self._rank.log.running()) is not None:
            self._polls.append((time.monotonic(), iteration))
        status = self._status(ended)
        self._open = [accepted for accepted in self._open if not self._closed(accepted, status)]
        before, self._pending = self._pending, self._requests.pending()
        # A request that is written in place may be half-written: that one is taken at the next poll.
        is_complete = self._pending is not None and (self._pending == before or self._pending.rstrip().endswith("}"))
        if is_complete or ended:
            self._decide(replace(status, open=self._open))
        self._requests.write("progress.json", replace(status, open=self._open))

    def _decide(self, status: JobStatus) -> None:
        """Take the pending request, and accept it or write down why not."""
        taken = self._requests.take()
        if taken is None:
            return
        (text, problem), request = taken, None
        try:
            require(not problem, f"the request cannot be taken: {problem}", instead="Send it as the user who runs the job")
            request = parse_request(text)
            self._accept(request, status)
        except ProfilingConfigError as error:
            logger.warning("refused a capture request: %s", printable(str(error)))
            # The client looks for the answer under the request's name, unless that is another request's.
            request_id = new_id() if request is None or self._requests.knows(request.id) else request.id
            refused = RefusedRequest(refused=str(error), request=request or text[:1000])
            self._requests.write(f"refused/{request_id}.json", refused)
            self._requests.forget_call_off(request_id)

    def _closed(self, accepted: AcceptedCapture, status: JobStatus) -> bool:
        """Close a capture if it is over, or if it was withdrawn before it began; whether it is closed."""
        iteration = status.iteration or 0
        if status.ended or iteration >= accepted.end:
            self._requests.close(accepted, status.ended or "done")
        elif self._requests.is_called_off(accepted.id) and iteration < accepted.start - warm_up_of(accepted, status):
            logger.info("request %s is withdrawn", accepted.id)
            self._requests.close(accepted, "withdrawn", withdrawn=True)
            self._accepted.remove(accepted)
        else:
            return False
        return True

    def _accept(self, request: CaptureRequest, status: JobStatus) -> None:
        require(not self._requests.is_called_off(request.id), "it was withdrawn", instead="Request it again")
        planned = plan_capture(request, status)
        # A rank carries out each name once, and done/ keeps one file for it.
        require(
            not self._requests.knows(request.id),
            f"an earlier request was called {request.id}",
            instead="Leave id out, or give each request its own",
        )
        accepted = replace(planned, attempt=claim_attempt(self._requests.root, planned.window, 0, self._holder))
        self._requests.write(f"accepted/{accepted.id}.json", accepted)
        self._open.append(accepted)
        self._accepted.append(accepted)
        reason = printable(accepted.reason or "no reason given")
        logger.info(
            "accepted request %s (%s): iterations %d to %d of rank(s) %s with %s", accepted.id,
            reason, accepted.start, accepted.window.last, accepted.ranks, accepted.profilers,
        )  # fmt: skip

    def _status(self, ended: str | None) -> JobStatus:
        config, rank, torch = self._config, self._rank, sys.modules.get("torch")
        iteration, durations = rank.log.running(), rank.log.durations()
        recent = [duration for _, duration in durations[-50:]]
        # From start to start: longer than an iteration itself if the loop waits, evaluates or saves between two iterations.
        polled = [
            int((now - before) * 1e9 / (current - earlier))
            for (before, earlier), (now, current) in pairwise(self._polls)
            if current > earlier
        ] or [0]
        under_nsys = config.use_nsys_profiler or runs_under_nsys()
        nsys_captures = len(config.windows) + sum("nsys" in one.profilers for one in self._accepted)
        slow_limit = config.slow_iteration_captures if config.slow_iteration_factor is not None else 0
        return JobStatus(
            run=self._run,
            launch=self._env.launch_id,
            job_id=self._env.job_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            pid_space=pid_space(),
            poll_seconds=config.on_demand_seconds,
            world_size=rank.layout.world_size,
            pipeline_ranks=rank.layout.pipeline_ranks(),
            profile_ranks=config.profile_ranks,
            profilers=[name for name, setting in PROFILERS.items() if getattr(config, setting)] or ["torch"],
            train_iters=rank.train_iters,
            warm_up=config.pytorch_profiler_warmup,
            iteration=iteration,
            completed=len(durations),
            fastest_ns=max(min(recent[-10:]), min(polled)) if recent else None,
            median_ns=int(max(statistics.median(recent), statistics.median(polled))) if recent else None,
            windows=[[window.start, window.end] for window in config.windows if window.end > (iteration or 0)],
            records_memory=self._windows.records_memory,
            cuda=torch is not None and torch.cuda.is_initialized(),
            under_nsys=under_nsys,
            nsys_captures_left=config.nsys_capture_count - nsys_captures if under_nsys else 0,
            slow_captures_left=slow_limit - sum(one.kind == "slow_iteration" for one in self._accepted),
            open=self._open,
            ended=ended,
        )
