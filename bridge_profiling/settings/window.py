"""The request of a profile, a window of iterations and ranks: one check, whoever asks, in the caller's own names.

Imports neither torch nor nemo_run.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from bridge_profiling.common.errors import ProfilingConfigError, require
from bridge_profiling.layout import ParallelLayout
from bridge_profiling.manifest import Window

#: Values of `profile_ranks` other than a list: every rank, or one rank per pipeline stage.
RANK_WORDS = ("all", "pp")

#: Global ranks, or one of RANK_WORDS.
Ranks: TypeAlias = list[int] | str

#: Iterations are below it: the manifest's readers, NumPy and pyarrow count with 64 bits.
MAX_ITERATION = 1 << 63


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """The caller's names for a request, in messages. One name that holds the whole window is both `start` and `end`."""

    start: str = "profiling.profile_step_start"
    end: str = "profiling.profile_step_end"
    ranks: str = "profiling.profile_ranks"
    limit: str = "train.train_iters"
    first: int = 0  # number of the first iteration

    def window(self, start: object, end: object) -> str:
        """A window as the caller types it."""
        return typed(self.start, f"{start}:{end}") if self.start == self.end else f"{self.start}={start!r} {self.end}={end!r}"


FIELDS = Spelling()
OPTIONS = Spelling(start="--steps", end="--steps", ranks="--ranks")
ARGUMENTS = Spelling(start="profile_step_start", end="profile_step_end", ranks="profile_ranks")
TRAINER = Spelling(start="profile_step_start", end="profile_step_end", limit="the Trainer's max_steps")


def typed(name: str, value: object) -> str:
    """A value as typed after an option, or assigned to any other name."""
    return f"{name}{' ' if name.startswith('-') else '='}{value}"


def check_request(
    start: int,
    end: int,
    ranks: object,
    *,
    spelled: Spelling = FIELDS,
    train_iters: int | None = None,
    world_size: int | None = None,
) -> tuple[Window, Ranks]:
    """Check a request, and return its window and normalized ranks.

    Args:
        start: first iteration captured.
        end: first iteration after the window.
        ranks: a list of integers, an integer, or one of RANK_WORDS.
        spelled: the caller's names for these.
        train_iters: number of training iterations, if known; the window must end within them.
        world_size: number of ranks, if known; listed ranks must be below it.

    Raises:
        ProfilingConfigError: anything but integers, an empty window, a window past the end of training, an empty list of ranks,
            or ranks outside the world.
    """
    window = check_window(start, end, spelled, train_iters=train_iters)
    return window, check_ranks(ranks, spelled, world_size=world_size)


def check_window(start: int, end: int, spelled: Spelling = FIELDS, *, train_iters: int | None = None) -> Window:
    """The window of a request, checked as in `check_request`."""
    given, first = spelled.window(start, end), spelled.first
    for step in (start, end):
        require(
            isinstance(step, int) and not isinstance(step, bool) and first <= step < MAX_ITERATION,
            f"{given}: {step!r} is not an integer from {first} to 2^63 - 1",
            why=f"iterations are counted from {first}, with 64 bits",
            instead=f"Type for example {spelled.window(first + 10, first + 12)}",
        )
    swapped = spelled.window(end, start)
    require(
        start < end,
        f"{given}: the window is empty",
        why="a window is its first iteration and the first one after it",
        instead=f"Type {swapped if start > end else f'{spelled.window(start, start + 1)} to capture iteration {start} alone'}",
    )
    last = first - 1 + train_iters if train_iters is not None else end
    require(
        end <= last + 1,
        f"{given} exceeds {spelled.limit}={train_iters}",
        why=f"the last iteration is {last}, so the window would be cut short",
        instead=f"Type for example {spelled.window(max(last + 1 - (end - start), first), last + 1)}, or raise {spelled.limit}",
    )
    return Window(start, end)


def check_ranks(ranks: object, spelled: Spelling = FIELDS, *, world_size: int | None = None) -> Ranks:
    """The ranks of a request, as distinct numbers or one of RANK_WORDS; checked as in `check_request`."""
    name = spelled.ranks
    one, every, stages = (typed(name, value) for value in ("0" if name.startswith("-") else "[0]", *RANK_WORDS))
    either = f"Type {one} for rank 0, {every} for every rank, or {stages} for one rank per pipeline stage"
    if isinstance(ranks, str):
        require(ranks in RANK_WORDS, f"{name}={ranks!r} is not known", why="the words are 'all' and 'pp'", instead=either)
        return ranks
    listed = [ranks] if isinstance(ranks, int) and not isinstance(ranks, bool) else ranks
    if not isinstance(listed, Sequence):
        raise ProfilingConfigError(f"{name}={ranks!r} is not a list of ranks", instead=either)
    require(listed, f"{name}=[] names no rank", why="an empty list could mean all or none", instead=either)
    wrong = [rank for rank in listed if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0]
    holds = f"{name} holds {', '.join(map(repr, wrong))}"
    require(not wrong, holds, why="a rank is an integer from 0 upwards", instead=either)
    distinct = list(dict.fromkeys(listed))
    outside = [rank for rank in distinct if world_size is not None and rank >= world_size]
    require(
        not outside,
        f"{name} names {', '.join(map(str, outside))}, but the job has {world_size} rank{'' if world_size == 1 else 's'}",
        why=f"ranks run from 0 to {(world_size or 0) - 1}",
        instead=f"List ranks of this job, or type {every}",
    )
    return distinct


def select_ranks(ranks: object, layout: ParallelLayout) -> list[int]:
    """The global ranks that `profile_ranks` selects in this layout; raises ProfilingConfigError as `check_ranks` does."""
    chosen = check_ranks(ranks)
    if isinstance(chosen, list):
        return chosen
    return layout.pipeline_ranks() if chosen == "pp" else list(range(layout.world_size))


def parse_steps(text: str, spelled: Spelling = OPTIONS) -> Window:
    """Parse a window as typed: `10:12` is iterations 10 and 11."""
    found = re.fullmatch(r"\s*(\d{1,99})\s*:\s*(\d{1,99})\s*", text, re.ASCII)
    if found is None:
        raise ProfilingConfigError(
            f"{typed(spelled.start, text)} is not a window",
            why="a window is its first iteration and the first one after it",
            instead=f"Type {spelled.window(10, 12)} to capture iterations 10 and 11",
        )
    return check_window(int(found[1]), int(found[2]), spelled)


def parse_ranks(text: str, words: tuple[str, ...] = RANK_WORDS, *, world_size: int | None = None) -> Ranks:
    """Parse the value of --ranks: `0,1` is [0, 1]; one of `words` is returned unchanged."""
    if text in words:
        return text
    try:
        ranks = [int(rank) for rank in text.strip("[]").split(",")]
    except ValueError:
        raise ProfilingConfigError(
            f"--ranks {text} is not a list of ranks",
            why=f"the value is {' or '.join(words)}, or integers separated by commas",
            instead=f"Type --ranks 0,1 or --ranks {next(iter(difflib.get_close_matches(text, words, n=1)), words[0])}",
        ) from None
    return check_ranks(ranks, OPTIONS, world_size=world_size)
