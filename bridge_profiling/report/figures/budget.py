"""The step's budget as stacked bars: what an iteration of each rank is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bridge_profiling.analysis.attribution.parts import BY_ACTIVITY, BY_CAUSE
from bridge_profiling.report.figures.style import COLOURS, Figure, axis, figure

#: What the parts are called, and the colour of each.
PARTS = {
    "compute_us": ("compute", "compute"),
    "communication_us": ("communication", "communication"),
    "waiting_us": ("waiting for other ranks", "waiting"),
    "data_loading_us": ("data loading", "data_loading"),
    "host_launch_us": ("host late to launch", "host_launch"),
    "small_kernels_us": ("kernels too small to launch ahead", "small_kernels"),
    "host_sync_us": ("host synchronisation", "host_sync"),
    "pageable_copy_us": ("copies of pageable memory", "pageable_copy"),
    "copy_us": ("copies", "copy"),
    "checkpoint_us": ("checkpoint", "checkpoint"),
    "profiler_us": ("the profiler's own work", "profiler"),
    "dependency_stalled_us": ("between dependent kernels", "dependency_stalled"),
    "exposed_communication_us": ("communication alone, waiting included", "communication"),
    "copying_us": ("copies alone", "copy"),
    "idle_us": ("idle", "idle"),
}

#: Both ways to cut the same bar.
VIEWS = {"cause": BY_CAUSE, "activity": BY_ACTIVITY}

#: A part that is less than this of every bar cannot be seen.
_VISIBLE = 0.0005


def parts_that_matter(rows: Sequence[Mapping[str, Any]], view: str = "cause") -> list[str]:
    """Parts that can be seen in some bar.

    Args:
        rows: of the bars.
        view: a key of `VIEWS`.
    """
    return [part for part in VIEWS[view] if any(row[part] > _VISIBLE * row["duration_us"] for row in rows)]


def budget_figure(rows: Sequence[Mapping[str, Any]], view: str = "cause") -> Figure:
    """Stacked bars that add up to the iteration, one for each row.

    Args:
        rows: of `Run.budget`, with a `label` or else by their `rank`.
        view: `cause`: what the time without compute is owed to; `activity`: what ran.
    """
    labels = [str(row.get("label", f"rank {row.get('rank')}")) for row in rows]
    traces = []
    for part in parts_that_matter(rows, view):
        name, colour = PARTS[part]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": labels,
                "x": [round(row[part] / 1e3, 4) for row in rows],
                "customdata": [round(row[part] / row["duration_us"], 5) if row["duration_us"] else 0.0 for row in rows],
                "marker": {"color": COLOURS[colour], "line": {"width": 0}},
                "hovertemplate": "%{y}<br>%{x:.2f} ms, %{customdata:.1%} of the iteration<extra>" + name + "</extra>",
            }
        )
    return figure(
        traces,
        130 + max(len(rows), 2) * (34 if len(rows) <= 16 else 17),
        barmode="stack",
        bargap=0.25,
        xaxis=axis("ms of the median iteration"),
        # Ranks from the top down; every one named.
        yaxis={**axis(""), "autorange": "reversed", "type": "category", "dtick": 1, "showgrid": False},
    )
