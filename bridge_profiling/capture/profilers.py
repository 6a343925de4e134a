"""The profilers of one rank: calls to them that may not fail, and what became of each.

A profiler that raises is logged, marked failed and left out from then on; training goes on.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bridge_profiling.capture.profiler import Backend
from bridge_profiling.errors import one_line
from bridge_profiling.manifest import Status, combined_status

logger = logging.getLogger(__name__)

#: From best to worst: everything asked for; some of it; nothing, as the window never opened; nothing, as something broke.


@dataclass
class Outcome:
    """What became of one profiler.

    Args:
        backend: the profiler.
        status: as the manifest has it.
        reason: why it is not `complete`.
    """

    backend: Backend
    status: Status = "missed"
    reason: str | None = None


class Profilers:
    """The profilers that a config asks for, on one rank.

    Args:
        rank: global rank, for the log.
        backends: the profilers.
    """

    def __init__(self, rank: int, backends: list[Backend]) -> None:
        self._rank = rank
        self.outcomes = [Outcome(backend) for backend in backends]
        #: Those that have not failed and are not done.
        self.active = list(self.outcomes)
        self._left_to_write: list[tuple[Outcome, Callable[[], None]]] = []

    @property
    def status(self) -> Status:
        """What all profilers have in common, else `partial` when at least one captured something."""
        return combined_status({outcome.status for outcome in self.outcomes})

    @property
    def names(self) -> str:
        """The active profilers, for the log."""
        return " and ".join(outcome.backend.name for outcome in self.active)

    @property
    def warm_up_needed(self) -> bool:
        """Whether one of them wants the iteration before the window."""
        return any(outcome.backend.needs_warm_up for outcome in self.active)

    def open(self) -> None:
        """Prepare all of them before the model is built."""
        self._each("open", lambda backend: backend.open())

    def warm_up(self) -> None:
        """Have those that need it prepare for the next iteration."""
        self._each("warm up", lambda backend: backend.warm_up() if backend.needs_warm_up else None)

    def presume_failed(self) -> None:
        """Until the capture is written, what a killed process leaves is a failure."""
        for outcome in self.active:
            outcome.status = "failed"

    def start(self) -> None:
        """Start recording."""
        synchronize(self._rank)
        self._each("start", lambda backend: backend.start())

    def stop(self, interrupted: list[int]) -> None:
        """Stop recording; what need not keep the training waiting is left for `finish`."""
        synchronize(self._rank)
        for outcome in list(self.active):
            self._attempt(outcome, "stop", partial(self._stop, outcome, interrupted))

    def _stop(self, outcome: Outcome, interrupted: list[int]) -> None:
        rest = outcome.backend.stop(interrupted)
        if rest is not None:
            self._left_to_write.append((outcome, rest))

    @property
    def unwritten(self) -> bool:
        """Whether `finish` still has something to write."""
        return bool(self._left_to_write)

    @property
    def unpacked(self) -> list[Path]:
        """What is whole, and lies under another name until `finish` has packed it."""
        return [outcome.backend.unpacked for outcome, _ in self._left_to_write if outcome.backend.unpacked is not None]

    def close(self) -> None:
        """Release all of them, also those that failed."""
        for outcome in self.outcomes:
            self._attempt(outcome, "close", outcome.backend.close)

    def release(self) -> None:
        """Let go of what was recorded: it is written."""
        for outcome in self.outcomes:
            self._attempt(outcome, "release", outcome.backend.release)

    def leave(self, but: set[str] | None = None) -> set[str]:
        """The process may exit next.

        Args:
            but: names of profilers for which this was done already.

        Returns:
            The names for which it is done now.
        """
        done = set(but or ())
        for outcome in self.outcomes:
            if outcome.backend.name not in done:
                done.add(outcome.backend.name)
                self._attempt(outcome, "leave", outcome.backend.leave)
        return done

    def finish(self, status: Status, reason: str | None) -> None:
        """Write what is left, and give those that did not fail their status. May run in another thread."""
        for outcome, rest in self._left_to_write:
            self._attempt(outcome, "write", rest)
        self._left_to_write = []
        for outcome in self.active:
            # A memory backend may have written snapshots of OOMs before its window.
            wrote = status == "missed" and outcome.backend.artifacts
            outcome.status, outcome.reason = "partial" if wrote else status, reason
        self.active = []

    def fail(self, reason: str) -> None:
        """Mark all of them failed and release them."""
        for outcome in self.outcomes:
            outcome.status, outcome.reason = "failed", outcome.reason or reason
        self.active = []
        self.close()

    def _each(self, action: str, call: Callable[[Backend], None]) -> None:
        for outcome in list(self.active):
            self._attempt(outcome, action, partial(call, outcome.backend))

    def _attempt(self, outcome: Outcome, action: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            if outcome in self.active:
                self.active.remove(outcome)
            # The first failure is the one that explains the others.
            outcome.status, outcome.reason = "failed", outcome.reason or f"{action}: {one_line(error)}"
            logger.error(
                "rank %d: %s could not %s: %s. Training goes on without it.",
                self._rank, outcome.backend.name, action, one_line(error),
            )  # fmt: skip

    def report(self, captured: list[int]) -> None:
        """Log what was captured and where it lies.

        Args:
            captured: iterations in the capture.
        """
        for outcome in self.outcomes:
            if outcome.status in ("complete", "partial"):
                where = ", ".join(str(path) for path in outcome.backend.artifacts) or "nsys' own report"
                logger.info(
                    "rank %d: %s captured iterations %s (%s): %s",
                    self._rank, outcome.backend.name, _span(captured), outcome.reason or outcome.status, where,
                )  # fmt: skip
            elif outcome.status == "missed":
                logger.warning("rank %d: %s captured nothing: %s", self._rank, outcome.backend.name, outcome.reason)


def synchronize(rank: int) -> None:
    """Wait for the device, so that the window's edges lie between iterations there too."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except Exception as error:
        # A device that has failed already: the training will hear of it, and what was recorded is still written.
        logger.error("rank %d: the device did not synchronize: %s", rank, one_line(error))


def _span(iterations: list[int]) -> str:
    if not iterations:
        return "none"
    return f"{iterations[0]} to {iterations[-1]}" if len(iterations) > 1 else str(iterations[0])
