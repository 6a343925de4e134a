"""Memory over time: what each allocation site held, or the totals where no site is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bridge_profiling.report.figures.style import COLOURS, Figure, axis, figure

#: Colours of sites, told apart by the colour-blind; the last is for the rest.
_SITES = ("#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#56b4e9", "#8d7bb8", "#f0e442", "#7f5a36", "#9a9a9a")


#: Height of the picture itself, and of a line of its legend, in pixels.
_PICTURE, _LINE = 320, 20


def memory_figure(by_site: Sequence[Mapping[str, Any]], timeline: Sequence[Mapping[str, Any]]) -> Figure:
    """One device's memory over time.

    Args:
        by_site: rows of `Run.memory_over_time` of one device; none without a snapshot.
        timeline: rows of `Run.memory_timeline` of the same.
    """
    times = [row["time_ns"] for row in (*by_site, *timeline)]
    zero = min(times, default=0)
    traces: list[dict[str, Any]] = []
    sites: dict[str, list[Mapping[str, Any]]] = {}
    for row in by_site:
        sites.setdefault(row["site"], []).append(row)
    for place, (name, rows) in enumerate(sites.items()):
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "stackgroup": "sites",
                "name": _shortened(name),
                "x": [round((row["time_ns"] - zero) / 1e6, 3) for row in rows],
                "y": [round(row["bytes"] / 2**20, 2) for row in rows],
                "line": {"width": 0.5, "shape": "hv", "color": _SITES[min(place, len(_SITES) - 1)]},
                "hovertemplate": "%{y:,.1f} MiB at %{x:.1f} ms<extra>%{fullData.name}</extra>",
            }
        )
    for column, name, dash in (
        ("allocated_bytes", "allocated", "solid"),
        ("reserved_bytes", "reserved by the allocator", "dot"),
    ):
        rows = [row for row in timeline if row[column] is not None]
        if not rows or (column == "allocated_bytes" and sites):
            continue  # the areas' upper edge is what was allocated
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": name,
                "x": [round((row["time_ns"] - zero) / 1e6, 3) for row in rows],
                "y": [round(row[column] / 2**20, 2) for row in rows],
                "line": {
                    "shape": "hv",
                    "dash": dash,
                    "width": 1.5,
                    "color": COLOURS["compute" if dash == "solid" else "muted"],
                },
                "hovertemplate": "%{y:,.1f} MiB at %{x:.1f} ms<extra>" + name + "</extra>",
            }
        )
    below = 60 + _LINE * len(traces)
    return figure(
        traces,
        20 + _PICTURE + below,
        margin={"l": 70, "r": 20, "t": 20, "b": below},
        xaxis={**axis("ms since the recording began"), "automargin": False},
        yaxis={**axis("MiB"), "rangemode": "tozero"},
        # A line each: sites are long, and names side by side would be cut.
        legend={"orientation": "v", "x": 0, "y": -50 / _PICTURE, "xanchor": "left", "yanchor": "top", "traceorder": "normal"},
    )


def _shortened(site: str) -> str:
    """A site with the last three parts of its file's path, which name it within a package."""
    function, _, path = site.rpartition(" ")
    parts = path.split("/")
    return f"{function} …/{'/'.join(parts[-3:])}" if len(parts) > 4 else site
