"""The window against what a Trainer is told to run: `max_steps`, as Lightning and Hugging Face both call it."""

from __future__ import annotations

from bridge_profiling.config import ProfilingConfig
from bridge_profiling.errors import ProfilingConfigError


def check_max_steps(config: ProfilingConfig, max_steps: int | None) -> None:
    """Refuse a window that the training ends before.

    Args:
        config: what is asked for.
        max_steps: optimizer steps that the Trainer runs; None where it does not tell.

    Raises:
        ProfilingConfigError: the window is not captured whole.
    """
    if config.enabled and max_steps is not None and config.profile_step_end > max_steps:
        raise ProfilingConfigError(
            f"profile_step_end={config.profile_step_end} lies past the Trainer's max_steps={max_steps}",
            why=f"its last iteration is {max_steps - 1}, so the window {config.window} would not be captured whole",
            instead=f"Pass profile_step_end={max_steps} or less, or a larger max_steps",
        )
