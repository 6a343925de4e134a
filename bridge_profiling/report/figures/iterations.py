"""Ranks × iterations as a heat map: which rank was slow when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bridge_profiling.report.figures.style import SCALE, Figure, axis, figure

#: What can be shown, its words, and whether little of it is good.
MEASURES = {
    "own_us": "own time: the iteration without waiting for other ranks",
    "duration_us": "duration",
    "compute_us": "compute",
    "waiting_us": "waiting for other ranks",
}

#: More rows than this cannot be told apart: neighbours are shown as one, by their highest value.
MOST_ROWS = 256


def iterations_figure(rows: Sequence[Mapping[str, Any]], measure: str = "own_us") -> Figure:
    """A cell for each iteration of each rank; of many ranks, one for the highest of some neighbours.

    Args:
        rows: of `Run.ranks`: rank, iteration, and the measures.
        measure: a key of `MEASURES`.
    """
    ranks = sorted({row["rank"] for row in rows})
    numbers = sorted({row["iteration"] for row in rows}, key=lambda number: -1 if number is None else number)
    values = {(row["rank"], row["iteration"]): row[measure] for row in rows}
    step = -(-len(ranks) // MOST_ROWS) or 1
    labels, cells, worst = [], [], []
    for begin in range(0, len(ranks), step):
        block = ranks[begin : begin + step]
        labels.append(f"rank {block[0]}" if len(block) == 1 else f"ranks {block[0]}-{block[-1]}")
        highest = [
            max(((values[rank, number], rank) for rank in block if values.get((rank, number)) is not None), default=None)
            for number in numbers
        ]
        cells.append([None if best is None else round(best[0] / 1e3, 3) for best in highest])
        worst.append(["" if best is None else f"rank {best[1]}" for best in highest])
    trace = {
        "type": "heatmap",
        "x": ["capture" if number is None else f"{number}" for number in numbers],
        "y": labels,
        "z": cells,
        "text": worst,
        "colorscale": SCALE,
        "colorbar": {"title": {"text": "ms", "side": "right"}, "thickness": 14},
        "xgap": 1 if len(numbers) <= 60 else 0,
        "ygap": 1 if len(labels) <= 64 else 0,
        "hovertemplate": "%{text}, iteration %{x}<br>%{z:.2f} ms<extra></extra>",
    }
    if len(ranks) * len(numbers) <= 80:  # few enough to be written in
        trace["texttemplate"] = "%{z:.1f}"
    height = 130 + len(labels) * (34 if len(labels) <= 8 else 16 if len(labels) <= 64 else 4)
    return figure(
        [trace],
        min(max(height, 220), 900),
        xaxis={**axis("iteration"), "type": "category", "showgrid": False},
        yaxis={**axis(""), "autorange": "reversed", "type": "category", "showgrid": False},
    )
