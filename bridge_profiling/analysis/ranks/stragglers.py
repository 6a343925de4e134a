"""Whether one rank holds the others up, always the same or now one and now another, and how sure that is.

Arithmetic on the rows of `ranks.ranks`; reads no tables itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from bridge_profiling.analysis.attribution.parts import ENOUGH_ITERATIONS
from bridge_profiling.analysis.ranks.matching import tell

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: A rank is slow in an iteration when its own time exceeds the median rank's by this part of the iteration.
SLOW = 0.02

#: Below this probability that chance alone makes some rank slow as often, a stable straggler is certain enough to act on.
_UNLIKELY, _DOUBTFUL = 0.01, 0.1

_SCHEMA = pa.schema(
    [
        ("rank", pa.int32()),
        ("verdict", pa.string()),
        ("confidence", pa.string()),
        ("chance", pa.float64()),
        ("iterations", pa.int32()),
        ("times_slow", pa.int32()),
        ("times_slowest", pa.int32()),
        ("times_fastest", pa.int32()),
        ("excess_own_us", pa.float64()),
        ("excess_compute_us", pa.float64()),
        ("waited_for_us", pa.float64()),
    ]
)


def iterations_that_count(boundary: Mapping[int, bool], limitations: list[str]) -> list[int]:
    """The iterations that a steady state is judged by: all but boundary iterations, or all where that leaves fewer than three.

    Args:
        boundary: whether each captured iteration is one on any rank.
        limitations: a sentence is appended when all count.
    """
    steady = sorted(number for number, edge in boundary.items() if not edge)
    if len(steady) >= ENOUGH_ITERATIONS or len(steady) == len(boundary):
        return steady
    tell(limitations, f"only {len(boundary)} iterations are captured: those at the profiler's start and stop count too")
    return sorted(boundary)


def stragglers(ranks: pa.Table, *, limitations: list[str]) -> pa.Table:
    """Which ranks are slow, and whether they stay so.

    Args:
        ranks: what `ranks.ranks` gave.
        limitations: what cannot be judged is appended.

    Returns:
        A row per rank, the slowest first: rank; verdict: `stable` (slow in more than half of the iterations), `sometimes` or
        `no`; confidence `high`, `medium` or `low`, null for `no`; chance: the probability that some rank is slow as often by
        chance, were slowness handed out anew each iteration; iterations; times_slow (own time beyond the median rank's by
        2 % of the iteration); times_slowest, times_fastest; excess_own_us and excess_compute_us: mean own time and compute
        beyond the median rank's; waited_for_us: mean of what others waited for it. Means are per iteration. Empty for a
        single rank.
    """
    grid = _Grid(ranks, limitations)
    if len(grid.ranks) < 2 or not len(grid.numbers):
        tell(limitations, "fewer than two ranks captured the same iterations: none can be called slow")
        return _SCHEMA.empty_table()
    if len(grid.numbers) < ENOUGH_ITERATIONS:
        tell(
            limitations,
            f"with {len(grid.numbers)} iterations captured, a rank that is always slow cannot be told from one that was "
            "slow by chance: capture more iterations",
        )
    own = _excess(grid.own_us)
    compute, waited_for = _excess(grid.compute_us), grid.waited_for_us
    slow = own > SLOW * np.nanmedian(grid.duration_us, axis=1, keepdims=True)
    seen = (~np.isnan(own)).sum(axis=0)
    times_slow = slow.sum(axis=0)
    share = float(slow.sum() / max(seen.sum(), 1))
    rows = []
    for place, rank in enumerate(grid.ranks):
        captured, times = int(seen[place]), int(times_slow[place])
        verdict = "stable" if 2 * times > captured else "sometimes" if times else "no"
        chance = _chance(times, captured, share, len(grid.ranks)) if times else 1.0
        rows.append(
            {
                "rank": rank,
                "verdict": verdict,
                "confidence": None if verdict == "no" else _confidence(chance, captured),
                "chance": chance,
                "iterations": captured,
                "times_slow": times,
                "times_slowest": int((grid.place[:, place] == "slowest").sum()),
                "times_fastest": int((grid.place[:, place] == "fastest").sum()),
                "excess_own_us": float(np.nanmean(own[:, place])),
                "excess_compute_us": float(np.nanmean(compute[:, place])),
                "waited_for_us": float(np.nanmean(waited_for[:, place])),
            }
        )
    rows.sort(key=lambda row: (-row["excess_own_us"], row["rank"]))
    return pa.Table.from_pylist(rows, schema=_SCHEMA)


def verdict(found: pa.Table) -> str:
    """One word for a run.

    `stable`: a rank is slow in most iterations; `rotating`: several are, each in few; `occasional`: one is, in few; `none`;
    `unknown`.

    Args:
        found: what `stragglers` gave.
    """
    words = found["verdict"].to_pylist()
    if not words:
        return "unknown"
    if "stable" in words:
        return "stable"
    return {0: "none", 1: "occasional"}.get(words.count("sometimes"), "rotating")


class _Grid:
    """Columns of `ranks.ranks` as arrays of iterations by ranks; NaN where a rank has not captured an iteration."""

    def __init__(self, ranks: pa.Table, limitations: list[str]) -> None:
        rows = [row | {"iteration": -1 if row["iteration"] is None else row["iteration"]} for row in ranks.to_pylist()]
        rows = [row for row in rows if row["own_us"] is not None]
        boundary: dict[int, bool] = {}
        captured: dict[int, int] = {}
        for row in rows:
            boundary[row["iteration"]] = boundary.get(row["iteration"], False) or row["boundary"]
            captured[row["iteration"]] = captured.get(row["iteration"], 0) + 1
        shared = {number: edge for number, edge in boundary.items() if captured[number] > 1}
        self.numbers = iterations_that_count(shared, limitations) if shared else []
        self.ranks = sorted({row["rank"] for row in rows if row["iteration"] in set(self.numbers)})
        place_of = {rank: place for place, rank in enumerate(self.ranks)}
        line_of = {number: line for line, number in enumerate(self.numbers)}
        chosen = [row for row in rows if row["iteration"] in line_of]
        lines = np.array([line_of[row["iteration"]] for row in chosen], np.int64)
        places = np.array([place_of[row["rank"]] for row in chosen], np.int64)
        self.own_us, self.compute_us, self.waited_for_us, self.duration_us = (
            self._filled(chosen, name, lines, places) for name in ("own_us", "compute_us", "waited_for_us", "duration_us")
        )
        self.place = np.full((len(self.numbers), len(self.ranks)), "", object)
        self.place[lines, places] = [row["place"] for row in chosen]

    def _filled(
        self, rows: Sequence[Mapping[str, Any]], name: str, lines: NDArray[np.int64], places: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        grid = np.full((len(self.numbers), len(self.ranks)), np.nan)
        grid[lines, places] = [row[name] for row in rows]
        return grid


def _excess(grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """What each rank has beyond the median rank of the iteration."""
    return grid - np.nanmedian(grid, axis=1, keepdims=True)


def _chance(times: int, iterations: int, share: float, ranks: int) -> float:
    """The probability that any of the ranks is slow that often, when each is so in a share of iterations independently."""
    tail = sum(math.comb(iterations, k) * share**k * (1 - share) ** (iterations - k) for k in range(times, iterations + 1))
    return 1.0 - (1.0 - min(tail, 1.0)) ** ranks


def _confidence(chance: float, iterations: int) -> str:
    if iterations < ENOUGH_ITERATIONS or chance > _DOUBTFUL:
        return "low"
    return "high" if chance <= _UNLIKELY else "medium"
