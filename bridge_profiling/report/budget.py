"""The time budget of a run: its typical iteration, cut into parts by cause that add up to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from bridge_profiling.facts.parts import BY_CAUSE


@dataclass(frozen=True)
class Part:
    """The time of an iteration that has one cause."""

    column: str  # one of `BY_CAUSE`
    time_us: float  # microseconds of an iteration
    share: float  # of the iteration; of a run, the mean over its ranks
    low: float  # the smallest share of a rank
    high: float  # the largest share of a rank


@dataclass(frozen=True)
class Budget:
    """The parts of an iteration, in the order of `BY_CAUSE`; none without iterations."""

    iteration_us: float | None  # the median over ranks of each rank's median iteration; None without iterations
    waiting_known: bool  # on every rank; else `communication_us` contains waiting for other ranks
    parts: list[Part]  # their times add up to `iteration_us`, and their shares to 1


def budget(rows: Sequence[dict[str, Any]]) -> Budget:
    """The budget of some ranks, from their rows of `Run.attribution`.

    Shares are averaged, not times: the parts then add up to the median iteration, however the ranks differ.
    """
    if not rows:
        return Budget(None, False, [])
    iteration_us = median(row["duration_us"] for row in rows)
    timed = [row for row in rows if row["duration_us"]]
    parts = []
    for column in BY_CAUSE if timed else ():
        shares = [row[column] / row["duration_us"] for row in timed]
        share = fmean(shares)
        parts.append(Part(column, share * iteration_us, share, min(shares), max(shares)))
    return Budget(iteration_us, all(row["waiting_known"] for row in rows), parts)
