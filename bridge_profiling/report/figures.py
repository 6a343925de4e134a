"""Answers as Plotly figures: plain data for the page, and for `Run.figure` in a notebook. Computes no answer.

A figure is Plotly's own JSON, built without Plotly's Python objects, which take a second to import. The page sets the colors of
text and background.
"""

from __future__ import annotations

import html
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any

from bridge_profiling.facts.parts import BY_ACTIVITY, BY_CAUSE
from bridge_profiling.facts.statistics import Change, Estimate
from bridge_profiling.printable import printable
from bridge_profiling.report import words
from bridge_profiling.report.views import Figure, Row

#: Colors that people with color blindness can tell apart, after Okabe and Ito (https://jfly.uni-koeln.de/color/), those of one
#: family in one hue; parts of an iteration, measures of it, kinds of work, names of groups; colors of allocation
#: sites, the last for the rest; properties that figures share. The scale of heat maps suits white and black.
COLORS, PARTS, MEASURES, KIND_NAMES, GROUPS, _SITES, _STYLES = words.resource("theme").values()

#: Two ways to divide the same bar.
VIEWS = {"cause": BY_CAUSE, "activity": BY_ACTIVITY}

#: Beyond these numbers, groups are combined by name, ranks in neighboring rows, and a matrix shows those that wait most.
MOST_GROUPS, MOST_ROWS, MOST_RANKS = 24, 256, 32

#: A part smaller than this share of every bar is invisible.
_VISIBLE = 0.0005

#: Height of the memory picture, and of a line of its legend, in pixels.
_PICTURE, _LINE = 320, 20

#: Below the memory picture, a line for each name: names of sites are long, and Plotly cuts those that stand side by side.
_LEGEND_BELOW = {"orientation": "v", "x": 0, "y": -50 / _PICTURE, "xanchor": "left", "yanchor": "top", "traceorder": "normal"}

#: Texts in a figure that are ours alone: no name may be put into them.
_TEMPLATES = ("hovertemplate", "texttemplate")

#: Counters drawn at first.
_COUNTERS_SHOWN = 4


def figure(data: list[dict[str, Any]], height: int, **layout: Any) -> Figure:
    """A figure with the margins, legend and hover that all share; `layout` overrides them."""
    return {"data": data, "layout": {"height": height, **_STYLES["layout"], **layout}}


def plain_texts(value: Any, key: str = "") -> Any:
    """A figure, or a part of it, for Plotly, which reads markup in every text, and draws links and images: names stay text.

    Templates are ours, and have line breaks. The page does the same in `draw` of figures.js.
    """
    if isinstance(value, dict):
        return {name: plain_texts(each, name) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_texts(each, key) for each in value]
    if not isinstance(value, str) or key in _TEMPLATES:
        return value
    # MathJax, which notebooks have, reads what is between dollar signs.
    return html.escape(printable(value), quote=False).replace("$", "&#36;")


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis with a title and a light grid."""
    return {"title": {"text": title}, **_STYLES["axis"], **more}


def _names() -> dict[str, Any]:
    """An axis of names, from the top down, each shown."""
    return axis("", autorange="reversed", type="category", dtick=1, showgrid=False)


def bars_figure(
    labels: Sequence[str],
    values: Sequence[float | None],
    title: str,
    *,
    highlighted: Collection[str] = (),
    color: str = "muted",
) -> Figure:
    """Horizontal bars, one value for each label; highlighted labels stand out."""
    trace = _STYLES["bars"] | {
        "y": list(labels),
        "x": [None if value is None else round(value, 4) for value in values],
        "marker": {"color": [COLORS["highlight"] if label in highlighted else COLORS[color] for label in labels]},
    }
    height = 80 + max(len(labels), 2) * (28 if len(labels) <= 16 else 16)
    margin = {"l": 120, "r": 20, "t": 15, "b": 50}
    return figure([trace], height, bargap=0.3, margin=margin, xaxis=axis(title), yaxis=_names())


def visible_parts(rows: Sequence[Row], view: str = "cause") -> list[str]:
    """Parts that can be seen in at least one bar."""
    return [part for part in VIEWS[view] if any(row[part] > _VISIBLE * row["duration_us"] for row in rows)]


def attribution_figure(rows: Sequence[Row], view: str = "cause", title: str = "ms of the median iteration") -> Figure:
    """Rows of `Run.attribution` as stacked bars, named by `label` or rank; `view` divides them by `cause` or `activity`."""
    labels = [str(row.get("label", f"rank {row.get('rank')}")) for row in rows]
    traces = []
    for part in visible_parts(rows, view):
        name, color = PARTS[part]
        traces.append(stacked_bar(name, color, labels, rows, part))
    return stacked(traces, len(rows), title)


def stacked_bar(name: str, color: str, labels: Sequence[str], rows: Sequence[Row], part: str) -> dict[str, Any]:
    """One part of every bar of a stacked figure: a column of rows that have `duration_us` as well."""
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": list(labels),
        "x": [round(row[part] / 1e3, 4) for row in rows],
        "customdata": [round(row[part] / row["duration_us"], 5) if row["duration_us"] else 0.0 for row in rows],
        "marker": {"color": COLORS[color], "line": {"width": 0}},
        "hovertemplate": "%{y}<br>%{x:.2f} ms, %{customdata:.1%} of the iteration<extra>%{fullData.name}</extra>",
    }


def stacked(traces: list[dict[str, Any]], bars: int, title: str) -> Figure:
    """Stacked bars of parts from `stacked_bar`."""
    height = 130 + max(bars, 2) * (34 if bars <= 16 else 17)
    return figure(traces, height, barmode="stack", bargap=0.25, xaxis=axis(title), yaxis=_names())


def by_group(rows: Sequence[Row], iterations: int) -> list[dict[str, Any]]:
    """Rows of `Run.communication` per iteration, the most time first; of many groups, those of one name and size combined.

    `wait_us` is the mean over the ranks; combined groups have mean times and median bandwidths.
    """
    combined: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        key: tuple[Any, ...] = (row["operation"], row["dimension"], row["group"], row["group_size"])
        if len(rows) <= MOST_GROUPS:
            key = (*key, row["group_name"], row["group_ranks"])
        combined[key].append(row)
    found = [_combined(members, iterations) for members in combined.values()]
    return sorted(found, key=lambda row: -((row["transfer_us"] or 0.0) + (row["wait_us"] or 0.0)))


def _combined(rows: Sequence[Row], iterations: int) -> dict[str, Any]:
    first, count = rows[0], len(rows)
    group, operation = group_label(first), first["operation"] or "?"
    members = f"{count} groups of {first['group_size']}"
    if count == 1:
        ranks = json.loads(first["group_ranks"] or "[]")
        members = ", ".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]} … {ranks[-1]}"

    def known(name: str) -> list[float]:
        return [row[name] for row in rows if row[name] is not None]

    def total(name: str, by: int) -> float | None:
        return sum(known(name)) / by if known(name) else None

    participants = sum(row["captured_ranks"] or 0 for row in rows)
    return {
        "label": f"{operation} · {group} [{members or '?'}]",
        "operation": operation,
        "group": group,
        "ranks": members or "?",
        "count": sum(row["count"] for row in rows) / iterations / count,
        "bytes": total("bytes", iterations * count),
        "transfer_us": total("transfer_us", iterations * count),
        "wait_us": total("wait_us", iterations * max(participants, 1)),
        **{name: median(known(name)) if known(name) else None for name in ("algorithm_bandwidth_gbs", "bus_bandwidth_gbs")},
    }


def group_name(group: str | None) -> str:
    """Megatron's name of a group without the part that all have in common."""
    return (group or "unknown group").removesuffix("_GROUP").replace("_", " ").lower()


def group_label(row: Row) -> str:
    """A group by its parallel dimension, where that is known, and by the program's name, unless that is a number of torch's."""
    name, dimension = group_name(row["group"]), row["dimension"]
    if dimension is None:
        return name
    spanned = "all ranks" if dimension == "all" else str(dimension)
    unnamed = row["group"] is None or name.isdecimal() or name in ("default pg", dimension)
    return spanned if unnamed else f"{spanned}: {name}"


def communication_figure(rows: Sequence[Row]) -> Figure:
    """Transfer and waiting of rows of `by_group`; those whose transfer is unknown have no bar."""
    rows = [row for row in rows if row["transfer_us"] is not None]
    bars = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": [row["label"] for row in rows],
            "x": [None if row[part] is None else round(row[part] / 1e3, 4) for row in rows],
            "marker": {"color": COLORS[color]},
            "hovertemplate": "%{y}<br>%{x:.3f} ms per iteration<extra>" + color + "</extra>",
        }
        for part, name, color in (
            ("transfer_us", "transfer", "communication"),
            ("wait_us", "waiting for the last rank, mean of the ranks", "waiting"),
        )
    ]
    height, margin = 120 + max(len(rows), 2) * 30, {"l": 240, "r": 20, "t": 40, "b": 50}
    return figure(bars, height, barmode="stack", bargap=0.3, margin=margin, xaxis=axis("ms per iteration"), yaxis=_names())


def change_figure(parts: Mapping[str, Change], whole: Change, names: tuple[str, str], part_names: Mapping[str, str]) -> Figure:
    """A waterfall from one side's median iteration to the other's: the change of each part adds up to that of the whole."""
    shown = {name: part for name, part in parts.items() if part.change}
    labels = [names[0], *(part_names[name] for name in shown), names[1]]
    values = [whole.base, *(part.change for part in shown.values()), whole.other]
    levels = [*accumulate((part.change for part in shown.values()), initial=whole.base), whole.other]
    low, high = min(levels) / 1e3, max(levels) / 1e3
    room = max(0.15 * (high - low), 0.01 * high)
    texts = [f"{whole.base / 1e3:.2f}", *(f"{part.change / 1e3:+.2f}" for part in shown.values()), f"{whole.other / 1e3:.2f}"]
    places = list(range(len(labels)))
    trace = _STYLES["waterfall"] | {
        "measure": ["absolute", *("relative" for _ in shown), "total"],
        "y": places,  # names of runs may be equal, places are not
        "x": [round(value / 1e3, 4) for value in values],
        "text": texts,
        "customdata": labels,
    }
    return figure(
        [trace],
        90 + 34 * len(labels),
        margin={"l": 250, "r": 70, "t": 20, "b": 50},
        # From zero, a change of a few percent would be invisible.
        xaxis=axis("ms of the median iteration", range=[max(low - 2 * room, 0), high + room]),
        yaxis=axis("", autorange="reversed", tickmode="array", tickvals=places, ticktext=labels),
        showlegend=False,
    )


def series_figure(labels: Sequence[str], medians: Sequence[Estimate | None], changed: Sequence[bool]) -> Figure:
    """The median iteration of each run with its interval, in order; runs that differ from the previous one stand out."""
    points = [(number, estimate) for number, estimate in enumerate(medians, 1) if estimate is not None]
    reach = [0.0 if each.high is None else each.high - each.value for _, each in points]
    trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [number for number, _ in points],
        "y": [round(each.value / 1e3, 4) for _, each in points],
        "error_y": {"type": "data", "array": [round(each / 1e3, 4) for each in reach], "thickness": 1.2, "width": 4},
        "customdata": [labels[number - 1] for number, _ in points],
        "line": {"color": COLORS["muted"], "width": 1.5},
        "marker": {"size": 9, "color": [COLORS["highlight" if changed[number - 1] else "compute"] for number, _ in points]},
        "hovertemplate": "%{customdata}<br>%{y:.3f} ms<extra></extra>",
    }
    return figure(
        [trace],
        320,
        margin={"l": 70, "r": 20, "t": 20, "b": 60},
        # Numbers: paths of many runs do not fit next to each other.
        xaxis=axis("run", tick0=1, dtick=-(-len(labels) // 15), range=[0.5, len(labels) + 0.5]),
        # From zero, a change of a few percent would be invisible.
        yaxis=axis("ms of the median iteration"),
        showlegend=False,
    )


def _heat_map(x: Sequence[str], y: Sequence[str], z: list[list[float | None]], hover: str, **more: Any) -> dict[str, Any]:
    return _STYLES["heat_map"] | {"x": x, "y": y, "z": z, "hovertemplate": hover + "<extra></extra>", **more}


def iterations_figure(rows: Sequence[Row], measure: str = "own_us") -> Figure:
    """Rows of `Run.ranks` as ranks × iterations; of many ranks, a row is the highest of some neighbors."""
    ranks = sorted({row["rank"] for row in rows})
    numbers = sorted({row["iteration"] for row in rows}, key=lambda number: -1 if number is None else number)
    values = {(row["rank"], row["iteration"]): row[measure] for row in rows}
    step = -(-len(ranks) // MOST_ROWS) or 1
    labels, cells, highest_ranks = [], [], []
    for begin in range(0, len(ranks), step):
        block = ranks[begin : begin + step]
        labels.append(f"rank {block[0]}" if len(block) == 1 else f"ranks {block[0]}-{block[-1]}")
        highest = [
            max(((values[rank, number], rank) for rank in block if values.get((rank, number)) is not None), default=None)
            for number in numbers
        ]
        cells.append([None if best is None else round(best[0] / 1e3, 3) for best in highest])
        highest_ranks.append(["" if best is None else f"rank {best[1]}" for best in highest])
    trace = _heat_map(
        ["capture" if number is None else f"{number}" for number in numbers],
        labels,
        cells,
        "%{text}, iteration %{x}<br>%{z:.2f} ms",
        text=highest_ranks,
        xgap=1 if len(numbers) <= 60 else 0,
        ygap=1 if len(labels) <= 64 else 0,
        texttemplate="%{z:.1f}" if len(ranks) * len(numbers) <= 80 else "",
    )
    height = 130 + len(labels) * (34 if len(labels) <= 8 else 16 if len(labels) <= 64 else 4)
    return figure(
        [trace],
        min(max(height, 220), 900),
        xaxis=axis("iteration", type="category", showgrid=False),
        yaxis=axis("", autorange="reversed", type="category", showgrid=False),
    )


@dataclass(frozen=True)
class WaitMatrix:
    """Waiting between ranks: `wait_us[row][column]` is how long a rank waits for another per iteration.

    `shown` is the share of all waiting that is in the matrix, from 0 to 1.
    """

    ranks: list[int]
    wait_us: list[list[float]]
    shown: float


def wait_matrix(waits: Iterable[Row], iterations: int, everyone: Sequence[int]) -> WaitMatrix:
    """The matrix of the ranks that wait or are waited for most, from rows of `Run.waits`."""
    between: dict[tuple[int, int], float] = defaultdict(float)
    weight: dict[int, float] = defaultdict(float, dict.fromkeys(everyone, 0.0))
    for row in waits:
        between[row["rank"], row["waits_for"]] += row["wait_us"] / max(iterations, 1)
        for end in (row["rank"], row["waits_for"]):
            weight[end] += row["wait_us"]
    ranks = sorted(sorted(weight, key=lambda rank: (-weight[rank], rank))[:MOST_RANKS])
    cells = [[between.get((rank, other), 0.0) for other in ranks] for rank in ranks]
    total = sum(between.values())
    return WaitMatrix(ranks, cells, sum(map(sum, cells)) / total if total else 1.0)


def waits_figure(matrix: WaitMatrix) -> Figure:
    """Rows wait, columns are waited for."""
    labels = [str(rank) for rank in matrix.ranks]
    cells = [
        [None if row == column else round(value / 1e3, 3) for column, value in enumerate(cells)]
        for row, cells in enumerate(matrix.wait_us)
    ]
    template = "%{z:.1f}" if len(labels) <= 12 else ""
    hover = "rank %{y} waits for rank %{x}<br>%{z:.2f} ms per iteration"
    trace = _heat_map(labels, labels, cells, hover, zmin=0, xgap=1, ygap=1, texttemplate=template)
    return figure(
        [trace],
        max(150 + len(labels) * (40 if len(labels) <= 8 else 18), 240),
        margin={"l": 90, "r": 20, "t": 20, "b": 60},
        xaxis=axis("for this rank", type="category", showgrid=False, tickangle=0),
        yaxis=axis("this rank waits", autorange="reversed", type="category", showgrid=False),
    )


def counters_figure(rows: Sequence[Row]) -> Figure:
    """One device's counters in percent over time: those with the highest means at first, the others on request."""
    by_name: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_name[row["metric"]].append(row)
    order = sorted(by_name, key=lambda name: -sum(row["value"] for row in by_name[name]) / len(by_name[name]))
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": [round(row["time_us"] / 1e3, 3) for row in by_name[name]],
            "y": [round(row["value"], 2) for row in by_name[name]],
            "line": {"width": 1.2},
            "visible": True if place < _COUNTERS_SHOWN else "legendonly",
            "hovertemplate": "%{y:.1f}% at %{x:.1f} ms<extra>%{fullData.name}</extra>",
        }
        for place, name in enumerate(order)
    ]
    below = 60 + _LINE * len(traces)
    return figure(
        traces,
        20 + _PICTURE + below,
        margin={"l": 70, "r": 20, "t": 20, "b": below},
        xaxis=axis("ms since the first marked iteration began", automargin=False),
        yaxis=axis("%", rangemode="tozero"),
        legend=_LEGEND_BELOW,
    )


def memory_figure(by_site: Sequence[Row], timeline: Sequence[Row]) -> Figure:
    """One device's memory over time, stacked by allocation site where a snapshot names sites."""
    zero = min((row["time_ns"] for row in (*by_site, *timeline)), default=0)

    def line(rows: Sequence[Row], column: str, name: str, style: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": [round((row["time_ns"] - zero) / 1e6, 3) for row in rows],
            "y": [round(row[column] / 2**20, 2) for row in rows],
            "line": {"shape": "hv", **style},
            "hovertemplate": "%{y:,.1f} MiB at %{x:.1f} ms<extra>%{fullData.name}</extra>",
            **more,
        }

    sites: dict[str, list[Row]] = defaultdict(list)
    for row in by_site:
        sites[row["site"]].append(row)
    traces = [
        line(rows, "bytes", _short_site(name), {"width": 0.5, "color": _SITES[min(place, len(_SITES) - 1)]}, stackgroup="sites")
        for place, (name, rows) in enumerate(sites.items())
    ]
    for column, name, dash, color in (
        ("allocated_bytes", "allocated", "solid", "compute"),
        ("reserved_bytes", "reserved by the allocator", "dot", "muted"),
    ):
        rows = [row for row in timeline if row[column] is not None]
        if rows and not (column == "allocated_bytes" and sites):  # the upper edge of the areas is the allocated memory
            traces.append(line(rows, column, name, {"dash": dash, "width": 1.5, "color": COLORS[color]}))
    below = 60 + _LINE * len(traces)
    return figure(
        traces,
        20 + _PICTURE + below,
        margin={"l": 70, "r": 20, "t": 20, "b": below},
        xaxis=axis("ms since the recording began", automargin=False),
        yaxis=axis("MiB", rangemode="tozero"),
        legend=_LEGEND_BELOW,
    )


def _short_site(site: str) -> str:
    """A site with the last three parts of its file's path, which identify it within a package."""
    function, _, path = site.rpartition(" ")
    parts = path.split("/")
    return f"{function} …/{'/'.join(parts[-3:])}" if len(parts) > 4 else site
