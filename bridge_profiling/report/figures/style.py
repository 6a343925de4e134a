"""What all figures share: a colour for each part of the budget that the colour-blind tell apart too, and quiet axes."""

from __future__ import annotations

from typing import Any

#: After Okabe and Ito (https://jfly.uni-koeln.de/color/): the same part in the same colour wherever it is shown. Parts of one
#: family, as communication and waiting in it, have one hue.
COLOURS = {
    "compute": "#0072b2",
    "communication": "#d55e00",
    "waiting": "#f2b48c",
    "data_loading": "#cc79a7",
    "host_launch": "#e69f00",
    "small_kernels": "#f5d77f",
    "host_sync": "#882255",
    "pageable_copy": "#5ab79b",
    "copy": "#009e73",
    "checkpoint": "#7a5195",
    "profiler": "#5c5c5c",
    "dependency_stalled": "#56b4e9",
    "idle": "#b0b0b0",
    "memcpy": "#009e73",
    "memset": "#7fc9a9",
    "annotation": "#8d7bb8",
    "highlight": "#d55e00",
    "muted": "#8c96a3",
}

#: From little to much, evenly, for the colour-blind too; as clear on white as on black.
SCALE = "Cividis"

Figure = dict[str, Any]


def figure(data: list[dict[str, Any]], height: int, **layout: Any) -> Figure:
    """A figure with the margins, legend and hover of all of them.

    Args:
        data: Plotly traces.
        height: in pixels.
        layout: more of Plotly's layout; wins over what all share.
    """
    shared: dict[str, Any] = {
        "height": height,
        "margin": {"l": 90, "r": 20, "t": 40, "b": 50},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom", "traceorder": "normal"},
        "hovermode": "closest",
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
    }
    return {"data": data, "layout": shared | layout}


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis with a title and a quiet grid.

    Args:
        title: with the unit.
        more: of Plotly's axis.
    """
    return {"title": {"text": title}, "automargin": True, "zeroline": False, "gridcolor": "rgba(128,128,128,0.25)", **more}
