"""Questions about a run, and their answers."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from bridge_profiling.traces.types import Caveat


@dataclass(frozen=True)
class Answer:
    """What a question returns.

    Args:
        table: the rows.
        caveats: what the rows cannot show.
    """

    table: pa.Table
    caveats: tuple[Caveat, ...] = ()
