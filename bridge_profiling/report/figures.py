"""Answers as Plotly figures: plain data for the page, and for `Run.figure` in a notebook. Computes no answer.

A figure is Plotly's own JSON, built without Plotly's Python objects, which take a second to import. The page sets the colors of
text and background.
"""

from __future__ import annotations

import html
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, cycle
from math import sqrt
from typing import Any

from bridge_profiling.common.printable import printable
from bridge_profiling.facts.intervals import grouped
from bridge_profiling.facts.parts import BY_ACTIVITY, BY_CAUSE
from bridge_profiling.facts.statistics import Change, Estimate
from bridge_profiling.report import words
from bridge_profiling.report.rows import Rows, WaitMatrix, kernel_counters, matrix_products
from bridge_profiling.report.views import Figure, Row

#: Colors of allocation sites, the last for the rest. Colors that people with color blindness can tell apart, after Okabe and
#: Ito (https://jfly.uni-koeln.de/color/), those of one family in one hue. Parts of an iteration, also on CPUs, measures of it,
#: kinds of work, names of a training's sizes; properties of traces and of whole figures. The scale of heat maps
#: suits white and black.
_SITES, COLORS, PARTS, HOST_PARTS, MEASURES, KIND_NAMES, SIZES, STYLES, _LAYOUTS = (
    words.resource("theme")[name]
    for name in ("sites", "colors", "parts", "host_parts", "measures", "kinds", "training", "styles", "layouts")
)

#: Two ways to divide the same bar.
VIEWS = {"cause": BY_CAUSE, "activity": BY_ACTIVITY}

#: Beyond this number, ranks are combined in neighboring rows.
MOST_ROWS = 256

#: A part smaller than this share of every bar is invisible.
_VISIBLE = 0.0005

#: Height of a picture over time, and of a line of its legend, in pixels.
_PICTURE, _LINE = 320, 20

#: Texts in a figure that are ours alone: no name may be put into them.
_TEMPLATES = ("hovertemplate", "texttemplate")

#: Counters drawn at first.
_COUNTERS_SHOWN = 4

#: Colors of precisions, and of groups of kernels: the last for the rest.
_SERIES = ("compute", "communication", "copy", "host_launch", "data_loading", "muted")

#: The least and the greatest arithmetic intensity of a roofline, in FLOP per byte.
_LEAST, _GREATEST = 1.0, 10_000.0


def figure(kind: str, data: list[dict[str, Any]], height: int, **layout: Any) -> Figure:
    """A figure with the layout of its kind, and what all have in common; `layout` adds to that, also to properties of axes."""
    declared = _LAYOUTS[kind]
    axes = {name: STYLES["axis"] | of | layout.get(name, {}) for name, of in declared.items() if name in ("xaxis", "yaxis")}
    return {"data": data, "layout": {"height": height, **STYLES["layout"], **declared, **layout, **axes}}


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


def bars_figure(
    labels: Sequence[str],
    values: Sequence[float | None],
    title: str,
    *,
    highlighted: Collection[str] = (),
    color: str = "muted",
) -> Figure:
    """Horizontal bars, one value for each label; highlighted labels stand out."""
    trace = STYLES["bars"] | {
        "y": list(labels),
        "x": [None if value is None else round(value, 4) for value in values],
        "marker": {"color": [COLORS["highlight"] if label in highlighted else COLORS[color] for label in labels]},
    }
    height = 80 + max(len(labels), 2) * (28 if len(labels) <= 16 else 16)
    return figure("bars", [trace], height, xaxis={"title": {"text": title}})


def visible_parts(rows: Sequence[Row], view: str = "cause") -> list[str]:
    """Parts that can be seen in at least one bar."""
    return [part for part in VIEWS[view] if any(row[part] > _VISIBLE * row["duration_ns"] for row in rows)]


def attribution_figure(rows: Sequence[Row], view: str = "cause", title: str = "ms of the median iteration") -> Figure:
    """Rows of `RunFacts.attribution` as stacked bars, by `label` or rank; `view` divides them by `cause` or `activity`."""
    return _stacked(rows, {part: PARTS[part] for part in visible_parts(rows, view)}, title)


def host_figure(rows: Sequence[Row]) -> Figure:
    """Rows of `rows.mean_host_iterations` as stacked bars."""
    shown = {part: of for part, of in HOST_PARTS.items() if any(row[part] for row in rows)}
    return _stacked(rows, shown, "ms of the mean iteration")


def _stacked(rows: Sequence[Row], parts: Mapping[str, tuple[str, str]], title: str) -> Figure:
    """A stacked bar for each row, of columns with a name and a color each."""
    labels = [str(row.get("label", f"rank {row.get('rank')}")) for row in rows]
    traces = [
        STYLES["stacked"]
        | {
            "name": name,
            "y": labels,
            "x": [round(row[part] / 1e6, 4) for row in rows],
            "customdata": [round(row[part] / row["duration_ns"], 5) if row["duration_ns"] else 0.0 for row in rows],
            "marker": {"color": COLORS[color], "line": {"width": 0}},
        }
        for part, (name, color) in parts.items()
    ]
    height = 130 + max(len(rows), 2) * (34 if len(rows) <= 16 else 17)
    return figure("stacked", traces, height, xaxis={"title": {"text": title}})


def communication_figure(rows: Sequence[Row]) -> Figure:
    """Transfer and waiting of rows of `rows.by_group`; those whose transfer is unknown have no bar."""
    rows = [row for row in rows if row["transfer_ns"] is not None]
    waiting = "waiting for the last rank, mean of the ranks"
    bars = [
        STYLES["stacked"]
        | {
            "name": name,
            "y": [row["label"] for row in rows],
            "x": [None if row[part] is None else round(row[part] / 1e6, 4) for row in rows],
            "marker": {"color": COLORS[color]},
            "hovertemplate": "%{y}<br>%{x:.3f} ms per iteration<extra>" + color + "</extra>",
        }
        for part, name, color in (("transfer_ns", "transfer", "communication"), ("wait_ns", waiting, "waiting"))
    ]
    return figure("communication", bars, 120 + max(len(rows), 2) * 30)


def change_figure(parts: Mapping[str, Change], whole: Change, names: tuple[str, str], part_names: Mapping[str, str]) -> Figure:
    """A waterfall from one side's median iteration to the other's: the change of each part adds up to that of the whole."""
    shown = {name: part for name, part in parts.items() if part.change}
    labels = [names[0], *(part_names[name] for name in shown), names[1]]
    values = [whole.base, *(part.change for part in shown.values()), whole.other]
    levels = [*accumulate((part.change for part in shown.values()), initial=whole.base), whole.other]
    low, high = min(levels) / 1e6, max(levels) / 1e6
    room = max(0.15 * (high - low), 0.01 * high)
    texts = [f"{whole.base / 1e6:.2f}", *(f"{part.change / 1e6:+.2f}" for part in shown.values()), f"{whole.other / 1e6:.2f}"]
    places = list(range(len(labels)))
    trace = STYLES["waterfall"] | {
        "measure": ["absolute", *("relative" for _ in shown), "total"],
        "y": places,  # names of runs may be equal, places are not
        "x": [round(value / 1e6, 4) for value in values],
        "text": texts,
        "customdata": labels,
    }
    # From zero, a change of a few percent would be invisible.
    across = {"range": [max(low - 2 * room, 0), high + room]}
    return figure("waterfall", [trace], 90 + 34 * len(labels), xaxis=across, yaxis={"tickvals": places, "ticktext": labels})


def series_figure(labels: Sequence[str], medians: Sequence[Estimate | None], changed: Sequence[bool]) -> Figure:
    """The median iteration of each run with its interval, in order; runs that differ from the previous one stand out."""
    points = [(number, estimate) for number, estimate in enumerate(medians, 1) if estimate is not None]
    reach = [0.0 if each.high is None else each.high - each.value for _, each in points]
    trace = STYLES["series"] | {
        "x": [number for number, _ in points],
        "y": [round(each.value / 1e6, 4) for _, each in points],
        "error_y": {"type": "data", "array": [round(each / 1e6, 4) for each in reach], "thickness": 1.2, "width": 4},
        "customdata": [labels[number - 1] for number, _ in points],
        "line": {"color": COLORS["muted"], "width": 1.5},
        "marker": {"size": 9, "color": [COLORS["highlight" if changed[number - 1] else "compute"] for number, _ in points]},
    }
    # Numbers: paths of many runs do not fit next to each other.
    return figure("series", [trace], 320, xaxis={"dtick": -(-len(labels) // 15), "range": [0.5, len(labels) + 0.5]})


def _heat_map(x: Sequence[str], y: Sequence[str], z: list[list[float | None]], hover: str, **more: Any) -> dict[str, Any]:
    return STYLES["heat_map"] | {"x": x, "y": y, "z": z, "hovertemplate": hover + "<extra></extra>", **more}


def iterations_figure(rows: Sequence[Row], measure: str = "own_ns") -> Figure:
    """Rows of `RunFacts.ranks` as ranks × iterations; of many ranks, a row is the highest of some neighbors."""
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
        cells.append([None if best is None else round(best[0] / 1e6, 3) for best in highest])
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
    return figure("iterations", [trace], min(max(height, 220), 900))


def waits_figure(matrix: WaitMatrix) -> Figure:
    """Rows wait, columns are waited for."""
    labels = [str(rank) for rank in matrix.ranks]
    cells = [
        [None if row == column else round(value / 1e6, 3) for column, value in enumerate(cells)]
        for row, cells in enumerate(matrix.wait_ns)
    ]
    template = "%{z:.1f}" if len(labels) <= 12 else ""
    hover = "rank %{y} waits for rank %{x}<br>%{z:.2f} ms per iteration"
    trace = _heat_map(labels, labels, cells, hover, zmin=0, xgap=1, ygap=1, texttemplate=template)
    return figure("waits", [trace], max(150 + len(labels) * (40 if len(labels) <= 8 else 18), 240))


def roofline_figure(rows: Rows) -> Figure | None:
    """Rows of `RunFacts.matrix_products`: speed by arithmetic intensity, below what the device's peak and its memory allow.

    None where either is unknown.
    """
    points = [row for row in matrix_products(rows) if row["roof_tflops"] and row["tflops"]]
    traces: list[dict[str, Any]] = []
    for precision, color in zip(sorted({row["precision"] for row in points}), cycle(_SERIES[:-1]), strict=False):
        mine = [row for row in points if row["precision"] == precision]
        roofs = sorted({(row["peak_tflops"], row["memory_tb_s"]) for row in mine})
        traces += [_roof(precision, peak, bandwidth, COLORS[color]) for peak, bandwidth in roofs]
        details = [(row["operator"], row["shapes"][:120], row["share_of_roof"], row["device_ns"] / 1e6) for row in mine]
        places = [(row["flops_per_byte"], row["tflops"]) for row in mine]
        marker = _areas(mine, points) | {"color": COLORS[color]}
        traces.append(_points("roofline", precision, places, details, marker))
        if measured := [row for row in mine if row["measured_flops_per_byte"]]:
            places = [(row["measured_flops_per_byte"], row["tflops"]) for row in measured]
            named = [(row["operator"], row["shapes"][:120], row["dram_tb_s"]) for row in measured]
            marker = {"color": COLORS[color], "symbol": "diamond-open", "size": 10}
            traces.append(_points("measured", f"{precision}, measured traffic", places, named, marker))
    return figure("roofline", traces, 380) if traces else None


def kernel_counters_figure(rows: Rows) -> Figure | None:
    """Rows of `RunFacts.kernel_counters`: each kernel between the device's memory and its tensor cores.

    None where neither was measured.
    """
    points = [row for row in kernel_counters(rows) if row["tensor_active"] is not None and row["dram"] is not None]
    traces = []
    for place, (group, mine) in enumerate(grouped(points, "group").items()):
        places = [(100 * row["dram"], 100 * row["tensor_active"]) for row in mine]
        details = [(row["name"][:120], row["device_ns"] / 1e6, row["dram_tb_s"] or 0.0) for row in mine]
        marker = _areas(mine, points) | {"color": COLORS[_SERIES[min(place, len(_SERIES) - 1)]]}
        traces.append(_points("counters", group, places, details, marker))
    return figure("counters", traces, 380) if traces else None


def _points(
    style: str, name: str, places: Sequence[tuple[float, float]], details: Sequence[Sequence[Any]], marker: dict[str, Any]
) -> dict[str, Any]:
    """Points with details to hover over."""
    x, y = ([round(each[end], 3) for each in places] for end in (0, 1))
    details = [[round(each, 4) if isinstance(each, float) else each for each in row] for row in details]
    return STYLES[style] | {"name": name, "x": x, "y": y, "customdata": details, "marker": marker}


def _areas(rows: Rows, all_rows: Rows) -> dict[str, Any]:
    """Markers whose areas are as the device times of rows, down to a size that can be seen."""
    longest_ns = all_rows[0]["device_ns"]
    return {"opacity": 0.75, "size": [round(max(30 * sqrt(row["device_ns"] / longest_ns), 6), 1) for row in rows]}


def _roof(precision: str, peak: float, bandwidth: float, color: str) -> dict[str, Any]:
    ridge = peak / bandwidth
    intensities = sorted({_LEAST, min(max(ridge, _LEAST), _GREATEST), _GREATEST})
    text = f"{peak:,.0f} TFLOP/s of {precision} from {ridge:,.0f} FLOP per byte on; memory of {bandwidth:g} TB/s"
    return STYLES["roof"] | {
        "x": intensities,
        "y": [round(min(peak, intensity * bandwidth), 3) for intensity in intensities],
        "line": {"color": color, "width": 1.5},
        "text": [text] * len(intensities),
    }


def counters_figure(rows: Rows) -> Figure:
    """One device's counters in percent over time: those with the highest means at first, the others on request."""
    by_name = grouped(rows, "metric")
    order = sorted(by_name, key=lambda name: -sum(row["value"] for row in by_name[name]) / len(by_name[name]))
    traces = [
        STYLES["sampled"]
        | {
            "name": name,
            "x": [round(row["time_ns"] / 1e6, 3) for row in by_name[name]],
            "y": [round(row["value"], 2) for row in by_name[name]],
            "visible": True if place < _COUNTERS_SHOWN else "legendonly",
        }
        for place, name in enumerate(order)
    ]
    return _over_time("sampled", traces)


def memory_figure(by_site: Rows, timeline: Rows) -> Figure:
    """One device's memory over time, stacked by allocation site where a snapshot names sites."""
    zero = min((row["time_ns"] for row in (*by_site, *timeline)), default=0)

    def line(rows: Sequence[Row], column: str, name: str, style: dict[str, Any], **more: Any) -> dict[str, Any]:
        x, y = [round((row["time_ns"] - zero) / 1e6, 3) for row in rows], [round(row[column] / 2**20, 2) for row in rows]
        return STYLES["memory"] | {"name": name, "x": x, "y": y, "line": {"shape": "hv", **style}, **more}

    sites = grouped(by_site, "site")
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
    return _over_time("memory", traces)


def _over_time(kind: str, traces: list[dict[str, Any]]) -> Figure:
    """Lines over time, with a legend below."""
    below = 60 + _LINE * len(traces)
    return figure(kind, traces, 20 + _PICTURE + below, margin={"l": 70, "r": 20, "t": 20, "b": below})


def _short_site(site: str) -> str:
    """A site with the last three parts of its file's path, which identify it within a package."""
    function, _, path = site.rpartition(" ")
    parts = path.split("/")
    return f"{function} …/{'/'.join(parts[-3:])}" if len(parts) > 4 else site
