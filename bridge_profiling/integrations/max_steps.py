"""The window against what a Trainer is told to run: `max_steps`, as Lightning and Hugging Face both call it."""

from __future__ import annotations

from bridge_profiling.config import ProfilingConfig, check_window_fits


def check_max_steps(config: ProfilingConfig, max_steps: int | None) -> None:
    """Refuse a window that the training ends before.

    Args:
        config: what is asked for.
        max_steps: optimizer steps that the Trainer runs; None where it does not tell.

    Raises:
        ProfilingConfigError: the window is not captured whole.
    """
    if config.enabled:
        check_window_fits(config.profile_step_end, max_steps, name="profile_step_end", limit="the Trainer's max_steps")
