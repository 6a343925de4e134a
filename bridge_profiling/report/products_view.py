"""Matrix products, convolutions and attention, from rows of `Run.matrix_products`: a table, and a roofline figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bridge_profiling.report import words
from bridge_profiling.report.figures import COLORS, axis, figure
from bridge_profiling.report.tables import most
from bridge_profiling.report.views import Cell, FigureView, Row, TableView, ms, of, table

_KEYS = ("operator", "shapes", "precision", "flops", "flops_per_byte", "peak_tflops", "memory_gbs")


#: Colors of precisions in the figure, and as many operators as are drawn.
_COLORS = {"fp8": "data_loading", "bf16": "compute", "fp16": "dependency_stalled", "tf32": "host_launch", "fp32": "copy"}
_MOST_DRAWN = 60

#: Sizes of markers in pixels: of the operator with the most device time, and of those with little.
_LARGEST, _SMALLEST = 30, 7


def _of_all_ranks(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One row per operator, shapes, precision and device, those of all ranks together; most device time first."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        sums = found.setdefault(tuple(row[key] for key in _KEYS), {**row, "count": 0, "device_us": 0.0})
        sums |= {"count": sums["count"] + row["count"], "device_us": sums["device_us"] + row["device_us"]}
    for sums in found.values():
        speed = sums["flops"] * sums["count"] / sums["device_us"] / 1e6 if sums["flops"] and sums["device_us"] else None
        share = speed / sums["peak_tflops"] if speed and sums["peak_tflops"] else None
        sums |= {"tflops": speed, "share_of_peak": share}
    return sorted(found.values(), key=lambda row: -row["device_us"])


def matrix_products(rows: Sequence[Row], count: int) -> TableView:
    """One row per operator, shapes and precision, most device time first."""
    shown, note = most(_of_all_ranks(rows), count)
    columns = {
        "operator": lambda row: row["operator"],
        "count": of("count"),
        "device ms": ms("device_us"),
        "GFLOP a call": lambda row: Cell(words.number(row["flops"] and row["flops"] / 1e9), row["flops"]),
        "TFLOP/s": lambda row: Cell(words.number(row["tflops"] and round(row["tflops"], 1)), row["tflops"]),
        "of peak": of("share_of_peak", words.percent),
        "FLOP/byte": lambda row: Cell(
            words.number(row["flops_per_byte"] and round(row["flops_per_byte"], 1)), row["flops_per_byte"]
        ),
        "precision": lambda row: row["precision"] or words.UNKNOWN,
        "input shapes": lambda row: row["shapes"],
    }
    operators = sorted({row["operator"] for row in shown})
    title = "Matrix products, convolutions and attention of all ranks, by input shapes"
    return table("products", title, shown, columns, name_last=True, filters=operators, sorted_by=2, note=note)


def roofline(rows: Sequence[Row]) -> FigureView | None:
    """Speed over arithmetic intensity, with the limits of each device; None if no row has both, and a known device."""
    known = [row for row in _of_all_ranks(rows) if row["flops_per_byte"] and row["tflops"] and row["peak_tflops"]]
    drawn = [row for row in known if row["memory_gbs"]][:_MOST_DRAWN]
    if not drawn:
        return None
    least, highest = min(row["flops_per_byte"] for row in drawn) / 2, max(row["flops_per_byte"] for row in drawn) * 2
    traces = []
    for precision, color in _COLORS.items():
        mine = [row for row in drawn if row["precision"] == precision]
        for peak, memory_gbs in sorted({(row["peak_tflops"], row["memory_gbs"]) for row in mine}):
            traces.append(_limit(precision, COLORS[color], peak, memory_gbs, (least, highest)))
        if mine:
            traces.append(_markers(precision, COLORS[color], mine, drawn[0]["device_us"]))
    caption = (
        "Speed of matrix products, convolutions and attention over their arithmetic intensity, if inputs are read once and the "
        "output is written once; larger markers have more device time. A line is what the device's memory and its dense peak "
        "allow, as stated: far below its slope or its flat part, a product is small or its kernel slow."
    )
    shown = figure(
        traces,
        420,
        margin={"l": 60, "r": 20, "t": 40, "b": 55},
        xaxis=axis("FLOP per byte", type="log"),
        yaxis=axis("TFLOP/s", type="log"),
        hovermode="closest",
    )
    return FigureView("roofline", {"roofline": shown}, caption)


def _limit(precision: str, color: str, peak_tflops: float, memory_gbs: float, span: tuple[float, float]) -> dict[str, Any]:
    ridge = peak_tflops * 1e3 / memory_gbs
    least, highest = min(span[0], ridge / 2), max(span[1], ridge * 2)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"{precision} limit: {peak_tflops:,.0f} TFLOP/s, {memory_gbs:,.0f} GB/s",
        "x": [least, ridge, highest],
        "y": [least * memory_gbs / 1e3, peak_tflops, peak_tflops],
        "line": {"color": color, "width": 1.5, "dash": "dash"},
        "hoverinfo": "skip",
    }


def _markers(precision: str, color: str, rows: Sequence[Row], most_us: float) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": precision,
        "x": [round(row["flops_per_byte"], 3) for row in rows],
        "y": [round(row["tflops"], 4) for row in rows],
        "text": [f"{row['operator']} {row['shapes'][:100]}" for row in rows],
        "customdata": [[row["share_of_peak"], words.ms(row["device_us"])] for row in rows],
        "marker": {
            "color": color,
            "opacity": 0.75,
            "size": [round(_SMALLEST + (_LARGEST - _SMALLEST) * (row["device_us"] / most_us) ** 0.5, 1) for row in rows],
        },
        "hovertemplate": "%{text}<br>%{y:.1f} TFLOP/s, %{customdata[0]:.1%} of the peak<br>"
        "%{x:.1f} FLOP per byte, %{customdata[1]} ms<extra>" + precision + "</extra>",
    }
