"""The base class of profilers, and the guard around calls to them: a profiler may fail, the training may not."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bridge_profiling.capture.files import CaptureFiles
from bridge_profiling.capture.signals import raised_by_handler
from bridge_profiling.common.errors import TrainingLogger, one_line, say
from bridge_profiling.common.printable import printable
from bridge_profiling.manifest import Status
from bridge_profiling.settings.profiling import ProfilingConfig

logger = TrainingLogger(__name__)


@contextmanager
def guarded(
    what: str, rank: int, failed: Callable[[str], None] | None = None, *, traceback: bool = False, seen: set[type] | None = None
) -> Iterator[None]:
    """Log an exception instead of raising it into the training, unless a signal handler raised it.

    `failed` is called with the error on one line; each type of error in `seen` is logged once.
    """
    try:
        yield
    except Exception as error:
        if raised_by_handler(error):
            raise
        reason = one_line(error)
        if seen is None or type(error) not in seen:
            logger.error("rank %d: %s: %s. Training goes on.", rank, what, reason, exc_info=traceback)
        if seen is not None:
            seen.add(type(error))
        if failed is not None:
            failed(reason)


@dataclass(frozen=True)
class Outcome:
    """How a profiler ended: `complete` (everything asked for), `partial`, `missed` (the window never opened) or `failed`.

    `reason` is why the status is not `complete`.
    """

    status: Status
    reason: str | None = None


@dataclass(eq=False)
class Profiler:
    """One profiler of one window on one rank. Its methods may raise anything; they are called under `guarded`.

    They are called in this order: `open`, `warm_up` (in the iterations before the window), `start`, `iteration_range` for each
    captured iteration, then `stop`, and `close` in any case, also after an error and for a window that never opened; at the end
    of the training `leave`.

    Args:
        config: the settings.
        files: where to write.
        metadata: the rank and window; written into captures whose format can carry it.
        artifacts: the files written so far.
        notes: facts that readers of the capture should know; written into the manifest.
        outcome: None until it has failed or finished.
        announces: print the outcome where logging does not show it.
    """

    config: ProfilingConfig
    files: CaptureFiles
    metadata: dict[str, object]
    artifacts: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    outcome: Outcome | None = None
    announces: bool = False

    name = ""
    #: A whole capture that the function returned by `stop` still has to bring into its final form.
    unpacked: Path | None = None

    def open(self) -> None:
        """Prepare when the hook opens, before the model is built."""

    def warm_up(self) -> None:
        """Prepare, so that the first captured iteration does not pay for it."""

    def start(self) -> None:
        """Start recording. The device is idle."""

    def iteration_range(self, iteration: int) -> AbstractContextManager | None:
        """A range around a captured iteration, which names it in the capture."""
        return self.phase_range(f"iteration_{iteration}")

    def phase_range(self, name: str) -> AbstractContextManager | None:
        """A range around a phase of a captured iteration."""

    def stop(self, interrupted: list[int]) -> Callable[[], None] | None:
        """Stop recording and write, while the device is idle and training waits.

        The capture must not show the `interrupted` iterations, which an exception ended, as complete. Returns a function that
        writes the rest, for a thread, or None.
        """

    def close(self) -> None:
        """Release the profiler when the window has closed, whatever happened before."""

    def release(self) -> None:
        """Free the memory of the recording after everything is written. May be called more than once."""

    @property
    def is_unsettled(self) -> bool:
        """Whether the thread in which it started still has to call `clean_up`."""
        return False

    def clean_up(self) -> None:
        """Remove what other threads could not."""

    def forked(self) -> None:
        """Record nothing in a child process that the training has forked, and write nothing when it ends."""

    def leave(self) -> None:
        """Called when the hook closes, after `close`, on the last profiler of its kind: the process may exit next."""

    def guarded(self, action: str) -> AbstractContextManager[None]:
        """Guard a call. A profiler that raises is logged, marked `failed` and left out from then on."""
        return guarded(f"{self.name} could not {action}", self.files.rank, lambda error: self.fail(f"{action}: {error}"))

    def fail(self, reason: str) -> None:
        """Mark it failed. The first failure explains the later ones, so its reason stays."""
        self.outcome = Outcome("failed", (self.outcome and self.outcome.reason) or reason)

    def finish(self, status: Status, reason: str | None) -> None:
        """Set the outcome of a profiler that did not fail."""
        # The memory profiler may have written snapshots of out-of-memory errors before its window.
        wrote = status == "missed" and self.artifacts
        self.outcome = Outcome("partial" if wrote else status, reason)

    def log_outcome(self, captured: list[int]) -> None:
        """Log which iterations were captured, and in which files."""
        rank, outcome = self.files.rank, self.outcome or Outcome("failed")
        if outcome.status in ("complete", "partial"):
            where = ", ".join(str(path) for path in self.artifacts) or "nsys' own report"
            span = " to ".join(str(iteration) for iteration in dict.fromkeys([*captured[:1], *captured[-1:]])) or "none"
            message = printable(
                f"rank {rank}: {self.name} captured iterations {span} ({outcome.reason or outcome.status}): {where}"
            )
            logger.info("%s", message)
            if not logger.isEnabledFor(logging.INFO) and self.announces:
                # A training without logging would not hear of its captures.
                say(f"bridge_profiling: {message}")
        elif outcome.status == "missed":
            logger.warning("rank %d: %s captured nothing: %s", rank, self.name, outcome.reason)


def for_each(profilers: Iterable[Profiler], method: Callable[[Profiler], None]) -> None:
    """Call a method of each profiler, under the guard of this action."""
    for profiler in profilers:
        with profiler.guarded(method.__name__.replace("_", " ")):
            getattr(profiler, method.__name__)()


def synchronize_device(rank: int) -> None:
    """Wait for the device, so that the window's edges are between iterations there too."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        # A device that has failed already raises here and in the training's next call; the recording is still written.
        with guarded("the device did not synchronize", rank):
            torch.cuda.synchronize()
