"""Rank 0's part of captures on demand: it tells where the job is, reads requests, and accepts or refuses them for all ranks.

Runs in the listener's thread, never in the training's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import statistics
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from bridge_profiling.capture.control.listener import Training
from bridge_profiling.capture.control.mailbox import ACCEPTED, PROGRESS, REQUEST, Mailbox
from bridge_profiling.capture.control.planning import JobState, admit, open_request
from bridge_profiling.capture.control.request import CaptureRequest, new_id, parse_request
from bridge_profiling.capture.files import claim_attempt
from bridge_profiling.config import ProfilingConfig
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.launch_env import LaunchEnv
from bridge_profiling.layout import ParallelLayout
from bridge_profiling.nsys.launch import runs_under_nsys
from bridge_profiling.processes import pid_space

logger = logging.getLogger(__name__)

#: By which the pace of a training is known that waits between its iterations.
_KEPT_LOOKS = 11


class RequestDecider:
    """Decides for one job.

    Args:
        mailbox: where requests come.
        config: the job's own.
        layout: the job's parallel layout.
        launch: what the ranks of this launch have in common.
        identity: who holds this run's folders; claims those of later windows.
        training: the hook.
        train_iters: iterations the training runs, when known.
        records_memory: whether a memory history is being recorded.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        config: ProfilingConfig,
        layout: ParallelLayout,
        launch: str,
        identity: str,
        training: Training,
        train_iters: int | None,
        records_memory: Callable[[], bool],
    ) -> None:
        self._mailbox, self._config, self._identity, self._training = mailbox, config, identity, training
        self._records_memory = records_memory
        self._accepted: dict[str, Any] | None = None
        self._slow_captures = 0
        self._nsys_captures = 0
        self._doubtful: object = None
        self._began = False
        #: When the last looks were, in seconds, and in which iteration the training was then.
        self._looks: deque[tuple[float, int]] = deque(maxlen=_KEPT_LOOKS)
        self._state = JobState(
            run=uuid.uuid4().hex,
            launch=launch,
            job_id=LaunchEnv.read().job_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            pid_space=pid_space(),
            iteration=None,
            completed=0,
            fastest_ns=None,
            median_ns=None,
            poll_seconds=config.on_demand_seconds,
            world_size=layout.world_size,
            pipeline_ranks=layout.pipeline_ranks(),
            profile_ranks=config.profile_ranks,
            profilers=_profilers(config),
            train_iters=train_iters,
            windows=[],
            records_memory=False,
            cuda=False,
            under_nsys=False,
            nsys_captures_left=0,
        )

    # -- what the listener calls ---------------------------------------------------------------------------------------

    def look(self, names: set[str]) -> None:
        """Read a request if there is one, decide, close what is past, and tell where the job is."""
        if not self._began:
            self._clear(names)
            names = self._mailbox.names()
        self._state = self._now()
        self._close_if_past()
        if REQUEST in names:
            self._read()
        self._mailbox.write(PROGRESS, self._state.as_json())

    def end(self, ending: str) -> None:
        """The training has ended: nothing asked for later is carried out."""
        self._state = replace(self._now(), ended=ending)
        if self._accepted is not None:
            self._mailbox.close(self._accepted, ending)
            self._accepted = None
        text = self._mailbox.take()
        if text is not None:
            self._refuse(text, ProfilingConfigError(f"the job has ended: {ending}", instead="Ask a job that is running"))
        self._state = replace(self._state, open=None)
        self._mailbox.write(PROGRESS, self._state.as_json())

    # -- deciding ------------------------------------------------------------------------------------------------------

    def _clear(self, names: set[str]) -> None:
        """Lay aside what an earlier run of this directory left open."""
        self._began = True
        accepted = self._mailbox.read(ACCEPTED) if ACCEPTED in names else {}
        if "id" in accepted:
            self._mailbox.close(accepted, "the job ended before it was done")
        text = self._mailbox.take() if REQUEST in names else None
        if text is not None:
            over = ProfilingConfigError("it was made before this run of the job began", instead="Ask again")
            self._refuse(text, over)

    def _read(self) -> None:
        sign, text = self._mailbox.look()
        if sign is None:
            return
        try:
            # What is no plain file of text, or too long for a request, holds nothing.
            parse_request(text or "")
        except ProfilingConfigError:
            if sign != self._doubtful:
                # Half-written, perhaps: whoever does not write by a link is given until the next look.
                self._doubtful = sign
                return
        self._doubtful = None
        text = self._mailbox.take()
        if text is None:
            return  # withdrawn in this very moment
        try:
            request = parse_request(text)
            self._accept(request)
        except ProfilingConfigError as error:
            self._refuse(text, error)

    def _accept(self, request: CaptureRequest) -> None:
        if self._accepted is not None:
            raise open_request(self._state)
        if self._mailbox.knows(request.id):
            # Ranks carry out each name once, and what became of the first would be lost.
            raise ProfilingConfigError(
                f"another request was called {request.id}", instead="Leave id out, or give each request one of its own"
            )
        if request.kind == "slow_iteration":
            self._count_slow(request)
        admitted = admit(request, self._state)
        window = admitted.window
        accepted = {
            "id": request.id,
            "launch": self._state.launch,
            "run": self._state.run,
            "start": window.start,
            "end": window.end,
            "ranks": admitted.ranks,
            "profilers": admitted.profilers,
            "shapes": request.shapes,
            "stacks": request.stacks,
            "kind": request.kind,
            "reason": request.reason,
            "requested_at": request.requested_at,
            "requested_by": request.requested_by,
            "attempt": claim_attempt(self._mailbox.root, window, 0, self._identity),
            "accepted_at_iteration": self._state.iteration,
        }
        self._mailbox.write(ACCEPTED, accepted)
        self._accepted = accepted
        self._slow_captures += request.kind == "slow_iteration"
        self._nsys_captures += "nsys" in admitted.profilers
        self._state = replace(self._state, open=_summary(accepted))
        logger.info(
            "a request is accepted: iterations %d to %d of rank(s) %s with %s%s",
            window.start, window.last, admitted.ranks, " and ".join(admitted.profilers),
            f": {request.reason}" if request.reason else "",
        )  # fmt: skip

    def _count_slow(self, request: CaptureRequest) -> None:
        if self._config.slow_iteration_factor is None:
            raise ProfilingConfigError(
                "this job captures no slow iterations",
                why="it was launched without profiling.slow_iteration_factor",
                instead="Leave kind out",
            )
        if self._slow_captures >= self._config.slow_iteration_captures:
            raise ProfilingConfigError(
                f"slow iterations were captured {self._slow_captures} times, as often as profiling.slow_iteration_captures says"
            )

    def _refuse(self, text: str, error: ProfilingConfigError) -> None:
        logger.warning("a request for a capture is refused: %s", error)
        id_, asked = new_id(), text[:1000]  # type: str, object
        with contextlib.suppress(ProfilingConfigError):
            request = parse_request(text)
            asked = request.as_json()
            taken = self._accepted is not None and self._accepted["id"] == request.id
            # Under its own name, by which whoever asked looks for the answer, unless that is another's.
            id_ = id_ if taken or self._mailbox.knows(request.id) else request.id
        self._mailbox.refuse(id_, asked, str(error))

    def _close_if_past(self) -> None:
        accepted, iteration = self._accepted, self._state.iteration
        if accepted is not None and iteration is not None and iteration >= accepted["end"]:
            self._accepted = None
            self._mailbox.close(accepted, "done")
            self._state = replace(self._state, open=None)

    # -- where the job is ----------------------------------------------------------------------------------------------

    def _now(self) -> JobState:
        iteration, durations = self._training.running_iteration, self._training.durations
        recent = [duration for _, duration in durations]
        pace = self._pace(iteration)
        torch = sys.modules.get("torch")
        under_nsys = self._config.use_nsys_profiler or runs_under_nsys()
        return replace(
            self._state,
            iteration=iteration,
            completed=len(recent),
            fastest_ns=max(min(recent[-10:]), min(pace, default=0)) if recent else None,
            median_ns=max(int(statistics.median(recent[-50:])), int(statistics.median(pace or [0]))) if recent else None,
            windows=[[window.start, window.end] for window in self._config.windows if window.end > (iteration or 0)],
            records_memory=self._records_memory(),
            cuda=torch is not None and torch.cuda.is_initialized(),
            under_nsys=under_nsys,
            nsys_captures_left=self._config.nsys_capture_count - len(self._config.windows) - self._nsys_captures
            if under_nsys
            else 0,
            open=_summary(self._accepted) if self._accepted is not None else None,
        )

    def _pace(self, iteration: int | None) -> list[int]:
        """Nanoseconds from one iteration's begin to the next one's, between one look and the next, as far back as is kept.

        More than an iteration's own time where a loop waits, evaluates or saves between two iterations.
        """
        if iteration is not None:
            self._looks.append((time.monotonic(), iteration))
        looks = list(self._looks)
        return [int((now - before) * 1e9 / (here - there)) for (before, there), (now, here) in pairwise(looks) if here > there]


def _profilers(config: ProfilingConfig) -> list[str]:
    asked = {
        "torch": config.use_pytorch_profiler,
        "memory": config.record_memory_history,
        "nsys": config.use_nsys_profiler,
    }
    return [name for name, wanted in asked.items() if wanted] or ["torch"]


def _summary(accepted: dict[str, Any]) -> dict[str, Any]:
    return {key: accepted[key] for key in ("id", "start", "end", "ranks", "profilers", "requested_at")}
