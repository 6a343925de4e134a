"""One rank's thread for captures on demand: it looks for accepted captures and for slow iterations.

It polls the request directory about once a second, in a thread of its own, so that a file system that hangs does not delay
training. In rank 0's thread the coordinator also publishes the job's status, and accepts or refuses requests for all ranks.
Ranks do not communicate otherwise.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bridge_profiling.capture.control.coordinator import Coordinator
from bridge_profiling.capture.control.directory import RequestDirectory
from bridge_profiling.capture.control.messages import AcceptedCapture, CaptureRequest, JobStatus, RankAnswer
from bridge_profiling.capture.describe import Plan, RankInfo
from bridge_profiling.capture.nsys_profiler import check_armed
from bridge_profiling.capture.profiler import guarded
from bridge_profiling.capture.windows import Windows
from bridge_profiling.common.errors import CaptureError, TrainingLogger, one_line
from bridge_profiling.common.launch_env import LaunchEnv
from bridge_profiling.common.slow_iterations import COOL_DOWN, SlowWatch
from bridge_profiling.manifest import Trigger
from bridge_profiling.nsys.launch import runs_under_nsys
from bridge_profiling.settings.profiling import PROFILERS, ProfilingConfig

logger = TrainingLogger(__name__)

#: Training that ends waits at most this long for a thread that may hang in a file system.
_STOP_SECONDS = 2.0


class Listener(threading.Thread):
    """One rank's thread; `holder` is the name under which this run holds its folders."""

    def __init__(self, root: Path, config: ProfilingConfig, rank: RankInfo, windows: Windows, holder: str) -> None:
        super().__init__(name="bridge_profiling listener", daemon=True)
        self._requests, self._config, self._rank, self._windows = RequestDirectory(root), config, rank, windows
        self._coordinator = Coordinator(self._requests, config, rank, windows, holder) if rank.number == 0 else None
        # Now: the environment may name the launch only while the hook opens.
        self._launch = LaunchEnv.read().launch_id
        factor = config.slow_iteration_factor
        self._watch = None if factor is None else SlowWatch(factor, self._is_disturbed)
        #: Iterations that paid for something else than training, of those in the log.
        self._disturbed: list[range] = []
        #: The status when this rank began to listen; an earlier run may have left it.
        self._first_status: JobStatus | None = None
        #: The captures that this rank has received, by name, and the names of those that it may have to drop again.
        self._received: dict[str, AcceptedCapture] = {}
        self._posted: set[str] = set()
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

    def _is_disturbed(self, iteration: int) -> bool:
        return any(iteration in one for one in self._disturbed)

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
                if is_current and one.launch == self._launch:
                    self._receive(one)
        for gone in self._posted - {one.id for one in accepted}:
            if (done := self._requests.done(gone)) is not None:
                self._posted.discard(gone)
                if done.withdrawn:
                    self._windows.withdraw(gone)
        if self._watch is not None:
            durations = self._rank.log.durations()
            oldest = min((iteration for iteration, _ in durations), default=0)
            # A capture delays the ranks that do not make it, too.
            warm_up, received = self._config.pytorch_profiler_warmup, self._received.values()
            captured = [range(one.start - warm_up, one.end + COOL_DOWN) for one in received if one.end + COOL_DOWN > oldest]
            self._disturbed = captured + self._windows.disturbed(oldest)
            slow = self._watch.check(durations)
            if slow is not None and not any(one.kind == "slow_iteration" for one in accepted):
                self._request_capture(slow)

    def _receive(self, accepted: AcceptedCapture) -> None:
        self._received[accepted.id] = accepted
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
        answer = RankAnswer(rank=rank, status="refused" if reason else "armed", reason=reason, iteration=iteration)
        self._requests.write(f"answers/{accepted.id}/rank-{rank}.json", answer)

    def _plan(self, accepted: AcceptedCapture, iteration: int | None) -> Plan:
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
        request = CaptureRequest(iterations=length, kind="slow_iteration", reason=reason, requested_by=f"rank {rank}")
        self._requests.submit(request)
