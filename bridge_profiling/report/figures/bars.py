"""One number for each of some things, those to look at highlighted: ranks, kernels, evidence of a finding."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from bridge_profiling.report.figures.style import COLOURS, Figure, axis, figure


def bars_figure(
    labels: Sequence[str],
    values: Sequence[float | None],
    title: str,
    *,
    highlighted: Collection[str] = (),
    colour: str = "muted",
) -> Figure:
    """Horizontal bars.

    Args:
        labels: from the top down.
        values: one each.
        title: of the axis, with the unit.
        highlighted: labels in the colour of what is to be looked at.
        colour: of the others: a key of `COLOURS`.
    """
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": list(labels),
        "x": [None if value is None else round(value, 4) for value in values],
        "marker": {"color": [COLOURS["highlight"] if label in highlighted else COLOURS[colour] for label in labels]},
        "texttemplate": "%{x:.4~g}",
        "textposition": "outside",
        "cliponaxis": False,
        "hovertemplate": "%{y}<br>%{x:.3f}<extra></extra>",
        "showlegend": False,
    }
    return figure(
        [trace],
        80 + max(len(labels), 2) * (28 if len(labels) <= 16 else 16),
        bargap=0.3,
        margin={"l": 120, "r": 20, "t": 15, "b": 50},
        xaxis=axis(title),
        yaxis={**axis(""), "autorange": "reversed", "type": "category", "dtick": 1, "showgrid": False},
    )
