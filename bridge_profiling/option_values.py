"""What is typed for the options that several commands share: a window of iterations, and ranks."""

from __future__ import annotations

from bridge_profiling.config import RANK_WORDS
from bridge_profiling.errors import ProfilingConfigError


def parse_steps(text: str) -> tuple[int, int]:
    """`10:12` as (10, 12).

    Raises:
        ProfilingConfigError: it is not two whole numbers.
    """
    first, colon, last = text.partition(":")
    try:
        if not colon:
            raise ValueError(text)
        return int(first), int(last)
    except ValueError:
        raise ProfilingConfigError(
            f"--steps {text} is not a window",
            why="a window is its first iteration and the first one after it",
            instead="Type --steps 10:12 to capture iterations 10 and 11",
        ) from None


def parse_ranks(text: str, words: tuple[str, ...] = RANK_WORDS) -> list[int] | str:
    """`0,1` as [0, 1]; a word as it is.

    Args:
        text: what was typed.
        words: those that are known where it was typed.

    Raises:
        ProfilingConfigError: something else.
    """
    if text in words:
        return text
    try:
        return [int(rank) for rank in text.strip("[]").split(",")]
    except ValueError:
        known = f"one of the words {' and '.join(words)}" if len(words) > 1 else f"the word {words[0]}"
        raise ProfilingConfigError(
            f"--ranks {text} is not a list of ranks",
            why=f"ranks are whole numbers with commas between them, or {known}",
            instead="Type --ranks 0,1 or --ranks all",
        ) from None
