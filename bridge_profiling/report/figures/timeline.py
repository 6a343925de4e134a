"""A timeline: a lane for each stream, a bar for what ran. The page's script draws the same from the same segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bridge_profiling.analysis.ranks.timeline import KINDS, Segments
from bridge_profiling.report.figures.style import COLOURS, Figure, axis, figure

#: What kinds are called in the legend.
KIND_NAMES = {
    "compute": "compute",
    "communication": "communication",
    "memcpy": "copy",
    "memset": "memset",
    "annotation": "host annotation",
}

#: Along a bar there is a point to hover over every so much of the picture's width.
_HOVER = 40

Highlight = tuple[str, float, float]


def timeline_figure(
    shown: Sequence[Segments], *, span_ms: tuple[float, float] | None = None, highlights: Sequence[Highlight] = ()
) -> Figure:
    """What ran on some ranks in one picture.

    Args:
        shown: segments of each rank, from the top down; all of one iteration.
        span_ms: the part to show; None for all of it.
        highlights: name, start and end in milliseconds of what a lane of its own shows on top.
    """
    ends = [float((each.start_ns + each.duration_ns).max()) / 1e6 for each in shown if len(each)]
    begin, end = span_ms or (0.0, max(ends, default=1.0))
    several = len({each.window.rank for each in shown}) > 1
    labels: list[str] = ["what shows it"] if highlights else []
    points: dict[str, dict[str, list[Any]]] = {}
    for name, first, last in highlights:
        _add(points, "highlight", 0, first, last, name, end - begin)
    for each in shown:
        prefix = f"rank {each.window.rank} · " if several else ""
        for row in range(len(each)):
            first = each.start_ns[row] / 1e6
            last = first + each.duration_ns[row] / 1e6
            if last < begin or first > end:
                continue
            kind = KINDS[each.kind[row]]
            _add(points, kind, len(labels) + int(each.lane[row]), first, last, _said(each, row), end - begin)
        labels += [f"{prefix}{lane}" for lane in each.lanes]
    traces = [_trace(kind, found) for kind, found in points.items()]
    return figure(
        traces,
        110 + max(len(labels), 2) * 26,
        margin={"l": 150, "r": 20, "t": 40, "b": 45},
        xaxis={**axis("ms since the iteration began"), "range": [begin, end]},
        yaxis={
            **axis(""),
            "tickvals": list(range(len(labels))),
            "ticktext": labels,
            "range": [len(labels) - 0.4, -0.6],
            "showgrid": False,
            "fixedrange": True,
        },
    )


def _said(each: Segments, row: int) -> str:
    count = int(each.count[row])
    more = f" and {count - 1:,} more" if count > 1 else ""
    return f"{each.name[row][:120]}{more}<br>{each.duration_ns[row] / 1e6:.3f} ms"


def _add(
    points: dict[str, dict[str, list[Any]]], kind: str, lane: int, first: float, last: float, text: str, span: float
) -> None:
    """Points along a bar, and a gap behind it."""
    mine = points.setdefault(kind, {"x": [], "y": [], "text": []})
    steps = 1 + min(int((last - first) / (span / _HOVER)), _HOVER)
    mine["x"] += [*(round(first + (last - first) * step / steps, 5) for step in range(steps + 1)), None]
    mine["y"] += [lane] * (steps + 1) + [None]
    mine["text"] += [text] * (steps + 1) + [""]


def _trace(kind: str, found: dict[str, list[Any]]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "what shows it" if kind == "highlight" else KIND_NAMES[kind],
        "line": {"width": 14, "color": "#000000" if kind == "highlight" else COLOURS[kind]},
        "meta": kind,
        "hovertemplate": "%{text}<br>at %{x:.3f} ms<extra></extra>",
        "connectgaps": False,
        **found,
    }
