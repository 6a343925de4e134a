"""One rank's thread for captures on demand: it looks for accepted captures and for slow iterations.

It polls the request directory about once a second, in a thread of its own, so that a file system that hangs does not delay
training. In rank 0's thread the coordinator also publishes the job's status, and accepts or refuses requests for all ranks.
Ranks do not communicate otherwise.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import threading
import time
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bridge_profiling.capture.control import protocol
from bridge_profiling.capture.control.planning import plan_capture, warm_up_of
from bridge_profiling.capture.describe import Plan, RankInfo
from bridge_profiling.capture.files import claim_attempt
from bridge_profiling.capture.nsys_profiler import check_armed
from bridge_profiling.capture.profiler import guarded
from bridge_profiling.capture.windows import Windows
from bridge_profiling.config import PROFILERS, ProfilingConfig
from bridge_profiling.errors import CaptureError, ProfilingConfigError, TrainingLogger, one_line, require
from bridge_profiling.launch_env import LaunchEnv
from bridge_profiling.manifest import Trigger
from bridge_profiling.nsys.launch import runs_under_nsys
from bridge_profiling.printable import printable
from bridge_profiling.processes import is_running, pid_space
from bridge_profiling.slow_iterations import COOL_DOWN, SlowWatch

logger = TrainingLogger(__name__)

#: Training that ends waits at most this long for a thread that may hang in a file system.
_STOP_SECONDS = 2.0

#: Polls remembered to measure the time from one iteration's start to the next.
_KEPT_POLLS = 11

#: How long a client on another machine may leave its lease without renewal. A shared file system may show one late.
_LEASE_SECONDS = 60.0


class Listener(threading.Thread):
    """One rank's thread; `holder` is the name under which this run holds its folders."""

    def __init__(self, root: Path, config: ProfilingConfig, rank: RankInfo, windows: Windows, holder: str) -> None:
        super().__init__(name="bridge_profiling listener", daemon=True)
        self._requests, self._config, self._rank, self._windows = protocol.RequestDirectory(root), config, rank, windows
        self._coordinator = Coordinator(root, config, rank, windows, holder) if rank.number == 0 else None
        factor = config.slow_iteration_factor
        self._watch = None if factor is None else SlowWatch(factor, windows.is_disturbed)
        #: The status when this rank began to listen; an earlier run may have left it.
        self._first_status: protocol.JobStatus | None = None
        #: Names of the captures that this rank has received, and of those it may have to drop again.
        self._received: set[str] = set()
        self._posted: set[str] = set()
        #: Captures whose iterations this rank has not reached.
        self._ahead: list[protocol.AcceptedCapture] = []
        self._seen_errors: set[type] = set()
        self._ending = "training ended"
        self._stopping = threading.Event()

    def stop(self, ending: str) -> None:
        """Stop the thread; rank 0 publishes how training ended."""
        self._ending = ending
        self._stopping.set()
        self.join(_STOP_SECONDS)

    def run(self) -> None:
        """Poll until `stop`."""
        with self._guarded():
            if self._coordinator is not None:
                self._requests.open()
                group, root = self._requests.writing_group(), self._requests.root
                if group is not None:
                    logger.warning(
                        "captures on demand: every member of %s can request one in %s, unless you chmod g-w", group, root
                    )
                self._requests.check()
            self._first_status = self._requests.status()
            if self._coordinator is not None:
                self._coordinator.begin()
        while not self._stopping.is_set():
            with self._guarded():
                self._poll()
            self._stopping.wait(self._config.on_demand_seconds)
        with self._guarded():
            if self._coordinator is not None:
                self._requests.check()
                self._coordinator.poll(self._ending)

    def _guarded(self) -> AbstractContextManager[None]:
        # Once per type: a missing directory, for example, fails at every poll.
        return guarded("no captures on demand", self._rank.number, seen=self._seen_errors)

    def _poll(self) -> None:
        if self._coordinator is None and not self._requests.path.exists():
            return  # Rank 0 has not created it yet.
        # Every time: someone may open it to everyone while the job runs.
        self._requests.check()
        if self._coordinator is not None:
            self._coordinator.poll()
        accepted = self._requests.accepted()
        for one in accepted:
            if one.id not in self._received:
                status = self._requests.status()
                # A capture of an earlier run stays until this run's rank 0 removes it.
                is_current = status is not None and status != self._first_status and status.run == one.run
                if is_current and one.launch == LaunchEnv.read().launch_id:
                    self._receive(one)
        for gone in self._posted - {one.id for one in accepted}:
            if (done := self._requests.done(gone)) is not None:
                self._posted.discard(gone)
                if done.withdrawn:
                    self._windows.withdraw(gone)
                    self._ahead = [one for one in self._ahead if one.id != gone]
        # Captures also delay the ranks that do not make them.
        iteration = self._rank.log.running() or 0
        for one in [one for one in self._ahead if iteration >= one.start - self._config.pytorch_profiler_warmup]:
            self._ahead.remove(one)
            if self._watch is not None:
                self._watch.ignore_before(one.end + COOL_DOWN)
        slow = None if self._watch is None else self._watch.check(self._rank.log.durations())
        if slow is not None and not any(one.kind == "slow_iteration" for one in accepted):
            self._request_capture(slow)

    def _receive(self, accepted: protocol.AcceptedCapture) -> None:
        self._received.add(accepted.id)
        self._ahead.append(accepted)
        if self._watch is not None and accepted.kind == "slow_iteration":
            self._watch.ignore_before(accepted.end + COOL_DOWN)
        rank, iteration, reason = self._rank.number, self._rank.log.running(), None
        if rank not in accepted.ranks:
            return
        try:
            self._windows.post(self._plan(accepted, iteration))
            self._posted.add(accepted.id)
        except Exception as error:
            reason = str(error) if isinstance(error, CaptureError) else one_line(error)
            logger.error("rank %d: cannot carry out request %s: %s. Training goes on.", rank, accepted.id, reason)
        answer = protocol.RankAnswer(rank=rank, status="refused" if reason else "armed", reason=reason, iteration=iteration)
        self._requests.write(f"answers/{accepted.id}/rank-{rank}.json", answer)

    def _plan(self, accepted: protocol.AcceptedCapture, iteration: int | None) -> Plan:
        """The window of an accepted capture; raises CaptureError if this rank cannot capture it."""
        if iteration is not None and iteration >= accepted.start:
            raise CaptureError(
                f"iteration {iteration} runs already, and the window begins at {accepted.start}; request a later --start"
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
            profile_every=None,
            **{**switches, **accepted.settings},
        )
        config.finalize(world_size=self._rank.layout.world_size)
        trigger = Trigger(
            kind=accepted.kind,
            reason=accepted.reason,
            requested_at=accepted.requested_at,
            requested_by=accepted.requested_by,
            request=accepted.id,
        )
        return Plan(config, trigger, accepted.attempt)

    def _request_capture(self, slow: str) -> None:
        """Request a capture for a slow iteration, unless a request is pending or the job makes no more such captures."""
        status = self._requests.status()
        if status is None or status.slow_captures_left <= 0 or self._requests.pending() is not None:
            return
        rank = self._rank.number
        reason = f"{slow}, on rank {rank}"
        length = self._config.profile_step_end - self._config.profile_step_start
        logger.warning("rank %d: %s; requesting a capture of %d iterations", rank, reason, length)
        request = protocol.CaptureRequest(iterations=length, kind="slow_iteration", reason=reason, requested_by=f"rank {rank}")
        self._requests.submit(request)


class Coordinator:
    """Decides on requests for one job, on its rank 0. Arguments as of `Listener`."""

    def __init__(self, root: Path, config: ProfilingConfig, rank: RankInfo, windows: Windows, holder: str) -> None:
        self._requests, self._config, self._rank, self._windows = protocol.RequestDirectory(root), config, rank, windows
        self._holder = holder
        self._accepted: list[protocol.AcceptedCapture] = []
        #: By request, its client's lease as last read, and since when it is the same.
        self._leases: dict[str, tuple[protocol.Lease | None, float]] = {}
        #: Text of the request that was pending at the last poll.
        self._pending: str | None = None
        #: Time in seconds and current iteration of the last polls.
        self._polls: deque[tuple[float, int]] = deque(maxlen=_KEPT_POLLS)
        env = LaunchEnv.read()
        self._status = protocol.JobStatus(
            run=protocol.new_id(),
            launch=env.launch_id,
            job_id=env.job_id,
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
        )

    def begin(self) -> None:
        """Close a capture that an earlier run left open, and refuse its request: this run has timed no iterations yet."""
        for accepted in self._requests.accepted():
            self._requests.close(accepted, "the job ended before it was done")
        self._decide()

    def poll(self, ended: str | None = None) -> None:
        """Close a capture that is over, decide on a pending request, and publish the status.

        `ended` says how the training ended.
        """
        self._update_status(ended)
        still_open = [accepted for accepted in self._status.open if not self._closed(accepted, ended)]
        self._status = replace(self._status, open=still_open)
        before, self._pending = self._pending, self._requests.pending()
        # A request that is written in place may be half-written: that one is taken at the next poll.
        is_complete = self._pending is not None and (self._pending == before or self._pending.rstrip().endswith("}"))
        if is_complete or ended:
            self._decide()
        self._requests.write("progress.json", self._status)

    def _decide(self) -> None:
        """Take the pending request, and accept it or write down why not."""
        taken = self._requests.take()
        if taken is None:
            return
        (text, problem), request = taken, None
        try:
            require(not problem, f"the request cannot be taken: {problem}", instead="Send it as the user who runs the job")
            request = protocol.parse_request(text)
            self._accept(request)
        except ProfilingConfigError as error:
            logger.warning("refused a capture request: %s", printable(str(error)))
            # The client looks for the answer under the request's name, unless that is another request's.
            request_id = protocol.new_id() if request is None or self._requests.knows(request.id) else request.id
            refused = protocol.RefusedRequest(refused=str(error), request=request or text[:1000])
            self._requests.write(f"refused/{request_id}.json", refused)
            if request is not None and request.id == request_id:
                self._requests.end_lease(request_id)

    def _closed(self, accepted: protocol.AcceptedCapture, ended: str | None) -> bool:
        """Close a capture if it is over, or if its client has ended before it began; whether it is closed."""
        iteration = self._status.iteration or 0
        if ended or iteration >= accepted.end:
            self._requests.close(accepted, ended or "done")
        elif self._is_abandoned(accepted) and iteration < accepted.start - warm_up_of(accepted, self._status):
            logger.info("request %s is withdrawn: its client has ended", accepted.id)
            self._requests.close(accepted, "withdrawn: its client has ended", withdrawn=True)
            self._accepted.remove(accepted)
        else:
            return False
        self._leases.pop(accepted.id, None)
        return True

    def _is_abandoned(self, request: protocol.CaptureRequest) -> bool:
        """Whether the client of a request, which has not got its answer, is gone."""
        if not request.leased:
            return False
        lease, now = self._requests.lease(request.id), time.monotonic()
        before, since = self._leases.setdefault(request.id, (lease, now))
        if lease != before:
            self._leases[request.id] = (lease, now)
            return False
        if lease is None:
            return not self._requests.has_lease(request.id)
        if lease.kept:
            return False
        # Elsewhere its process cannot be seen, and clocks differ: its renewals are counted.
        here = lease.pid_space is not None and lease.pid_space == self._status.pid_space
        return not is_running(lease.pid) if here else now - since > _LEASE_SECONDS

    def _accept(self, request: protocol.CaptureRequest) -> None:
        require(not self._is_abandoned(request), "its client has ended", instead="Request it again")
        planned = plan_capture(request, self._status)
        # A rank carries out each name once, and done/ keeps one file for it.
        require(
            not self._requests.knows(request.id),
            f"an earlier request was called {request.id}",
            instead="Leave id out, or give each request its own",
        )
        accepted = replace(planned, attempt=claim_attempt(self._requests.root, planned.window, 0, self._holder))
        self._requests.write(f"accepted/{accepted.id}.json", accepted)
        self._status = replace(self._status, open=[*self._status.open, accepted])
        self._accepted.append(accepted)
        reason = printable(accepted.reason or "no reason given")
        logger.info(
            "accepted request %s (%s): iterations %d to %d of rank(s) %s with %s", accepted.id,
            reason, accepted.start, accepted.window.last, accepted.ranks, accepted.profilers,
        )  # fmt: skip

    def _update_status(self, ended: str | None) -> None:
        iteration, durations = self._rank.log.running(), self._rank.log.durations()
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
            records_memory=self._windows.records_memory,
            cuda=torch is not None and torch.cuda.is_initialized(),
            under_nsys=under_nsys,
            nsys_captures_left=self._config.nsys_capture_count - nsys_captures if under_nsys else 0,
            slow_captures_left=slow_limit - sum(one.kind == "slow_iteration" for one in self._accepted),
            ended=ended,
        )
