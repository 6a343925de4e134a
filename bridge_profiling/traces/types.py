"""Types that readers, analysis and report share. Imports no pyarrow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Caveat:
    """Something that a capture cannot show, or that was read differently than it was written.

    Args:
        code: stable identifier in snake_case, such as `streams_unrecorded`. Code compares this, never the text.
        text: one or more sentences for the user, without naming the ranks.
        ranks: global ranks it applies to; empty for the whole run.
        file: the file it is about, if it is about one.
    """

    code: str
    text: str
    ranks: tuple[int, ...] = ()
    file: str | None = None
