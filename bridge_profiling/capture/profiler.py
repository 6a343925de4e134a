"""What the hook asks of a profiler. A backend may raise anything: the hook catches it, and training goes on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from bridge_profiling.capture.files import CaptureFiles
from bridge_profiling.config import ProfilingConfig


@dataclass
class Backend:
    """One profiler on one rank.

    The hook calls, in this order: `open`, `warm_up` (only with `needs_warm_up`, in the iteration before the window),
    `start`, for each captured iteration `iteration_range`, then `stop`, and `close` in any case, also after an error
    and where the window never opened; at the end of the training `leave`.

    Args:
        config: what was asked.
        files: where to write.
        metadata: what identifies this rank and window; written into captures whose format can carry it.
    """

    config: ProfilingConfig
    files: CaptureFiles
    metadata: dict[str, object]
    artifacts: list[Path] = field(default_factory=list)
    #: What the reader of the capture should know about it; written into the manifest.
    notes: list[str] = field(default_factory=list)

    name = ""
    needs_warm_up = False
    #: A capture that is whole, while what `stop` has returned gives it its final form.
    unpacked: Path | None = None

    def open(self) -> None:
        """Called when the hook opens, before the model is built."""

    def warm_up(self) -> None:
        """Prepare, so that the first captured iteration does not pay for it."""

    def start(self) -> None:
        """Start recording. The device is idle."""

    def iteration_range(self, iteration: int) -> AbstractContextManager | None:
        """A range around a captured iteration, which names it in the capture."""
        return None

    def phase_range(self, name: str) -> AbstractContextManager | None:
        """A range around a phase of a captured iteration."""
        return None

    def stop(self, interrupted: list[int]) -> Callable[[], None] | None:
        """Stop recording and write. The device is idle, and training waits.

        Args:
            interrupted: iterations an exception ended, which the capture must not show as iterations done.

        Returns:
            What is left to write and can be written while training goes on, or None. It is called once, in another thread.
        """
        return None

    def close(self) -> None:
        """Called once when the window has closed, whatever happened before."""

    def release(self) -> None:
        """Called once after everything is written, when the training is disturbed anyway: let go of what is held."""

    def leave(self) -> None:
        """Called when the hook closes, after `close`, on the last profiler of its kind: the process may exit next."""
