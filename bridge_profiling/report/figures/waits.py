"""Who waits for whom, as a matrix: rows wait, columns are waited for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bridge_profiling.report.figures.style import SCALE, Figure, axis, figure

#: More ranks than this make no matrix that can be read: those that wait or are waited for most are shown.
MOST_RANKS = 32


@dataclass(frozen=True)
class WaitMatrix:
    """Waiting between ranks.

    Args:
        ranks: those shown, ascending.
        wait_us: what each (row) waits for each (column) in an iteration, on average over the captured ones.
        shown: how much of all waiting the shown cells are, 0 to 1; 1 of no waiting.
    """

    ranks: list[int]
    wait_us: list[list[float]]
    shown: float


def wait_matrix(waits: Sequence[Mapping[str, Any]], iterations: int, everyone: Sequence[int]) -> WaitMatrix:
    """The matrix of the ranks that matter most.

    Args:
        waits: rows of `Run.waits`: rank, waits_for, wait_us.
        iterations: how many iterations they are of; 1 for captures without any.
        everyone: all captured ranks.
    """
    between: dict[tuple[int, int], float] = defaultdict(float)
    weight: dict[int, float] = dict.fromkeys(everyone, 0.0)
    for row in waits:
        between[row["rank"], row["waits_for"]] += row["wait_us"] / max(iterations, 1)
        for end in (row["rank"], row["waits_for"]):
            weight[end] = weight.get(end, 0.0) + row["wait_us"]
    ranks = sorted(sorted(weight, key=lambda rank: (-weight[rank], rank))[:MOST_RANKS])
    cells = [[between.get((rank, other), 0.0) for other in ranks] for rank in ranks]
    total = sum(between.values())
    return WaitMatrix(ranks, cells, sum(map(sum, cells)) / total if total else 1.0)


def waits_figure(matrix: WaitMatrix) -> Figure:
    """The matrix as a heat map.

    Args:
        matrix: what `wait_matrix` gave.
    """
    labels = [str(rank) for rank in matrix.ranks]
    trace = {
        "type": "heatmap",
        "x": labels,
        "y": labels,
        "z": [
            [None if row == column else round(value / 1e3, 3) for column, value in enumerate(cells)]
            for row, cells in enumerate(matrix.wait_us)
        ],
        "colorscale": SCALE,
        "zmin": 0,
        "colorbar": {"title": {"text": "ms", "side": "right"}, "thickness": 14},
        "xgap": 1,
        "ygap": 1,
        "hovertemplate": "rank %{y} waits for rank %{x}<br>%{z:.2f} ms of an iteration<extra></extra>",
    }
    if len(labels) <= 12:
        trace["texttemplate"] = "%{z:.1f}"
    size = 150 + len(labels) * (40 if len(labels) <= 8 else 18)
    return figure(
        [trace],
        max(size, 240),
        margin={"l": 90, "r": 20, "t": 20, "b": 60},
        xaxis={**axis("for this rank"), "type": "category", "showgrid": False, "tickangle": 0},
        yaxis={**axis("this rank waits"), "autorange": "reversed", "type": "category", "showgrid": False},
    )
