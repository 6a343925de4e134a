"""From one side's iteration to the other's, part by part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge_profiling.analysis.compare.statistics import Change
from bridge_profiling.report.figures.style import COLOURS, Figure, axis, figure


def change_figure(parts: Mapping[str, Change], whole: Change, words: Mapping[str, str], names: tuple[str, str]) -> Figure:
    """A waterfall: the base's median iteration, what each part changed, the other's.

    Args:
        parts: the change of each part; they add up to the whole's.
        whole: of the median iteration.
        words: what each part is called.
        names: of the two sides.
    """
    shown = {name: part for name, part in parts.items() if part.change}
    labels = [names[0], *(words[name] for name in shown), names[1]]
    values = [whole.base, *(part.change for part in shown.values()), whole.other]
    texts = [f"{whole.base / 1e3:.2f}", *(f"{part.change / 1e3:+.2f}" for part in shown.values()), f"{whole.other / 1e3:.2f}"]
    places = list(range(len(labels)))
    trace: dict[str, Any] = {
        "type": "waterfall",
        "orientation": "h",
        "measure": ["absolute", *("relative" for _ in shown), "total"],
        # Names of runs may be the same; places are not.
        "y": places,
        "x": [round(value / 1e3, 4) for value in values],
        "text": texts,
        "textposition": "outside",
        "cliponaxis": False,
        "customdata": labels,
        "hovertemplate": "%{customdata}: %{text} ms<extra></extra>",
        "increasing": {"marker": {"color": COLOURS["communication"]}},
        "decreasing": {"marker": {"color": COLOURS["copy"]}},
        "totals": {"marker": {"color": COLOURS["muted"]}},
        "connector": {"line": {"color": COLOURS["muted"], "width": 1}},
    }
    return figure(
        [trace],
        90 + 34 * len(labels),
        margin={"l": 250, "r": 70, "t": 20, "b": 50},
        xaxis=axis("ms of the median iteration"),
        yaxis={
            **axis(""),
            "autorange": "reversed",
            "tickmode": "array",
            "tickvals": list(range(len(labels))),
            "ticktext": labels,
        },
        showlegend=False,
    )
