"""Listens for requests beside the training, in a thread of its own: a file system that hangs holds up nothing but that.

About once a second each rank looks into the job's directory for requests (mailbox.py). Rank 0 decides; the others do what
it has accepted. No rank talks to another.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from bridge_profiling.capture.control.mailbox import ACCEPTED, PROGRESS, REQUEST, Mailbox
from bridge_profiling.capture.control.request import CaptureRequest
from bridge_profiling.capture.nsys_profiler import check_armed
from bridge_profiling.capture.slow_iterations import COOL_DOWN, SlowWatch
from bridge_profiling.capture.window import WindowPlan
from bridge_profiling.config import ProfilingConfig
from bridge_profiling.errors import CaptureError, one_line
from bridge_profiling.manifest import Trigger
from bridge_profiling.nsys.launch import runs_under_nsys

logger = logging.getLogger(__name__)

#: A training that ends does not wait longer than this for a thread that may hang in a file system.
_STOP_SECONDS = 2.0


class Training(Protocol):
    """What of the hook is seen from here."""

    @property
    def running_iteration(self) -> int | None:
        """The iteration that began last; None before the first."""

    @property
    def durations(self) -> tuple[tuple[int, int], ...]:
        """`(iteration, nanoseconds)` of the last ones."""

    def schedule(self, plan: WindowPlan) -> None:
        """Capture a window that is still to come."""

    def watch_above(self, nanoseconds: int) -> None:
        """Iterations longer than this are slow."""


class Decider(Protocol):
    """What rank 0 does at each look (decider.py)."""

    def look(self, names: set[str]) -> None:
        """Read, decide, publish."""

    def end(self, ending: str) -> None:
        """The training has ended."""


class Listener:
    """One rank's thread.

    Args:
        mailbox: where requests come.
        config: the job's own.
        rank: global rank.
        launch: what the ranks of this launch have in common.
        training: the hook.
        decider: on rank 0.
        watch: what is slow; None where nobody asked.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        config: ProfilingConfig,
        rank: int,
        launch: str,
        training: Training,
        decider: Decider | None,
        watch: SlowWatch | None,
    ) -> None:
        self._mailbox, self._config, self._rank, self._launch = mailbox, config, rank, launch
        self._training, self._decider, self._watch = training, decider, watch
        self._stopping = threading.Event()
        self._ending = "training ended"
        self._heard: str | None = None
        #: What rank 0 told last when this rank began to listen: an earlier run of this directory, perhaps.
        self._left_behind: dict[str, Any] = {}
        self._asked = 0
        self._said: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="bridge_profiling listener", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def stop(self, ending: str) -> None:
        """Stop, and tell whoever asks later how the training ended."""
        self._ending = ending
        self._stopping.set()
        self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        self._carefully(self._begin)
        while True:
            self._carefully(self._look)
            if self._stopping.wait(self._config.on_demand_seconds):
                break
        if self._decider is not None:
            self._carefully(lambda: self._decider.end(self._ending))  # type: ignore[union-attr]

    def _carefully(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:
            # Once for each kind of trouble: a directory that went away is looked for again a second later.
            if type(error).__name__ not in self._said:
                self._said.add(type(error).__name__)
                logger.error("rank %d: no captures on demand: %s. Training goes on.", self._rank, one_line(error))

    def _begin(self) -> None:
        if self._decider is None and PROGRESS in self._mailbox.names():
            self._left_behind = self._mailbox.read(PROGRESS)

    def _look(self) -> None:
        names = self._mailbox.names()
        if self._decider is not None:
            self._decider.look(names)
            names = self._mailbox.names()
        if ACCEPTED in names:
            self._hear(self._mailbox.read(ACCEPTED))
        if self._watch is not None:
            self._watch_out(self._watch, names)

    # -- what was accepted ---------------------------------------------------------------------------------------------

    def _hear(self, accepted: dict[str, Any]) -> None:
        """Do what rank 0 has accepted, once; answer."""
        id_ = accepted.get("id")
        if not id_ or id_ == self._heard or accepted.get("launch") != self._launch or not self._of_this_run(accepted):
            return
        self._heard = id_
        if self._watch is not None:
            self._watch.be_quiet_before(accepted["end"] + COOL_DOWN)
            self._asked += accepted["kind"] == "slow_iteration"
        if self._rank not in accepted["ranks"]:
            return
        try:
            iteration = self._do(accepted)
        except Exception as error:
            reason = str(error) if isinstance(error, CaptureError) else one_line(error)
            logger.error("rank %d: the request %s is not carried out: %s. Training goes on.", self._rank, id_, reason)
            self._mailbox.answer(id_, self._rank, status="refused", reason=reason)
        else:
            self._mailbox.answer(id_, self._rank, status="armed", reason=None, iteration=iteration)

    def _of_this_run(self, accepted: dict[str, Any]) -> bool:
        """Whether a rank 0 that runs has accepted it: what an earlier one did lies there until rank 0 clears it away."""
        if self._decider is not None:
            return True
        told = self._mailbox.read(PROGRESS)
        return told != self._left_behind and told.get("run") == accepted.get("run")

    def _do(self, accepted: dict[str, Any]) -> int | None:
        iteration = self._training.running_iteration
        if iteration is not None and iteration >= accepted["start"]:
            raise CaptureError(
                f"this rank was in iteration {iteration} when it heard of a window that begins at {accepted['start']};"
                " ask again with a later --start"
            )
        if "torch" in accepted["profilers"] and runs_under_nsys():
            raise CaptureError("nsys runs around this rank, and the torch profiler needs CUPTI for itself")
        if "nsys" in accepted["profilers"]:
            check_armed()
        self._training.schedule(self._plan(accepted))
        return iteration

    def _plan(self, accepted: dict[str, Any]) -> WindowPlan:
        config = replace(
            self._config,
            profile_step_start=accepted["start"],
            profile_step_end=accepted["end"],
            profile_ranks=accepted["ranks"],
            use_pytorch_profiler="torch" in accepted["profilers"],
            record_memory_history="memory" in accepted["profilers"],
            use_nsys_profiler="nsys" in accepted["profilers"],
            record_shapes=self._config.record_shapes or accepted["shapes"],
            pytorch_profiler_collect_callstack=self._config.pytorch_profiler_collect_callstack or accepted["stacks"],
        )
        trigger = Trigger(
            kind=accepted["kind"],
            reason=accepted["reason"],
            requested_at=accepted["requested_at"],
            requested_by=accepted["requested_by"],
            request=accepted["id"],
        )
        return WindowPlan(config, trigger, accepted["attempt"])

    # -- what is slow --------------------------------------------------------------------------------------------------

    def _watch_out(self, watch: SlowWatch, names: set[str]) -> None:
        """Ask for a capture when an iteration was slow; the first rank that asks is heard, and rank 0 counts."""
        self._training.watch_above(watch.threshold(self._training.durations))
        slow = watch.take()
        if slow is None or self._asked >= self._config.slow_iteration_captures or names & {REQUEST, ACCEPTED}:
            return
        length = self._config.profile_step_end - self._config.profile_step_start
        request = CaptureRequest(
            iterations=length, kind="slow_iteration", reason=slow.told(self._rank), requested_by=f"rank {self._rank}"
        )
        logger.warning("rank %d: %s; %d iterations are to be captured for it", self._rank, request.reason, length)
        # Refused or not, the same slow spell is not asked for at every look.
        watch.be_quiet_before(slow.iteration + COOL_DOWN)
        self._mailbox.file(request.as_json())
