"""Trainings on CPUs: where an iteration of the host goes, in words, as a table and as bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import Any

from bridge_profiling.facts.intervals import grouped
from bridge_profiling.facts.parts import HOST_PARTS, steady
from bridge_profiling.report import figures, words
from bridge_profiling.report.views import Figure, Row, TableView, ms, of, table

#: Parts of an iteration: its name, and its color in the figure.
_PARTS = {
    "operators_us": ("operators", "compute"),
    "communication_us": ("communication", "communication"),
    "waiting_us": ("waiting for other ranks", "waiting"),
    "data_loading_us": ("data loading", "data_loading"),
    "checkpoint_us": ("checkpoint", "checkpoint"),
    "other_us": ("Python and other", "python"),
}

#: Parts with less than this share of the iteration, on every rank, are combined. Shares that differ by more are a range.
_SMALL, _ALIKE = 0.02, 0.05


def means(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One row per rank from rows of `Run.host_iterations`: the median duration, and means of it and its parts."""
    found = []
    for rank, mine in sorted(grouped([dict(row) for row in rows], "rank").items()):
        counted = steady(mine)
        parts = {part: fmean(row[part] or 0.0 for row in counted) for part in (*HOST_PARTS, "waiting_us", "own_us")}
        mean_us = fmean(row["duration_us"] for row in counted)
        known = {
            "rank": rank,
            "iterations": len(counted),
            "duration_us": mean_us,
            "waiting_known": mine[0]["waiting_us"] is not None,
        }
        found.append(known | parts | {"median_us": median(row["duration_us"] for row in counted)})
    return found


def typical_us(ranks: Sequence[Row]) -> float | None:
    """The median over ranks of the median iteration; None without ranks."""
    return median(row["median_us"] for row in ranks) if ranks else None


def sentences(ranks: Sequence[Row]) -> Iterator[str]:
    """How long an iteration takes, and its parts."""
    counts = sorted({row["iterations"] for row in ranks})
    of_iterations = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    took = words.milliseconds(typical_us(ranks))
    yield f"An iteration takes {took} (median of {of_iterations} on {words.counted(len(ranks), 'rank')}, profiled), on CPUs."
    parts, rest = [], 0.0
    for part, (name, _) in _PARTS.items():
        shares = [row[part] / row["duration_us"] if row["duration_us"] else 0.0 for row in ranks]
        low, high = min(shares), max(shares)
        if high < _SMALL:
            rest += fmean(shares)
        else:
            by_rank = f" ({low:.0%} to {high:.0%} by rank)" if high - low > _ALIKE else ""
            parts.append((fmean(shares), f"{words.percent(fmean(shares))} {name}{by_rank}"))
    said = [text for _, text in sorted(parts, key=lambda part: -part[0])]
    yield f"Its parts: {', '.join([*said, *([f'{words.percent(rest)} other'] if rest >= 0.005 else [])])}."


def host_table(ranks: Sequence[Row]) -> TableView:
    """The parts of each rank's mean iteration."""
    columns = {
        "rank": of("rank", str),
        "iteration": ms("duration_us"),
        **{name: ms(part) for part, (name, _) in _PARTS.items() if any(row[part] for row in ranks)},
        "own": ms("own_us"),
        "mean of": of("iterations"),
    }
    title = "The mean iteration on CPUs, ms; own time is without waiting for other ranks"
    return table("host", title, ranks, columns, of_ranks=True)


def host_figure(ranks: Sequence[Row]) -> Figure:
    """The same as stacked bars."""
    labels = [f"rank {row['rank']}" for row in ranks]
    traces = [
        figures.stacked_bar(name, color, labels, ranks, part)
        for part, (name, color) in _PARTS.items()
        if any(row[part] for row in ranks)
    ]
    return figures.stacked(traces, len(ranks), "ms of the mean iteration")
